"""SiLU of the gate times the up projection, over one packed buffer.

With the gate and up weights packed into one matrix, their product is one buffer [..., 2 F]; this kernel reads it
once and writes [..., F].
"""

from __future__ import annotations

import torch

from specdec_kernels.checks import expect_contiguous, expect_dtype
from specdec_kernels.launch import dispatch

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def silu_mul(gate_up: torch.Tensor, *, impl: str = "auto") -> torch.Tensor:
    """silu(gate) * up with silu(x) = x / (1 + exp(-x)).

    Args:
        gate_up: [..., 2 F], contiguous: the gate in the first half of a row, up in the second. SiLU is computed in
            float32 and rounded to the dtype of `gate_up` before the multiplication, as the separate operations do.

    Returns:
        [..., F], dtype of `gate_up`.

    Raises:
        ValueError: a shape, dtype or layout does not fit; the message names expected and actual.
    """
    if gate_up.ndim == 0 or gate_up.shape[-1] % 2 or gate_up.shape[-1] == 0:
        raise ValueError(f"gate_up: expected an even last dimension of at least 2, got shape {list(gate_up.shape)}")
    expect_dtype("gate_up", gate_up, *_DTYPES)
    expect_contiguous(gate_up=gate_up)
    return dispatch("silu_mul", __package__, impl, gate_up)(gate_up)
