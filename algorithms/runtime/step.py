"""The speculative step with its phases draft, verify, accept and commit.

A chunk of prompts may ride in a step: its tiles are further rows of the target's forward, so they share one reading of
the weights with the nodes to be verified. Their requests take part from the next step on.

A step reads nothing back, and every tensor that it starts from keeps its address, so any part of it can be captured in
a CUDA graph. A step over more rows than are in use passes over the padding: inactive rows have no columns to store,
their accepted path is empty, and their lengths stay.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from algorithms.runtime.algorithm import Batch, DraftTree, Observation
from algorithms.runtime.chunk import Chunk
from algorithms.runtime.constraints import ConstraintState
from algorithms.runtime.draft_check import check_draft
from algorithms.runtime.join_trees import graft_chain
from algorithms.runtime.paged_attention import JointMixer, PagedMixer
from algorithms.runtime.parts import StepParts
from algorithms.runtime.sampling_params import SamplingNeeds
from algorithms.runtime.tensor_parallel import agree_on_acceptance, agree_on_draft
from specdec_kernels import (
    Accepted,
    Committed,
    SamplingTensors,
    accept,
    accept_targets,
    apply_penalties,
    build_chain,
    commit_step,
    count_tokens,
    draft_topk,
    forbid_tokens,
    gather_path,
    links_from_mask,
    mask_paths,
    mask_tokens,
    move_accepted,
)
from specdec_kernels.tree.types import mask_words
from specdec_kernels.verify.types import DRAWN_RULES

PHASES = ("draft", "verify", "accept", "commit")
"""Phases of a step, in order; each is a method of `Step`."""
CONSTRAINED = ("draft", "graft", "verify", "accept", "commit")
"""Phases of a step for requests with grammars; `graft` counts as part of the draft."""


_LEFT_BY_PHASES = {
    "tree", "hidden", "features", "targets", "nodes", "logits", "accepted", "_tiles_hidden", "_tiles_features",
}  # fmt: skip


def phases_of(needs: SamplingNeeds) -> tuple[str, ...]:
    """The phases of a step made for `needs`."""
    return CONSTRAINED if needs.constrained else PHASES


class Step:
    """The phases over one batch, each leaving its result for the next. Run them in the order of `PHASES`."""

    drafted: DraftTree
    """What the drafter drafted."""
    tree: DraftTree
    """What is verified."""
    hidden: Tensor
    features: list[Tensor]
    targets: Tensor | None
    """[B, N] int64: the target's token behind each node where that is all that is needed, -1 for none; else None."""
    nodes: Tensor
    """[B, 3, N] int64: tokens, first children and next siblings of the draft, where grammars need them; else unset."""
    logits: Tensor
    """[B, N, V]; not written where `targets` are given."""
    accepted: Accepted
    table: Tensor
    """[B, 2 (D + 1) + 4] int64: emitted tokens, their log-probabilities as float32 bits (0 where no request asks
    for them), then num_accepted, valid, num_drafted and ran_out, see `specdec_kernels.commit`. Where n likeliest
    tokens are asked for, 2 (D + 1) n more: their ids, and their log-probabilities as float32 bits."""

    def __init__(
        self,
        parts: StepParts,
        batch: Batch,
        needs: SamplingNeeds,
        checked: bool = False,
        nodes: int | None = None,
        chunk: Chunk | None = None,
    ) -> None:
        """`checked` looks at the draft, which reads it back: such a step cannot be captured. `nodes` is how many are
        verified of each tree, where the algorithm's own number is not; 1 drafts nothing. `chunk` rides along."""
        self._parts, self._batch, self._needs, self._checked = parts, batch, needs, checked
        self._chunk = chunk
        self.num_nodes = nodes or parts.algorithm.num_nodes
        self._depth = min(parts.algorithm.max_depth, self.num_nodes - 1)
        self._chain = parts.algorithm.chain or self.num_nodes == 1

    def forget(self) -> None:
        """Keep the table alone of what the phases have left; then captured steps share the memory of the rest."""
        for name in set(vars(self)) & _LEFT_BY_PHASES:
            delattr(self, name)

    def draft(self) -> None:
        """Ask the drafter for a tree. Raises EngineError if the step is checked and the tree is not as declared."""
        algorithm, batch = self._parts.algorithm, self._batch
        if self.num_nodes == algorithm.num_nodes:
            tree = algorithm.propose(batch)
            if self._checked:
                check_draft(algorithm, batch, tree, self._parts.resources.target.config.vocab_size)
        elif self.num_nodes == 1:
            links = build_chain(batch.lengths, 1, impl=self._parts.resources.impl)
            tree = DraftTree(batch.last_tokens[:, None], links)
        else:
            tree = self._first_nodes(algorithm.propose_few(batch, self.num_nodes))
        self.drafted = self.tree = agree_on_draft(tree)

    def _first_nodes(self, tree: DraftTree) -> DraftTree:
        """The first nodes of a tree that has more. Parents come before their children. Those of a drawn tree are a
        drawn tree, because which they are does not depend on what was drawn."""
        nodes, lengths, impl = self.num_nodes, self._batch.lengths, self._parts.resources.impl
        if tree.tokens.shape[1] <= nodes:
            return tree
        if self._chain:
            links = build_chain(lengths, nodes, impl=impl)
        else:
            mask = tree.links.mask[:, :nodes, : mask_words(nodes)].contiguous()
            links = links_from_mask(mask, lengths, impl=impl)
        probs, rows, confidence = tree.draft_probs, tree.draft_rows, tree.confidence
        if rows is not None:
            rows = rows[:, :nodes].contiguous()
        elif probs is not None:
            probs = probs[:, : nodes - 1].contiguous()
        if confidence is not None:
            confidence = confidence[:, :nodes].contiguous()
        return DraftTree(tree.tokens[:, :nodes].contiguous(), links, probs, rows, confidence=confidence)

    def graft(self) -> None:
        """Put what grammars force into the draft, and lay it out for the host.

        Drafts that were drawn stay as they are: the rules that judge them must know what each was drawn from. Capturing
        runs a phase more than once, so this one starts from what the drafter drafted, and not from its own result.
        """
        algorithm, constraints = self._parts.algorithm, self._constraints
        if algorithm.rule not in DRAWN_RULES and algorithm.num_nodes > 1:
            forced, lengths = constraints.forced[self._batch.rows], self._batch.lengths
            self.tree = graft_chain(self.drafted, forced, lengths, algorithm.chain, self._parts.resources.impl)
        links = self.tree.links
        self.nodes = torch.stack([self.tree.tokens, links.first_child.long(), links.next_sibling.long()], 1)

    @property
    def _constraints(self) -> ConstraintState:
        constraints = self._parts.state.constraints
        assert constraints is not None
        return constraints

    def verify(self) -> None:
        """Run the target over all nodes, and over the tiles of the chunk that rides along."""
        model, capture, tokens = self._parts.resources.target.model, self._parts.algorithm.capture, self.tree.tokens
        if self._chunk is None:
            self.hidden, self.features = model(tokens, self._mixer(), capture)
        else:
            tiles = self._chunk.begin(self._batch.max_length)
            joint = JointMixer(((self._mixer(), tokens), (tiles, self._chunk.tokens)))
            hidden, features = model(joint.tokens, joint, capture)
            self.hidden, self._tiles_hidden = joint.split(hidden)
            both = [joint.split(feature) for feature in features]
            self.features, self._tiles_features = [of_nodes for of_nodes, _ in both], [of_tiles for _, of_tiles in both]
        self.targets = model.likeliest(self.hidden) if self._needs.greedy else None
        if self.targets is None:
            self.logits = model.logits(self.hidden)

    def _mixer(self) -> PagedMixer:
        """The plan of a forward over all nodes."""
        links, resources = self.tree.links, self._parts.resources
        paths = None
        if resources.deterministic and not self._chain:
            paths = mask_paths(links.mask, self._depth + 1, impl=resources.impl)
        return PagedMixer.over(
            self._batch,
            links.positions,
            self._parts.cache,
            resources,
            mode="chain" if self._chain else "tree",
            mask=None if self._chain else links.mask,
            depths=None if self._chain else links.depth,
            paths=paths,
            phase="verify" if self.num_nodes > 1 else "decode",
        )

    def accept(self) -> None:
        """Decide which drafts the target would have written itself, and choose the bonus token. With sizes to choose
        from, the choice takes in what was accepted."""
        accepted = self._accepted()
        # What follows from tokens that all processes chose together needs no agreement.
        together = self.targets is not None and self._parts.resources.target.model.chooses_together
        self.accepted = accepted if together else agree_on_acceptance(accepted)
        if self._parts.sizing is not None and self.num_nodes > 1 and not self._needs.constrained:
            self._parts.sizing.learn(self._batch, self.tree, self.accepted, self.num_nodes)

    def _accepted(self) -> Accepted:
        batch, algorithm, needs = self._batch, self._parts.algorithm, self._needs
        impl, sampling = self._parts.resources.impl, SamplingTensors()
        if self.targets is not None:
            # All rules are greedy without a temperature: the target's own token decides.
            tokens, links, depth = self.tree.tokens, self.tree.links, self._depth
            return accept_targets(tokens, links, self.targets, batch.lengths, depth, impl=impl)
        if needs.filtered:
            sampling = batch.sampling
        elif needs.sampled:
            sampling = SamplingTensors(batch.sampling.temperature, seeds=batch.sampling.seeds)
        if needs.penalised:
            self._penalise()
        if needs.forbids:
            self._forbid()
        if needs.constrained:
            masks, rows = self._constraints, batch.rows
            mask_tokens(self.logits, masks.bits[rows], masks.constrained[rows], impl=impl)
        if sampling.temperature is not None:
            algorithm.inspect(batch, self.tree, self.logits, sampling)
        return accept(
            algorithm.rule,
            self.tree.tokens,
            self.tree.links,
            self.logits,
            batch.lengths,
            self._depth,
            sampling,
            draft_probs=self.tree.draft_probs,
            draft_rows=self.tree.draft_rows,
            return_logprobs=needs.logprobs,
            impl=impl,
        )

    def _penalise(self) -> None:
        penalties, rows = self._parts.state.penalties, self._batch.rows
        assert penalties is not None
        apply_penalties(
            self.logits,
            self.tree.tokens,
            self.tree.links.mask,
            penalties.output_counts[rows],
            penalties.prompt_seen[rows],
            repetition=penalties.repetition[rows],
            presence=penalties.presence[rows],
            frequency=penalties.frequency[rows],
            bias=penalties.bias[rows],
            impl=self._parts.resources.impl,
        )

    def _forbid(self) -> None:
        forbidden, batch, links = self._parts.state.forbidden, self._batch, self.tree.links
        assert forbidden is not None
        forbid_tokens(
            self.logits,
            self.tree.tokens,
            links.mask,
            links.positions,
            batch.history,
            batch.lengths,
            forbidden.words[batch.rows],
            forbidden.until[batch.rows],
            impl=self._parts.resources.impl,
        )

    def commit(self) -> None:
        """Enter the accepted path into the state, bring it to the front of the cache, and show it to the drafter; then
        finish the chunk that rides along."""
        batch, accepted, parts = self._batch, self.accepted, self._parts
        impl = parts.resources.impl
        committed = commit_step(
            self.tree.tokens,
            self.tree.links.first_child,
            self.tree.links.next_sibling,
            accepted.tokens,
            accepted.num_accepted,
            accepted.nodes,
            accepted.valid,
            accepted.logprobs,
            active=batch.active,
            lengths=batch.lengths,
            last_tokens=batch.last_tokens,
            history=batch.history,
            impl=impl,
        )
        hidden, *features = self._on_path(committed)
        if self._needs.penalised:
            penalties = parts.state.penalties
            assert penalties is not None
            count_tokens(penalties.output_counts[batch.rows], accepted.tokens, committed.counts, impl=impl)
        if parts.backlog is not None and self.num_nodes == 1:
            parts.backlog.keep(batch, hidden, features)
        else:
            parts.observe(
                Observation(
                    batch=replace(batch, lengths=committed.start),
                    tokens=committed.tokens,
                    next_tokens=committed.next_tokens,
                    features=features,
                    hidden=hidden,
                    positions=committed.positions,
                    counts=committed.counts,
                    altered=self._needs.constrained,
                )
            )
        if self._chunk is not None:
            self._chunk.finish(self._tiles_hidden, self._tiles_features)
        self.table = committed.table
        if self._needs.top_logprobs:
            self.table = torch.cat([self.table, self._top_logprobs()], 1)

    def _top_logprobs(self) -> Tensor:
        """[B, 2 (D + 1) n] int64: the likeliest tokens behind each node of the accepted path, then the bits of their
        log-probabilities. A logit's distance to the largest one is added to the log-probability of that, which cannot
        underflow."""
        (batch, nodes, _), count = self.logits.shape, self._needs.top_logprobs
        flat = self.logits.flatten(0, 1)
        probs, tokens = draft_topk(flat, count, impl=self._parts.resources.impl)
        values = flat.gather(1, tokens).float()
        logprobs = values - values[:, :1] + probs[:, :1].log()
        both = torch.stack([tokens, logprobs.view(torch.int32).long()], 1).view(batch, nodes, 2, count)
        path = self.accepted.nodes.clamp(min=0).long()[:, :, None, None].expand(-1, -1, 2, count)
        return both.gather(1, path).transpose(1, 2).reshape(batch, -1)

    def _on_path(self, committed: Committed) -> list[Tensor]:
        """Hidden states and features in text order; of a tree, keys and values move with them."""
        parts, values = self._parts, [self.hidden, *self.features]
        if self._chain:
            # A chain is in text order already.
            return [value[:, : committed.tokens.shape[1]] for value in values]
        impl = parts.resources.impl
        move_accepted(parts.cache.kv, self._batch.page_table, committed.start, committed.nodes, impl=impl)
        return gather_path(values, committed.nodes, impl=impl)
