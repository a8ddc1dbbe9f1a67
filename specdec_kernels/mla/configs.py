"""Static launch table of latent attention. Nothing is tuned while a step runs.

The key is the chip, the latent size and whether the rows are few: N * H rows are many even for decoding. The rows of
sm90 were chosen by measuring (`docs/decisions/latent_attention.md`); those of the other chips compile and were not
measured. Keys are split as those of paged attention, see `attention.configs`.
"""

from __future__ import annotations

from dataclasses import replace

from specdec_kernels.attention.configs import (
    INVARIANT_PARTIAL_BYTES,
    PROCESSORS,
    AttentionConfig,
    fixed_borders,
    spread,
)
from specdec_kernels.attention.types import WorkShape
from specdec_kernels.launch import CHIPS, current_chip
from specdec_kernels.mla.types import MlaCall

MAX_SPLITS = 64
PARTIAL_BYTES = 32 << 20
WARP_SPECIALIZED_SIZES = (512, 64)  # of latent and rotated keys
WARP_SPECIALIZED_PAGE = 16  # tokens of a copy
_SPLIT_TOKENS = 512
_INVARIANT_ROWS = 64
_INVARIANT_FIRST_SPLITS = 8
_INTERPRETER_INVARIANT_KEYS = 32
_INTERPRETER_FIRST_SPLITS = 4
_INTERPRETER_MAX_ROWS = 1024
_LEAST = 16  # lanes that a matrix instruction takes
_WIDEST = 256


def mla_config(
    chip: str,
    sizes: tuple[int, int],
    rows: int,
    max_length: int,
    split_tokens: int | None = None,
    itemsize: int = 2,
    batch_invariant: bool = False,
    page_size: int = WARP_SPECIALIZED_PAGE,
) -> AttentionConfig:
    """Row of the table for `rows` query rows of one request over at most `max_length` keys whose latent and rotated
    part have `sizes` of `itemsize` bytes. `split_tokens` replaces the table's split length, rounded up to a tile;
    shorter splits make the tile shorter. `batch_invariant`: the same for any rows and length. On sm90
    `kernel_hopper` takes pages in multiples of `WARP_SPECIALIZED_PAGE`, and splits in multiples of the table's."""
    if batch_invariant:
        rows = _INVARIANT_ROWS
    if chip == "interpreter" and batch_invariant:
        config = AttentionConfig(rows, _INTERPRETER_INVARIANT_KEYS, 1, 1, 2 * _INTERPRETER_INVARIANT_KEYS)
    elif chip == "interpreter":
        # A program costs the same for any tile, so one tile takes all rows or keys.
        block_m = min(_INTERPRETER_MAX_ROWS, max(_LEAST, _power_of_two(rows)))
        config = AttentionConfig(block_m, min(512, max(_LEAST, _power_of_two(max_length))), 1, 1, _SPLIT_TOKENS)
    elif itemsize > 2:
        # float32 is for checking results: a tile that fits everywhere is enough.
        config = AttentionConfig(_LEAST, _LEAST, 4, 1, _SPLIT_TOKENS)
    else:
        tile = _TABLE[chip, 256 if sizes[0] <= 256 else 512][16 if rows <= 16 else 64]
        config = AttentionConfig(*tile, _SPLIT_TOKENS)
    first_splits = _INTERPRETER_FIRST_SPLITS if chip == "interpreter" else 0
    config = replace(
        config,
        first_splits=_INVARIANT_FIRST_SPLITS if batch_invariant else first_splits,
        max_splits=MAX_SPLITS,
        slots=PROCESSORS.get(chip, 1),
    )
    if split_tokens is not None:
        block_n = min(config.block_n, max(_LEAST, _power_of_two(split_tokens)))
        config = replace(config, block_n=block_n, split_tokens=-(-split_tokens // block_n) * block_n)
    whole_copies = page_size % WARP_SPECIALIZED_PAGE == 0
    if chip == "sm90" and sizes == WARP_SPECIALIZED_SIZES and itemsize == 2 and whole_copies:
        split_tokens = -(-config.split_tokens // _SPLIT_TOKENS) * _SPLIT_TOKENS
        config = replace(config, warp_specialized=True, block_m=64, block_n=64, split_tokens=split_tokens)
    return config


def divide(call: MlaCall) -> tuple[WorkShape, AttentionConfig]:
    """How the work of a call is divided."""
    q_latent, q_rope, cache, metadata, split_tokens, batch_invariant = call
    batch, num_nodes, heads, latent = q_latent.shape
    max_length = metadata.max_length
    assert max_length is not None
    config = mla_config(
        current_chip(q_latent), (latent, q_rope.shape[3]), num_nodes * heads, max_length, split_tokens,
        cache.element_size(), batch_invariant, cache.shape[1],
    )  # fmt: skip
    if not batch_invariant:
        config = spread(config, batch * -(-num_nodes * heads // config.block_m))
    work = WorkShape(
        batch=batch,
        num_nodes=num_nodes,
        group=heads,
        num_slots=metadata.tree_width or num_nodes,
        all_slots=metadata.tree_width is not None,
        max_length=max_length,
        window=None,
        block_m=config.block_m,
        split_tokens=config.split_tokens,
        first_splits=config.first_splits,
        longest_split=config.longest_split,
        max_splits=max_splits(num_nodes * heads, latent, cache.element_size()),
        num_splits=1,
        fixed_splits=batch_invariant,
    )
    if batch_invariant:
        splits = len(fixed_borders(max_length, work.split_tokens, work.first_splits))
        return work._replace(num_splits=splits), config
    return work._replace(num_splits=work.splits_of(max_length)), config


def max_splits(rows: int, latent: int, itemsize: int = 2) -> int:
    """Most splits of a request with `rows` query rows, whose partial results `PARTIAL_BYTES` hold."""
    return max(1, min(MAX_SPLITS, PARTIAL_BYTES // (max(1, rows) * (latent * itemsize + 4))))


def requests_at_once(work: WorkShape, latent: int, itemsize: int) -> int:
    """Requests of a launch, whose partial results `INVARIANT_PARTIAL_BYTES` hold: splits at fixed positions have no
    other bound."""
    part_bytes = work.num_splits * work.num_nodes * work.group * (latent * itemsize + 4)
    return max(1, INVARIANT_PARTIAL_BYTES // part_bytes) if work.fixed_splits else max(1, work.batch)


def write_tile(chip: str, tokens: int, heads: int) -> dict[str, int]:
    """TOKENS and HEADS of a program of the store. On a GPU a token has the same tile, and the same bits, among any
    others."""
    if chip == "interpreter":
        return dict(TOKENS=_power_of_two(max(2, tokens)), HEADS=_power_of_two(heads))
    return dict(TOKENS=2, HEADS=min(16, _power_of_two(heads)))


HEAD_TILES = {chip: dict(TOKENS=64, COLUMNS=64, BLOCK_K=64) for chip in CHIPS} | {
    "interpreter": dict(TOKENS=64, COLUMNS=512, BLOCK_K=64)
}
"""Of `head_product`, for any number of tokens."""


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
    ("sm90", 512): {16: (16, 32, 4, 3), 64: (64, 32, 8, 3)},
    ("sm100", 256): {16: (16, 32, 4, 3), 64: (64, 32, 8, 2)},
    ("sm100", 512): {16: (16, 32, 4, 3), 64: (32, 32, 8, 2)},
    ("gfx942", 256): {16: (16, 32, 4, 1), 64: (64, 16, 8, 1)},
    ("gfx942", 512): {16: (16, 16, 8, 1), 64: (32, 16, 8, 1)},
}
