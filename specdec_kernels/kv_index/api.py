"""Public functions of the family: checks, then the kernel or the definition.

Every function takes `page_table` [B, P] int32, page ids, negative where no page is held, `page_size` >= 1 tokens per
page. `lengths` [B] int64 are tokens held, counted as P * page_size where larger, or committed tokens L.
"""

import torch
from torch import Tensor

from specdec_kernels.checks import expect_at_least, expect_contiguous, expect_fields, expect_shape, expect_tensors
from specdec_kernels.kv_index.types import (
    INT64_MAX,
    FlashAttentionIndices,
    FlashInferChunks,
    FlashInferIndices,
    LevelSlots,
)
from specdec_kernels.launch import dispatch


def token_slots(
    page_table: Tensor, start: Tensor, counts: Tensor, width: int, page_size: int, impl: str = "auto"
) -> Tensor:
    """KV slots of the positions start, start + 1, ... of every request.

    Args:
        start: [B] int64, first position.
        counts: [B] int32, positions wanted per request.
        width: columns of the result; columns from `counts[b]` on are -1.

    Returns:
        [B, width] int64, -1 also where a position is negative, beyond the table or on a page that is not held.
    """
    _check_table(page_table, page_size, start=start)
    expect_tensors({"page_table": page_table}, counts=(counts, (page_table.shape[0],), torch.int32))
    expect_at_least("width", width, 0)
    return dispatch("token_slots", __package__, impl, page_table)(page_table, start, counts, width, page_size)


def level_slots(
    page_table: Tensor,
    lengths: Tensor,
    active: Tensor,
    levels: int,
    width: int,
    page_size: int,
    *,
    first: int = 0,
    impl: str = "auto",
) -> LevelSlots:
    """Positions and KV slots of all levels of a draft of `width` tokens a level.

    The tokens of level l have position L + `first` + l, and the slots of positions L + `first` + l * width and
    following.

    Args:
        active: [B] int32: 1, or 0 for a padding slot.
        levels, width, first: at least 0, 1 and 0.

    Slots are -1 also beyond the table and on a page that is not held.
    """
    _check_table(page_table, page_size, lengths=lengths)
    expect_tensors({"page_table": page_table}, active=(active, (page_table.shape[0],), torch.int32))
    expect_at_least("levels", levels, 0)
    expect_at_least("width", width, 1)
    expect_at_least("first", first, 0)
    build = dispatch("level_slots", __package__, impl, page_table)
    return build(page_table, lengths, active, levels, width, page_size, first)


def flashinfer_indices(
    page_table: Tensor,
    lengths: Tensor,
    page_size: int,
    columns: int | None = None,
    out: FlashInferIndices | None = None,
    impl: str = "auto",
) -> FlashInferIndices:
    """Page ids of all requests, one request after another, as FlashInfer's paged wrappers take them.

    Args:
        columns: most pages of a request, default P: its tokens are counted as columns * page_size where more. Past the
            table a request has page 0.
        out: where the result is written, for calls in CUDA graphs.
    """
    _check_table(page_table, page_size, lengths=lengths)
    batch, columns = len(page_table), page_table.shape[1] if columns is None else columns
    expect_at_least("columns", columns, page_table.shape[1])
    if out is None:
        sizes = (batch + 1, batch * columns, batch)
        out = FlashInferIndices(*(page_table.new_empty(size) for size in sizes))
    expect_fields(out, others=dict(page_table=page_table), B=batch, P=batch * columns)
    dispatch("flashinfer_indices", __package__, impl, page_table)(page_table, lengths, page_size, columns, out)
    return out


def flashinfer_chunks(
    keys: Tensor, most: int, out: FlashInferChunks, limit: int | None = None, impl: str = "auto"
) -> FlashInferChunks:
    """Chunks of equal size for requests of these lengths, of which the longest has at most `most`.

    Args:
        keys: [B] int64, at least 1.
        most: chunks that each request has tiles for.
        out: its `request` and `chunk` are given, the rest is written.
        limit: keys that a tile sees at most, in a window.
    """
    expect_at_least("most", most, 1)
    expect_tensors(keys=(keys, (None,), torch.int64))
    expect_fields(out, others=dict(keys=keys), B=len(keys))
    dispatch("flashinfer_chunks", __package__, impl, keys)(keys, most, out, INT64_MAX if limit is None else limit)
    return out


def flashinfer_mask(
    mask: Tensor,
    lengths: Tensor,
    keys: Tensor,
    width: int,
    *,
    window: int | None = None,
    depths: Tensor | None = None,
    row_depths: Tensor | None = None,
    out: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Visibility of trees as FlashInfer's packed mask: bit row * keys + key of a request, the lowest bit of a byte
    first. A row sees the prefix [0, L) and, of the draft, the slots of its mask.

    Args:
        mask: [B, N, W] int64 words; bit j of row i: the row sees slot L + j.
        lengths: [B] int64, L.
        keys: [B] int64, prefix and draft slots together, 1 to `width`.
        width: bound on the keys of a request, which sizes the result.
        window: a key is seen only if position of the row - position of the key < window.
        depths: [B, M] int32 depth of each draft slot; default: its number.
        row_depths: [B, N] int32 depth of each row; default: `depths`.
        out: where the result is written, for calls in CUDA graphs.

    Returns:
        [B, ceil(N * width / 8)] uint8, zeros after a request's bits. Request b begins at a row of it.
    """
    batch, nodes, _ = mask.shape
    shape = (batch, -(-nodes * width // 8))
    out = mask.new_empty(shape, dtype=torch.uint8) if out is None else out
    expect_at_least("width", width, 1)
    expect_tensors(
        mask=(mask, (batch, nodes, None), torch.int64),
        lengths=(lengths, (batch,), torch.int64),
        keys=(keys, (batch,), torch.int64),
        depths=(depths, (batch, None), torch.int32),
        row_depths=(row_depths, (batch, nodes), torch.int32),
        out=(out, shape, torch.uint8),
    )
    rows = depths if row_depths is None else row_depths
    dispatch("flashinfer_mask", __package__, impl, mask)(mask, lengths, keys, window, depths, rows, out)
    return out


def flash_attention_table(
    page_table: Tensor, lengths: Tensor, page_size: int, impl: str = "auto"
) -> FlashAttentionIndices:
    """Page table and lengths as FlashAttention's paged calls take them: entries past the length are page 0."""
    _check_table(page_table, page_size, lengths=lengths)
    return dispatch("flash_attention_table", __package__, impl, page_table)(page_table, lengths, page_size)


def move_accepted(kv: Tensor, page_table: Tensor, lengths: Tensor, nodes: Tensor, impl: str = "auto") -> None:
    """Move keys and values of each accepted path to the front, in place: position L + nodes[j] -> L + j.

    The key and value of tree node i were written at position L + i for any shape of the tree. Once the path
    n_0 = 0 < n_1 < ... < n_k is accepted, node n_j belongs at L + j. Overlapping moves are safe: the old values of a
    whole path are read before any is written. Requests must not share the pages of positions from L on.

    Args:
        kv: [layers, 2, pages, page_size, H_kv, D], or with 1 instead of 2 where a layer has one tensor; contiguous,
            changed in place.
        nodes: [B, D + 1] int32, accepted path from the root on, rising, then -1 (`Accepted.nodes`).
    """
    expect_shape("kv", kv, (None, 1 if kv.ndim > 1 and kv.shape[1] == 1 else 2, None, None, None, None))
    _check_table(page_table, kv.shape[3], lengths=lengths)
    expect_tensors({"page_table": page_table, "kv": kv}, nodes=(nodes, (page_table.shape[0], None), torch.int32))
    expect_contiguous(kv=kv)
    dispatch("move_accepted", __package__, impl, kv)(kv, page_table, lengths, nodes)


def _check_table(page_table: Tensor, page_size: int, **per_request: Tensor) -> None:
    """A page table with one row per request, and [B] int64 tensors."""
    expect_shape("page_table", page_table, (None, None))
    shape = (page_table.shape[0],)
    expect_tensors(
        page_table=(page_table, (None, None), torch.int32),
        **{name: (tensor, shape, torch.int64) for name, tensor in per_request.items()},
    )
    expect_at_least("page_size", page_size, 1)
