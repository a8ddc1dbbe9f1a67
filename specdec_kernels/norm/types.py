"""Arguments and results of the norms."""

from __future__ import annotations

from typing import NamedTuple

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
