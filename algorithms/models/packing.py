"""One weight of several projections that read the same input, for the fused forward."""

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor, nn

from algorithms.models.scaled_linear import ScaledLinear
from specdec_kernels import ScaledWeight


class Packed(NamedTuple):
    """Weights [rows of all, in] of several projections, and their biases."""

    weight: Tensor | ScaledWeight
    bias: Tensor | None


@torch.no_grad()
def packed(projections: Sequence[nn.Linear | ScaledLinear]) -> Packed:
    """`joined`; the weights and biases of the projections become views of it."""
    found = joined(projections)
    weight, bias = found
    codes = weight.codes if isinstance(weight, ScaledWeight) else weight
    sizes = [projection.weight.shape[0] for projection in projections]
    for projection, part in zip(projections, codes.split(sizes), strict=True):
        projection.weight = nn.Parameter(part.view(projection.weight.dtype), requires_grad=False)
    for projection, part in zip(projections, () if bias is None else bias.split(sizes), strict=bias is not None):
        projection.bias = nn.Parameter(part, requires_grad=False)
    return found


def joined(projections: Sequence[nn.Linear | ScaledLinear]) -> Packed:
    """One matrix of all `projections`. Raises ValueError where some are scaled and others are not."""
    scaled = [projection for projection in projections if isinstance(projection, ScaledLinear)]
    if scaled and len({getattr(projection, "format", None) for projection in projections}) > 1:
        raise ValueError("expected projections that read the same input to have weights of one format, got several")
    # torch does not join float8 numbers on every device.
    weights: list[Tensor] = [each.weight.view(torch.uint8) if scaled else each.weight for each in projections]
    weight = torch.cat(weights)
    biases: list[Tensor] = [projection.bias for projection in projections if projection.bias is not None]
    return Packed(
        _scaled(weight, [projection.scaled_weight for projection in scaled]) if scaled else weight,
        torch.cat(biases) if biases else None,
    )


def _scaled(codes: Tensor, members: Sequence[ScaledWeight]) -> ScaledWeight:
    """`codes` with the scales of the members whose rows they are. Groups of rows become smaller where a member would
    begin inside of one."""
    group, row, scales = members[0].group_rows, 0, []
    for member in members:
        group = gcd(group, row)
        row += member.shape[0]
    for member in members:
        repeated = member.scales.repeat_interleave(member.group_rows // group, 0)
        scales.append(repeated[: -(-member.shape[0] // group)])
    return members[0]._replace(codes=codes, scales=torch.cat(scales), group_rows=group)
