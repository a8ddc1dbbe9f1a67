"""The slots that each row of a tree sees in the order of the text, from the bits of its mask.

A program takes a row: the place of a slot among those seen is the number of bits below its own.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.launch import lanes, launch


@triton.jit(do_not_specialize=["most"])
def _paths_kernel(
    mask_ptr,  # [rows, WORDS] int64
    paths_ptr,  # [rows, most] int32
    most,
    WORDS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    words = tl.load(mask_ptr + row * WORDS + slot // 64, mask=slot < WORDS * 64, other=0)
    seen = ((words >> (slot % 64).to(tl.int64)) & 1).to(tl.int32)
    place = tl.cumsum(seen, 0) - 1
    count = tl.sum(seen, 0)
    tl.store(paths_ptr + row * most + place, slot, mask=(seen != 0) & (place < most))
    for first in tl.range(0, most, BLOCK):
        column = first + tl.arange(0, BLOCK)
        tl.store(paths_ptr + row * most + column, column * 0 - 1, mask=(column >= count) & (column < most))


def mask_paths(mask: Tensor, most: int) -> Tensor:
    batch, nodes, words = mask.shape
    paths = mask.new_empty((batch, nodes, most), dtype=torch.int32)
    launch(
        _paths_kernel,
        (batch * nodes,),
        *(mask, paths, most),
        num_warps=1,
        WORDS=words,
        SLOTS=triton.next_power_of_2(words * 64),
        BLOCK=lanes(most, 64),
    )
    return paths
