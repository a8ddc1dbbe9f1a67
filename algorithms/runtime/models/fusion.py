"""The two forwards of a model: torch's operations one by one, and fused kernels.

A `Fusable` module runs torch's operations until `set_forward` of its model names an implementation of the kernels.
Training, and the float32 runs that prove identity, use torch; inference in half precision on a GPU uses the kernels.
Roundings are the same in both, and sums differ in their order alone.

For the kernels, matrices that read the same rows are packed into one. The parameters become views of it, so names,
state dicts and torch's forward stay as they are, and memory is used once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from specdec_kernels import Normed, linear
from specdec_kernels.projection.configs import rows_of_the_table


class Packed(NamedTuple):
    """Weights [rows of all, in] of several projections, one below the other, and their biases, if any."""

    weight: Tensor
    bias: Tensor | None


class Fusable(nn.Module):
    """A module with two forwards. `impl` is that of the kernels, or None for torch's operations. With `batch_invariant`
    the bits of a row do not depend on the number of rows, see `specdec_kernels.projection`."""

    impl: str | None = None
    batch_invariant: bool = False

    def pack(self) -> None:
        """Prepare the weights for the kernels; called again, it does nothing."""


class NormedProjection(Fusable):
    """A projection with a fused end of a sublayer of its own."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Normed:
        """The norm of residual + the projection of x, and that sum."""
        raise NotImplementedError


class FusableModel(Fusable):
    """A whole model with two forwards."""

    _rehearsed: tuple[str, bool] | None = None

    def rehearse(self, rows: int) -> None:
        """Run every kernel of the fused forward over `rows` rows, whatever they hold, so that it is compiled."""
        raise NotImplementedError

    def set_forward(self, impl: str | None, batch_invariant: bool = False) -> None:
        """Run fused kernels of the implementation `impl`, or torch's operations if None, which are never
        `batch_invariant`.

        On a GPU this compiles the kernels for every number of rows, at the first call.
        """
        for module in self.modules():
            if isinstance(module, Fusable):
                module.impl, module.batch_invariant = impl, batch_invariant
                if impl is not None:
                    module.pack()
        if impl is None or (impl, batch_invariant) == self._rehearsed or not next(self.parameters()).is_cuda:
            return
        with torch.inference_mode():
            for rows in rows_of_the_table(batch_invariant):
                self.rehearse(rows)
        self._rehearsed = (impl, batch_invariant)


def queries_only(layer: int, q: Tensor, k: Tensor, v: Tensor, weights: object) -> Tensor:
    """A mixer for rehearsals, which mixes nothing."""
    return q


@torch.no_grad()
def packed(projections: Sequence[nn.Linear]) -> Packed:
    """One matrix of all `projections`, whose parameters become views of it."""
    sizes = [projection.weight.shape[0] for projection in projections]
    weights: list[Tensor] = [projection.weight for projection in projections]
    weight = torch.cat(weights)
    for projection, part in zip(projections, weight.split(sizes), strict=True):
        projection.weight = nn.Parameter(part, requires_grad=False)
    biases: list[Tensor] = [projection.bias for projection in projections if projection.bias is not None]
    if not biases:
        return Packed(weight, None)
    bias = torch.cat(biases)
    for projection, part in zip(projections, bias.split(sizes), strict=True):
        projection.bias = nn.Parameter(part, requires_grad=False)
    return Packed(weight, bias)


def project(projection: nn.Module, x: Tensor, impl: str | None, batch_invariant: bool = False) -> Tensor:
    """`projection(x)`; by the kernel if it is a plain linear layer and `impl` is given."""
    if impl is None or not isinstance(projection, nn.Linear):
        return projection(x)
    weight, bias = projection.weight, projection.bias
    return linear(x.contiguous(), weight, bias, batch_invariant=batch_invariant, impl=impl)
