"""Checks what a drafter hands over, once per engine, outside of any captured graph.

A wrong draft gives wrong text, or an error deep inside a kernel. The check reads tensors back, so it looks at the first
tree only: at that of an empty batch before anything is captured, and at that of the first requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from algorithms.runtime.algorithm import Algorithm, Batch, DraftTree
from algorithms.runtime.request import EngineError
from specdec_kernels import TreeLinks
from specdec_kernels.verify.types import DRAWN_RULES

_LINK_DTYPES = {
    "first_child": torch.int32,
    "next_sibling": torch.int32,
    "depth": torch.int32,
    "positions": torch.int64,
    "mask": torch.int64,
}


def check_draft(algorithm: Algorithm, batch: Batch, tree: Any, vocab_size: int) -> None:
    """Raise EngineError in one sentence unless `tree` is what `algorithm` declares, for the active rows of `batch`."""
    problem = next(_problems(algorithm, batch, tree, vocab_size), None)
    if problem is not None:
        raise EngineError(f"algo={algorithm.name}: {problem}")


def _problems(algorithm: Algorithm, batch: Batch, tree: Any, vocab_size: int) -> Iterator[str]:
    """What is wrong, in an order in which every test may rely on those before it."""
    if not isinstance(tree, DraftTree):
        yield f"propose gave {type(tree).__name__}, expected a DraftTree"
    rows, nodes, device = len(batch.lengths), algorithm.num_nodes, batch.lengths.device
    named = f"[rows, num_nodes] = {[rows, nodes]}"
    yield from _tensor_problems("tokens", tree.tokens, (rows, nodes), named, torch.int64, device)
    if not isinstance(tree.links, TreeLinks):
        got = type(tree.links).__name__
        yield f"propose gave links of type {got}, expected TreeLinks from build_chain or build_tree"
    for name, dtype in _LINK_DTYPES.items():
        words = (-(-nodes // 64),) if name == "mask" else ()
        shape = (rows, nodes, *words)
        yield from _tensor_problems(f"links.{name}", getattr(tree.links, name), shape, str(list(shape)), dtype, device)
    if tree.confidence is not None:
        yield from _tensor_problems("confidence", tree.confidence, (rows, nodes), named, torch.float32, device)
    yield from _token_problems(batch, tree.tokens, vocab_size)
    yield from _tree_problems(algorithm, batch, tree.links)
    if algorithm.rule in DRAWN_RULES:
        if tree.draft_probs is None:
            yield f"rule {algorithm.rule!r}: expected draft_probs, got None"
            return
        shape, expected = (rows, nodes - 1, vocab_size), "[rows, num_nodes - 1, vocabulary]"
        if tree.draft_rows is not None:
            yield from _tensor_problems("draft_rows", tree.draft_rows, (rows, nodes), named, torch.int32, device)
            shape, expected = (rows, *tree.draft_probs.shape[1:2], vocab_size), "[rows, any, vocabulary]"
        expected = f"{expected} = {list(shape)}"
        yield from _tensor_problems("draft_probs", tree.draft_probs, shape, expected, torch.float32, device)


def _tensor_problems(
    name: str, value: Any, shape: tuple[int, ...], expected: str, dtype: torch.dtype, device: torch.device
) -> Iterator[str]:
    if not isinstance(value, Tensor):
        yield f"propose gave {name} of type {type(value).__name__}, expected a tensor"
    if tuple(value.shape) != shape:
        yield f"propose gave {name} of shape {list(value.shape)}, expected {expected}"
    if value.dtype != dtype:
        yield f"{name}: expected dtype {dtype}, got {value.dtype}"
    if value.device != device:
        yield f"{name}: expected a tensor on {device}, got one on {value.device}"


def _token_problems(batch: Batch, tokens: Tensor, vocab_size: int) -> Iterator[str]:
    outside = (tokens < 0) | (tokens >= vocab_size)
    if bool(outside.any()):
        row, node = outside.nonzero()[0].tolist()
        token = int(tokens[row, node])
        yield f"tokens: expected ids from 0 to {vocab_size - 1}, also in unused nodes, got {token} at node {node}"
    wrong = (tokens[:, 0] != batch.last_tokens) & batch.active.bool()
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        last, got = int(batch.last_tokens[row]), int(tokens[row, 0])
        yield f"node 0 must hold the last committed token, batch.last_tokens: expected {last}, got {got}"


def _tree_problems(algorithm: Algorithm, batch: Batch, links: TreeLinks) -> Iterator[str]:
    """Only nodes that node 0 leads to are verified; the others may hold anything."""
    active = batch.active.bool()[:, None]
    used = (links.mask[:, :, 0] & 1).bool() & active
    if not torch.equal(used[:, :1], active):
        yield "node 0 does not see itself: expected links from build_chain or build_tree, with parent -1 for node 0"
    depth = torch.where(used, links.depth, 0)
    if algorithm.chain:
        straight = torch.arange(algorithm.num_nodes, device=depth.device)
        if bool(((depth != straight) & active).any()):
            yield "the parent of node i is not always node i - 1, and chain is True: set chain = False for a tree"
    deepest = int(depth.max())
    if deepest > algorithm.max_depth:
        yield f"max_depth: the draft has a node at depth {deepest}, expected at most max_depth = {algorithm.max_depth}"
    if bool((used & (links.positions != batch.lengths[:, None] + depth)).any()):
        yield "links.positions: expected batch.lengths + depth; pass batch.lengths to build_chain or build_tree"
