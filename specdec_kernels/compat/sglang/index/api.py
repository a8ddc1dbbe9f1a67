"""Index functions behind SGLang's signatures.

Every function takes `impl`: `auto`, `triton` or `reference`. All raise ValueError for a wrong shape, dtype, stride or
device and for a size out of its range, and RuntimeError where `impl="triton"` can run no kernel.
"""

from __future__ import annotations

import torch

from specdec_kernels.checks import expect_contiguous, expect_dtype, expect_same_device, expect_shape
from specdec_kernels.compat.sglang.index.types import ExportedMask
from specdec_kernels.launch import dispatch
from specdec_kernels.tree.types import MAX_NODES, WORD_BITS, mask_words

_FORMS = ("full", "query", "packed", "flashinfer")
_FLAT_FORMS = ("full", "flashinfer")


def parents_from_candidates(
    selected: torch.Tensor, parent_list: torch.Tensor, topk: int, impl: str = "auto"
) -> torch.Tensor:
    """Parent nodes of selected candidates, in the candidate numbering of SGLang's EAGLE worker.

    Entry i of `selected` becomes node i + 1. Its candidate id f lies in row r = f // topk of the drafting history.
    The parent of row 0 is the root. The parent of row r > 0 is the candidate `parent_list[b, r]`, looked up among the
    selected ones (the first of equal ids). An entry is an orphan, with parent -2, when f is negative, r lies beyond
    the list, or the parent was not selected before it. With `build_tree(..., orphans_see_root=True)` the result is
    that of `build_tree_kernel_efficient`.

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
    if topk < 1:
        raise ValueError(f"topk: expected at least 1, got {topk}")
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
