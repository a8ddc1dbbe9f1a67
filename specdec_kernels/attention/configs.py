"""Static launch table of paged attention. Nothing is tuned while a step runs.

The key is the chip, the head dimension, the bytes of a stored key element, and the packed query rows of one
(request, KV head), N * H / H_kv, rounded up to a bucket. The rows of sm90 were chosen by measuring; those of other
chips compile without spills.

Keys are split so that the programs of a call fill the chip in whole rounds (see `spread` and `device.split_layout`),
as far as `PARTIAL_BYTES` hold the partial results of a request. Calls over a window have shorter tiles where programs
compute few keys (`_WINDOW_TILES`).

A batch-invariant call has the tile of `INVARIANT_ROWS` for any number of rows, and splits at fixed positions: the
reduction over a tile of keys, its instruction and the order of the tiles are then the same for a row wherever it is
computed. Where partial results would take more than `INVARIANT_PARTIAL_BYTES`, or the requests fill the chip without
splits, one program computes all splits of its rows and rounds their results alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch

from specdec_kernels.launch import PROCESSORS

UNSPLIT = 1 << 30
MAX_SPLITS = 32
_INTERPRETER_FIRST_SPLITS = 4
_LONGEST_SPLIT = 2048
_LONGEST_SPLIT_OF_A_FULL_CHIP = 16384
_MOST_ROUNDS = 8
_MOST_FIRST_SPLITS = 16
_UNEVEN = 1.1
PARTIAL_BYTES = 8 << 20
INVARIANT_ROWS = 64
INVARIANT_PARTIAL_BYTES = 1 << 30
_INVARIANT_FIRST_SPLITS = 8
_ROWS_OF_A_WARP = 16
_SPLIT_TOKENS = 128
_INVARIANT_SPLIT_TOKENS = 256
_ROW_BUCKETS = (16, 32, 64, 128)
_MAX_SPLIT_TILES = 4
_INTERPRETER_MAX_ROWS = 1024
_FP8_NATIVE_CHIPS = ("sm90", "sm100")
_SWAP_AB_BUCKETS = (16, 32)  # with more rows, finding the maxima of keys by rows takes longer than conversions
_PROGRAMS_AT_ONCE = {16: 3, 32: 2, 64: 2, 128: 1}
_FP8_PROGRAMS_AT_ONCE = _PROGRAMS_AT_ONCE | {16: 2}


@dataclass(frozen=True)
class AttentionConfig:
    """Tile of one program and how the keys are split.

    block_m: packed query rows. block_n: keys per iteration. split_tokens: fewest keys of a split. first_splits: splits
    of a request that fill the chip. longest_split: most keys of a split, about; longer requests have multiples of
    `first_splits`. 0 for the two: as `spread` chooses. slots: programs that the chip runs at once. resident_programs:
    size of the persistent grid. fp8_native: the chip converts e4m3 itself. swap_ab: see `device_fp8`. warp_specialized:
    calls that `kernel_hopper` can do are its own; with fewer than 64 rows over float8 `device_fp8` is faster.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    split_tokens: int
    first_splits: int = 0
    longest_split: int = 0
    max_splits: int = MAX_SPLITS
    slots: int = 1
    resident_programs: int = 4
    fp8_native: bool = False
    swap_ab: bool = False
    warp_specialized: bool = False

    def fp8_code(self, kv_dtype: torch.dtype) -> int:
        """How the kernel reads the pool: 0 as it is, 1 the chip's own e4m3, 2 by moving bits."""
        if kv_dtype != torch.float8_e4m3fn:
            return 0
        return 1 if self.fp8_native else 2


@dataclass(frozen=True)
class MergeConfig:
    """Tile of one merge program: `rows` output rows, `unroll` of their partial results per iteration."""

    rows: int
    unroll: int
    num_warps: int


def attention_config(
    chip: str,
    head_dim: int,
    rows: int,
    max_length: int,
    split_tokens: int | None = None,
    kv_bytes: int = 2,
    tuning: Mapping[str, Any] | None = None,
    batch_invariant: bool = False,
    window: int | None = None,
    sequences: int = 1,
) -> AttentionConfig:
    """Row of the table for `rows` packed query rows of one (request, KV head) over at most `max_length` keys of
    `kv_bytes` bytes per element, of which a row sees `window`, in a call of `sequences` = requests x KV heads.

    `split_tokens` replaces the table's split length, rounded up to whole tiles; a split shorter than a tile makes the
    tile shorter. `tuning` replaces any field; ValueError for an unknown one.
    """
    if batch_invariant:
        config = _invariant_config(chip, head_dim, kv_bytes)
    elif chip == "interpreter":
        # A program costs the same for any tile, so one tile takes all rows or keys.
        block_m = min(_INTERPRETER_MAX_ROWS, max(16, _power_of_two(rows)))
        block_n = min(512, max(16, _power_of_two(max_length)))
        config = AttentionConfig(
            *(block_m, block_n, 1, 1, 4096), first_splits=_INTERPRETER_FIRST_SPLITS, swap_ab=head_dim >= 32
        )
    else:
        key = (chip, _head_dim_row(head_dim), _row_bucket(rows), kv_bytes)
        config = _table_config(chip, head_dim, rows, kv_bytes)
        if window is not None:
            config = replace(config, **_window_tile(key, window, sequences * -(-rows // config.block_m) / config.slots))
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


def spread(config: AttentionConfig, programs: int) -> AttentionConfig:
    """`config` with the splits of a call that has `programs` = requests x KV heads x tiles of rows without any: the
    fewest whose programs run in rounds of which the last is nearly full."""
    share = max(1, programs) / config.slots
    longest = max(_LONGEST_SPLIT, _power_of_two(int(_LONGEST_SPLIT_OF_A_FULL_CHIP * share)))
    return replace(
        config,
        first_splits=config.first_splits or _splits_in_whole_rounds(share),
        longest_split=max(config.longest_split or longest, config.split_tokens),
    )


def is_spread_without_splits(config: AttentionConfig, programs: int, max_length: int) -> bool:
    """Whether `spread` leaves the keys of requests of up to `max_length` whole, on a chip whose `slots` are known."""
    found = spread(replace(config, first_splits=0, longest_split=0), programs)
    return config.slots > 1 and found.first_splits == 1 and max_length <= found.longest_split


def _splits_in_whole_rounds(share: float) -> int:
    """Splits of a request in a call that fills a `share` of the chip without any."""
    most = max(1, int(_MOST_ROUNDS / share))
    unevenness = {splits: math.ceil(share * splits) / (share * splits) for splits in range(1, most + 1)}
    even = next((splits for splits, value in unevenness.items() if value <= _UNEVEN), 1)
    return min(even, _MOST_FIRST_SPLITS)


def fixed_borders(max_length: int, split_tokens: int, first_splits: int) -> list[int]:
    """First positions of the splits of up to `max_length` keys, see `device.fixed_split_of`."""
    begins, length, next_length_at = [0], split_tokens, split_tokens * first_splits
    while begins[-1] + length < max_length:
        begins.append(begins[-1] + length)
        if begins[-1] == next_length_at:
            length, next_length_at = 2 * length, 4 * next_length_at
    return begins


def bounded_splits(max_splits: int, rows: int, head_dim: int, itemsize: int) -> int:
    """`max_splits`, or as many splits of `rows` = N * H rows as `PARTIAL_BYTES` hold."""
    return max(1, min(max_splits, PARTIAL_BYTES // (max(1, rows) * (head_dim * itemsize + 4))))


def merge_config(chip: str, rows: int, num_splits: int, head_dim: int) -> MergeConfig:
    """Row of the table for up to `num_splits` partial results of `rows` = N * H output rows per request."""
    if chip == "interpreter":
        return MergeConfig(max(2, min(1024, _power_of_two(rows))), 2, 1)
    # A warp takes two rows of 128 two-byte numbers, 16 bytes per lane.
    rows, num_warps = (4, 2) if rows <= 64 else (8, 4)
    if head_dim > 256 and 8 < num_splits <= 16 and chip == "sm90":
        return MergeConfig(rows=1, unroll=16, num_warps=2)
    if head_dim > 256:
        rows = 2
    unroll = 8 if chip == "sm90" and num_splits > 4 else 4  # eight spill on sm100
    return MergeConfig(rows, unroll, num_warps)


def in_order_config(chip: str, config: AttentionConfig, rows: int, itemsize: int) -> AttentionConfig:
    """The row for programs that compute all splits. For more `rows` than the tile of `config` has, on sm90 it has twice
    the rows and warps, with the same bits."""
    if rows <= config.block_m or not _has_the_bits_of_a_warp(chip, config, itemsize):
        return config
    return replace(config, block_m=2 * config.block_m, num_warps=2 * config.num_warps)


def node_config(chip: str, config: AttentionConfig, group: int, itemsize: int) -> AttentionConfig:
    """The row for programs of one node, whose `group` query heads are its only rows, with the bits of `config`."""
    if group <= _ROWS_OF_A_WARP and _has_the_bits_of_a_warp(chip, config, itemsize):
        return replace(config, block_m=_ROWS_OF_A_WARP, num_warps=1)
    return replace(config, block_m=max(config.block_m, _power_of_two(group)))


def _has_the_bits_of_a_warp(chip: str, config: AttentionConfig, itemsize: int) -> bool:
    """Whether each warp has 16 rows and adds all keys of a tile by itself, as a warp of another such tile does."""
    return chip == "sm90" and itemsize == 2 and config.block_m == _ROWS_OF_A_WARP * config.num_warps


def _table_config(chip: str, head_dim: int, rows: int, kv_bytes: int) -> AttentionConfig:
    bucket = _row_bucket(rows)
    table = _FP8_TABLE if kv_bytes == 1 else _TABLE
    block_m, block_n, warps, stages, resident = table[chip, _head_dim_row(head_dim)][bucket]
    if kv_bytes == 4:
        # As many bytes per buffer as the row of two-byte elements.
        block_n = max(16, block_n // 2)
    return AttentionConfig(
        block_m,
        block_n,
        warps,
        stages,
        UNSPLIT if fills_the_chip(rows, block_m) else _SPLIT_TOKENS,
        slots=(_FP8_PROGRAMS_AT_ONCE if kv_bytes == 1 else _PROGRAMS_AT_ONCE)[bucket] * PROCESSORS[chip],
        resident_programs=resident * PROCESSORS[chip],
        fp8_native=chip in _FP8_NATIVE_CHIPS,
        swap_ab=chip == "sm90" and bucket in _SWAP_AB_BUCKETS and _head_dim_row(head_dim) == 128,
        warp_specialized=chip == "sm90",
    )


def _window_tile(key: tuple[str, int, int, int], window: int, share: float) -> dict[str, Any]:
    """Fields of the row `key` that a call over a window replaces; without splits it fills a `share` of the chip."""
    tile = _WINDOW_TILES.get(key)
    if tile is None or not tile.fewest_keys <= window * min(1.0, share) <= tile.most_keys:
        return {}
    return dict(block_n=tile.block_n, num_stages=tile.num_stages)


def _row_bucket(rows: int) -> int:
    return next((size for size in _ROW_BUCKETS if rows <= size), _ROW_BUCKETS[-1])


def _invariant_config(chip: str, head_dim: int, kv_bytes: int) -> AttentionConfig:
    if chip == "interpreter":
        return AttentionConfig(INVARIANT_ROWS, 64, 1, 1, _INVARIANT_SPLIT_TOKENS, first_splits=_INVARIANT_FIRST_SPLITS)
    config = _table_config(chip, head_dim, INVARIANT_ROWS, kv_bytes)
    return replace(config, split_tokens=_INVARIANT_SPLIT_TOKENS, first_splits=_INVARIANT_FIRST_SPLITS)


def fills_the_chip(rows: int, block_m: int) -> bool:
    """Whether a request has as many query rows as a prefill, which fill the chip without splitting keys."""
    return rows > _MAX_SPLIT_TILES * block_m


def _head_dim_row(head_dim: int) -> int:
    return 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256


def _power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


_Row = tuple[int, int, int, int, int]

# (chip, head_dim): {rows: (block_m, block_n, num_warps, num_stages, programs per processor)}
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
    ("sm90", 128): {16: (16, 128, 4, 3, 4), 32: (32, 64, 4, 4, 4), 64: (64, 64, 4, 3, 4), 128: (128, 128, 8, 3, 4)},
    ("sm80", 128): _TABLE["sm80", 128] | {128: (128, 32, 8, 2, 1)},
    # 64 keys per iteration spill.
    ("sm100", 128): _TABLE["sm100", 128] | {16: (16, 32, 4, 4, 2)},
}


class _WindowTile(NamedTuple):
    """Tile and KV buffers of calls over a window whose programs compute `fewest_keys` to `most_keys` of it."""

    block_n: int
    num_stages: int
    fewest_keys: int
    most_keys: int


# (chip, head_dim, rows, bytes of a key's element), as measured, see `docs/decisions/attention_splits.md`.
_WINDOW_TILES = {
    ("sm90", 128, 16, 2): _WindowTile(32, 3, 64, 4096),
    ("sm90", 128, 32, 2): _WindowTile(32, 3, 0, 128),
    ("sm90", 128, 64, 2): _WindowTile(32, 3, 0, 2048),
}
