"""Arguments that the launchers of the attention kernels derive from a call."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from specdec_kernels.attention.device import FP8_BITS_SCALE, LOG2_E, MODE_CODES, Static, Tensors
from specdec_kernels.attention.types import AttentionCall
from specdec_kernels.launch import current_chip


def static_of(call: AttentionCall) -> Static:
    """The compile-time description of the kernels that read keys."""
    metadata, work, along_paths = call.metadata, call.work, call.along_paths
    head_dim = call.q.shape[3]
    return Static(
        *(head_dim, triton.next_power_of_2(head_dim), call.kv.shape[3], work.group, call.kv.shape[2]),
        MODE=MODE_CODES["paths" if along_paths else metadata.mode],
        WORDS=0 if metadata.mask is None or along_paths else metadata.mask.shape[2],
        ALL_SLOTS=work.all_slots,
        SPLIT=work.num_splits > 1 or along_paths,
        FIXED=work.fixed_splits,
        FP8=call.config.fp8_code(call.kv.dtype),
        BLOCK_M=call.config.block_m,
        BLOCK_N=call.config.block_n,
    )


def tensors_of(
    call: AttentionCall, out: Tensor, lse: Tensor | None, state: tuple[Tensor | None, ...] | None = None
) -> Tensors:
    """The tensors of a kernel that writes `out`, `lse` and `state`, the fields of a `kernel_tree.TreeState`."""
    metadata = call.metadata
    depths = (None, None) if metadata.window is None else (metadata.depths, metadata.row_depths)
    items, offsets = (None, None) if call.tile_schedule is None else call.tile_schedule[:2]
    return Tensors(
        *(call.q, metadata.page_table, metadata.lengths, metadata.q_lens, metadata.mask, *depths),
        *(*call.scales.of_heads, items, offsets, out, lse, *(state or (None, None))),
    )


def score_factors(call: AttentionCall) -> tuple[float, float, float | None]:
    """score_scale, value_scale and soft_cap of the kernels."""
    metadata, scales = call.metadata, call.scales
    assert metadata.scale is not None
    stored = FP8_BITS_SCALE if call.config.fp8_code(call.kv.dtype) == 2 else 1.0
    score_scale = metadata.scale * stored * (scales.k_scale if isinstance(scales.k_scale, float) else 1.0)
    value_scale = stored * (scales.v_scale if isinstance(scales.v_scale, float) else 1.0)
    if metadata.soft_cap is None:
        return score_scale * LOG2_E, value_scale, None
    return score_scale / metadata.soft_cap, value_scale, metadata.soft_cap * LOG2_E


def pool_argument(kv: Tensor) -> Tensor:
    """An e4m3 pool goes to a chip as bytes, which all of them load; the interpreter reads its type as bytes."""
    if kv.dtype != torch.float8_e4m3fn or current_chip(kv) == "interpreter":
        return kv
    return kv.view(torch.uint8)
