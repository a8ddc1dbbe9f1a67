"""Public function of the family: arguments are checked here, once for both implementations."""

import torch
from torch import Tensor

from specdec_kernels.all_reduce.types import SLOTS, Exchange
from specdec_kernels.checks import expect_at_least_one, expect_dtype, expect_tensors
from specdec_kernels.launch import dispatch
from specdec_kernels.norm.types import Normed, NormInputs, weight_dtype


def all_reduce_add_rms_norm(
    parts: Tensor, exchange: Exchange, slot: int, residual: Tensor, weight: Tensor, eps: float, *, impl: str = "auto"
) -> Normed:
    """Sum the partial results of a row-parallel projection over all ranks, add the residual stream, and norm the sum.

    Every rank calls this with the same shapes, sends its own sum to the others and waits for theirs: in float32 without
    its last bit, which signals that the number has arrived. The sums are added in the order of the ranks, so every rank
    has the same bits, and they are rounded once, to the dtype of the residual.

    Args:
        parts: [P, ..., D] float32, contiguous: partial sums of this rank, added in their order.
        exchange: memory of the ranks; `exchange.width` is D.
        slot: 0 or 1, in turn from call to call, on every rank the same.
        residual: [..., D], at most `exchange.rows` rows, contiguous. It is not changed.
        weight: [D], dtype of the residual, or float32, as in `rms_norm`.
        eps: added to the mean square.
    """
    if not 0 <= slot < SLOTS:
        raise ValueError(f"slot: expected 0 to {SLOTS - 1}, got {slot}")
    if residual.numel() > exchange.rows * exchange.width:
        raise ValueError(f"residual: expected at most {exchange.rows} rows, got {residual.numel() // exchange.width}")
    if exchange.rows % 2:
        raise ValueError(f"exchange.rows: expected an even number, got {exchange.rows}")
    wide = (torch.float32, torch.float64) if residual.dtype == torch.float64 else torch.float32
    expect_dtype("exchange.memory", exchange.memory, torch.int64)
    expect_tensors(
        {"exchange.memory": exchange.memory},
        residual=(residual, (*(None for _ in residual.shape[:-1]), exchange.width), residual.dtype),
        parts=(parts, (None, *residual.shape), wide),
        weight=(weight, (exchange.width,), weight_dtype(residual, weight)),
    )
    expect_at_least_one(**{"number of parts": len(parts)})
    function = dispatch("all_reduce_add_rms_norm", __package__, impl, residual)
    return function(parts, exchange, slot, NormInputs(residual, weight, eps))
