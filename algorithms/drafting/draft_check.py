"""Checks the first drafts of an engine, outside of any captured graph: of an empty batch, and of the first requests.
The check reads tensors back. A wrong draft gives wrong output, or an error deep inside a kernel."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from algorithms.algorithm import Algorithm, Batch, DraftTree
from algorithms.engine.request import EngineError
from specdec_kernels import TreeLinks
from specdec_kernels.verify import SAMPLED_RULES


def check_draft(algorithm: Algorithm, batch: Batch, tree: Any, vocab_size: int) -> None:
    """Raise EngineError in one sentence unless `tree` is what `algorithm` declares, for the active rows of `batch`."""
    problem = next(_problems(algorithm, batch, tree, vocab_size), None)
    if problem is not None:
        raise EngineError(f"algo={algorithm.name}: {problem}")


def _problems(algorithm: Algorithm, batch: Batch, tree: Any, vocab_size: int) -> Iterator[str]:
    if not isinstance(tree, DraftTree):
        yield f"propose gave {type(tree).__name__}, expected a DraftTree"
    shape, device = (len(batch.lengths), algorithm.num_nodes), batch.lengths.device

    def problems_of(name: str, value: Any, dtype: torch.dtype, sizes: Sequence[int], named: str = "") -> Iterator[str]:
        if not isinstance(value, Tensor):
            yield f"propose gave {name} of type {type(value).__name__}, expected a tensor"
        if tuple(value.shape) != tuple(sizes):
            yield f"propose gave {name} of shape {list(value.shape)}, expected {named}{list(sizes)}"
        if value.dtype != dtype:
            yield f"{name}: expected dtype {dtype}, got {value.dtype}"
        if value.device != device:
            yield f"{name}: expected a tensor on {device}, got one on {value.device}"

    by_node = partial(problems_of, sizes=shape, named="[rows, num_nodes] = ")
    yield from by_node("tokens", tree.tokens, torch.int64)
    if not isinstance(tree.links, TreeLinks):
        got = type(tree.links).__name__
        yield f"propose gave links of type {got}, expected TreeLinks from build_chain or build_tree"
    for name, links in tree.links._asdict().items():
        sizes = (*shape, -(-shape[1] // 64)) if name == "mask" else shape
        dtype = torch.int64 if name in ("positions", "mask") else torch.int32
        yield from problems_of(f"links.{name}", links, dtype, sizes)
    if tree.path_probs is not None:
        yield from by_node("path_probs", tree.path_probs, torch.float32)
    yield from _token_problems(batch, tree.tokens, vocab_size)
    yield from _tree_problems(algorithm, batch, tree.links)
    if algorithm.rule in SAMPLED_RULES:
        if tree.draft_probs is None:
            yield f"rule {algorithm.rule!r}: expected draft_probs, got None"
            return
        sizes, named = (shape[0], shape[1] - 1, vocab_size), "[rows, num_nodes - 1, vocabulary] = "
        if tree.draft_rows is not None:
            yield from by_node("draft_rows", tree.draft_rows, torch.int32)
            sizes, named = (shape[0], *tree.draft_probs.shape[1:2], vocab_size), "[rows, any, vocabulary] = "
        yield from problems_of("draft_probs", tree.draft_probs, torch.float32, sizes, named)


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
