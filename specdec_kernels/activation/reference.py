"""The definition of the gated activation in plain torch."""

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, each operation rounded to the dtype of `gate_up`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
