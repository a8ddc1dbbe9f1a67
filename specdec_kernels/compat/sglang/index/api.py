"""Index functions behind SGLang's signatures.

Ragged rows lie one behind the other, row b at [o_b, o_b + c_b) with o_b the sum of the counts before it. A token table
(SGLang's req_to_token) holds the pool slot of every position of a request.

A backend without a tree mask runs every branch of a draft tree as a sequence of its own: B requests with T branches
and K steps. With pages of P tokens and T > 1 a branch must own whole pages, so branch t of a request of length L begins
at position base + t m P, base = L - L mod P, m = ceil((L mod P + K) / P), and its first L mod P positions repeat the
prefix tail, which has to be copied from branch 0. With P = 1 or T = 1 the T K drafts simply follow the prefix.

Every function takes `impl`: `auto`, `triton` or `reference`. An `out` tensor is written instead of a new one; its
entries that no row owns keep their contents. All raise ValueError for a wrong shape, dtype, stride or device and for a
size out of its range, and RuntimeError where `impl="triton"` can run no kernel.
"""

from __future__ import annotations

import torch

from specdec_kernels.checks import (
    expect_at_least,
    expect_contiguous,
    expect_dtype,
    expect_same_device,
    expect_shape,
)
from specdec_kernels.compat.sglang.index.types import (
    Compacted,
    DraftSlots,
    ExportedMask,
    RaggedValues,
    SequenceIndices,
)
from specdec_kernels.launch import dispatch
from specdec_kernels.tree.types import MAX_NODES, WORD_BITS, mask_words

_INTEGERS = (torch.int32, torch.int64)
_FORMS = ("full", "query", "packed", "flashinfer")
_FLAT_FORMS = ("full", "flashinfer")


def row_offsets(counts: torch.Tensor, capacity: int | None = None, impl: str = "auto") -> torch.Tensor:
    """Exclusive prefix sums of `counts` with the total behind them.

    Args:
        counts: [B] int32 or int64; negative entries count as 0.
        capacity: no sum is larger than this; by default 2^31 - 1.
        impl: see the module.

    Returns:
        [B + 1] int32.
    """
    _check_integers(counts=counts)
    expect_at_least("capacity", 0 if capacity is None else capacity, 0)
    return dispatch("row_offsets", __package__, impl, counts, "kernel_tables")(counts, capacity)


def read_table(
    table: torch.Tensor | None,
    rows: torch.Tensor | None,
    start: torch.Tensor,
    counts: torch.Tensor,
    capacity: int,
    *,
    fill: int = -1,
    offsets: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    impl: str = "auto",
) -> RaggedValues:
    """Entries start, start + 1, ... of every request's table row, all requests one behind the other.

    Args:
        table: [R, W] int32 or int64, slots of positions. None stands for a table whose entry is its column: the
            result is then the positions themselves.
        rows: [B] int32 or int64, the row per request; None without a table.
        start: [B] int32 or int64, first column.
        counts: [B] int32 or int64, columns wanted.
        capacity: entries of the result; rows that do not fit are cut.
        fill: what stands behind the last row and for a column or row outside the table.
        offsets: [B + 1] int32 to use instead of the sums of `counts`.
        out: [capacity] int32 or int64, see the module.
        impl: see the module.

    Returns:
        RaggedValues: offsets [B + 1] int32, values [capacity] int64.
    """
    _check_integers(start=start, counts=counts)
    if table is not None and rows is not None:
        _check_table(table, rows, torch.int64, start=start)
    elif table is not None or rows is not None:
        raise ValueError("table, rows: expected both or neither, got one of them")
    expect_at_least("capacity", capacity, 0)
    _check_out("out", out, start, (capacity,))
    if offsets is not None:
        expect_shape("offsets", offsets, (start.shape[0] + 1,))
        expect_dtype("offsets", offsets, torch.int32)
        expect_contiguous(offsets=offsets)
        expect_same_device(start=start, offsets=offsets)
    read = dispatch("read_table", __package__, impl, start, "kernel_tables")
    return read(table, rows, start, counts, capacity, fill, offsets, out)


def write_table(
    table: torch.Tensor,
    rows: torch.Tensor,
    start: torch.Tensor,
    counts: torch.Tensor,
    values: torch.Tensor,
    impl: str = "auto",
) -> None:
    """Put the values of every request at columns start, start + 1, ... of its table row, in place.

    Args:
        table: [R, W] int32, slots of positions; changed in place. Nothing is written outside.
        rows: [B] int32 or int64, the row per request. Requests that write must have different rows, or ranges that
            do not meet.
        start: [B] int32 or int64, first column.
        counts: [B] int32 or int64, values per request.
        values: [M] int32 or int64, the requests' values one behind the other; values behind the last row are not
            read.
        impl: see the module.
    """
    _check_table(table, rows, start=start, counts=counts)
    _check_integers(values=values)
    expect_same_device(table=table, values=values)
    dispatch("write_table", __package__, impl, table, "kernel_tables")(table, rows, start, counts, values)


def compact(
    index: torch.Tensor,
    source: torch.Tensor | None = None,
    *,
    fill: int = 0,
    out: torch.Tensor | None = None,
    impl: str = "auto",
) -> Compacted:
    """Entries that are not negative, moved to the front in their order; one pass over the entries.

    Args:
        index: [M] int32 or int64; a negative entry is dropped.
        source: [S] int32 or int64 to read: kept entry i becomes source[index[i]], or `fill` where index[i] >= S. By
            default the entry itself is kept.
        fill: what stands behind the kept entries.
        out: [capacity] int32 or int64, see the module; kept entries from `capacity` on are dropped. By default a
            new tensor of M entries.
        impl: see the module.

    Returns:
        Compacted: values [M] int64, num_kept [1] int32.
    """
    _check_integers(index=index)
    if source is not None:
        _check_integers(source=source)
        expect_same_device(index=index, source=source)
    _check_out("out", out, index, (None,))
    return dispatch("compact", __package__, impl, index, "kernel_tables")(index, source, fill, out)


def draft_slots(
    table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    topk: int,
    num_steps: int,
    page_size: int,
    impl: str = "auto",
) -> DraftSlots:
    """Slots that each draft step writes, and the copies of the prefix tail that branches need before.

    Args:
        table: [R, W] int32, slots of positions; the drafts' positions must be assigned.
        rows: [B] int32 or int64, the row per request.
        lengths: [B] int32 or int64, committed tokens.
        topk: T >= 1 branches.
        num_steps: K >= 1 drafts per branch.
        page_size: P >= 1 tokens per page.
        impl: see the module.

    Returns:
        DraftSlots: slots [K, B * T] int64, step by step; source and target [B, T - 1, P - 1] int64, -1 where
            there is nothing to copy (`move_slots` passes those over). -1 also for positions outside the table.
    """
    _check_table(table, rows, lengths=lengths)
    _check_sizes(topk=topk, num_steps=num_steps, page_size=page_size)
    slots = dispatch("draft_slots", __package__, impl, table, "kernel_drafts")
    return slots(table, rows, lengths, topk, num_steps, page_size)


def draft_kv_indices(
    table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    topk: int,
    num_steps: int,
    page_size: int,
    capacity: int,
    *,
    window: int | None = None,
    sink: int = 0,
    out: SequenceIndices | None = None,
    impl: str = "auto",
) -> SequenceIndices:
    """What branch t of request b attends to in draft step s: the prefix, then its own drafts 0 to s.

    With a window the prefix is its first `sink` positions and the last `window` before L; it is whole where
    L <= sink + window. Drafts keep the positions that the uncut prefix gives them.

    Args:
        table, rows, lengths, topk, num_steps, page_size: as in `draft_slots`.
        capacity: entries of a step's indices; T * sum(L) + B * T * K holds all. Branches that do not fit are cut and
            indptr ends there.
        window: recent prefix positions kept, >= 0; None keeps all.
        sink: first prefix positions kept beside the window, >= 0.
        out: indptr [K, >= B * T + 1] and indices [K, capacity], int32 or int64, see the module.
        impl: see the module.

    Returns:
        SequenceIndices: indptr [K, B * T + 1] int32 with entry 0 written, indices [K, capacity] int32, 0 behind the
            last branch and for positions outside the table.
    """
    _check_table(table, rows, lengths=lengths)
    _check_sizes(topk=topk, num_steps=num_steps, page_size=page_size)
    expect_at_least("capacity", capacity, 0)
    expect_at_least("window", 0 if window is None else window, 0)
    expect_at_least("sink", sink, 0)
    _check_sequences(out, table, (num_steps,), rows.shape[0] * topk, capacity)
    indices = dispatch("draft_kv_indices", __package__, impl, table, "kernel_drafts")
    return indices(table, rows, lengths, topk, num_steps, page_size, capacity, window, sink, out)


def verify_decode_indices(
    table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    factor: int,
    capacity: int,
    *,
    out: SequenceIndices | None = None,
    impl: str = "auto",
) -> SequenceIndices:
    """A chain of F tokens per request as F decode sequences: query q attends to positions 0 to L + q.

    Args:
        table: [R, W] int32, slots of positions.
        rows: [B] int32 or int64, the row per request.
        lengths: [B] int32 or int64, L, without the F tokens.
        factor: F >= 1 tokens of each chain.
        capacity: entries of the indices; F * sum(L) + B * F * (F + 1) / 2 holds all. Sequences that do not fit are
            cut and indptr ends there.
        out: indptr [>= B * F + 1] and indices [capacity], int32 or int64, see the module.
        impl: see the module.

    Returns:
        SequenceIndices: indptr [B * F + 1] int32, indices [capacity] int32, 0 behind the last sequence and for
            positions outside the table.
    """
    _check_table(table, rows, lengths=lengths)
    _check_sizes(factor=factor)
    expect_at_least("capacity", capacity, 0)
    _check_sequences(out, table, (), rows.shape[0] * factor, capacity)
    indices = dispatch("verify_decode_indices", __package__, impl, table, "kernel_drafts")
    return indices(table, rows, lengths, factor, capacity, out)


def align_eviction(evict: torch.Tensor, lengths: torch.Tensor, page_size: int, impl: str = "auto") -> torch.Tensor:
    """Keep every slot of the page that holds the last accepted token: only wholly unused pages are evicted.

    Args:
        evict: [B, N] bool, True where node i at position L + i is not wanted. The wanted ones are a prefix.
        lengths: [B] int32 or int64, L: committed tokens before this step.
        page_size: P >= 1 tokens per page.
        impl: see the module.

    Returns:
        [B, N] bool, `evict` with the entries on that page cleared.
    """
    expect_shape("evict", evict, (lengths.shape[0], None))
    expect_dtype("evict", evict, torch.bool)
    expect_contiguous(evict=evict)
    _check_integers(lengths=lengths)
    expect_same_device(evict=evict, lengths=lengths)
    expect_at_least("page_size", page_size, 1)
    return dispatch("align_eviction", __package__, impl, evict, "kernel_slots")(evict, lengths, page_size)


def move_slots(kv: torch.Tensor, source: torch.Tensor, target: torch.Tensor, impl: str = "auto") -> None:
    """Copy keys and values of all layers from source slots to target slots, in place.

    The whole list behaves as one step: each target receives what its source held before the call, also where the
    lists overlap. Short lists are moved by programs that hold every slot's share of the features at once, long ones
    go through a staging buffer.

    Args:
        kv: [layers, 2, pages, page_size, H_kv, D], contiguous, changed in place.
        source, target: [M] int64 slots, page * page_size + offset. A pair with a slot outside the pool (such
            as -1), or of one slot with itself, moves nothing. Other targets must differ from each other.
        impl: see the module.
    """
    expect_shape("kv", kv, (None, 2, None, None, None, None))
    for name, slots in (("source", source), ("target", target)):
        expect_shape(name, slots, (source.shape[0],))
        expect_dtype(name, slots, torch.int64)
    expect_contiguous(kv=kv, source=source, target=target)
    expect_same_device(kv=kv, source=source, target=target)
    dispatch("move_slots", __package__, impl, kv, "kernel_slots")(kv, source, target)


def parents_from_candidates(
    selected: torch.Tensor, parent_list: torch.Tensor, topk: int, impl: str = "auto"
) -> torch.Tensor:
    """Parent nodes of selected candidates, in the candidate numbering of SGLang's EAGLE worker.

    Entry i of `selected` becomes node i + 1. Its candidate id f lies in row r = f // topk of the drafting history.
    The parent of row 0 is the root, and so is that of a negative id. The parent of row r > 0 is the candidate
    `parent_list[b, r]`, looked up among all selected ones (the first of equal ids), wherever it stands. An entry is an
    orphan, with parent -2, when r lies beyond the list or the parent was not selected. With
    `build_tree(..., longest_walk=depth)` the result is that of `build_tree_kernel_efficient`.

    Args:
        selected: [B, N - 1] int64, contiguous, N <= 256.
        parent_list: [B, P] int64, contiguous; P may be 0.
        topk: candidates per row, at least 1.
        impl: see the module.

    Returns:
        [B, N] int32: -1 for the root, then the parent node of each entry or -2.
    """
    expect_shape("selected", selected, (None, None))
    expect_shape("parent_list", parent_list, (selected.shape[0], None))
    expect_dtype("selected", selected, torch.int64)
    expect_dtype("parent_list", parent_list, torch.int64)
    expect_same_device(selected=selected, parent_list=parent_list)
    expect_contiguous(selected=selected, parent_list=parent_list)
    _check_nodes("selected and root", selected.shape[1] + 1)
    expect_at_least("topk", topk, 1)
    return dispatch("parents_from_candidates", __package__, impl, selected, "kernel_trees")(selected, parent_list, topk)


def export_mask(
    mask: torch.Tensor,
    lengths: torch.Tensor,
    form: str = "full",
    capacity: int | None = None,
    impl: str = "auto",
) -> ExportedMask:
    """A batch of mask words as another system's mask.

    | form | cells | layout |
    |---|---|---|
    | `query` | [B, N, N] bool | cell (i, j): node i sees node j (SGLang QLEN_ONLY) |
    | `packed` | [B, N] uint8, 16, 32 or 64 | bit j of entry i; the smallest type with N bits (SGLang BITPACKING) |
    | `full` | [capacity] bool | request after request, N rows of L true cells and N tree cells (SGLang FULL_MASK) |
    | `flashinfer` | [capacity] uint8 | the bits of `full`, little-endian, each request from a fresh byte |

    `offsets` of the two flat forms has the start of each request in cells or bytes, and the total. Sizes are not
    known on the host, so the caller gives an upper bound: cells past the total are false (0), and what does not
    fit in `capacity` is dropped while `offsets` tells what was needed. A negative length counts as 0.

    Args:
        mask: [B, N, ceil(N/64)] int64, contiguous, 1 <= N <= 256.
        lengths: [B] int64, committed tokens L per request.
        form: one of the table's; `packed` for at most 64 nodes.
        capacity: length of `cells` of the flat forms, else None. N * (sum(L) + B * N) cells suffice for `full`, a
            byte for 8 of them and one per request for `flashinfer`.
        impl: see the module.

    Returns:
        ExportedMask: cells as in the table, offsets [B + 1] int64 for the flat forms, else None.
    """
    expect_dtype("mask", mask, torch.int64)
    expect_shape("mask", mask, (None, None, None))
    _check_nodes("mask", mask.shape[1])
    expect_shape("mask", mask, (None, None, mask_words(mask.shape[1])))
    expect_shape("lengths", lengths, (mask.shape[0],))
    expect_dtype("lengths", lengths, torch.int64)
    expect_same_device(mask=mask, lengths=lengths)
    expect_contiguous(mask=mask, lengths=lengths)
    _check_form(form, capacity, mask.shape[1])
    return dispatch("export_mask", __package__, impl, mask, "kernel_trees")(mask, lengths, form, capacity)


def _check_integers(**per_request: torch.Tensor) -> None:
    """Integer tensors [B] of one batch, device and unit stride."""
    batch = next(iter(per_request.values())).shape[0]
    for name, tensor in per_request.items():
        expect_shape(name, tensor, (batch,))
        expect_dtype(name, tensor, *_INTEGERS)
        expect_contiguous(**{name: tensor})
    expect_same_device(**per_request)


def _check_table(table: torch.Tensor, rows: torch.Tensor, *dtypes: torch.dtype, **per_request: torch.Tensor) -> None:
    """A token table (int32, or one of `dtypes`) with rows named by `rows`, and integers of one entry per request."""
    expect_shape("table", table, (None, None))
    expect_dtype("table", table, torch.int32, *dtypes)
    expect_contiguous(table=table)
    _check_integers(rows=rows, **per_request)
    expect_same_device(table=table, rows=rows)


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        expect_at_least(name, value, 1)


def _check_out(name: str, out: torch.Tensor | None, like: torch.Tensor, shape: tuple[int | None, ...]) -> None:
    """A tensor that is written in place: integers of `shape`, unit stride in the last axis."""
    if out is None:
        return
    expect_shape(name, out, shape)
    expect_dtype(name, out, *_INTEGERS)
    expect_same_device(input=like, **{name: out})
    if out.numel() and out.stride(-1) != 1:
        raise ValueError(f"{name}: expected unit stride in the last axis, got strides {out.stride()}")


def _check_sequences(
    out: SequenceIndices | None, like: torch.Tensor, steps: tuple[int, ...], sequences: int, capacity: int
) -> None:
    if out is not None:
        _check_out("out.indices", out.indices, like, (*steps, capacity))
        _check_out("out.indptr", out.indptr, like, (*steps, None))
        expect_at_least("out.indptr's entries", out.indptr.shape[-1], sequences + 1)


def _check_form(form: str, capacity: int | None, num_nodes: int) -> None:
    if form not in _FORMS:
        raise ValueError(f"form: expected one of {', '.join(_FORMS)}, got {form!r}")
    if form == "packed" and num_nodes > WORD_BITS:
        raise ValueError(f"form: packed holds up to {WORD_BITS} nodes, got {num_nodes}; use the words themselves")
    if form in _FLAT_FORMS and (capacity is None or capacity < 0):
        raise ValueError(f"capacity: form {form} expects the length of the flat result (>= 0), got {capacity}")
    if form not in _FLAT_FORMS and capacity is not None:
        raise ValueError(f"capacity: form {form} has a fixed shape and expects None, got {capacity}")


def _check_nodes(name: str, num_nodes: int) -> None:
    if not 1 <= num_nodes <= MAX_NODES:
        raise ValueError(f"{name}: expected 1 (the root alone) to {MAX_NODES} nodes, got {num_nodes}")
