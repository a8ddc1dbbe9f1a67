"""The definition of the gated activation in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, each operation rounded to the dtype of `gate_up`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
