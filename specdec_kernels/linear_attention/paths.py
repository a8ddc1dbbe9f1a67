"""Row links and paths of a forward, by a few torch operations on the device; all layers share them.

`slots` int64 are the state slots of B requests or P segments, -1 for zeros or padding. Node i of request b, in chains
and trees of N nodes, is row b N + i.
"""

import torch
from torch import Tensor

from specdec_kernels.checks import expect_shape
from specdec_kernels.linear_attention.types import CHUNK, Chunks, Paths, RowLinks, Trees


def chain_paths(slots: Tensor, num_nodes: int) -> tuple[RowLinks, Paths]:
    """Of B chains of N nodes."""
    batch, device = len(slots), slots.device
    order = torch.arange(batch * num_nodes, dtype=torch.int32, device=device)
    parents = torch.where(order % num_nodes == 0, -1, order - 1)
    first = order[::num_nodes].contiguous()
    paths = Paths(order, first, torch.full_like(first, num_nodes), slots, owners=order // num_nodes)
    return RowLinks(parents, slots.repeat_interleave(num_nodes)), paths


def tree_paths(slots: Tensor, nodes: Tensor) -> tuple[RowLinks, Paths]:
    """Of B trees of N nodes.

    A path leads from the root to each leaf. Paths to other nodes are empty, because a node's output is the same on
    every path through it: the leaf with the highest number writes it. An unused node is a path of its own.

    Args:
        nodes: [B, N, P] int32: the ancestors of each node from the root to itself, then -1; see `mask_paths`.
    """
    expect_shape("nodes", nodes, (len(slots), None, None))
    batch, count, most = nodes.shape
    node = torch.arange(count, dtype=torch.int32, device=slots.device)
    base = torch.arange(batch, dtype=torch.int32, device=slots.device)[:, None] * count
    alone = (nodes[:, :, :1] < 0) & (torch.arange(most, device=slots.device) == 0)
    nodes = torch.where(alone, node[:, None], nodes)
    depth = (nodes >= 0).sum(-1, keepdim=True)
    parent = nodes.gather(2, (depth - 2).clamp(min=0))[:, :, 0]
    # Column `count` takes what pads the paths.
    visited = torch.where(nodes < 0, count, nodes).flatten(1).long()
    leaves = torch.zeros(batch, count + 1, dtype=torch.int32, device=slots.device)
    leaves = leaves.scatter_reduce(1, visited, node[:, None].expand_as(nodes).flatten(1), "amax")[:, :count]
    rows = slots.repeat_interleave(count)
    links = RowLinks(torch.where(depth[:, :, 0] < 2, -1, parent + base).flatten(), rows)
    paths = Paths(
        order=torch.where(nodes < 0, -1, nodes + base[:, :, None]).flatten(),
        first=torch.arange(batch * count, dtype=torch.int32, device=slots.device) * most,
        counts=torch.where(leaves == node, depth[:, :, 0], 0).int().flatten(),
        starts=rows,
        owners=(leaves + base).flatten(),
    )
    return links, paths


def tree_masks(slots: Tensor, parents: Tensor, mask: Tensor) -> tuple[RowLinks, Trees]:
    """Of B trees of N nodes up to `CHUNK`, for `delta_rule_tree`.

    Args:
        parents: [B, N] int32: parent of each node, -1 where there is none; see `tree_parents`.
        mask: [B, N, 1] int64: ancestor bits of `parents`; see `TreeLinks`.
    """
    expect_shape("parents", parents, (len(slots), None))
    batch, count = parents.shape
    expect_shape("mask", mask, (batch, count, 1))
    base = torch.arange(batch, dtype=torch.int32, device=slots.device)[:, None] * count
    links = RowLinks(torch.where(parents < 0, -1, parents + base).flatten(), slots.repeat_interleave(count))
    return links, Trees(mask, slots)


def prompt_paths(
    slots: Tensor, starts: Tensor, counts: Tensor, firsts: Tensor, num_rows: int
) -> tuple[RowLinks, Paths]:
    """Segments of P prompts, each in adjacent rows of R; the state after a segment goes to its slot.

    A segment that starts its text starts from zeros. Rows of no segment are padding.

    Args:
        slots: different ones for the segments of a call.
        starts: [P] int64: position of the first token of the segment in its text.
        counts: [P] int32: tokens; with 0 a segment that starts its text resets its slot.
        firsts: [P] int64: row of the first token.
    """
    num_prompts, device = len(slots), slots.device
    order = torch.arange(num_rows, dtype=torch.int32, device=device)
    inside = (order >= firsts[:, None]) & (order < (firsts + counts)[:, None]) & (slots >= 0)[:, None]
    owners = torch.where(inside, torch.arange(num_prompts, device=device)[:, None], -1).amax(0).int()
    begins = torch.where(starts == 0, -1, slots)
    of_row, padding = owners.clamp(min=0).long(), owners < 0
    parents = torch.where(padding | (order == firsts[of_row]), -1, order - 1)
    links = RowLinks(parents.int(), torch.where(padding, -1, begins[of_row]))
    counts = torch.where(slots < 0, 0, counts)
    return links, Paths(order, firsts.int(), counts, begins, slots, owners)


def chunk_paths(
    slots: Tensor, starts: Tensor, counts: Tensor, firsts: Tensor, num_rows: int
) -> tuple[RowLinks, Chunks, Paths]:
    """`prompt_paths` of segments whose whole chunks go first, and the paths of the rows after these.

    Chunks are at fixed places of a text, so the states of a text do not depend on its segments: they start at multiples
    of `CHUNK` tokens of the text, and all but its last one have a multiple of them.

    Args:
        starts, firsts: multiples of `CHUNK`.
        num_rows: a multiple of `CHUNK`.
    """
    links, paths = prompt_paths(slots, starts, counts, firsts, num_rows)
    whole = paths.counts // CHUNK
    first, chunk = paths.first // CHUNK, torch.arange(num_rows // CHUNK, dtype=torch.int32, device=slots.device)
    is_whole = ((chunk >= first[:, None]) & (chunk < (first + whole)[:, None])).any(0)
    chunks = Chunks(first, whole, paths.starts, slots, is_whole.int())
    assert paths.owners is not None
    rest = paths._replace(
        first=paths.first + whole * CHUNK,
        counts=paths.counts - whole * CHUNK,
        starts=torch.where(whole > 0, slots, paths.starts),
        owners=torch.where(is_whole.repeat_interleave(CHUNK), -1, paths.owners),
    )
    return links, chunks, rest


def accepted_paths(slots: Tensor, nodes: Tensor, num_nodes: int) -> Paths:
    """The committed nodes of B trees of N nodes; the state after them goes to the slot, and stays where there are none.

    Args:
        nodes: [B, P] int32: nodes of the path, -1 after it, as `Committed.nodes`.
    """
    expect_shape("nodes", nodes, (len(slots), None))
    batch, most = nodes.shape
    base = torch.arange(batch, dtype=torch.int32, device=slots.device)
    counts = torch.where(slots < 0, 0, (nodes >= 0).sum(1, dtype=torch.int32))
    order = torch.where(nodes < 0, -1, nodes + base[:, None] * num_nodes).flatten()
    return Paths(order, base * most, counts, slots, slots)
