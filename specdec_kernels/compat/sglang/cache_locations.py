"""SGLang's KV-index kernels as functions, over `index`.

`grid` is the grid of a call written `name[grid](...)`. Where the tensors are longer than the batch, its first size (the
second of `generate_draft_decode_kv_indices`) is the number of requests. Tables are int32 [rows, row length], and an
argument `pool_len`, `row_stride` or `..._stride` is that row length. Outputs are written in place. The other sizes are
for SGLang's compiler (`bs_upper`, `iter_upper`, `num_tokens_upper`, `num_verify_tokens_upper`, `size_upper`,
`BLOCK_SIZE`) and are not used.
"""

from __future__ import annotations

import torch

from specdec_kernels.checks import expect_at_least, expect_shape
from specdec_kernels.compat.sglang import index
from specdec_kernels.compat.sglang.types import Launcher

Grid = tuple[int, ...]


@Launcher
def create_extend_after_decode_spec_info(
    verified_id: torch.Tensor,
    seq_lens: torch.Tensor,
    accept_lens: torch.Tensor,
    positions: torch.Tensor,
    new_verified_id: torch.Tensor,
    bs_upper: int = 0,
    *,
    grid: Grid | None = None,
    impl: str = "auto",
) -> None:
    """Positions of the accepted tokens of every request, and each request's last accepted token.

    Args:
        verified_id: [sum(accept_lens)] int32, accepted tokens, all requests one behind the other.
        seq_lens: [bs], committed length with the accepted tokens.
        accept_lens: [bs] int32, accepted tokens with the bonus. A request of 0 keeps its `new_verified_id`.
        positions: [>= sum(accept_lens)] int64, written in place.
        new_verified_id: [bs] int32, written in place.
    """
    seq_lens, accept_lens, new_verified_id = _of_batch(grid, seq_lens, accept_lens, new_verified_id)
    start, capacity = seq_lens - accept_lens, positions.shape[0]
    offsets, _ = index.read_table(None, None, start, accept_lens, capacity, out=positions, impl=impl)
    if verified_id.shape[0] == 0:
        return
    last = (offsets[1:] - 1).clamp(0, verified_id.shape[0] - 1)
    newest = torch.where(accept_lens > 0, verified_id[last].to(new_verified_id.dtype), new_verified_id)
    new_verified_id.copy_(newest)


@Launcher
def assign_req_to_token_pool(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int | None = None,
    bs_upper: int = 0,
    *,
    grid: Grid | None = None,
    impl: str = "auto",
) -> None:
    """Write each request's new slots at positions start to end - 1 of its row.

    Args:
        req_pool_indices: [bs], row of each request.
        req_to_token: [rows, pool_len] int32, written in place.
        start_offset, end_offset: [bs], first and past-the-last position.
        out_cache_loc: [sum(end - start)], slots of all requests one behind the other.
    """
    table = _table(req_to_token, pool_len)
    rows, start, end = _of_batch(grid, req_pool_indices, start_offset, end_offset)
    index.write_table(table, rows, start, end - start, out_cache_loc, impl=impl)


@Launcher
def assign_extend_cache_locs(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int | None = None,
    bs_upper: int = 0,
    *,
    grid: Grid | None = None,
    impl: str = "auto",
) -> None:
    """Read each request's slots at positions start to end - 1 into `out_cache_loc`; the inverse of
    `assign_req_to_token_pool`."""
    table = _table(req_to_token, pool_len)
    rows, start, end = _of_batch(grid, req_pool_indices, start_offset, end_offset)
    capacity = out_cache_loc.shape[0]
    index.read_table(table, rows, start, end - start, capacity, fill=0, out=out_cache_loc, impl=impl)


@Launcher
def assign_draft_cache_locs(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    num_new_pages_per_topk: torch.Tensor,
    out_cache_loc: torch.Tensor,
    source_cache_loc: torch.Tensor | None,
    target_cache_loc: torch.Tensor | None,
    last_page_lens_cumsum: torch.Tensor | None,
    duplicate_cache_len: int,
    pool_len: int | None,
    topk: int,
    speculative_num_steps: int,
    page_size: int,
    bs_upper: int = 0,
    iter_upper: int = 0,
    *,
    grid: Grid | None = None,
    impl: str = "auto",
) -> None:
    """Publish freshly allocated draft slots in the token table and gather those that the steps will write.

    Args:
        req_pool_indices, seq_lens: [bs].
        req_to_token: [rows, pool_len] int32, written in place from position seq_len on.
        extend_lens: [bs], slots per request; used with page_size > 1 and topk > 1 only.
        num_new_pages_per_topk, last_page_lens_cumsum: not used, because they follow from `seq_lens`.
        out_cache_loc: all allocated slots, one request behind the other. With page_size > 1 and topk > 1 its
            first bs * topk * steps entries become the slots of [request, branch, step].
        source_cache_loc, target_cache_loc: [duplicate_cache_len] int64, written in place: slots whose prefix
            tail is to be copied to the other branches.
        duplicate_cache_len: 0 leaves out the copy lists.
        topk, speculative_num_steps, page_size: sizes of the draft.
    """
    table = _table(req_to_token, pool_len)
    rows, lengths = _of_batch(grid, req_pool_indices, seq_lens)
    drafts = topk * speculative_num_steps
    if page_size == 1 or topk == 1:
        index.write_table(table, rows, lengths, torch.full_like(lengths, drafts), out_cache_loc, impl=impl)
        return
    (extend,) = _of_batch(grid, extend_lens)
    index.write_table(table, rows, lengths, extend, out_cache_loc, impl=impl)
    found = index.draft_slots(table, rows, lengths, topk, speculative_num_steps, page_size, impl=impl)
    if duplicate_cache_len > 0:
        for copies, out in ((found.source, source_cache_loc), (found.target, target_cache_loc)):
            if out is None:
                raise ValueError(f"source_cache_loc, target_cache_loc: expected tensors of {duplicate_cache_len}")
            index.compact(copies.flatten(), out=out, impl=impl)
    batch = rows.shape[0]
    dense = found.slots.view(speculative_num_steps, batch, topk).permute(1, 2, 0)
    out_cache_loc[: batch * drafts].view(batch, topk, speculative_num_steps).copy_(dense)


@Launcher
def generate_draft_decode_kv_indices(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    paged_kernel_lens: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    positions: torch.Tensor,
    pool_len: int | None = None,
    kv_indices_stride: int | None = None,
    kv_indptr_stride: int | None = None,
    bs_upper: int = 0,
    iter_upper: int = 0,
    num_tokens_upper: int = 0,
    page_size: int = 1,
    num_steps: int = 0,
    window_size: int = 0,
    sink_size: int = 0,
    *,
    grid: Grid | None = None,
    impl: str = "auto",
) -> None:
    """KV slots that every branch attends to in every draft step, as FlashInfer's index arrays.

    Args:
        req_pool_indices: [bs], row of each request.
        req_to_token: [rows, pool_len] int32.
        paged_kernel_lens: [bs], committed lengths.
        kv_indices: [steps, width] (or flat with rows of `kv_indices_stride`), written in place.
        kv_indptr: [steps, >= bs * topk + 1] (or flat with rows of `kv_indptr_stride`), written in place.
        positions: [bs * topk]; only its size is used, which gives topk.
        page_size: tokens per page.
        num_steps: steps, by default the rows of `kv_indices`, or the grid's first size.
        window_size, sink_size: recent and first prefix positions kept; both 0 keeps all.
    """
    batch = grid[1] if grid else req_pool_indices.shape[0]
    indices, indptr = _rows(kv_indices, kv_indices_stride), _rows(kv_indptr, kv_indptr_stride)
    steps = num_steps or (grid[0] if grid else indices.shape[0])
    topk = grid[2] if grid else positions.shape[0] // max(batch, 1)
    if batch == 0:
        return
    windowed = window_size > 0 or sink_size > 0
    index.draft_kv_indices(
        _table(req_to_token, pool_len), req_pool_indices[:batch], paged_kernel_lens[:batch], topk, steps,
        page_size, indices.shape[1], window=window_size if windowed else None, sink=sink_size,
        out=index.SequenceIndices(indptr[:steps], indices[:steps]), impl=impl,
    )  # fmt: skip


@Launcher
def create_draft_kv_indices(
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    expand_factor: int = 2,
    row_stride: int | None = None,
    num_tokens_upper: int = 0,
    *,
    grid: Grid | None = None,
    impl: str = "auto",
) -> None:
    """Verification of `expand_factor` tokens per request as independent decode sequences; any factor >= 2.

    Args:
        kv_indptr: [>= factor * bs + 1], written in place.
        kv_indices: [>= factor * sum(seq_lens) - bs * factor * (factor - 1) / 2], written in place.
        req_pool_indices: [bs], row of each request.
        req_to_token: [rows, row_stride] int32.
        seq_lens: [bs], lengths with all the tokens that are verified.
        expand_factor: tokens per request.
    """
    expect_at_least("expand_factor", expand_factor, 2)
    rows, lengths = _of_batch(grid, req_pool_indices, seq_lens)
    index.verify_decode_indices(
        _table(req_to_token, row_stride), rows, lengths - expand_factor, expand_factor, kv_indices.shape[0],
        out=index.SequenceIndices(kv_indptr, kv_indices), impl=impl,
    )  # fmt: skip


@Launcher
def align_evict_mask_to_page_size(
    seq_lens: torch.Tensor,
    evict_mask: torch.Tensor,
    page_size: int,
    num_draft_tokens: int,
    BLOCK_SIZE: int = 0,
    *,
    grid: Grid | None = None,
    impl: str = "auto",
) -> None:
    """Clear the evict flags of the page that holds the last accepted token.

    Args:
        seq_lens: [bs], committed lengths before this step.
        evict_mask: [bs * num_draft_tokens] bool, True frees a slot; written in place.
        page_size: tokens per page.
        num_draft_tokens: nodes per request.
    """
    (lengths,) = _of_batch(grid, seq_lens)
    flags = evict_mask[: lengths.shape[0] * num_draft_tokens].view(lengths.shape[0], num_draft_tokens)
    flags.copy_(index.align_eviction(flags, lengths, page_size, impl=impl))


@Launcher
def align_evict_mask_to_page_size_simple_eagle(
    out_cache_loc: torch.Tensor,
    evict_mask: torch.Tensor,
    page_size: int,
    num_draft_tokens: int,
    BLOCK_SIZE: int = 0,
    *,
    grid: Grid | None = None,
    impl: str = "auto",
) -> None:
    """Clear the evict flags of every page that holds a slot which is kept, whatever the order of the slots.

    Args:
        out_cache_loc: [bs * num_draft_tokens], slots by node.
        evict_mask: [bs * num_draft_tokens] bool, True frees a slot; written in place.
        page_size: tokens per page.
        num_draft_tokens: nodes per request.
    """
    batch = grid[0] if grid else evict_mask.shape[0] // max(num_draft_tokens, 1)
    flags = evict_mask[: batch * num_draft_tokens].view(batch, num_draft_tokens)
    slots = out_cache_loc[: batch * num_draft_tokens].view(batch, num_draft_tokens)
    pages = torch.div(slots, page_size, rounding_mode="floor")
    kept = ((pages[:, :, None] == pages[:, None, :]) & ~flags[:, None, :]).any(2)
    flags.copy_(flags & ~kept)


@Launcher
def fill_bonus_tokens(
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    accept_stride: int,
    *,
    grid: Grid | None = None,
    impl: str = "auto",
) -> None:
    """Each request's bonus token, the last of its accepted ones. A request of 0 keeps its `bonus_tokens`.

    Args:
        accept_tokens: [bs, accept_stride] (or flat), accepted tokens of each request, then anything.
        accept_lens: [bs], accepted tokens with the bonus.
        bonus_tokens: [bs], written in place.
        accept_stride: entries per request.
    """
    lens, bonus = _of_batch(grid, accept_lens, bonus_tokens)
    rows = accept_tokens.reshape(-1)[: lens.shape[0] * accept_stride].view(lens.shape[0], accept_stride)
    last = rows.gather(1, (lens.long() - 1).clamp(0, accept_stride - 1)[:, None])[:, 0]
    bonus.copy_(torch.where(lens > 0, last.to(bonus.dtype), bonus))


@Launcher
def fill_bonus_tokens_from_predict(
    predict: torch.Tensor,
    accept_index: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    accept_index_stride: int,
    *,
    grid: Grid | None = None,
    impl: str = "auto",
) -> None:
    """`fill_bonus_tokens` from the predictions by node: the one at each request's last accepted node.

    Args:
        predict: [bs * n], the token after each node.
        accept_index: [bs, accept_index_stride] (or flat), flat ids of the accepted nodes, then -1.
        accept_lens, bonus_tokens: as in `fill_bonus_tokens`.
        accept_index_stride: entries per request.
    """
    nodes = accept_index.reshape(-1).long().clamp(0, max(predict.shape[0] - 1, 0))
    fill_bonus_tokens(predict[nodes], accept_lens, bonus_tokens, accept_index_stride, grid=grid, impl=impl)


@Launcher
def get_target_cache_loc(
    tgt_cache_loc: torch.Tensor,
    to_free_slots: torch.Tensor,
    accept_length: torch.Tensor,
    to_free_num_slots: torch.Tensor,
    out_cache_loc: torch.Tensor,
    num_verify_tokens: int,
    num_verify_tokens_upper: int = 0,
    bs_upper: int = 0,
    *,
    grid: Grid | None = None,
    impl: str = "auto",
) -> None:
    """First accept_length + 1 slots of every request, and its last `to_free_num_slots`.

    Args:
        tgt_cache_loc: [sum(accept_length + 1)] int64, written in place.
        to_free_slots: [sum(to_free_num_slots)] int64, written in place.
        accept_length: [bs] int32, accepted drafts.
        to_free_num_slots: [bs].
        out_cache_loc: [bs * num_verify_tokens] int64, slots by node.
        num_verify_tokens: nodes per request.
    """
    accepted, freed = _of_batch(grid, accept_length, to_free_num_slots)
    batch = accepted.shape[0]
    slots = out_cache_loc[: batch * num_verify_tokens].view(batch, num_verify_tokens)
    rows = torch.arange(batch, device=slots.device)
    for start, counts, out in (
        (torch.zeros_like(rows), accepted + 1, tgt_cache_loc),
        ((num_verify_tokens - freed).to(rows.dtype), freed, to_free_slots),
    ):
        index.read_table(slots, rows, start, counts, out.shape[0], out=out, impl=impl)


def get_src_tgt_cache_loc(
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    accept_index: torch.Tensor,
    accept_length: torch.Tensor,
    draft_token_num: int,
    page_size: int,
    *,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Slots of the accepted tokens, room for where they go, and how many slots each request frees.

    Args:
        seq_lens: [bs], committed lengths before this step.
        out_cache_loc: [bs * draft_token_num] int64, slots by node.
        accept_index: [sum(accept_length + 1)], flat node ids of the accepted tokens.
        accept_length: [bs] int32, accepted drafts.
        draft_token_num: nodes per request.
        page_size: tokens per page; only whole pages are freed.

    Returns:
        Source slots, target slots (zeros, for `get_target_cache_loc` to write) and freed slots of each request.
    """
    source, _ = index.compact(accept_index, out_cache_loc, impl=impl)
    extended = seq_lens + draft_token_num
    pages = torch.div(seq_lens + accept_length + page_size, page_size, rounding_mode="floor")
    return source, torch.zeros_like(source), extended - torch.minimum(pages * page_size, extended)


@Launcher
def filter_finished_cache_loc_kernel(
    out_cache_loc: torch.Tensor,
    tgt_cache_loc: torch.Tensor,
    accept_length: torch.Tensor,
    accept_length_filter: torch.Tensor,
    bs_upper: int = 0,
    num_verify_tokens_upper: int = 0,
    *,
    grid: Grid | None = None,
    impl: str = "auto",
) -> None:
    """Target slots of the requests that go on.

    Args:
        out_cache_loc: [sum(accept_length_filter)] int64, written in place.
        tgt_cache_loc: [sum(accept_length + 1)] int64.
        accept_length: [bs] int32, accepted drafts.
        accept_length_filter: [bs] int32, accept_length + 1, or 0 for a request that has finished.
    """
    accepted, kept = _of_batch(grid, accept_length, accept_length_filter)
    start = index.row_offsets(accepted + 1, impl=impl)[:-1]
    rows, capacity = torch.zeros_like(kept), out_cache_loc.shape[0]
    index.read_table(tgt_cache_loc[None], rows, start, kept, capacity, fill=0, out=out_cache_loc, impl=impl)


@Launcher
def create_flashinfer_kv_indices_triton(
    req_to_token_ptr: torch.Tensor,
    req_pool_indices_ptr: torch.Tensor,
    page_kernel_lens_ptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_start_idx: torch.Tensor | None,
    kv_indices_ptr: torch.Tensor,
    req_to_token_ptr_stride: int | None = None,
    *,
    grid: Grid | None = None,
    impl: str = "auto",
) -> None:
    """Each request's slots, from `kv_start_idx` on, at `kv_indptr` of the flat index array.

    Args:
        req_to_token_ptr: [rows, stride] int32.
        req_pool_indices_ptr: [bs], row of each request.
        page_kernel_lens_ptr: [bs], slots of each request.
        kv_indptr: [>= bs + 1] int32.
        kv_start_idx: [bs] first position, or None for 0.
        kv_indices_ptr: [>= kv_indptr[bs]] int32 or int64, written in place.
    """
    rows, counts = _of_batch(grid, req_pool_indices_ptr, page_kernel_lens_ptr)
    start = torch.zeros_like(counts) if kv_start_idx is None else kv_start_idx[: rows.shape[0]]
    index.read_table(
        _table(req_to_token_ptr, req_to_token_ptr_stride), rows, start, counts, kv_indices_ptr.shape[0],
        fill=0, offsets=kv_indptr[: rows.shape[0] + 1].int(), out=kv_indices_ptr, impl=impl,
    )  # fmt: skip


@Launcher
def fill_accepted_out_cache_loc(
    accept_index: torch.Tensor,
    out_cache_loc: torch.Tensor,
    accepted_out_cache_loc: torch.Tensor,
    size_upper: int = 0,
    *,
    grid: Grid | None = None,
    impl: str = "auto",
) -> None:
    """Slots of the accepted nodes moved together, in linear time.

    Args:
        accept_index: [bs * S] int32 flat node ids, -1 where there is none.
        out_cache_loc: [bs * N] int64, slots by node.
        accepted_out_cache_loc: [bs * S] int64, written in place; entries behind the accepted ones stay.
    """
    index.compact(accept_index.flatten(), out_cache_loc, out=accepted_out_cache_loc, impl=impl)


def _of_batch(grid: Grid | None, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors' entries of the requests in the grid, all of them without a grid."""
    return tuple(tensor[: grid[0]] for tensor in tensors) if grid else tensors


def _table(req_to_token: torch.Tensor, pool_len: int | None) -> torch.Tensor:
    """The token table with rows of `pool_len`."""
    if pool_len is None:
        return req_to_token
    if req_to_token.dim() == 1:
        return req_to_token.view(-1, pool_len)
    expect_shape("req_to_token", req_to_token, (None, pool_len))
    return req_to_token


def _rows(array: torch.Tensor, stride: int | None) -> torch.Tensor:
    """A step-major array as a matrix; a flat one is cut into rows of `stride`."""
    if array.dim() == 2:
        return array
    if stride is None:
        raise ValueError("kv_indices_stride, kv_indptr_stride: expected for flat arrays, got None")
    return array[: array.shape[0] // stride * stride].view(-1, stride)
