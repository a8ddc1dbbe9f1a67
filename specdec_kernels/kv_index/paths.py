"""After acceptance: which slots a path moves from and to, which it frees, and the move itself.

The key and value of tree node i were written at position L + i, whatever the tree's shape. Once the path
n_0 = 0 < n_1 < ... < n_k is accepted, node n_j belongs at L + j, so the path moves to the front. Sources and
targets may be the same slots: everything is read before anything is written.
"""

from __future__ import annotations

import torch

from specdec_kernels.checks import expect_contiguous, expect_dtype, expect_same_device, expect_shape
from specdec_kernels.kv_index import path_reference as reference
from specdec_kernels.kv_index.arguments import check_at_least, check_requests, check_table
from specdec_kernels.kv_index.types import PathLocations
from specdec_kernels.launch import use_triton


def align_eviction(evict: torch.Tensor, lengths: torch.Tensor, page_size: int, impl: str = "auto") -> torch.Tensor:
    """Keep every slot of the page that holds the last accepted token: only wholly unused pages are evicted.

    Args:
        evict: [B, N] bool, True where node i at position L + i is not wanted. The wanted ones are a prefix.
        lengths: [B] int32 or int64, L: committed tokens before this step.
        page_size: P >= 1 tokens a page.
        impl: `auto`, `triton` or `reference`.

    Returns:
        [B, N] bool, `evict` with the entries on that page cleared.

    Raises:
        ValueError: wrong shape, dtype, strides or devices, `page_size` below 1.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    expect_shape("evict", evict, (lengths.shape[0], None))
    expect_dtype("evict", evict, torch.bool)
    expect_contiguous(evict=evict)
    check_requests(lengths=lengths)
    expect_same_device(evict=evict, lengths=lengths)
    check_at_least("page_size", page_size, 1)
    if use_triton(impl, evict):
        import specdec_kernels.kv_index.path_kernel as kernel

        return kernel.align_eviction(evict, lengths, page_size)
    return reference.align_eviction(evict, lengths, page_size)


def accepted_locations(
    slots: torch.Tensor, lengths: torch.Tensor, nodes: torch.Tensor, page_size: int, impl: str = "auto"
) -> PathLocations:
    """Slots that an accepted path lies in, those it belongs in, and those whose pages it leaves empty.

    Args:
        slots: [B, N] int64, slot of every tree node, node i at position L + i.
        lengths: [B] int32 or int64, L: committed tokens before this step.
        nodes: [B, S] int32, accepted path from the root on, -1 behind (`Accepted.nodes`); entries from N on
            count as -1.
        page_size: P >= 1 tokens a page.
        impl: `auto`, `triton` or `reference`.

    Returns:
        PathLocations: source and target [B, S] int64 (-1 behind the path); freed [B, N] int64, the slots
            behind the last page that holds a kept token, -1 behind; num_freed [B] int32.

    Raises:
        ValueError: wrong shape, dtype, strides or devices, `page_size` below 1.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    expect_shape("slots", slots, (lengths.shape[0], None))
    expect_dtype("slots", slots, torch.int64)
    expect_shape("nodes", nodes, (lengths.shape[0], None))
    expect_dtype("nodes", nodes, torch.int32)
    expect_contiguous(slots=slots, nodes=nodes)
    check_requests(lengths=lengths)
    expect_same_device(slots=slots, lengths=lengths, nodes=nodes)
    check_at_least("page_size", page_size, 1)
    if use_triton(impl, slots):
        import specdec_kernels.kv_index.path_kernel as kernel

        return kernel.accepted_locations(slots, lengths, nodes, page_size)
    return reference.accepted_locations(slots, lengths, nodes, page_size)


def move_accepted(
    kv: torch.Tensor, page_table: torch.Tensor, lengths: torch.Tensor, nodes: torch.Tensor, impl: str = "auto"
) -> None:
    """Move keys and values of each accepted path to the front, in place: position L + nodes[j] -> L + j.

    Overlapping moves are safe: the old values of a whole path are read before any is written. Requests must
    not share the pages of positions from L on.

    Args:
        kv: [layers, 2, pages, page_size, H_kv, D], contiguous, changed in place.
        page_table: [B, P] int32 page ids.
        lengths: [B] int64, L: committed tokens before this step.
        nodes: [B, D + 1] int32, accepted path from the root on, rising, -1 behind (`Accepted.nodes`).
        impl: `auto`, `triton` or `reference`.

    Raises:
        ValueError: wrong shape, dtype, strides or devices.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    expect_shape("kv", kv, (None, 2, None, None, None, None))
    check_table(page_table, kv.shape[3], lengths=lengths)
    expect_shape("nodes", nodes, (page_table.shape[0], None))
    expect_dtype("nodes", nodes, torch.int32)
    expect_contiguous(kv=kv, nodes=nodes)
    expect_same_device(kv=kv, page_table=page_table, nodes=nodes)
    if use_triton(impl, kv):
        import specdec_kernels.kv_index.path_kernel as kernel

        return kernel.move_accepted(kv, page_table, lengths, nodes)
    return reference.move_accepted(kv, page_table, lengths, nodes)


def move_slots(kv: torch.Tensor, source: torch.Tensor, target: torch.Tensor, impl: str = "auto") -> None:
    """Copy keys and values of all layers from source slots to target slots, in place.

    The whole list behaves as one step: what any source slot held before is what its target holds after, also
    where the lists overlap. Short lists are moved by programs that hold every slot's share of the features
    at once, long ones go through a staging buffer.

    Args:
        kv: [layers, 2, pages, page_size, H_kv, D], contiguous, changed in place.
        source, target: [M] int64 slots, page * page_size + offset. A pair with a slot outside the pool (such
            as -1), or of one slot with itself, moves nothing. Other targets must differ from each other.
        impl: `auto`, `triton` or `reference`.

    Raises:
        ValueError: wrong shape, dtype, strides or devices.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    expect_shape("kv", kv, (None, 2, None, None, None, None))
    for name, slots in (("source", source), ("target", target)):
        expect_shape(name, slots, (source.shape[0],))
        expect_dtype(name, slots, torch.int64)
    expect_contiguous(kv=kv, source=source, target=target)
    expect_same_device(kv=kv, source=source, target=target)
    if use_triton(impl, kv):
        import specdec_kernels.kv_index.path_kernel as kernel

        return kernel.move_slots(kv, source, target)
    return reference.move_slots(kv, source, target)
