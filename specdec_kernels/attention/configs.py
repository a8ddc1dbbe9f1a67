"""Static launch table of paged attention: no autotuning on a step's path.

The key is the chip, the head dimension, the bytes of a stored key element, and the packed query rows of one
(request, KV head), N * H / H_kv, rounded up to a bucket. Small buckets are bound by memory: they want bytes in
flight, so two or three KV buffers of 64 keys and several programs a processor. From 64 rows the matrix unit
wants one warp group, from 128 two. Every shipped row compiles without spills.

Split lengths are in tokens and grow only with a request's own length (see `device.split_layout`): results do
not depend on the batch, and no request has more than `MAX_SPLITS` partial results. Longer splits write fewer
partial results, shorter ones fill the chip from one request; the growth is where the two meet. More rows write
more per split, so they begin to grow earlier.

Measured on an H200, Triton 3.6, torch 2.11 (bfloat16, 32/8 heads x 128, pages of 16, graph replay, cold L2);
per cent of the time that a copy of the same bytes takes at 4.28 TB/s, `alone` without the merge:

                    us  alone                           us  alone                           us  alone
    decode 1 x 1k    9.2    7.8        chain 4, 8 x 8k  77.4   73.3  81 %   chain 16, 8 x 8k  83.2   79.6  76 %
    decode 1 x 8k   16.9   14.2        chain 8, 8 x 8k  81.6   77.7  77 %   tree 16, 8 x 8k   82.8   79.0  76 %
    decode 1 x 32k  41.5   38.3  76 %  chain 16, 1 x 1k 11.0    9.1         chain 16, 8 x 32k  270    264  93 %
    decode 1 x 128k  132    128  95 %  chain 16, 1 x 8k 24.2   23.8         chain 16, 64 x 1k 98.6   79.6  55 %
    decode 8 x 1k   14.5   14.8        chain 16, 1 x 32k 45.2  41.8  69 %   chain 16, 64 x 8k  555    532  89 %
    decode 8 x 8k   74.7   71.2  84 %  chain 16, 8 x 1k 18.1   15.2         chain 64, 1 x 8k  29.7   27.3
    decode 8 x 32k   256    250  98 %  chain 16, 8 x 2k 28.9   25.9  56 %   chain 64, 8 x 8k   219    207
    decode 64 x 1k  63.0   60.2  79 %                                       tree 64, 8 x 8k    222    210
    decode 64 x 8k   490    485  99 %

Two runs differ by up to 0.5 us, or 2 % where that is more. Chain 64 and tree 64 are bound by arithmetic.

Of the 20 us that chain 16, 8 x 8k takes beyond the copy, the merge is 4, and splitting itself most of the rest (see
the lengths below); splits of 512 there take 90.6 us, though 1 x 8k gains 3 by them. At 64 x 1k the partial results
of four splits of 256 are a quarter of all bytes moved; the merge takes four splits at a time for that shape, 6 us
less than eight. Several splits of a request in one program, so that all programs run at once, gained nothing (8 x 8k
82.9 us, 8 x 32k 274, 64 x 8k 564). Partial results in float32, each waited for behind a barrier of the one before,
took 94.1 us at 8 x 8k and 114 at 64 x 1k. Launching both kernels before the one ahead has ended saves 1.8 us at 1 x 1k.

Lengths of splits without the merge, partial results in float32:

    keys a split                          256     512    1024    2048
    decode, 8 x 8k                       72.0    72.0    76.9       -   268 MB
    decode, 64 x 1k                      60.9    65.2    61.6       -   212 MB
    chain 16, 1 x 8k                     15.7    15.2    20.8    34.4    34 MB
    chain 16, 8 x 8k                     94.7    86.5    78.3    71.8   270 MB
    chain 16, 64 x 8k                       -   560.8   528.2   506.5  2111 MB
    chain 64, 8 x 8k                        -   233.6   199.4   179.5   278 MB, bound by arithmetic

64 x 64 tiles of 64 rows: 8 x 32k 292.9 us, 64 x 32 309.3 us (at 512 keys a split); 8 warps lost everywhere.
128 x 128 tiles, and 64 x 64 for 128 rows, lost to 128 x 64. L2 eviction hints changed nothing.

Off by default, because slower or no faster (us without, with): polynomial exp2 on decode 8 x 8k 78.0, 78.1; chain
16 8 x 8k 103.1, 105.5; tree 64 8 x 8k 241.9, 268.6. Lazy rescaling 78.0, 78.4; 103.1, 104.2; 241.9, 269.2. The
exponential unit is no bottleneck on this chip; a vote over the tile is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

UNSPLIT = 1 << 30
FIRST_SPLITS = 4
_FIRST_SPLITS_OF_16_ROWS = 8
MAX_SPLITS = 32
_ROW_BUCKETS = (16, 32, 64, 128)
_MAX_SPLIT_TILES = 4
_INTERPRETER_MAX_ROWS = 1024
_PROCESSORS = {"sm80": 108, "sm90": 132, "sm100": 148, "gfx942": 304}
_FP8_NATIVE_CHIPS = ("sm90", "sm100")
_OVERLAP_CHIPS = ("sm90", "sm100")


@dataclass(frozen=True)
class AttentionConfig:
    """Tile of one program and how the keys are cut.

    block_m: packed query rows. block_n: keys a step. split_tokens: keys a program before partial results are
    merged, more for requests longer than first_splits of them. resident_programs: size of the persistent grid
    that walks a plan, a multiple of what fits at once. polynomial_exp2, lazy_rescale: see `device.softmax_step`.
    fp8_native: the chip converts e4m3 itself. overlap: launched before the kernel ahead has ended.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    split_tokens: int
    first_splits: int = FIRST_SPLITS
    max_splits: int = MAX_SPLITS
    resident_programs: int = 4
    polynomial_exp2: bool = False
    lazy_rescale: bool = False
    fp8_native: bool = False
    overlap: bool = False

    def fp8_code(self, kv_dtype: torch.dtype) -> int:
        """How the kernel reads the pool: 0 as it is, 1 the chip's own e4m3, 2 by moving bits."""
        if kv_dtype != torch.float8_e4m3fn:
            return 0
        return 1 if self.fp8_native else 2


@dataclass(frozen=True)
class MergeConfig:
    """Tile of one merge program: `rows` output rows, `unroll` of their partial results a step. overlap: it is
    launched before the attention kernel has ended."""

    rows: int
    unroll: int
    num_warps: int
    overlap: bool


def attention_config(
    chip: str,
    head_dim: int,
    rows: int,
    max_length: int,
    split_tokens: int | None = None,
    kv_bytes: int = 2,
    tuning: Mapping[str, Any] | None = None,
) -> AttentionConfig:
    """Row of the table for `rows` packed query rows of one (request, KV head) over at most `max_length` keys of
    `kv_bytes` bytes an element.

    `split_tokens` replaces the table's split length, `tuning` any field; splits shorter than a tile make the
    tile shorter, and others are rounded up to whole tiles.
    """
    if chip == "interpreter":
        # A program costs the same whatever its tile, so a tile takes everything that is there.
        block_m = min(_INTERPRETER_MAX_ROWS, max(16, _power_of_two(rows)))
        config = AttentionConfig(block_m, min(512, max(16, _power_of_two(max_length))), 1, 1, 4096)
    else:
        config = _table_config(chip, head_dim, rows, kv_bytes)
    if split_tokens is not None:
        block_n = min(config.block_n, max(16, _power_of_two(split_tokens)))
        config = replace(config, block_n=block_n, split_tokens=split_tokens)
    if tuning:
        unknown = sorted(set(tuning) - {field.name for field in fields(AttentionConfig)})
        if unknown:
            names = ", ".join(field.name for field in fields(AttentionConfig))
            raise ValueError(f"tuning: expected fields among {names}, got {', '.join(unknown)}")
        config = replace(config, **tuning)
    return replace(config, split_tokens=-(-config.split_tokens // config.block_n) * config.block_n)


def node_counts_of_the_table(group: int) -> tuple[int, ...]:
    """Query rows a request that together reach every row of the table, and prefill, with `group` query heads a
    KV head."""
    prefill = _MAX_SPLIT_TILES * _ROW_BUCKETS[-1] // group + 1
    return tuple(sorted({max(1, bucket // group) for bucket in _ROW_BUCKETS} | {prefill}))


def merge_config(chip: str, rows: int, num_splits: int) -> MergeConfig:
    """Row of the table for merging up to `num_splits` partial results of each of `rows` = N * H output rows a
    request."""
    if chip == "interpreter":
        return MergeConfig(max(2, min(1024, _power_of_two(rows))), 1, 1, overlap=False)
    # A warp takes two rows of 128 two-byte numbers, 16 bytes a lane.
    rows, num_warps = (4, 2) if rows <= 64 else (8, 4)
    # Eight splits at once spill on sm100.
    unroll = 8 if chip == "sm90" and num_splits > 4 else 4
    return MergeConfig(rows, unroll, num_warps, overlap=chip in _OVERLAP_CHIPS)


def _table_config(chip: str, head_dim: int, rows: int, kv_bytes: int) -> AttentionConfig:
    bucket = next((size for size in _ROW_BUCKETS if rows <= size), _ROW_BUCKETS[-1])
    table = _FP8_TABLE if kv_bytes == 1 else _TABLE
    block_m, block_n, warps, stages, resident = table[chip, _head_dim_row(head_dim)][bucket]
    if kv_bytes == 4:
        # The same bytes a buffer as the row of two-byte elements.
        block_n = max(16, block_n // 2)
    return AttentionConfig(
        block_m,
        block_n,
        warps,
        stages,
        _split_tokens(rows, block_m),
        first_splits=_FIRST_SPLITS_OF_16_ROWS if bucket == 16 else FIRST_SPLITS,
        resident_programs=resident * _PROCESSORS[chip],
        fp8_native=chip in _FP8_NATIVE_CHIPS,
        overlap=chip in _OVERLAP_CHIPS,
    )


def _split_tokens(rows: int, block_m: int) -> int:
    """Keys a program; prefill-sized queries fill the chip without splitting."""
    if rows > _MAX_SPLIT_TILES * block_m:
        return UNSPLIT
    return 256


def _head_dim_row(head_dim: int) -> int:
    return 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256


def _power_of_two(value: int) -> int:
    """Smallest power of two that is at least `value`."""
    return 1 << max(0, value - 1).bit_length()


_Row = tuple[int, int, int, int, int]

# (chip, head_dim): {rows: (block_m, block_n, num_warps, num_stages, programs a processor)}
_TABLE: dict[tuple[str, int], dict[int, _Row]] = {
    ("sm80", 64): {16: (16, 64, 4, 4, 3), 32: (32, 64, 4, 3, 2), 64: (64, 64, 4, 3, 2), 128: (128, 64, 8, 3, 1)},
    ("sm80", 128): {16: (16, 64, 4, 3, 2), 32: (32, 64, 4, 3, 2), 64: (64, 64, 8, 3, 1), 128: (128, 64, 8, 2, 1)},
    ("sm80", 256): {16: (16, 32, 4, 3, 2), 32: (32, 32, 4, 3, 1), 64: (64, 32, 8, 3, 1), 128: (64, 32, 8, 3, 1)},
    ("sm90", 64): {16: (16, 64, 4, 4, 3), 32: (32, 64, 4, 4, 3), 64: (64, 64, 4, 4, 2), 128: (128, 64, 8, 3, 1)},
    ("sm90", 128): {16: (16, 64, 4, 3, 6), 32: (32, 64, 4, 3, 4), 64: (64, 64, 4, 3, 4), 128: (128, 64, 8, 3, 4)},
    ("sm90", 256): {16: (16, 32, 4, 4, 2), 32: (32, 32, 4, 3, 2), 64: (64, 32, 8, 3, 1), 128: (128, 32, 8, 3, 1)},
    ("sm100", 64): {16: (16, 64, 4, 4, 3), 32: (32, 64, 4, 4, 3), 64: (64, 64, 4, 4, 2), 128: (128, 64, 8, 3, 1)},
    ("sm100", 128): {16: (16, 64, 4, 4, 2), 32: (32, 64, 4, 3, 2), 64: (64, 64, 4, 3, 2), 128: (128, 64, 8, 3, 1)},
    ("sm100", 256): {16: (16, 32, 4, 4, 2), 32: (32, 32, 4, 3, 2), 64: (64, 32, 8, 3, 1), 128: (64, 32, 8, 3, 1)},
    ("gfx942", 64): {16: (16, 64, 4, 2, 2), 32: (32, 64, 4, 2, 2), 64: (64, 64, 4, 2, 1), 128: (128, 64, 8, 2, 1)},
    ("gfx942", 128): {16: (16, 64, 4, 2, 2), 32: (32, 32, 4, 2, 2), 64: (64, 32, 4, 2, 1), 128: (128, 32, 8, 2, 1)},
    ("gfx942", 256): {16: (16, 32, 4, 2, 1), 32: (32, 32, 8, 2, 1), 64: (64, 16, 8, 2, 1), 128: (64, 16, 8, 2, 1)},
}
# The same for pools of one-byte elements.
_FP8_TABLE: dict[tuple[str, int], dict[int, _Row]] = _TABLE | {
    ("sm80", 128): _TABLE["sm80", 128] | {128: (128, 32, 8, 2, 1)},
    # 64 keys a step spill.
    ("sm100", 128): _TABLE["sm100", 128] | {16: (16, 32, 4, 4, 2)},
}
