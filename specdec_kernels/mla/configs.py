"""Static launch table of latent attention. Nothing is tuned while a step runs.

The key is the chip, the latent size and whether the rows are few: N * H rows are many even for decoding. The row of
sm90 was chosen by measuring (`docs/decisions/latent_attention.md`); the rows of the other chips compile and were not
measured. A request of more splits than `max_splits` has longer ones, each a power of two times `split_tokens`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MAX_SPLITS = 64
PARTIAL_BYTES = 32 << 20
_SPLIT_TOKENS = 512
_INTERPRETER_MAX_ROWS = 1024
_LEAST = 16  # lanes that a matrix instruction takes
_WIDEST = 256


@dataclass(frozen=True)
class MlaConfig:
    """Tile of one program: `block_m` query rows, `block_n` keys per iteration, `split_tokens` keys in all."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    split_tokens: int


@dataclass(frozen=True)
class MergeConfig:
    """Tile of one merge program: `rows` output rows, `block_s` of their `all_splits` partial results per iteration."""

    rows: int
    all_splits: int
    block_s: int
    num_warps: int


def mla_config(
    chip: str, latent: int, rows: int, max_length: int, split_tokens: int | None = None, itemsize: int = 2
) -> MlaConfig:
    """Row of the table for `rows` query rows of one request over at most `max_length` keys of `itemsize` bytes an
    entry. `split_tokens` replaces the table's split length, rounded up to a tile; shorter splits make the tile
    shorter."""
    if chip == "interpreter":
        # A program costs the same for any tile, so one tile takes all rows or keys.
        block_m = min(_INTERPRETER_MAX_ROWS, max(_LEAST, _power_of_two(rows)))
        config = MlaConfig(block_m, min(512, max(_LEAST, _power_of_two(max_length))), 1, 1, 4096)
    elif itemsize > 2:
        # float32 is for checking results: a tile that fits everywhere is enough.
        config = MlaConfig(_LEAST, _LEAST, 4, 1, _SPLIT_TOKENS)
    else:
        block_m, block_n, warps, stages = _TABLE[chip, 256 if latent <= 256 else 512][16 if rows <= 16 else 64]
        config = MlaConfig(block_m, block_n, warps, stages, _SPLIT_TOKENS)
    if split_tokens is None:
        return config
    block_n = min(config.block_n, max(_LEAST, _power_of_two(split_tokens)))
    return replace(config, block_n=block_n, split_tokens=-(-split_tokens // block_n) * block_n)


def max_splits(rows: int, latent: int) -> int:
    """Most splits of a request with `rows` query rows, whose partial results `PARTIAL_BYTES` hold."""
    return max(1, min(MAX_SPLITS, PARTIAL_BYTES // (4 * max(1, rows) * (latent + 1))))


def merge_config(chip: str, num_splits: int) -> MergeConfig:
    """Row of the table for merging `num_splits` partial results."""
    splits = max(2, _power_of_two(num_splits))
    if chip == "interpreter":
        return MergeConfig(rows=max(2, 256 // splits), all_splits=splits, block_s=splits, num_warps=1)
    return MergeConfig(rows=2, all_splits=splits, block_s=min(8, splits), num_warps=4)


def write_tile(chip: str, tokens: int, heads: int) -> dict[str, int]:
    """TOKENS and HEADS of a program of the store. On a GPU a token has the same tile, and the same bits, among any
    others."""
    if chip == "interpreter":
        return dict(TOKENS=_power_of_two(max(2, tokens)), HEADS=_power_of_two(heads))
    return dict(TOKENS=2, HEADS=min(16, _power_of_two(heads)))


def blocks(latent: int) -> tuple[int, int]:
    """`latent` columns as a power of two and the padded power of two that holds the rest (0: none). Large powers of two
    are halved: one accumulator of 512 columns takes twice its registers when it is stored."""
    first = 1 << (latent.bit_length() - 1)
    if first == latent and first > _WIDEST:
        return first // 2, first // 2
    return first, 0 if first == latent else max(_LEAST, _power_of_two(latent - first))


def _power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


# (chip, latent up to): {rows up to: (block_m, block_n, num_warps, num_stages)}
_TABLE: dict[tuple[str, int], dict[int, tuple[int, int, int, int]]] = {
    ("sm80", 256): {16: (16, 32, 4, 3), 64: (64, 32, 8, 2)},
    ("sm80", 512): {16: (16, 32, 4, 3), 64: (64, 32, 8, 3)},
    ("sm90", 256): {16: (16, 32, 4, 3), 64: (64, 32, 8, 3)},
    ("sm90", 512): {16: (16, 32, 4, 3), 64: (64, 64, 8, 2)},
    ("sm100", 256): {16: (16, 32, 4, 3), 64: (64, 32, 8, 2)},
    ("sm100", 512): {16: (16, 32, 4, 3), 64: (32, 32, 8, 2)},
    ("gfx942", 256): {16: (16, 32, 4, 1), 64: (64, 16, 8, 1)},
    ("gfx942", 512): {16: (16, 16, 8, 1), 64: (32, 16, 8, 1)},
}
