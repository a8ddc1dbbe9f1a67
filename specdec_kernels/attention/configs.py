"""Static launch table of paged attention: no autotuning on a step's path.

The key is the chip, the head dimension and the packed query rows of one (request, KV head), N * H / H_kv,
rounded up to a bucket. Small buckets are bound by memory: they want bytes in flight, so two or three KV
buffers of 64 keys and several programs a processor. From 64 rows the matrix unit wants one warp group, from
128 two. Every row compiles without spills: 64 x 64 tiles of four warps spill on sm90, so 32 keys and one more
stage stand there.

`split_tokens` is a length, not a count: partial results of a row then do not depend on the batch, and their
traffic stays a fixed share (2 * rows / split_tokens) of the KV traffic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

UNSPLIT = 1 << 30
_ROW_BUCKETS = (16, 32, 64, 128)
_MAX_SPLIT_TILES = 4
_INTERPRETER_MAX_ROWS = 1024


@dataclass(frozen=True)
class AttentionConfig:
    """Tile of one program: `block_m` packed query rows, `block_n` keys a step, `split_tokens` keys in all."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    split_tokens: int


@dataclass(frozen=True)
class MergeConfig:
    """Tile of one merge program: `rows` output rows, `block_s` of their `all_splits` partial results a
    step."""

    rows: int
    all_splits: int
    block_s: int
    num_warps: int


def attention_config(
    chip: str, head_dim: int, rows: int, max_length: int, split_tokens: int | None = None
) -> AttentionConfig:
    """Row of the table for `rows` packed query rows of one (request, KV head) over at most `max_length` keys.

    `split_tokens` replaces the table's split length; splits shorter than a tile make the tile shorter.
    """
    if chip == "interpreter":
        # A program costs the same whatever its tile, so a tile takes everything that is there.
        block_m = min(_INTERPRETER_MAX_ROWS, max(16, _power_of_two(rows)))
        config = AttentionConfig(block_m, min(512, max(16, _power_of_two(max_length))), 1, 1, 4096)
    else:
        bucket = next((size for size in _ROW_BUCKETS if rows <= size), _ROW_BUCKETS[-1])
        block_m, block_n, warps, stages = _TABLE[chip, _head_dim_row(head_dim)][bucket]
        config = AttentionConfig(block_m, block_n, warps, stages, _split_tokens(rows, block_m))
    if split_tokens is None:
        return config
    block_n = min(config.block_n, max(16, _power_of_two(split_tokens)))
    return replace(config, block_n=block_n, split_tokens=split_tokens)


def merge_config(chip: str, num_splits: int) -> MergeConfig:
    """Row of the table for merging `num_splits` partial results."""
    splits = _power_of_two(num_splits)
    if chip == "interpreter":
        return MergeConfig(rows=max(1, 1024 // splits), all_splits=splits, block_s=splits, num_warps=1)
    return MergeConfig(rows=1, all_splits=splits, block_s=min(16, splits), num_warps=4 if splits > 4 else 1)


def _split_tokens(rows: int, block_m: int) -> int:
    """Keys a program; prefill-sized queries fill the chip without splitting."""
    if rows > _MAX_SPLIT_TILES * block_m:
        return UNSPLIT
    return max(256, 16 * block_m)


def _head_dim_row(head_dim: int) -> int:
    return 64 if head_dim <= 64 else 128


def _power_of_two(value: int) -> int:
    """Smallest power of two that is at least `value`."""
    return 1 << max(0, value - 1).bit_length()


# (chip, head_dim): {rows: (block_m, block_n, num_warps, num_stages)}
_TABLE: dict[tuple[str, int], dict[int, tuple[int, int, int, int]]] = {
    ("sm80", 64): {16: (16, 64, 4, 4), 32: (32, 64, 4, 3), 64: (64, 64, 4, 3), 128: (128, 64, 8, 3)},
    ("sm80", 128): {16: (16, 64, 4, 3), 32: (32, 64, 4, 3), 64: (64, 64, 8, 3), 128: (128, 64, 8, 2)},
    ("sm90", 64): {16: (16, 64, 4, 4), 32: (32, 64, 4, 4), 64: (64, 64, 4, 4), 128: (128, 64, 8, 3)},
    ("sm90", 128): {16: (16, 64, 4, 4), 32: (32, 64, 4, 3), 64: (64, 32, 4, 4), 128: (128, 64, 8, 3)},
    ("sm100", 64): {16: (16, 64, 4, 4), 32: (32, 64, 4, 4), 64: (64, 64, 4, 4), 128: (128, 64, 8, 3)},
    ("sm100", 128): {16: (16, 64, 4, 4), 32: (32, 64, 4, 3), 64: (64, 64, 4, 3), 128: (128, 64, 8, 3)},
    ("gfx942", 64): {16: (16, 64, 4, 2), 32: (32, 64, 4, 2), 64: (64, 64, 4, 2), 128: (128, 64, 8, 2)},
    ("gfx942", 128): {16: (16, 64, 4, 2), 32: (32, 32, 4, 2), 64: (64, 32, 4, 2), 128: (128, 32, 8, 2)},
}
