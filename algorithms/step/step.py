"""The speculative step with its phases draft, verify, accept and commit.

A prefill batch may join a step (mixed prefill): its tiles are further rows of the target's forward, and its requests
take part from the next step on. A step reads nothing back, and every tensor that it starts from keeps its address, so
any part of it can be captured in a CUDA graph. It passes over padding: inactive rows have no columns to store, their
accepted path is empty, and their lengths stay.
"""

from dataclasses import replace

import torch
from torch import Tensor

import specdec_kernels as kernels
from algorithms.algorithm import Batch, DraftTree, Observation, Verified
from algorithms.attention.paged_attention import split_rows
from algorithms.drafting.draft_check import check_draft
from algorithms.drafting.tree_drafter import insert_chain
from algorithms.models.layers import Mixer
from algorithms.parallel.collectives import agree_on_acceptance, agree_on_draft
from algorithms.step.batch import DraftAdjustment
from algorithms.step.constraints import ConstraintState
from algorithms.step.context import StepParts
from algorithms.step.prefill_batch import PrefillBatch
from algorithms.step.sampling_params import SamplingNeeds
from specdec_kernels.tree import mask_words
from specdec_kernels.verify import SAMPLED_RULES

PHASES = ("draft", "verify", "accept", "commit")  # phases of a step, in order; each is a method of `Step`
CONSTRAINED = ("draft", "graft", "verify", "accept", "commit")
"""Phases of a step for requests with grammars; `graft` counts as part of the draft."""


def phases_of(needs: SamplingNeeds) -> tuple[str, ...]:
    return CONSTRAINED if needs.constrained else PHASES


class Step:
    """The phases over one batch, each leaving its result for the next. Run them in the order of `PHASES`."""

    drafted: DraftTree  # the drafter's tree
    tree: DraftTree  # the tree that is verified
    mixer: Mixer  # what planned the forward over the nodes
    hidden: Tensor
    features: list[Tensor]
    targets: Tensor | None
    """[B, N] int64: the target's token after each node where that is all that is needed, -1 for none; else None."""
    nodes: Tensor
    """[B, 3, N] int64: tokens, first children and next siblings of the draft, where grammars need them; else unset."""
    logits: Tensor  # [B, N, V]; not written where `targets` are given
    accepted: kernels.Accepted
    _tiles_hidden: Tensor  # of the prefill batch that joined
    _tiles_features: list[Tensor]
    table: Tensor
    """[B, 2 (D + 1) + 4] int64: emitted tokens, their log-probabilities as float32 bits (0 without a request
    for them), then num_accepted, valid, num_drafted and ran_out, see `specdec_kernels.commit`; then the columns of
    `widths`."""
    widths: dict[str, int]
    """Further columns of `table`, in order: `top` as of `_top_logprobs`, `drafts` as of `_drafts`, and `_evidence`."""

    def __init__(
        self,
        parts: StepParts,
        batch: Batch,
        needs: SamplingNeeds,
        checked: bool = False,
        nodes: int | None = None,
        prefill: PrefillBatch | None = None,
    ) -> None:
        """`checked` looks at the draft, which reads it back: such a step cannot be captured. `nodes` is how many are
        verified of each tree, where the algorithm's own number is not; 1 drafts nothing. `prefill` joins the step."""
        self._parts, self._batch, self._needs, self._checked = parts, batch, needs, checked
        self._prefill = prefill
        self.num_nodes = nodes or parts.algorithm.num_nodes
        self._depth = min(parts.algorithm.max_depth, self.num_nodes - 1)
        self._chain = parts.algorithm.chain or self.num_nodes == 1

    def drop_intermediates(self) -> None:
        """Drop all results but the table, so that captured steps share their memory."""
        for name in (vars(self).keys() & Step.__annotations__.keys()) - {"table", "widths"}:
            delattr(self, name)

    def draft(self) -> None:
        """Let the drafter propose a tree. Raises EngineError if the step is checked and the tree is not as declared."""
        algorithm, batch = self._parts.algorithm, self._adjusted_batch()
        if self.num_nodes == algorithm.num_nodes:
            tree = algorithm.propose(batch)
            if self._checked:
                check_draft(algorithm, batch, tree, self._parts.resources.target.config.vocab_size)
        elif self.num_nodes == 1:
            links = kernels.build_chain(batch.lengths, 1, impl=self._parts.resources.impl)
            tree = DraftTree(batch.last_tokens[:, None], links)
        else:
            tree = self._first_nodes(algorithm.propose_few(batch, self.num_nodes))
        self.drafted = self.tree = agree_on_draft(tree)

    def _adjusted_batch(self) -> Batch:
        needs, state = self._needs, self._parts.state
        batch = replace(self._batch, filtered=needs.filtered)
        if not (needs.penalised or needs.forbids):
            return batch
        penalties, forbidden = state.penalties if needs.penalised else None, state.forbidden if needs.forbids else None
        vocab, impl = self._parts.resources.target.config.vocab_size, self._parts.resources.impl
        return replace(batch, adjust=DraftAdjustment(penalties, forbidden, batch.slots, batch.lengths, vocab, impl))

    def _first_nodes(self, tree: DraftTree) -> DraftTree:
        """The first nodes of a tree that has more. Parents come before their children. The first nodes of a sampled
        tree are a sampled tree, because its shape does not depend on the sampled tokens."""
        nodes, lengths, impl = self.num_nodes, self._batch.lengths, self._parts.resources.impl
        if tree.tokens.shape[1] <= nodes:
            return tree
        if self._chain:
            links = kernels.build_chain(lengths, nodes, impl=impl)
        else:
            mask = tree.links.mask[:, :nodes, : mask_words(nodes)].contiguous()
            links = kernels.links_from_mask(mask, lengths, impl=impl)
        probs, rows, path_probs = tree.draft_probs, tree.draft_rows, tree.path_probs
        if probs is not None and rows is None:
            probs = probs[:, : nodes - 1].contiguous()

        def first(part: Tensor | None) -> Tensor | None:
            return None if part is None else part[:, :nodes].contiguous()

        return DraftTree(tree.tokens[:, :nodes].contiguous(), links, probs, first(rows), first(path_probs))

    def graft(self) -> None:
        """Insert jump-forward tokens into the draft, from what was drafted, since capturing runs phases repeatedly, and
        lay it out for the host. Sampled drafts stay: their rules need the distribution of each."""
        algorithm, constraints = self._parts.algorithm, self._constraints
        if algorithm.rule not in SAMPLED_RULES and algorithm.num_nodes > 1:
            forced, lengths = constraints.forced[self._batch.slots], self._batch.lengths
            self.tree = insert_chain(self.drafted, forced, lengths, algorithm.chain, self._parts.resources.impl)
        links = self.tree.links
        self.nodes = torch.stack([self.tree.tokens, links.first_child.long(), links.next_sibling.long()], 1)

    @property
    def _constraints(self) -> ConstraintState:
        constraints = self._parts.state.constraints
        assert constraints is not None
        return constraints

    def verify(self) -> None:
        """Run the target over all nodes, and over the tiles of the prefill batch that joined."""
        model, target_layers = self._parts.resources.target.model, self._parts.algorithm.target_layers
        tokens = self.tree.tokens
        mixer = self.mixer = self._nodes()
        if self._prefill is None:
            self.hidden, self.features = model(tokens, mixer, target_layers)
        else:
            tiles = self._prefill.begin(self._batch.max_length)
            groups = tokens, self._prefill.tokens
            shapes = [group.shape for group in groups]
            joint = self._parts.memory.joint((mixer, tiles))
            hidden, features = model(torch.cat([group.flatten() for group in groups]), joint, target_layers)
            self.hidden, self._tiles_hidden = split_rows(hidden, shapes)
            both = [split_rows(feature, shapes) for feature in features]
            self.features, self._tiles_features = [of_nodes for of_nodes, _ in both], [of_tiles for _, of_tiles in both]
        if self._parts.experts is not None:
            self._parts.experts.note()
        self.targets = model.argmax(self.hidden) if self._needs.greedy else None
        if self.targets is None:
            self.logits = model.logits(self.hidden)

    def _nodes(self) -> Mixer:
        return self._parts.memory.nodes(self._batch, self.tree.links, self._chain, self._depth)

    def accept(self) -> None:
        """Decide which drafts are accepted, and choose the bonus token."""
        accepted = self._accepted()
        # What follows from tokens that all processes chose together needs no agreement.
        together = self.targets is not None and self._parts.resources.target.model.argmax_is_shared
        self.accepted = accepted if together else agree_on_acceptance(accepted)

    def _accepted(self) -> kernels.Accepted:
        batch, algorithm, needs = self._batch, self._parts.algorithm, self._needs
        impl, sampling = self._parts.resources.impl, kernels.SamplingTensors()
        if self.targets is not None:
            # All rules are greedy without a temperature: the target's own token decides.
            tokens, links, depth = self.tree.tokens, self.tree.links, self._depth
            return kernels.accept_targets(tokens, links, self.targets, batch.lengths, depth, impl=impl)
        if needs.filtered:
            sampling = batch.sampling
        elif needs.sampled:
            sampling = kernels.SamplingTensors(batch.sampling.temperature, seeds=batch.sampling.seeds)
        tree, slots = self.tree, batch.slots
        if needs.penalised:
            penalties = self._parts.state.penalties
            assert penalties is not None
            kernels.apply_penalties(self.logits, tree.tokens, tree.links.mask, *penalties.of(slots), impl=impl)
        if needs.forbids:
            forbidden = self._parts.state.forbidden
            assert forbidden is not None
            words, until, links = forbidden.words[slots], forbidden.until[slots], tree.links
            kernels.forbid_tokens(
                self.logits, tree.tokens, links.mask, links.positions, batch.history, batch.lengths, words, until,
                impl=impl,
            )  # fmt: skip
        if needs.constrained:
            masks = self._constraints
            kernels.mask_tokens(self.logits, masks.bits[slots], masks.constrained[slots], impl=impl)
        if sampling.temperature is not None:
            algorithm.inspect(batch, tree, self.logits, sampling)
        return kernels.accept(
            algorithm.rule,
            tree.tokens,
            tree.links,
            self.logits,
            batch.lengths,
            self._depth,
            sampling,
            draft_probs=tree.draft_probs,
            draft_rows=tree.draft_rows,
            return_logprobs=needs.logprobs,
            impl=impl,
        )

    def commit(self) -> None:
        """Enter the accepted path into state and cache, let the drafter observe it, finish the joined prefill batch."""
        batch, accepted, parts = self._batch, self.accepted, self._parts
        impl = parts.resources.impl
        committed = kernels.commit_step(
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
        parts.memory.commit(self.mixer, batch, committed, self._chain)
        values = [self.hidden, *self.features]  # in order of position: those of a chain are already
        if self._chain:
            values = [value[:, : committed.tokens.shape[1]] for value in values]
        else:
            values = kernels.gather_path(values, committed.nodes, impl=impl)
        hidden, *features = values
        if self._needs.penalised:
            penalties = parts.state.penalties
            assert penalties is not None
            kernels.count_tokens(penalties.output_counts[batch.slots], accepted.tokens, committed.counts, impl=impl)
        whole = parts.algorithm.observes_verified
        verified = Verified(self.tree.tokens, self.tree.links, self.hidden) if whole else None
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
                    verified=verified,
                    drafts_stale=self._needs.constrained,
                )
            )
        if self._prefill is not None:
            self._prefill.finish(self._tiles_hidden, self._tiles_features)
        further = {"top": self._top_logprobs()} if self._needs.top_logprobs else {}
        if self._needs.drafts:
            further["drafts"] = self._drafts()
        further |= self._evidence()
        self.widths = {name: columns.shape[1] for name, columns in further.items()}
        self.table = torch.cat([committed.table, *further.values()], 1) if further else committed.table

    def _evidence(self) -> dict[str, Tensor]:
        """For adaptive draft length: accepted nodes [B, D + 1], bits of path probabilities [B, N]; none of a chain."""
        if self._parts.sizing is None or self._chain or self._needs.constrained:
            return {}
        path, probs = {"path": self.accepted.nodes.long()}, self.tree.path_probs
        return path if probs is None else path | {"path_probs": probs.view(torch.int32).long()}

    def _drafts(self) -> Tensor:
        """[B, 4 N] int64: tokens and parents of all nodes, -1 for none, then float32 bits of the target's
        log-probability of each and of the drafter's probability, -1 where that is not known."""
        tree, tokens = self.tree, self.tree.tokens
        parents = kernels.tree_parents(tree.links.mask, impl=self._parts.resources.impl).long()
        above = parents.clamp(min=0)
        values = self.logits.gather(1, above[:, :, None].expand_as(self.logits))
        target = values.gather(2, tokens[:, :, None])[:, :, 0].float() - values.float().logsumexp(2)
        if tree.draft_probs is not None:
            rows = above if tree.draft_rows is None else tree.draft_rows.long().gather(1, above)
            drafter = tree.draft_probs.flatten(1).gather(1, rows * tree.draft_probs.shape[2] + tokens)
        elif tree.path_probs is not None:
            drafter = tree.path_probs / tree.path_probs.gather(1, above)
        else:
            drafter = torch.full_like(target, -1.0)
        bits = [part.float().view(torch.int32).long() for part in (target, drafter)]
        return torch.cat([tokens, parents, *bits], 1)

    def _top_logprobs(self) -> Tensor:
        """[B, 2 (D + 1) n] int64: the most likely tokens after each accepted node, then the bits of their
        log-probabilities, as distances to the largest logit, whose log-probability cannot underflow."""
        (batch, nodes, _), count = self.logits.shape, self._needs.top_logprobs
        flat = self.logits.flatten(0, 1)
        probs, tokens = kernels.draft_topk(flat, count, impl=self._parts.resources.impl)
        values = flat.gather(1, tokens).float()
        logprobs = values - values[:, :1] + probs[:, :1].log()
        both = torch.stack([tokens, logprobs.view(torch.int32).long()], 1).view(batch, nodes, 2, count)
        path = self.accepted.nodes.clamp(min=0).long()[:, :, None, None].expand(-1, -1, 2, count)
        return both.gather(1, path).transpose(1, 2).reshape(batch, -1)
