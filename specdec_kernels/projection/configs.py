"""Static launch table of the products of few rows: no autotuning on a step's path.

The splits of the inner dimension are chosen by the chip and the shape of the weight alone. The tile follows the number
of rows, which changes no sum, because all tiles of the table add along the inner dimension in the same order.

Weights whose column tiles fill the chip several times have small tiles, several programs a processor; those with fewer
tiles than processors one program a processor with many loads in flight, and split-K; those between the two programs a
processor. Measurements: docs/decisions/fused_projections.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from specdec_kernels.launch import PROCESSORS, SHARED_BYTES

MAX_KERNEL_ROWS = 64  # rows of x that the kernel takes by itself; more go to torch's matmul, which is then faster
_MOST_ROWS = 128  # of one program
_INVARIANT_ROWS = (16, 32, 64, _MOST_ROWS, _MOST_ROWS + 1, 16 * _MOST_ROWS)
_INTERPRETER_ROWS = 16
_COLUMNS = 64  # the M side of the tensor core
_SHORTEST_SPLIT, _SHORTEST_OF_PAIRS = 512, {"sm90": 1024}
_EVENER = 0.1
_RESIDENT_OF_MANY, _RESIDENT_OF_CUT_PAIRS = {16: 128, 32: 128}, {16: 512}  # by the rows of a program
_FLOAT32_SPLIT = 128  # inner elements that are added one by one in float32, which has no tensor core

_CUT_STEP = 128  # a multiple of every block_k of the table, so that the cut is the same for every tile
# Rows of a program: (columns, block_k, num_warps, num_stages).
_FEW_TILES = {16: (64, 128, 4, 6), 32: (64, 128, 4, 4), 64: (64, 128, 4, 4), 128: (64, 128, 4, 4)}
_PAIRS_OF_TILES = {16: (64, 128, 4, 4), 32: (64, 128, 4, 4), 64: (64, 64, 4, 4), 128: (64, 64, 4, 3)}
_MANY_TILES = {16: (64, 128, 4, 3), 32: (64, 128, 4, 3), 64: (64, 64, 4, 4), 128: (64, 64, 4, 3)}
# Steps of a weight with few tiles that a program of `kernel_hopper` has in flight, by its rows: of cut weights, and of
# others. They take more than half of a processor's shared memory, so that the programs spread over all processors.
_RING_OF_CUT, _RING_OF_WHOLE = {16: 10, 32: 5}, {16: 6, 32: 5}
# For an inner dimension that is not a multiple of _CUT_STEP, such as 576: steps without a mask.
_ODD_INNER = (64, 64, 4, 6)
# More rows than one program takes are bound by arithmetic, and twice the columns halve what is loaded for it. Other
# chips than this one may multiply tiles of twice the columns by another instruction.
_BOUND_BY_ARITHMETIC = {"sm90": (128, 64, 8, 4)}

# Of float8 weights: (columns, num_warps, num_stages) by the rows of a program, of weights with many and with few tiles.
_MANY_TILES_OF_CODES = (64, 4, 4)
_TILES_OF_CODES = {16: (64, 4, 8), 32: (64, 4, 6), 64: (64, 4, 4)}
# The same where x is rounded to codes, and for more rows than one program takes. A sum and a product that is added to
# it take twice the registers: no program takes more than 64 rows, nor more than 32 in float32.
_TILES_OF_ROUNDED = {16: (128, 8, 6), 32: (128, 4, 4), 64: (64, 4, 4)}
_BOUND_BY_CODES = {False: (64, 4, 4), True: (128, 8, 4)}
# Groups of weights in flight by the rows of a program, of which two fit a processor, or one where few tiles have splits
# of many groups. More rows gain nothing.
_RING, _LONG_RING = {16: 6, 32: 4}, {16: 12, 32: 6}
_MOST_ROWS_OF_CODES, _MOST_ROWS_OF_FLOAT32_CODES = 64, 32
ROUNDED_APART_ROWS = 16
"""Rows of x that every program rounds to codes; more are rounded once, before the product."""


@dataclass(frozen=True)
class LinearConfig:
    """columns: weight rows of one program. block_k: inner elements a step. splits: programs that share a column tile,
    each with its part of the inner dimension. rows: rows of x a program takes at once. in_order: one program takes all
    splits of a tile. resident: inner elements of its weights, the last of its split, that a program loads into
    registers before it waits for its predecessor; 0 for none. ring: steps of its weights that a program of
    `kernel_hopper` or `kernel_scaled_hopper` has in flight; 0 where a pipelined kernel computes."""

    columns: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int
    rows: int
    in_order: bool = False
    resident: int = 0
    ring: int = 0

    def split_length(self, inner: int) -> int:
        """Inner elements of a program: whole steps, or all. Tiles of 64 and of 128 are cut at the same places."""
        step = _CUT_STEP if inner % _CUT_STEP == 0 and self.block_k == _CUT_STEP // 2 else self.block_k
        steps = -(-inner // step)
        return min(inner, -(-steps // self.splits) * step)


def warmup_rows(batch_invariant: bool) -> tuple[int, ...]:
    """Numbers of rows that together compile every kernel of a forward; the last is more than the kernel takes."""
    return _INVARIANT_ROWS if batch_invariant else (16, 32, 64, MAX_KERNEL_ROWS + 1)


def linear_config(chip: str, outer: int, inner: int, rows: int, element_bytes: int) -> LinearConfig:
    """The row of the table for a weight [outer, inner] and `rows` rows of x."""
    many = rows > _MOST_ROWS
    if chip == "interpreter":
        # Every program multiplies matrices of one shape, so that a row has the bits of one routine.
        return LinearConfig(512, 256, _splits(inner, -(-inner // 512), 256), 1, 1, _INTERPRETER_ROWS, many)
    block = min(_MOST_ROWS, max(16, 1 << max(0, rows - 1).bit_length()))
    if element_bytes == 4:
        cut, warps = _splits(inner, inner // _FLOAT32_SPLIT, 16), 8 if block == _MOST_ROWS else 4
        return LinearConfig(32, 16, cut, warps, 3, block, many)
    tiles = -(-outer // _COLUMNS)
    cut = _splits(inner, min(_programs_a_tile(chip, tiles, inner), inner // _SHORTEST_SPLIT), _CUT_STEP)
    columns, block_k, warps, stages = _table(tiles * cut, chip)[block] if inner % _CUT_STEP == 0 else _ODD_INNER
    resident = _resident(chip, tiles * cut, cut, block) if inner % _CUT_STEP == 0 else 0
    if chip != "sm90" and block == _MOST_ROWS:
        warps = 8
    if many and chip in _BOUND_BY_ARITHMETIC:
        wide = _BOUND_BY_ARITHMETIC[chip]
        # Fewer programs than processors: narrow tiles and a program for each split fill the chip.
        many = -(-rows // block) * -(-outer // wide[0]) >= PROCESSORS[chip]
        columns, block_k, warps, stages = wide if many else (columns, block_k, warps, stages)
    fitting = SHARED_BYTES[chip] // ((columns + block) * block_k * element_bytes)
    few = chip == "sm90" and tiles * cut <= PROCESSORS[chip]
    ring = (_RING_OF_CUT if cut > 1 else _RING_OF_WHOLE).get(block, 0) if few else 0
    stages = max(2, min(stages, fitting))
    found = LinearConfig(columns, block_k, cut, warps, stages, block, many and cut > 1, resident, ring)
    shortest = inner - (cut - 1) * found.split_length(inner)
    return found if resident <= shortest else replace(found, resident=0)


def scaled_config(
    chip: str, outer: int, inner: int, rows: int, element_bytes: int, float8_x: bool = False
) -> LinearConfig:
    """`linear_config` for a `ScaledWeight`: no step is in two groups of 128 inner elements, a step is a group where x
    is rounded to codes, and the steps are the same for every number of rows."""
    found = linear_config(chip, outer, inner, rows, element_bytes)
    if chip == "interpreter":
        return replace(found, columns=_CUT_STEP, block_k=_CUT_STEP)
    block_k = _CUT_STEP if float8_x or inner % _CUT_STEP == 0 else _ODD_INNER[1]
    if element_bytes == 4:
        rows = min(found.rows, _MOST_ROWS_OF_FLOAT32_CODES)
        return replace(found, block_k=block_k, rows=rows, num_stages=2) if float8_x else found
    tiles, processors = -(-outer // _COLUMNS), PROCESSORS[chip]
    cut = _splits(inner, min(max(1, 2 * processors // tiles), inner // _SHORTEST_SPLIT), block_k)
    block, many = min(found.rows, _MOST_ROWS_OF_CODES), rows > _MOST_ROWS
    fills = tiles * cut > 2 * processors
    ring = _ring(block, 0 if fills else inner // block_k // cut) if float8_x and chip == "sm90" else 0
    if many:
        columns, warps, stages = _BOUND_BY_CODES[float8_x]
    elif fills:
        columns, warps, stages = _MANY_TILES_OF_CODES
    else:
        columns, warps, stages = (_TILES_OF_ROUNDED if float8_x else _TILES_OF_CODES)[block]
    # A code is converted in registers; codes and rows of x wait in shared memory.
    fitting = SHARED_BYTES[chip] // ((columns + block * element_bytes) * block_k)
    return LinearConfig(columns, block_k, cut, warps, max(2, min(stages, fitting)), block, many and cut > 1, ring=ring)


def _ring(rows: int, groups: int) -> int:
    """For programs of `groups` groups, or that fill the chip if 0."""
    longer = _LONG_RING.get(rows, 0)
    return longer if longer <= groups else _RING.get(rows, 0)


def _programs_a_tile(chip: str, tiles: int, inner: int) -> int:
    """As many as give every processor a program or, where that leaves clearly fewer of them idle, two. Very short
    splits lose more than idle processors do."""
    processors = PROCESSORS[chip]
    one, two = (max(1, count * processors // tiles) for count in (1, 2))
    is_evener = two * tiles / (2 * processors) > one * tiles / processors + _EVENER
    return two if is_evener and inner // two >= _SHORTEST_OF_PAIRS.get(chip, 0) else one


def _resident(chip: str, programs: int, cut: int, rows: int) -> int:
    """Inner elements whose weights are resident in registers. Other weights gain nothing: the early loads delay the
    predecessor by as much."""
    if chip != "sm90" or programs <= PROCESSORS[chip]:
        return 0
    if programs > 2 * PROCESSORS[chip]:
        return _RESIDENT_OF_MANY.get(rows, 0)
    return _RESIDENT_OF_CUT_PAIRS.get(rows, 0) if cut > 1 else 0


def _table(programs: int, chip: str) -> dict[int, tuple[int, int, int, int]]:
    """The tiles of a call with `programs` programs."""
    if programs <= PROCESSORS[chip]:
        return _FEW_TILES
    return _PAIRS_OF_TILES if programs <= 2 * PROCESSORS[chip] else _MANY_TILES


def _splits(inner: int, wanted: int, step: int) -> int:
    """Splits of whole steps, none of them empty, near the number wanted."""
    steps = -(-inner // step)
    length = -(-steps // max(1, min(wanted, steps)))
    return -(-steps // length)
