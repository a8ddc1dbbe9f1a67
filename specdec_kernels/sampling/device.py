"""Device functions that selection, the filtered distributions and verification are composed of.

Words, from the widest part of a row to the narrowest:

row         logits of one node, or with `PROBS` its probabilities
chunk       tokens of one program of the kernels over deferred rows (`SelectionConfig.chunk`)
strip       tokens that one warp reads in `kernel_stats`, at most 1,024; of each its largest value and sums are kept
group       64 neighbouring tokens, of which the largest is kept; elsewhere WIDTH neighbouring tokens
slot        place in registers for one group of a filtered row; a row has `SelectionConfig.slots`
class       of a deferred row: the values between two of the five edges around its guessed threshold
deferred    a filtered row whose threshold does not lie within its slots; it waits in a queue for `kernel_nucleus`
key         an int32 that orders as a float does, shifted by the bits that the row's type leaves zero
unit        2^-60 of a total weight

Weights are w = exp((l - max l) / T), or the probability itself; always float32. Filters are
thresholds on the value, found by bisection over keys, so that 16-bit logits need at most 16 halvings. A sample counts
weights in whole units, in int64: the running sums are exact, rise from entry to entry in every order of addition, and
resolve every value of a uniform.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from specdec_kernels.sampling.reference import MIN_TEMPERATURE

_MIN_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)
FLOAT32_MAX = tl.constexpr(torch.finfo(torch.float32).max)
LOG2E = tl.constexpr(1.4426950408889634)
_UNITS = tl.constexpr(2.0**60)  # units of a total in which a sample is counted
_MOST_INVERSE = tl.constexpr(2.0**126)  # so that the inverse of a subnormal total stays finite
_ULP = tl.constexpr(2.0**-53)
# A scan shorter than the eight 16-bit logits of one vector load does not compile on Triton 3.6.
MIN_SCAN = 8


VECTOR_BYTES = 16  # that a thread reads at once
_THREADS = tl.constexpr(32)


def grouping(vocab: int, width: int) -> tuple[int, int, int]:
    """Tokens of a group, at most `width`; groups of a row; and lanes that hold one entry per group."""
    width = min(max(triton.next_power_of_2(vocab), MIN_SCAN), width)
    groups = triton.cdiv(vocab, width)
    return width, groups, max(triton.next_power_of_2(groups), MIN_SCAN)


def rows_per_program(rows: int, most: int, lanes: int) -> int:
    """Rows of `lanes` lanes of one program: a power of two, at most `most`, within Triton's 2^20 entries a block."""
    return min(triton.next_power_of_2(max(rows, 1)), most, max(1, (1 << 19) // lanes))


class Uniforms(NamedTuple):
    """The source of uniforms: the generator, or given ones."""

    seeds: Any  # int64 by request, or None
    positions: Any  # int64 by row, or None
    uniforms: Any  # float64, or None


class Limits(NamedTuple):
    """The limits that the filters of each row set, and the scale of its weights, [R]."""

    wanted: Any  # k of top-k, 0 is off
    share: Any  # p of top-p, 1 is off
    lowest: Any  # value below which min-p cuts, -inf is off
    everything: Any  # weight of the unfiltered row
    top: Any  # largest value
    scale: Any  # log2(e) / T


@triton.jit
def usable(value):
    """NaN as -inf and +inf as the largest float32."""
    value = tl.where(value == value, value, float("-inf"))
    return tl.minimum(value, FLOAT32_MAX)


@triton.jit
def load_entries(values_ptr, row, column, row_stride, live):
    """Entries as float32, NaN and infinities as they are; -inf where not `live`."""
    offset = row.to(tl.int64) * row_stride + column
    value = tl.load(values_ptr + offset, mask=live, other=float("-inf")).to(tl.float32)
    return value


@triton.jit
def load_values(values_ptr, row, column, row_stride, live):
    """`load_entries` with NaN as -inf and +inf as the largest float32."""
    return usable(load_entries(values_ptr, row, column, row_stride, live))


@triton.jit
def by_warps(entries, WARPS: tl.constexpr, VECTOR: tl.constexpr):
    """`entries` [R, E] as [R, steps, WARPS, threads, VECTOR], as loads spread them, so that no warp waits for
    another."""
    R: tl.constexpr = entries.shape[0]
    STEPS: tl.constexpr = entries.shape[1] // (WARPS * _THREADS * VECTOR)
    if STEPS > 0:
        of_warps = tl.reshape(entries, (R, STEPS, WARPS, _THREADS, VECTOR))
    else:
        of_warps = tl.reshape(entries, (R, 1, 1, 1, entries.shape[1]))
    return of_warps


@triton.jit
def warp_sums(entries):
    """[R, 1, WARPS, 1, 1]: the sum of the entries [R, steps, WARPS, threads, vector] of each warp."""
    of_threads = tl.sum(tl.sum(entries, 4, keep_dims=True), 1, keep_dims=True)
    return tl.sum(of_threads, 3, keep_dims=True)


@triton.jit
def sum_of_all(entries):
    """[R]: the sum of the entries [R, steps, warps, threads, vector]."""
    of_warps = warp_sums(entries)
    return tl.sum(tl.reshape(of_warps, (of_warps.shape[0], of_warps.shape[2])), 1)


@triton.jit
def spread_rows(of_rows):
    """[R] as [R, 1, 1, 1, 1]."""
    return of_rows[:, None, None, None, None]


@triton.jit
def finite(top):
    """A shift for exponents that keeps rows without a usable logit free of inf - inf."""
    return tl.where(top > float("-inf"), top, 0.0)


@triton.jit
def exponent_scale(temperature):
    """log2(e) / T, at T = 1 for greedy rows."""
    return 1.0 / tl.maximum(tl.where(temperature > 0, temperature, 1.0), _MIN_TEMPERATURE) * LOG2E


@triton.jit
def weigh(value, top, scale, PROBS: tl.constexpr):
    """Unnormalised probability of a value."""
    return tl.maximum(value, 0.0) if PROBS else tl.exp2((value - finite(top)) * scale)


@triton.jit
def philox_uniform(seed, position, stream, slot=0):
    """Uniform in (0, 1), float64, keyed by (seed, position, stream, slot), see `reference.philox_uniform`."""
    low = position.to(tl.uint32)
    high = (position >> 32).to(tl.uint32)
    zero = low * 0
    word, second, _, _ = tl.philox(seed, low, high, zero + stream, zero + slot)
    odd = (word.to(tl.int64) << 21) | ((second >> 12).to(tl.int64) << 1) | 1
    return odd.to(tl.float64) * _ULP


@triton.jit
def sort_key(value, SHIFT: tl.constexpr):
    """int32 that orders as the float32 `value` does; zeros of both signs are one key."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # of -0.0 it makes 0.0
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def key_value(key, SHIFT: tl.constexpr):
    """The float32 that `sort_key` maps to `key` (an int32)."""
    wide = (key << SHIFT) | tl.where(key < 0, (1 << SHIFT) - 1, 0)
    return (wide ^ ((wide >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def next_below(value):
    """The greatest float32 below `value`; zeros of both signs are one value."""
    key = sort_key(value, 0) - 1
    return key_value(tl.where(key == -1, -2, key), 0)


@triton.jit
def count_and_share(sampling, request, live, VOCAB: tl.constexpr):
    """The k (0 is off) and the p (1 is off) of each request."""
    wanted = tl.zeros_like(request)
    share = tl.full(request.shape, 1.0, tl.float32)
    if sampling.top_k is not None:
        wanted = tl.load(sampling.top_k + request, mask=live, other=0)
        wanted = tl.where((wanted > 0) & (wanted < VOCAB), wanted, 0)
    if sampling.top_p is not None:
        share = tl.load(sampling.top_p + request, mask=live, other=1.0)
        share = tl.where(share < 1, share, 1.0)
    return wanted, share


@triton.jit
def keyed_uniform(origin, place, request, row, live, stream, slot=0):
    """Uniforms, float64: those at `place` where they are given, else by the seed of `request` and the position of
    `row`. `origin` has the fields of `Uniforms`."""
    if origin.uniforms is not None:
        uniform = tl.load(origin.uniforms + place, mask=live, other=0.0)
    else:
        seed = tl.load(origin.seeds + request, mask=live, other=0)
        position = tl.load(origin.positions + row, mask=live, other=0)
        uniform = philox_uniform(seed, position, stream, slot)
    return uniform


@triton.jit
def count_from(value, limit):
    """[R]: how many entries of `value` [R, steps, warps, threads, vector] are at least `limit` [R]. A thread counts in
    float32, which takes half the instructions, and exactly up to 2^24."""
    over = (value >= spread_rows(limit)).to(tl.float32)
    of_threads = tl.sum(tl.sum(over, 4, keep_dims=True), 1, keep_dims=True)
    return sum_of_all(of_threads.to(tl.int32))


@triton.jit
def kth_key(value, wanted, low, high, SHIFT: tl.constexpr):
    """[R]: the largest key in [low, high) that `wanted` [R] of `value` [R, steps, warps, threads, vector] reach; `low`
    and `high` are int64 so that their sum cannot overflow."""
    while tl.max(high - low, 0) > 1:
        middle = (low + high) >> 1
        reached = count_from(value, key_value(middle.to(tl.int32), SHIFT)) >= wanted
        searching = high - low > 1
        low = tl.where(searching & reached, middle, low)
        high = tl.where(searching & (reached == 0), middle, high)
    return low


@triton.jit
def key_of_few(value, most, enough, low, high, SHIFT: tl.constexpr):
    """[R]: a key in (low, high] that `enough` to `most` entries of `value` [R, steps, warps, threads, vector] reach;
    where ties allow none, the smallest that no more than `most` reach."""
    found = tl.zeros_like(most)
    searching = high - low > 1
    while tl.max(searching.to(tl.int32), 0) > 0:
        middle = (low + high) >> 1
        reached = count_from(value, key_value(middle.to(tl.int32), SHIFT))
        low = tl.where(searching & (reached > most), middle, low)
        high = tl.where(searching & (reached <= most), middle, high)
        found = tl.where(searching & (reached <= most), reached, found)
        searching = (high - low > 1) & (found < enough)
    return high


@triton.jit
def mass_key(value, weight, goal, low, high, SHIFT: tl.constexpr):
    """[R]: the smallest key in (low, high] above which the entries [R, steps, warps, threads, vector] have less
    `weight` than `goal` [R]."""
    while tl.max(high - low, 0) > 1:
        middle = (low + high) >> 1
        over = value > spread_rows(key_value(middle.to(tl.int32), SHIFT))
        lacks = sum_of_all(tl.where(over, weight, 0.0)) < goal
        searching = high - low > 1
        high = tl.where(searching & lacks, middle, high)
        low = tl.where(searching & (lacks == 0), middle, low)
    return high


@triton.jit
def _only(chosen, value):
    """[R]: the int64 `value` [R, E] of the one entry that is `chosen`, 0 where none is. By halves, because within a
    warp a sum of 32-bit integers is one instruction."""
    halves = tl.join((value >> 32).to(tl.int32), value.to(tl.int32))
    high, low = tl.split(tl.sum(tl.where(chosen[:, :, None], halves, 0), 1))
    return (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def locate(weight, total, uniform):
    """Entry (-1 where there is no weight) at which the running sum of `weight` [R, E] passes uniform * its total, and
    the arguments of `share_within`. `total` [R] is that sum, or nearly. The last entry with weight takes what rounding
    leaves; an entry without weight is never found."""
    some = total > 0
    inverse = tl.where(some, tl.minimum(1.0 / tl.where(some, total, 1.0), _MOST_INVERSE), 0.0)
    units = (weight * inverse[:, None] * _UNITS).to(tl.int64)
    running = tl.cumsum(units, 1)
    whole = _only(tl.arange(0, weight.shape[1])[None, :] == weight.shape[1] - 1, running)
    goal = tl.minimum((uniform * whole.to(tl.float64)).to(tl.int64), whole - 1)
    place = tl.sum((running <= goal[:, None]).to(tl.int32), 1)
    return tl.where(whole > 0, place, -1), units, running, goal


@triton.jit
def share_within(units, running, goal):
    """How far into the weight of the entry that `locate` found the goal is: float64 in (0, 1)."""
    begin = running - units
    found = (begin <= goal[:, None]) & (running > goal[:, None])
    share = ((goal[:, None] - begin).to(tl.float64) + 0.5) / tl.maximum(units, 1).to(tl.float64)
    return _only(found, share.to(tl.int64, bitcast=True)).to(tl.float64, bitcast=True)


@triton.jit
def find(weight, uniform):
    """The entry of `locate`, and how far into its weight the goal is."""
    place, units, running, goal = locate(weight, tl.sum(weight, 1), uniform)
    return place, share_within(units, running, goal)


@triton.jit
def log_value(values_ptr, row, token, row_stride, live, PROBS: tl.constexpr):
    """The logit at `token`, or the logarithm of the probability there."""
    value = load_values(values_ptr, row, token, row_stride, live)
    return tl.log(tl.maximum(value, 0.0)) if PROBS else value


@triton.jit
def streamed_mass(
    values_ptr, row, asks, row_stride, middle, top, scale,
    VOCAB: tl.constexpr, SHIFT: tl.constexpr, PROBS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """[R]: weight of the entries of the whole row whose key is above `middle`."""
    lane = tl.arange(0, BLOCK_V)[None, :]
    above = tl.zeros((row.shape[0], BLOCK_V), tl.float32)
    for start in range(0, VOCAB, BLOCK_V):
        live = asks[:, None] & (start + lane < VOCAB)
        value = load_values(values_ptr, row[:, None], start + lane, row_stride, live)
        weight = weigh(value, top[:, None], scale[:, None], PROBS)
        above += tl.where(sort_key(value, SHIFT) > middle[:, None], weight, 0.0)
    return tl.sum(above, 1)


@triton.jit
def streamed_kth_key(
    values_ptr, row, row_stride, wanted, low, high,
    VOCAB: tl.constexpr, SHIFT: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """`kth_key` over the whole row."""
    lane = tl.arange(0, BLOCK_V)[None, :]
    while tl.max(high - low, 0) > 1:
        searching = high - low > 1
        middle = (low + high) >> 1
        # Summed over lanes once, at the end: a sum in every step would make all warps wait each time.
        found = tl.zeros((row.shape[0], BLOCK_V), tl.int32)
        for start in range(0, VOCAB, BLOCK_V):
            live = searching[:, None] & (start + lane < VOCAB)
            value = load_values(values_ptr, row[:, None], start + lane, row_stride, live)
            found += (sort_key(value, SHIFT) >= middle.to(tl.int32)[:, None]).to(tl.int32)
        reached = tl.sum(found, 1) >= wanted
        low = tl.where(searching & reached, middle, low)
        high = tl.where(searching & (reached == 0), middle, high)
    return low


@triton.jit
def streamed_mass_key(
    values_ptr, row, row_stride, goal, low, high, top, scale,
    VOCAB: tl.constexpr, SHIFT: tl.constexpr, PROBS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """`mass_key` over the whole row."""
    while tl.max(high - low, 0) > 1:
        searching = high - low > 1
        middle = (low + high) >> 1
        above = streamed_mass(
            values_ptr, row, searching, row_stride, middle.to(tl.int32), top, scale, VOCAB, SHIFT, PROBS, BLOCK_V
        )  # fmt: skip
        lacks = above < goal
        high = tl.where(searching & lacks, middle, high)
        low = tl.where(searching & (lacks == 0), middle, low)
    return high
