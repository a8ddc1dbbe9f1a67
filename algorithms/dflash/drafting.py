"""DFlash (arXiv 2602.06036) and its successors: a whole block of drafts from one pass of a block-diffusion drafter.

observe   The target's hidden states at a few layers are fused into one context vector per committed token; the keys and
          values of every draft layer are computed from it and stored in the drafter's pages.
propose   [last token, mask, …, mask] at positions L … L + B - 1 attends to [context; block]. The target's LM head at
          the masks gives one distribution per position; with `slots` next, at the last token too. Their most likely
          tokens are a chain; a drafter with a head (DSpark, Domino, DFlash 2) chooses each given those before it. With
          `topk` above 1 the most likely paths are a tree of `num_nodes`, best first as in DDTree; with a Markov head or
          a GRU it grows level by level as in EAGLE-2.

With another `draft_sampling` than topk, drafts are sampled under the request's sampling parameters, in a chain or a
tree of fixed shape, and a rule for sampled drafts decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import specdec_kernels as kernels
from algorithms.algorithm import Algorithm, AttentionCalls, Batch, DraftTree, Observation, Resources
from algorithms.checked import Between, Checked
from algorithms.dflash.config import ANCHOR, SELECTOR
from algorithms.drafting.draft_sampling import (
    DEFAULT_TREE_NODES,
    MAX_NODES,
    MAX_TOPK,
    DraftSampling,
    SampledShape,
    TreeShape,
)

if TYPE_CHECKING:
    from torch import Tensor

    from algorithms.dflash.config import DFlashConfig
    from algorithms.dflash.heads import BlockLogits
    from algorithms.models.loading import Target, TargetFolder
    from specdec_kernels import Frontier


class DFlash(Algorithm):
    name = "dflash"
    needs_draft_model = True

    @dataclass
    class Config(Checked):
        GROUP = "algo."
        name: str = "dflash"
        block_size: Annotated[int | None, Between(1, MAX_NODES)] = None
        """Tokens of a block, the last committed one included; None takes the size the drafter was trained with."""
        topk: Annotated[int, Between(1, MAX_TOPK)] = 1
        """Tokens of each position that may enter the tree; 1 drafts a chain."""
        num_nodes: Annotated[int | None, Between(2, MAX_NODES)] = None
        """Nodes of the tree, node 0 included; None takes 32. A chain has block_size nodes."""
        window: Annotated[int | None, Between(1)] = None
        """Positions the drafter's context reaches back; None is all of it."""
        draft_sampling: str | None = None
        """topk, sample (independent) or without_replacement; None follows from the rule, else it is topk."""
        rule: str | None = None
        """Acceptance rule; None is target_only for topk, block for a sampled chain, traversal for a sampled tree."""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.topk == 1 and self.num_nodes is not None:
                raise ValueError("algo.num_nodes is the size of a tree: expected algo.topk above 1, got 1")
            DraftSampling.of(self.draft_sampling, self.rule, self.topk == 1)

    @classmethod
    def check(cls, config: Any, target: TargetFolder, draft_path: str | None) -> AttentionCalls:
        from algorithms.dflash.loading import read_dflash

        _, drafter = read_dflash(cls.drafter_folder(draft_path), target)
        _block_of(config, drafter)
        modes = {mode for mode, _ in _attention_kinds(drafter, config.window)}
        draft = next(mode for mode in ("tree", "block", "chain") if mode in modes)
        return AttentionCalls(drafter.decoder, {"draft": draft})

    def __init__(self, config: Config, target: Target, draft_path: str | None) -> None:
        from algorithms.dflash.loading import load_dflash

        self._drafter = load_dflash(self.drafter_folder(draft_path), target)
        self._drafter.bind(target.model)
        self._topk = config.topk
        self._block = _block_of(config, self._drafter.config)
        self._most_drafts = self._drafter.config.num_drafts(self._block)
        self.chain = self._topk == 1 or self._most_drafts == 0
        self.num_nodes = self._most_drafts + 1 if self.chain else config.num_nodes or DEFAULT_TREE_NODES
        self.max_depth = min(self._most_drafts, self.num_nodes - 1)
        self._sampling = DraftSampling.of(config.draft_sampling, config.rule, config.topk == 1)
        self._nodes = None
        if self._sampling.sampled and self._most_drafts:
            self.rule = self._sampling.rule
            self._nodes = SampledShape.of(TreeShape(self.max_depth, self._topk, self.num_nodes))
            self.max_depth = self._nodes.max_depth
        self.draft_slots = self._block
        self.target_layers = self._drafter.target_layers
        self._kinds = _attention_kinds(self._drafter.config, config.window)

    def bind(self, resources: Resources) -> None:
        from algorithms.attention.memory import allocate_draft_memory
        from algorithms.drafting.sampled_tree import SampledTree
        from algorithms.drafting.tree_drafter import Drafts

        self._resources, self._drafts = resources, Drafts(resources, self._drafter.vocabulary)
        resources.choose_forward(self._drafter)
        self._memory = allocate_draft_memory(self._drafter.config.decoder, resources)
        self._stacked = self._drafter.stack_kv()
        self._sampled = None
        if self._nodes is not None:
            self._sampled = SampledTree(
                self._nodes, resources, self._sampling.replacement, width=self._topk,
                vocabulary=self._drafter.vocabulary,
            )  # fmt: skip

    def propose_few(self, batch: Batch, num_nodes: int) -> DraftTree:
        """The whole block is drafted, because its positions see each other; the LM head runs at the first ones only."""
        impl, depth = self._resources.impl, min(self._most_drafts, num_nodes - 1)
        if depth == 0:
            return DraftTree(batch.last_tokens[:, None], kernels.build_chain(batch.lengths, 1, impl=impl))
        hidden, logits = self._block_outputs(batch, self.max_depth if self._sampled else depth)
        batch.adjust(logits, 0, self._drafter.vocabulary)
        paths = self._drafter.along_paths(logits, hidden, impl)
        drafted = hidden[:, -logits.shape[1] :]
        if (lattice := self._drafter.lattice(logits, drafted, batch.last_tokens, impl)) is not None:
            return self._from_lattice(batch, *lattice, num_nodes)
        if paths is not None:
            return self._along_paths(batch, paths, depth, num_nodes)
        if self._sampled is not None:
            return self._sampled.sample(batch, logits)
        if self.chain:
            confidence = self._drafter.confidence(drafted) if self._resources.needs_path_probs else None
            return self._drafts.likeliest_chain(batch, logits, confidence)
        return self._drafts.likeliest_tree(batch, logits, self._topk, num_nodes, self._drafter.confidence(drafted))

    def _along_paths(self, batch: Batch, paths: BlockLogits, depth: int, num_nodes: int) -> DraftTree:
        """The chain or tree of a drafter whose head reads the drafts before each."""
        from algorithms.drafting.tree_drafter import level_masks

        if self._sampled is None and self.chain:
            run_place = lambda place, tokens: paths.after(place, tokens).squeeze(1)  # noqa: E731
            return self._drafts.grow_chain(batch, run_place, depth, paths.confidence)
        first = paths.after(0, batch.last_tokens[:, None]).squeeze(1)
        if self._sampled is not None:
            return self._sampled.grow(batch, first, lambda level, *columns: paths.after(level + 1, *columns))

        def run(level: int, frontier: Frontier) -> Tensor:
            return paths.after(level + 1, frontier.tokens, frontier.parents)

        shape = TreeShape(depth, self._topk, num_nodes)
        masks = level_masks(batch, shape)
        return self._drafts.grow_tree(batch, first, run, shape, masks, confidence=paths.confidence)

    def _from_lattice(self, batch: Batch, lattice: kernels.Lattice, pairs: Tensor, num_nodes: int) -> DraftTree:
        """The chain or tree of the most likely candidates given their parents, or a chain sampled from these."""
        impl, sampling = self._resources.impl, batch.sampling
        if self._sampled is not None:
            assert sampling.temperature is not None
            if batch.filtered:
                pairs = _filtered_pairs(lattice, pairs, sampling, impl)
            chain = kernels.sample_chain(lattice, pairs, sampling.temperature, sampling.seeds, batch.lengths, impl=impl)
            probs = kernels.dense_probs(lattice, chain.probs, self._drafter.target.config.vocab_size)
            return DraftTree(chain.tokens, kernels.build_chain(batch.lengths, chain.tokens.shape[1], impl=impl), probs)
        if self.chain:
            chosen = kernels.greedy_chain(lattice, pairs, impl=impl)
            links = kernels.build_chain(batch.lengths, chosen.tokens.shape[1], impl=impl)
        else:
            chosen = kernels.lattice_tree(lattice, pairs, num_nodes, impl=impl)
            links = kernels.build_tree(chosen.parents, batch.lengths, impl=impl)
        return DraftTree(chosen.tokens, links, path_probs=chosen.scores)

    def _block_outputs(self, batch: Batch, depth: int) -> tuple[Tensor, Tensor]:
        """Final hidden states of each block up to the last of `depth` drafts, and logits [B, depth, V_d] of these."""
        drafter, first = self._drafter, self._drafter.config.first_slot
        links = kernels.build_chain(batch.lengths, self._block, impl=self._resources.impl)
        windows: dict[str, Any] = {}
        if any(mode == "tree" for mode, _ in self._kinds):
            # One window for all slots of a block: as a tree whose nodes all have depth 0.
            mask = links.mask if any(drafter.config.sliding_causal) else links.mask[:, -1:].expand_as(links.mask)
            windows = dict(mask=mask.contiguous(), depths=links.depth * 0)
        mixer = self._memory.over(batch, links.positions, phase="draft", kinds=self._kinds, **windows)
        hidden = drafter(drafter.embed_block(batch.last_tokens, self._block), mixer)
        return hidden[:, : first + depth], drafter.logits(hidden[:, first : first + depth])

    def observe(self, seen: Observation) -> None:
        impl, batch, width = self._resources.impl, seen.batch, seen.tokens.shape[1]
        features = self._drafter.gather(seen.features, seen.tokens)
        keys, values = self._drafter.context_kv(self._drafter.context(features, seen.hidden), self._stacked)
        cache = self._memory.cache
        slots = kernels.token_slots(batch.page_table, batch.lengths, seen.counts, width, cache.page_size, impl=impl)
        kernels.materialize_kv(
            keys.flatten(0, 1),
            values.flatten(0, 1),
            cache.kv,
            slots.flatten(),
            seen.positions.flatten(),
            cache.rope,
            k_norm=self._stacked.k_norm,
            eps=cache.config.rms_norm_eps,
            impl=impl,
        )


def _attention_kinds(drafter: DFlashConfig, run_window: int | None) -> list[tuple[str, int | None]]:
    """(mode, window) of each layer; `run_window` narrows all of them. A window from the last committed token, and that
    token itself, is one of a tree whose nodes all have depth 0."""
    kinds = []
    for layer, is_causal in enumerate(drafter.causal_layers):
        mode, own = "chain" if is_causal else "block", drafter.decoder.window(layer)
        if own is not None and drafter.window_origin == ANCHOR:
            mode, own = "tree", own + 1
        windows = [window for window in (own, run_window) if window is not None]
        kinds.append((mode, min(windows, default=None)))
    return kinds


def _filtered_pairs(lattice: kernels.Lattice, pairs: Tensor, sampling: kernels.SamplingTensors, impl: str) -> Tensor:
    """`pairs` [B, D, C, C] with -inf for candidates that a request's filters remove from those after a predecessor."""
    values = lattice.logits.float()[:, :, None] + pairs
    rows = sampling.repeated(values[0, ..., 0].numel())
    kept = kernels.filtered_probs(values.flatten(0, 2), rows, impl=impl).view_as(values) > 0
    return pairs.where(kept, float("-inf"))


def _block_of(config: DFlash.Config, drafter: DFlashConfig) -> int:
    """Tokens of a block; ValueError for a block, window or tree that the drafter cannot have."""
    trained = drafter.block_size
    block = config.block_size or trained
    sampled = DraftSampling.of(config.draft_sampling, config.rule, config.topk == 1).sampled
    drafts = drafter.num_drafts(block)
    if (drafter.head or sampled) and config.topk > 1 and drafts:
        nodes = config.num_nodes or DEFAULT_TREE_NODES
        TreeShape(min(drafts, nodes - 1), config.topk, nodes)
    if drafter.head and drafter.head.kind == SELECTOR and sampled and config.topk > 1:
        raise ValueError(
            "algo.draft_sampling: a drafter with a candidate selector samples chains only, got algo.topk > 1"
        )
    if config.topk > drafter.num_known:
        raise ValueError(f"algo.topk: the drafter knows {drafter.num_known} tokens, got {config.topk}")
    if block > trained:
        raise ValueError(f"algo.block_size: expected at most {trained}, as trained, got {block}")
    if config.window is not None and config.window < block:
        raise ValueError(f"algo.window: expected at least the block of {block}, got {config.window}")
    return block
