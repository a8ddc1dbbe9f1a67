"""The two forwards of a model: torch's operations one by one, and fused kernels.

Training and float32 runs use torch; inference in half precision on a GPU uses the kernels. Roundings are the same in
both; sums differ in their order. For the kernels, matrices that read the same input are packed into one, and the
parameters become views of it: names, state dicts and torch's forward stay as they are.
"""

from typing import Any

import torch
from torch import Tensor, nn

from specdec_kernels import Normed, linear
from specdec_kernels.projection import warmup_rows


class Fusable(nn.Module):
    """A module with two forwards. `impl` is the kernels' implementation, or None for torch's operations. With
    `batch_invariant` the bits of an output row do not depend on the number of rows."""

    impl: str | None = None
    batch_invariant: bool = False
    float32: tuple[str, ...] = ()
    """Names of own parameters and buffers that stay in float32, whatever the dtype of the model."""
    unscaled: tuple[str, ...] = ()  # names of own projections that stay as they are where weights are quantised

    def adopt(self, prefix: str, stored: dict[str, Any]) -> None:
        """Turn the tensors of a checkpoint (`Stored` by name) that begin with `prefix` into those of this module."""

    def pack(self) -> None:
        """Prepare the weights for the kernels, once."""


class NormedProjection(Fusable):
    """A projection with its own fused end of a sublayer."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Normed:
        raise NotImplementedError


class FusableModel(Fusable):
    _warmed_up: tuple[str, bool] | None = None

    def warmup(self, rows: int) -> None:
        """Run every kernel of the fused forward over `rows` rows, so that it is compiled."""
        raise NotImplementedError

    def set_forward(self, impl: str | None, batch_invariant: bool = False) -> None:
        """Run fused kernels of `impl`, or torch's operations if None; on a GPU the first call compiles the kernels."""
        for module in self.modules():
            if isinstance(module, Fusable):
                module.impl, module.batch_invariant = impl, batch_invariant
                if impl is not None:
                    module.pack()
        if impl is None or (impl, batch_invariant) == self._warmed_up or not next(self.parameters()).is_cuda:
            return
        with torch.inference_mode():
            for rows in warmup_rows(batch_invariant):
                self.warmup(rows)
        self._warmed_up = (impl, batch_invariant)


def queries_only(layer: int, q: Tensor, k: Tensor, v: Tensor, weights: object) -> Tensor:
    """A mixer for warm-up, which mixes nothing."""
    return q


def project(projection: nn.Module, x: Tensor, impl: str | None, batch_invariant: bool = False) -> Tensor:
    """`projection(x)`; by the kernel if it is a plain linear layer and `impl` is given."""
    if impl is None or not isinstance(projection, nn.Linear):
        return projection(x)
    weight, bias = projection.weight, projection.bias
    return linear(x.contiguous(), weight, bias, batch_invariant=batch_invariant, impl=impl)
