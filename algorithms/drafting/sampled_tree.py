"""Samples the tokens of a tree of fixed shape, level by level, and keeps the distributions that they come from.

A level runs the nodes of one depth that have children, in `width` columns; spare columns repeat the last node.
Column j of level i, counted from 0 below node 0, is stored `base + i * width + j` slots after L in the drafter's
cache, and sees itself, its ancestors, and node 0 (`base` 1) if the drafter has stored it.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from algorithms.algorithm import Batch, DraftTree, Resources
from algorithms.drafting.draft_sampling import SampledShape
from specdec_kernels import build_chain, build_tree, draft_topk, filtered_probs, sample_children
from specdec_kernels.tree import mask_words

RunNodes = Callable[[int, Tensor, Tensor], Tensor]
"""(level, tokens [B, T], parents [B, T] columns of the level before) -> logits [B, T, V] after each token."""


class Level(NamedTuple):
    """One level: its columns, and the children that are sampled from them."""

    nodes: Tensor  # [T] int64
    parents: Tensor  # [rows, T] int64: columns of the level before
    mask: Tensor  # [rows, T, W] int64: bit j: slot j is seen
    children: Tensor  # [P, K] int32, -1 in places that are not used
    columns: Tensor  # [P] int32: 0, 1, ..., P - 1
    first: int  # the sampled nodes are `first` to `end` - 1
    end: int


class SampledTree:
    """The device tensors of one shape, for up to `resources.max_batch` requests."""

    def __init__(
        self, shape: SampledShape, resources: Resources, replacement: bool, *, width: int = 1, base: int = 0,
        vocabulary: Tensor | None = None,
    ) -> None:  # fmt: skip
        """`vocabulary` [V] int64 is what is added to an id of the drafter to give the target's; None adds nothing."""
        self.shape, self._replacement, self._impl = shape, replacement, resources.impl
        self._rows, self._device = resources.max_batch, resources.device
        self._vocab_size, self._vocabulary = resources.target.config.vocab_size, vocabulary
        self._known = None if vocabulary is None else vocabulary + torch.arange(len(vocabulary), device=self._device)
        self.chain = max(len(shape.children(node)) for node in range(len(shape.parents))) == 1
        self._parents = self._repeated(shape.parents, torch.int32)
        self.levels = self._levels(width, base)
        rows, first = [-1] * len(shape.parents), 0
        for depth, level in enumerate(self.levels):
            for column, node in enumerate(shape.parents_at(depth)):
                rows[node] = first + column
            first += len(level.nodes)
        self._rows_by_level = self._repeated(rows, torch.int32)
        self._rows_by_depth = self._repeated(shape.depths, torch.int32)
        parents = [node for depth in range(shape.max_depth) for node in shape.parents_at(depth)]
        self._all_children = self._tensor(_table([shape.children(node) for node in parents]), torch.int32)
        self._all_depths = self._tensor([shape.depths[node] for node in parents], torch.int32)

    def _tensor(self, values: object, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)

    def _repeated(self, values: object, dtype: torch.dtype) -> Tensor:
        one = self._tensor(values, dtype)
        return one[None].repeat(self._rows, *[1] * one.ndim)

    def _levels(self, width: int, base: int) -> list[Level]:
        shape, found = self.shape, []
        before: list[int] = [0]
        seen = {0: base and 1}  # slots by node: what its column sees
        for depth in range(shape.max_depth):
            parents = shape.parents_at(depth)
            columns = parents if depth == 0 else [*parents, *[parents[-1]] * (width - len(parents))]
            above = [0 if depth == 0 else before.index(shape.parents[node]) for node in columns]
            slot, words = base + (depth - 1) * width, mask_words(max(1, base + depth * width))
            masks = []
            for column, node in enumerate(columns):
                bits = seen[0] if depth == 0 else seen[shape.parents[node]] | 1 << (slot + column)
                seen.setdefault(node, bits)
                masks.append(_words(bits, words))
            below = [child for node in parents for child in shape.children(node)]
            found.append(
                Level(
                    self._tensor(columns, torch.int64), self._repeated(above, torch.int64),
                    self._repeated(masks, torch.int64),
                    self._tensor(_table([shape.children(node) for node in parents]), torch.int32),
                    self._tensor(range(len(parents)), torch.int32), min(below), max(below) + 1,
                )
            )  # fmt: skip
            before = columns
        return found

    def masks(self, rows: int) -> list[Tensor]:
        """Masks [rows, T, W] of the columns of each level below node 0."""
        return [level.mask[:rows] for level in self.levels[1:]]

    def sample(self, batch: Batch, logits: Tensor) -> DraftTree:
        """The tree whose depth d + 1 is sampled from `logits[:, d]`, [B, D, V], independently of the parent."""
        rows, depth, vocab = logits.shape
        tokens = batch.last_tokens[:, None].repeat(1, len(self.shape.parents))
        probs, most_likely = self._distributions(batch, logits)
        self._sample(batch, tokens, probs, self._all_children, self._all_depths, most_likely)
        if self._vocabulary is not None:
            tokens[:, 1:] += self._vocabulary.take(tokens[:, 1:])
        return self._tree(batch, tokens, self._in_target(probs), self._rows_by_depth[:rows])

    def grow(self, batch: Batch, logits: Tensor, run: RunNodes) -> DraftTree:
        """The tree whose children are sampled given their parents, from `logits` [B, V] after the last token."""
        rows, found = len(logits), []
        tokens = batch.last_tokens[:, None].repeat(1, len(self.shape.parents))
        logits = logits[:, None]
        for number, level in enumerate(self.levels):
            if number:
                logits = run(number - 1, tokens.index_select(1, level.nodes), level.parents[:rows])
            probs, most_likely = self._distributions(batch, logits)
            self._sample(batch, tokens, probs, level.children, level.columns, most_likely)
            if self._vocabulary is not None:
                ids = tokens[:, level.first : level.end]
                ids += self._vocabulary.take(ids)
            found.append(self._in_target(probs))
        return self._tree(batch, tokens, torch.cat(found, 1), self._rows_by_level[:rows])

    def _distributions(self, batch: Batch, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Distributions [B, T, V] of the columns of `logits` [B, T, V], and their most likely tokens, [B, T, K]."""
        rows, width, vocab = logits.shape
        flat, most = logits.reshape(rows * width, vocab), min(self._all_children.shape[1], vocab)
        probs = filtered_probs(flat, batch.sampling.repeated(width), impl=self._impl)
        return probs.view(rows, width, vocab), draft_topk(flat, most, impl=self._impl).tokens.view(rows, width, most)

    def _sample(
        self, batch: Batch, tokens: Tensor, probs: Tensor, children: Tensor, columns: Tensor, most_likely: Tensor
    ) -> None:
        sampling = batch.sampling
        assert sampling.temperature is not None
        sample_children(
            tokens, probs, children, columns, most_likely, sampling.temperature, sampling.seeds, batch.lengths,
            replacement=self._replacement, impl=self._impl,
        )  # fmt: skip

    def _in_target(self, probs: Tensor) -> Tensor:
        """Distributions [..., V] over the drafter's ids as distributions over the target's."""
        if self._known is None:
            return probs
        return probs.new_zeros(*probs.shape[:-1], self._vocab_size).index_copy_(-1, self._known, probs)

    def _tree(self, batch: Batch, tokens: Tensor, probs: Tensor, draft_rows: Tensor) -> DraftTree:
        if self.chain:
            links = build_chain(batch.lengths, tokens.shape[1], impl=self._impl)
            padded = probs.shape[1] >= tokens.shape[1]  # otherwise row n belongs to node n
            return DraftTree(tokens, links, probs, draft_rows if padded else None)
        links = build_tree(self._parents[: len(tokens)], batch.lengths, impl=self._impl)
        return DraftTree(tokens, links, probs, draft_rows)


def _table(rows: list[list[int]]) -> list[list[int]]:
    width = max(map(len, rows))
    return [[*row, *[-1] * (width - len(row))] for row in rows]


def _words(bits: int, words: int) -> list[int]:
    """Words of 64 bits as int64."""
    parts = [(bits >> (64 * word)) & ((1 << 64) - 1) for word in range(words)]
    return [part - (1 << 64) if part >> 63 else part for part in parts]
