"""Results of the norms."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Normed(NamedTuple):
    """`normed` [..., D]: what the next projection reads. `residual` [..., D]: the residual stream it was made of."""

    normed: torch.Tensor
    residual: torch.Tensor
