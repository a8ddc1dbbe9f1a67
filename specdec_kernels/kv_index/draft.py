"""Where drafts lie and what they attend to, for backends without a tree mask.

Such a backend runs every branch of a draft tree as a sequence of its own: B requests with T branches and K
steps. With pages of P tokens and T > 1 a branch must own whole pages, so branch t of a request of length L
begins at position base + t m P, base = L - L mod P, m = ceil((L mod P + K) / P), and its first L mod P
positions repeat the prefix tail, which has to be copied from branch 0. With P = 1 or T = 1 the T K drafts
simply follow the prefix.
"""

from __future__ import annotations

import torch

from specdec_kernels.kv_index import draft_reference as reference
from specdec_kernels.kv_index.arguments import check_at_least, check_out, check_token_table
from specdec_kernels.kv_index.types import DraftSlots, SequenceIndices, StepIndices
from specdec_kernels.launch import use_triton


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
        rows: [B] int32 or int64, the row of each request.
        lengths: [B] int32 or int64, committed tokens.
        topk: T >= 1 branches.
        num_steps: K >= 1 drafts of a branch.
        page_size: P >= 1 tokens a page.
        impl: `auto`, `triton` or `reference`.

    Returns:
        DraftSlots: slots [K, B * T] int64, step by step; source and target [B, T - 1, P - 1] int64, -1 where
            there is nothing to copy (`move_slots` passes those over). -1 also for positions outside the table.

    Raises:
        ValueError: wrong shape, dtype, strides or devices, a size below 1.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    check_token_table(table, rows, lengths=lengths)
    _check_sizes(topk, num_steps, page_size)
    if use_triton(impl, table):
        import specdec_kernels.kv_index.draft_kernel as kernel

        return kernel.draft_slots(table, rows, lengths, topk, num_steps, page_size)
    return reference.draft_slots(table, rows, lengths, topk, num_steps, page_size)


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
    out: StepIndices | None = None,
    impl: str = "auto",
) -> StepIndices:
    """What branch t of request b attends to in draft step s: the prefix, then its own drafts 0 to s.

    With a window the prefix is its first `sink` positions and the last `window` before L; it is whole where
    L <= sink + window. Drafts keep the positions that the uncut prefix gives them.

    Args:
        table, rows, lengths, topk, num_steps, page_size: as in `draft_slots`.
        capacity: entries of a step's indices; T * sum(L) + B * T * K holds all. Branches that do not fit are
            cut and indptr ends there.
        window: recent prefix positions kept, >= 0; None keeps all.
        sink: first prefix positions kept beside the window, >= 0.
        out: indptr [K, >= B * T + 1] and indices [K, capacity], int32 or int64, to write instead of new
            tensors; entries that no branch owns keep their contents.
        impl: `auto`, `triton` or `reference`.

    Returns:
        StepIndices: indptr [K, B * T + 1] int32 with entry 0 written, indices [K, capacity] int32, 0 behind
            the last branch and for positions outside the table.

    Raises:
        ValueError: wrong shape, dtype, strides or devices, a size out of its range.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    check_token_table(table, rows, lengths=lengths)
    _check_sizes(topk, num_steps, page_size)
    check_at_least("capacity", capacity, 0)
    check_at_least("window", 0 if window is None else window, 0)
    check_at_least("sink", sink, 0)
    if out is not None:
        check_out("out.indices", out.indices, table, (num_steps, capacity))
        check_out("out.indptr", out.indptr, table, (num_steps, None))
        check_at_least("out.indptr's columns", out.indptr.shape[1], rows.shape[0] * topk + 1)
    arguments = (table, rows, lengths, topk, num_steps, page_size, capacity)
    if use_triton(impl, table):
        import specdec_kernels.kv_index.draft_kernel as kernel

        return kernel.draft_kv_indices(*arguments, window=window, sink=sink, out=out)
    return reference.draft_kv_indices(*arguments, window=window, sink=sink, out=out)


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
    """A chain of F tokens a request as F decode sequences: query q attends to positions 0 to L + q.

    Args:
        table: [R, W] int32, slots of positions.
        rows: [B] int32 or int64, the row of each request.
        lengths: [B] int32 or int64, L, without the F tokens.
        factor: F >= 1 tokens of each chain.
        capacity: entries of the indices; F * sum(L) + B * F * (F + 1) / 2 holds all. Sequences that do not
            fit are cut and indptr ends there.
        out: indptr [>= B * F + 1] and indices [capacity], int32 or int64, to write instead of new tensors;
            entries that no sequence owns keep their contents.
        impl: `auto`, `triton` or `reference`.

    Returns:
        SequenceIndices: indptr [B * F + 1] int32, indices [capacity] int32, 0 behind the last sequence and
            for positions outside the table.

    Raises:
        ValueError: wrong shape, dtype, strides or devices, a size out of its range.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    check_token_table(table, rows, lengths=lengths)
    check_at_least("factor", factor, 1)
    check_at_least("capacity", capacity, 0)
    if out is not None:
        check_out("out.indices", out.indices, table, (capacity,))
        check_out("out.indptr", out.indptr, table, (None,))
        check_at_least("out.indptr's entries", out.indptr.shape[0], rows.shape[0] * factor + 1)
    if use_triton(impl, table):
        import specdec_kernels.kv_index.draft_kernel as kernel

        return kernel.verify_decode_indices(table, rows, lengths, factor, capacity, out=out)
    return reference.verify_decode_indices(table, rows, lengths, factor, capacity, out=out)


def _check_sizes(topk: int, num_steps: int, page_size: int) -> None:
    for name, value in (("topk", topk), ("num_steps", num_steps), ("page_size", page_size)):
        check_at_least(name, value, 1)
