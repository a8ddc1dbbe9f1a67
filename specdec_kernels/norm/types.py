"""Arguments and results of the norms."""

from typing import NamedTuple

import torch
from torch import Tensor


class Normed(NamedTuple):
    """`normed` [..., D]: what the next projection reads. `residual` [..., D]: the residual stream it was made of."""

    normed: Tensor
    residual: Tensor


class NormInputs(NamedTuple):
    """What a sum is added to and normed by: the residual stream [..., D], the weight [D], and eps."""

    residual: Tensor
    weight: Tensor
    eps: float


def weight_dtype(rows: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype that a norm's weight must have: that of the rows, or float32 with rows in half precision."""
    return torch.float32 if rows.element_size() == 2 and weight.dtype == torch.float32 else rows.dtype
