"""SGLang's KV-index kernels as functions. Those that write at most the new tokens of a step are plain torch.

In a call written `name[grid](...)` the first size of the grid (the second of `generate_draft_decode_kv_indices`) is the
number of requests, also where the tensors are longer. Outputs are written in place; entries that no request owns keep
their contents. Sizes for SGLang's compiler (`*_upper`, `BLOCK_SIZE`) are not used. Integers may be int32 or int64.
Shapes of the common arguments:

    req_to_token        [rows, pool_len] int32: KV slot of each position of a pool row
    req_pool_indices    [bs]: pool row of each request
    seq_lens and other per-request values [bs]
    out_cache_loc       slots by node, or all new slots, one request after another
"""

import torch
from torch import Tensor

from specdec_kernels.checks import (
    expect_at_least,
    expect_at_least_one,
    expect_same_device,
    expect_shape,
    expect_strided,
    expect_tensors,
)
from specdec_kernels.compat.sglang.reference import branch_start, put, table_entries, write_spans
from specdec_kernels.compat.sglang.types import INT32_MAX, INTEGERS, Grid, Sequences, Spans, by_request, launched
from specdec_kernels.launch import dispatch


@launched("seq_lens", "accept_lens", "new_verified_id")
def create_extend_after_decode_spec_info(
    verified_id: Tensor,
    seq_lens: Tensor,
    accept_lens: Tensor,
    positions: Tensor,
    new_verified_id: Tensor,
    bs_upper: int = 0,
    *,
    impl: str = "auto",
) -> None:
    """Positions of the accepted tokens of every request, and each request's last accepted token.

    Args:
        verified_id: [sum(accept_lens)], accepted tokens, one request after another.
        seq_lens: committed lengths with the accepted tokens.
        accept_lens: accepted tokens with the bonus. A request of 0 keeps its `new_verified_id`.
        positions: [>= sum(accept_lens)], written in place.
        new_verified_id: [bs], written in place.
    """
    _flat(seq_lens, positions=positions, verified_id=verified_id)
    _read(Spans(None, None, seq_lens - accept_lens, accept_lens, positions), impl)
    if verified_id.shape[0]:
        last = verified_id[(accept_lens.clamp(min=0).cumsum(0) - 1).clamp(0, verified_id.shape[0] - 1)]
        new_verified_id.copy_(torch.where(accept_lens > 0, last.to(new_verified_id.dtype), new_verified_id))


@launched("req_pool_indices", "start_offset", "end_offset")
def assign_req_to_token_pool(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int | None = None,
    bs_upper: int = 0,
) -> None:
    """Write each request's slots of `out_cache_loc` [sum(end - start)] at positions start to end - 1 of its row of
    `req_to_token`, in place."""
    table = _table(req_to_token, pool_len, req_pool_indices=req_pool_indices, out_cache_loc=out_cache_loc)
    write_spans(Spans(table, req_pool_indices, start_offset, end_offset - start_offset, out_cache_loc))


@launched("req_pool_indices", "start_offset", "end_offset")
def assign_extend_cache_locs(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int | None = None,
    bs_upper: int = 0,
    *,
    impl: str = "auto",
) -> None:
    """Read each request's slots at positions start to end - 1 into `out_cache_loc`; the inverse of
    `assign_req_to_token_pool`."""
    table = _table(req_to_token, pool_len, req_pool_indices=req_pool_indices, out_cache_loc=out_cache_loc)
    _read(Spans(table, req_pool_indices, start_offset, end_offset - start_offset, out_cache_loc), impl)


@launched("req_pool_indices", "seq_lens")
def assign_draft_cache_locs(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    extend_lens: Tensor,
    num_new_pages_per_topk: Tensor,
    out_cache_loc: Tensor,
    source_cache_loc: Tensor | None,
    target_cache_loc: Tensor | None,
    last_page_lens_cumsum: Tensor | None,
    duplicate_cache_len: int,
    pool_len: int | None,
    topk: int,
    speculative_num_steps: int,
    page_size: int,
    bs_upper: int = 0,
    iter_upper: int = 0,
) -> None:
    """Write newly allocated draft slots to the token table, and list those that the steps will write.

    With pages of P = `page_size` > 1 tokens, T = `topk` > 1 branches and K = `speculative_num_steps`, a branch owns
    whole pages: branch t of a request of length L begins at position base + t m P, base = L - L mod P,
    m = ceil((L mod P + K) / P), and its first L mod P positions repeat the prefix tail, which has to be copied from
    branch 0. Otherwise the T K drafts follow the prefix.

    Args:
        req_to_token: written in place from position `seq_lens` on.
        extend_lens: slots per request; only for P > 1 and T > 1.
        num_new_pages_per_topk, last_page_lens_cumsum: not used.
        out_cache_loc: all allocated slots. For P > 1 and T > 1 the first bs T K become [request, branch, step].
        source_cache_loc, target_cache_loc: [duplicate_cache_len], written in place: slots of the prefix tails, and of
            their copies in the other branches. A length of 0 leaves the lists out.
    """
    table = _table(req_to_token, pool_len, req_pool_indices=req_pool_indices, out_cache_loc=out_cache_loc)
    expect_at_least_one(topk=topk, speculative_num_steps=speculative_num_steps, page_size=page_size)
    paged = page_size > 1 and topk > 1
    drafts = topk * speculative_num_steps
    # Unused, `extend_lens` may be a placeholder without dimensions.
    counts = extend_lens[: seq_lens.shape[0]] if paged else torch.full_like(seq_lens, drafts)
    expect_shape("extend_lens", counts, seq_lens.shape)
    write_spans(Spans(table, req_pool_indices, seq_lens, counts, out_cache_loc))
    if not paged:
        return
    expect_at_least("out_cache_loc's entries", out_cache_loc.shape[0], seq_lens.shape[0] * drafts)
    length, branch = seq_lens.long()[:, None], torch.arange(topk, device=table.device)
    first = branch_start(length, branch, speculative_num_steps, page_size)
    positions = first[:, :, None] + torch.arange(speculative_num_steps, device=table.device)
    pool_rows = req_pool_indices.long()[:, None, None]
    slots = table_entries(table, pool_rows, positions).flatten()
    out_cache_loc[: slots.shape[0]] = slots.to(out_cache_loc.dtype)
    if duplicate_cache_len <= 0:
        return
    if source_cache_loc is None or target_cache_loc is None:
        raise ValueError(f"source_cache_loc, target_cache_loc: expected tensors of {duplicate_cache_len}, got None")
    _flat(table, source_cache_loc=source_cache_loc, target_cache_loc=target_cache_loc)
    for out, start in (source_cache_loc, length), (target_cache_loc, first[:, 1:]):
        _list_tails(out, start, length % page_size, table, pool_rows, page_size, topk)


def _list_tails(
    out: Tensor, start: Tensor, tails: Tensor, table: Tensor, pool_rows: Tensor, page_size: int, topk: int
) -> None:
    """Write the slots of the `tails` [bs, 1] positions before `start` [bs, 1 or topk - 1] to `out`, by branch."""
    tail, offset = tails[:, :, None], torch.arange(page_size - 1, device=table.device)
    branch = torch.arange(topk - 1, device=table.device)[None, :, None]
    place = (tail.cumsum(0) - tail) * (topk - 1) + branch * tail + offset
    values = table_entries(table, pool_rows, (start[:, :, None] - tail + offset).expand_as(place))
    put(out, place.flatten(), values.flatten(), (offset < tail).expand_as(place).flatten())


@launched("req_pool_indices", "paged_kernel_lens", axis=1)
def generate_draft_decode_kv_indices(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    paged_kernel_lens: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    positions: Tensor,
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
    grid: Grid = (),
    impl: str = "auto",
) -> None:
    """KV slots that every branch attends to in every draft step: the prefix, then its own drafts up to the step.

    With a window the prefix is its first `sink_size` and last `window_size` positions; drafts keep the positions that
    the whole prefix gives them. Branches that do not fit are truncated, and `kv_indptr` ends there.

    Args:
        paged_kernel_lens: [bs], committed lengths.
        kv_indices: [steps, width] (or flat with rows of `kv_indices_stride`), written in place.
        kv_indptr: [steps, >= bs * topk + 1] (or flat with rows of `kv_indptr_stride`), written in place.
        positions: [bs * topk]; only its size is used, which gives topk.
        page_size: tokens per page, see `assign_draft_cache_locs`.
        num_steps: steps, by default the grid's first size, or the rows of `kv_indices`.
        window_size, sink_size: recent and first prefix positions kept; both 0 keeps all.
    """
    batch = req_pool_indices.shape[0]
    if batch == 0:
        return
    indices, indptr = _steps(kv_indices, kv_indices_stride), _steps(kv_indptr, kv_indptr_stride)
    steps = num_steps or (grid[0] if grid else indices.shape[0])
    topk = grid[2] if grid else positions.shape[0] // batch
    expect_at_least_one(topk=topk, num_steps=steps, page_size=page_size)
    expect_at_least("window_size", window_size, 0)
    expect_at_least("sink_size", sink_size, 0)
    sequences = Sequences(
        _table(req_to_token, pool_len), req_pool_indices, paged_kernel_lens, indptr[:steps], indices[:steps], topk,
        num_steps=steps, page_size=page_size, limit=sink_size + window_size or INT32_MAX, sink=sink_size,
    )  # fmt: skip
    _list(sequences, impl)


@launched("req_pool_indices", "seq_lens")
def create_draft_kv_indices(
    kv_indptr: Tensor,
    kv_indices: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    expand_factor: int = 2,
    row_stride: int | None = None,
    num_tokens_upper: int = 0,
    *,
    impl: str = "auto",
) -> None:
    """Verification of `expand_factor` >= 2 tokens per request as decode sequences of their own: token q attends to the
    prefix and to tokens 0 to q.

    Args:
        kv_indptr: [>= factor * bs + 1], written in place.
        kv_indices: [>= factor * sum(seq_lens) - bs * factor * (factor - 1) / 2], written in place.
        seq_lens: lengths with all the tokens that are verified.
    """
    expect_at_least("expand_factor", expand_factor, 2)
    table, prefix = _table(req_to_token, row_stride), seq_lens - expand_factor
    lists = kv_indptr[None], kv_indices[None]
    _list(Sequences(table, req_pool_indices, prefix, *lists, repeat=expand_factor, growth=1), impl)


@launched("seq_lens")
def align_evict_mask_to_page_size(
    seq_lens: Tensor, evict_mask: Tensor, page_size: int, num_draft_tokens: int, BLOCK_SIZE: int = 0
) -> None:
    """Clear the evict flags of the page that holds the last accepted token.

    Args:
        seq_lens: committed lengths before this step.
        evict_mask: [bs * num_draft_tokens] bool, True frees a slot; the others are a prefix. Written in place.
    """
    expect_at_least_one(page_size=page_size)
    flags = by_request("evict_mask", evict_mask, seq_lens.shape[0], num_draft_tokens, torch.bool)
    kept = (~flags).sum(1)
    first = torch.div(seq_lens + kept - 1, page_size, rounding_mode="floor") * page_size - seq_lens
    node = torch.arange(num_draft_tokens, device=flags.device)
    flags &= ~((node >= first[:, None]) & (node < first[:, None] + page_size))


@launched()
def align_evict_mask_to_page_size_simple_eagle(
    out_cache_loc: Tensor,
    evict_mask: Tensor,
    page_size: int,
    num_draft_tokens: int,
    BLOCK_SIZE: int = 0,
    *,
    grid: Grid = (),
) -> None:
    """Clear the evict flags [bs * num_draft_tokens] of every page that holds a kept slot, for any
    order of the slots; in place."""
    batch = grid[0] if grid else evict_mask.shape[0] // max(num_draft_tokens, 1)
    flags = by_request("evict_mask", evict_mask, batch, num_draft_tokens, torch.bool)
    slots = by_request("out_cache_loc", out_cache_loc, batch, num_draft_tokens)
    pages = torch.div(slots, page_size, rounding_mode="floor")
    kept = ((pages[:, :, None] == pages[:, None, :]) & ~flags[:, None, :]).any(2)
    flags.copy_(flags & ~kept)


@launched("accept_lens", "bonus_tokens")
def fill_bonus_tokens(accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int) -> None:
    """Each request's last accepted token into `bonus_tokens` [bs]. A request of 0 accepted tokens keeps its entry.

    `accept_tokens` [bs, accept_stride] (or flat) holds the accepted tokens of each request, then anything.
    """
    rows = by_request("accept_tokens", accept_tokens, accept_lens.shape[0], accept_stride)
    last = rows.gather(1, (accept_lens.long() - 1).clamp(0, accept_stride - 1)[:, None])[:, 0]
    bonus_tokens.copy_(torch.where(accept_lens > 0, last.to(bonus_tokens.dtype), bonus_tokens))


@launched("accept_lens", "bonus_tokens")
def fill_bonus_tokens_from_predict(
    predict: Tensor, accept_index: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_index_stride: int
) -> None:
    """`fill_bonus_tokens` from `predict` [bs * n], the token after each node. `accept_index` [bs, accept_index_stride]
    (or flat) holds the flat ids of the accepted nodes."""
    nodes = accept_index.reshape(-1).long().clamp(0, max(predict.shape[0] - 1, 0))
    fill_bonus_tokens(predict[nodes], accept_lens, bonus_tokens, accept_index_stride)


@launched("accept_length", "to_free_num_slots")
def get_target_cache_loc(
    tgt_cache_loc: Tensor,
    to_free_slots: Tensor,
    accept_length: Tensor,
    to_free_num_slots: Tensor,
    out_cache_loc: Tensor,
    num_verify_tokens: int,
    num_verify_tokens_upper: int = 0,
    bs_upper: int = 0,
    *,
    impl: str = "auto",
) -> None:
    """The first accept_length + 1 of each request's `num_verify_tokens` slots into `tgt_cache_loc`, and its last
    `to_free_num_slots` into `to_free_slots`."""
    slots = by_request("out_cache_loc", out_cache_loc, accept_length.shape[0], num_verify_tokens)
    _flat(slots, tgt_cache_loc=tgt_cache_loc, to_free_slots=to_free_slots)
    rows, freed = torch.arange(slots.shape[0], device=slots.device), to_free_num_slots
    _read(Spans(slots, rows, torch.zeros_like(rows), accept_length + 1, tgt_cache_loc), impl)
    _read(Spans(slots, rows, num_verify_tokens - freed, freed, to_free_slots), impl)


def get_src_tgt_cache_loc(
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    accept_index: Tensor,
    accept_length: Tensor,
    draft_token_num: int,
    page_size: int,
    *,
    impl: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Slots of the accepted tokens, room for their targets, and how many slots each request frees.

    Args:
        seq_lens: committed lengths before this step.
        out_cache_loc: [bs * draft_token_num], slots by node.
        accept_index: [sum(accept_length + 1)], flat node ids of the accepted tokens.
        accept_length: accepted drafts.
        page_size: tokens per page; only whole pages are freed.

    Returns:
        Source slots, target slots (zeros, for `get_target_cache_loc` to write) and freed slots of each request.
    """
    source = out_cache_loc[accept_index.long().clamp(0, max(out_cache_loc.shape[0] - 1, 0))]
    extended = seq_lens + draft_token_num
    pages = torch.div(seq_lens + accept_length + page_size, page_size, rounding_mode="floor")
    return source, torch.zeros_like(source), extended - torch.minimum(pages * page_size, extended)


@launched("accept_length", "accept_length_filter")
def filter_finished_cache_loc_kernel(
    out_cache_loc: Tensor,
    tgt_cache_loc: Tensor,
    accept_length: Tensor,
    accept_length_filter: Tensor,
    bs_upper: int = 0,
    num_verify_tokens_upper: int = 0,
    *,
    impl: str = "auto",
) -> None:
    """Target slots of the requests that go on: of `tgt_cache_loc` [sum(accept_length + 1)] those with a filter of
    accept_length + 1, not 0, into `out_cache_loc` [sum(accept_length_filter)]."""
    _flat(accept_length, out_cache_loc=out_cache_loc, tgt_cache_loc=tgt_cache_loc)
    start = (accept_length + 1).cumsum(0) - accept_length - 1
    table, rows = tgt_cache_loc[None], torch.zeros_like(start)
    _read(Spans(table, rows, start, accept_length_filter, out_cache_loc), impl)


@launched("req_pool_indices_ptr", "page_kernel_lens_ptr", "kv_start_idx")
def create_flashinfer_kv_indices_triton(
    req_to_token_ptr: Tensor,
    req_pool_indices_ptr: Tensor,
    page_kernel_lens_ptr: Tensor,
    kv_indptr: Tensor,
    kv_start_idx: Tensor | None,
    kv_indices_ptr: Tensor,
    req_to_token_ptr_stride: int | None = None,
    *,
    impl: str = "auto",
) -> None:
    """Each request's `page_kernel_lens_ptr` slots from position `kv_start_idx` (None: 0) on, written to
    `kv_indices_ptr` from `kv_indptr` [>= bs + 1] int32 on."""
    rows, counts = req_pool_indices_ptr, page_kernel_lens_ptr
    flat = dict(req_pool_indices_ptr=rows, kv_indptr=kv_indptr, kv_indices_ptr=kv_indices_ptr)
    table = _table(req_to_token_ptr, req_to_token_ptr_stride, **flat)
    expect_at_least("kv_indptr's entries", kv_indptr.shape[0], rows.shape[0] + 1)
    first = torch.zeros_like(counts) if kv_start_idx is None else kv_start_idx
    _read(Spans(table, rows, first, counts, kv_indices_ptr, kv_indptr[: rows.shape[0] + 1]), impl)


@launched()
def fill_accepted_out_cache_loc(
    accept_index: Tensor, out_cache_loc: Tensor, accepted_out_cache_loc: Tensor, size_upper: int = 0
) -> None:
    """Slots of the accepted nodes, in their order: `out_cache_loc` at the entries of `accept_index` [bs * S] that are
    not negative, into `accepted_out_cache_loc` [bs * S]; in linear time."""
    nodes = accept_index.flatten()
    _flat(nodes, accept_index=nodes, out_cache_loc=out_cache_loc, accepted_out_cache_loc=accepted_out_cache_loc)
    kept = nodes >= 0
    inside = kept & (nodes < out_cache_loc.shape[0])
    slots = out_cache_loc[torch.where(inside, nodes, 0).long()] if out_cache_loc.numel() else nodes
    put(accepted_out_cache_loc, kept.long().cumsum(0) - 1, torch.where(inside, slots, 0), kept)


def _read(spans: Spans, impl: str) -> None:
    dispatch("read_spans", __package__, impl, spans.values, "kernel_index")(spans)


def _list(sequences: Sequences, impl: str) -> None:
    """Check the lists for the number of sequences, and fill them."""
    lists = dict(kv_indptr=sequences.indptr, kv_indices=sequences.values)
    expect_strided(**{name: (each, (len(sequences.indptr), None), INTEGERS) for name, each in lists.items()})
    count = sequences.lengths.shape[0] * sequences.repeat
    expect_at_least("kv_indptr's entries", sequences.indptr.shape[1], count + 1)
    expect_same_device(req_to_token=sequences.table, **lists)
    dispatch("list_sequences", __package__, impl, sequences.values, "kernel_index")(sequences)


def _table(req_to_token: Tensor, pool_len: int | None, **flat: Tensor) -> Tensor:
    """The token table with rows of `pool_len`; `flat` as in `_flat`."""
    table = req_to_token.view(-1, pool_len) if req_to_token.dim() == 1 and pool_len else req_to_token
    expect_tensors(req_to_token=(table, (None, pool_len), torch.int32))
    _flat(table, **flat)
    return table


def _flat(like: Tensor, **tensors: Tensor) -> None:
    """Raise ValueError unless the tensors are contiguous integers [size] on the device of `like`."""
    expect_tensors({"per_request": like}, **{name: (tensor, (None,), INTEGERS) for name, tensor in tensors.items()})


def _steps(array: Tensor, stride: int | None) -> Tensor:
    """A step-major array as a matrix; a flat one is cut into rows of `stride`."""
    if array.dim() == 2:
        return array
    if stride is None:
        raise ValueError("kv_indices_stride, kv_indptr_stride: expected for flat arrays, got None")
    return array[: array.shape[0] // stride * stride].view(-1, stride)
