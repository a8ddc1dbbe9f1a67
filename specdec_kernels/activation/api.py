"""SiLU of the gate times the up projection, over one packed buffer."""

import torch
from torch import Tensor

from specdec_kernels.checks import expect_tensors
from specdec_kernels.launch import dispatch

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def silu_mul(gate_up: Tensor, *, impl: str = "auto") -> Tensor:
    """silu(gate) * up [..., F] with silu(x) = x / (1 + exp(-x)), for gate and up side by side in `gate_up` [..., 2 F].

    SiLU is computed in float32 and rounded to the dtype of `gate_up` before the multiplication, as the separate
    operations do. `gate_up` is contiguous.
    """
    if gate_up.ndim == 0 or gate_up.shape[-1] % 2 or gate_up.shape[-1] == 0:
        raise ValueError(f"gate_up: expected an even last dimension of at least 2, got shape {list(gate_up.shape)}")
    expect_tensors(gate_up=(gate_up, gate_up.shape, _DTYPES))
    return dispatch("silu_mul", __package__, impl, gate_up)(gate_up)
