"""Ancestor masks in the layouts that other systems read."""

from __future__ import annotations

import torch

from specdec_kernels.checks import expect_contiguous, expect_dtype, expect_same_device, expect_shape
from specdec_kernels.launch import use_triton
from specdec_kernels.tree import reference
from specdec_kernels.tree.links import expect_nodes
from specdec_kernels.tree.types import WORD_BITS, ExportedMask, mask_words

FORMS = ("full", "query", "packed", "flashinfer")
FLAT_FORMS = ("full", "flashinfer")


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
        lengths: [B] int64, committed tokens L of each request.
        form: one of the table's.
        capacity: length of `cells` of the flat forms, else None. N * (sum(L) + B * N) cells suffice for `full`, a
            byte for 8 of them and one a request for `flashinfer`.
        impl: `auto`, `triton` or `reference`.

    Returns:
        ExportedMask: cells as in the table, offsets [B + 1] int64 for the flat forms, else None.

    Raises:
        ValueError: wrong shape, dtype, strides or devices, an unknown `form` or `impl`, `packed` for more than 64
            nodes, a capacity that is missing, negative or not wanted.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    expect_dtype("mask", mask, torch.int64)
    expect_shape("mask", mask, (None, None, None))
    expect_nodes("mask", mask.shape[1])
    expect_shape("mask", mask, (None, None, mask_words(mask.shape[1])))
    expect_shape("lengths", lengths, (mask.shape[0],))
    expect_dtype("lengths", lengths, torch.int64)
    expect_same_device(mask=mask, lengths=lengths)
    expect_contiguous(mask=mask, lengths=lengths)
    _check_form(form, capacity, mask.shape[1])
    if use_triton(impl, mask):
        import specdec_kernels.tree.mask_kernel as mask_kernel

        return mask_kernel.export_mask(mask, lengths, form, capacity)
    return reference.export_mask(mask, lengths, form, capacity)


def _check_form(form: str, capacity: int | None, num_nodes: int) -> None:
    if form not in FORMS:
        raise ValueError(f"form: expected one of {', '.join(FORMS)}, got {form!r}")
    if form == "packed" and num_nodes > WORD_BITS:
        raise ValueError(f"form: packed holds up to {WORD_BITS} nodes, got {num_nodes}; use the words themselves")
    if form in FLAT_FORMS and (capacity is None or capacity < 0):
        raise ValueError(f"capacity: form {form} expects the length of the flat result (>= 0), got {capacity}")
    if form not in FLAT_FORMS and capacity is not None:
        raise ValueError(f"capacity: form {form} has a fixed shape and expects None, got {capacity}")
