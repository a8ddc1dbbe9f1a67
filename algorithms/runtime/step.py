"""What runs on the device: the prefill of prompts, and the step with its phases draft, verify, accept and commit.

A step reads nothing back, and every tensor that it starts from keeps its address, so any part of it can be captured in
a CUDA graph. A step over more rows than are in use passes over the padding: inactive rows have no columns to store,
their accepted path is empty, and their lengths stay.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from algorithms.runtime.algorithm import Algorithm, Batch, DraftTree, Observation, Resources
from algorithms.runtime.batch import BatchState
from algorithms.runtime.cache import KVCache
from algorithms.runtime.paged_attention import PagedMixer
from algorithms.runtime.sampling_params import SamplingNeeds
from algorithms.runtime.tensor_parallel import agree_on_acceptance, agree_on_draft
from specdec_kernels import Accepted, SamplingTensors, accept, apply_penalties, count_tokens, move_accepted

PHASES = ("draft", "verify", "accept", "commit")
"""Phases of a step, in order; each is a method of `Step`."""


@dataclass(frozen=True)
class StepParts:
    """What every step of a run works with."""

    algorithm: Algorithm
    cache: KVCache
    state: BatchState
    resources: Resources


def prefill(parts: StepParts, batch: Batch, width: int) -> None:
    """Run the target over all but the last token of new prompts, and show the result to the drafter.

    `batch` holds the rows of these prompts; the longest has `width` tokens before its last one.
    """
    counts, batch = batch.lengths.to(torch.int32), replace(batch, lengths=torch.zeros_like(batch.lengths))
    columns = torch.arange(width + 1, device=counts.device)
    # Behind a shorter prompt the row may hold what a former request left there.
    text = torch.where(columns <= counts[:, None], batch.history[:, : width + 1], 0)
    tokens, positions = text[:, :-1].contiguous(), columns[:-1].repeat(len(text), 1)
    mixer = PagedMixer.over(batch, positions, parts.cache, parts.resources, counts=counts, phase="prefill")
    hidden, features = parts.resources.target.model(tokens, mixer, parts.algorithm.capture)
    next_tokens = text[:, 1:].contiguous()
    parts.algorithm.observe(
        Observation(batch, tokens, next_tokens, features, hidden, positions, counts, is_prefill=True)
    )


class Step:
    """The phases over one batch, each leaving its result for the next. Run them in the order of `PHASES`."""

    tree: DraftTree
    hidden: Tensor
    features: list[Tensor]
    logits: Tensor
    accepted: Accepted
    table: Tensor
    """[B, 2 (D + 1) + 2] int64: emitted tokens, their log-probabilities as float32 bits, num_accepted, valid."""

    def __init__(self, parts: StepParts, batch: Batch, needs: SamplingNeeds) -> None:
        self._parts, self._batch, self._needs = parts, batch, needs

    def draft(self) -> None:
        algorithm, expected = self._parts.algorithm, (len(self._batch.lengths), self._parts.algorithm.num_nodes)
        tree = algorithm.propose(self._batch)
        if tree.tokens.shape != expected:
            raise ValueError(
                f"algo={algorithm.name}: propose gave tokens of shape {list(tree.tokens.shape)}, expected [rows, "
                f"num_nodes] = {list(expected)}"
            )
        self.tree = agree_on_draft(tree)

    def verify(self) -> None:
        algorithm, target = self._parts.algorithm, self._parts.resources.target.model
        links = self.tree.links
        mixer = PagedMixer.over(
            self._batch,
            links.positions,
            self._parts.cache,
            self._parts.resources,
            mode="chain" if algorithm.chain else "tree",
            mask=None if algorithm.chain else links.mask,
            depths=None if algorithm.chain else links.depth,
            phase="verify" if algorithm.num_nodes > 1 else "decode",
        )
        self.hidden, self.features = target(self.tree.tokens, mixer, algorithm.capture)
        self.logits = target.logits(self.hidden)

    def accept(self) -> None:
        batch, algorithm, needs = self._batch, self._parts.algorithm, self._needs
        impl, sampling = self._parts.resources.impl, SamplingTensors()
        if needs.filtered:
            sampling = batch.sampling
        elif needs.sampled:
            sampling = SamplingTensors(batch.sampling.temperature, seeds=batch.sampling.seeds)
        if needs.penalised:
            self._penalise()
        accepted = accept(
            algorithm.rule,
            self.tree.tokens,
            self.tree.links,
            self.logits,
            batch.lengths,
            algorithm.max_depth,
            sampling,
            draft_probs=self.tree.draft_probs,
            impl=impl,
        )
        self.accepted = agree_on_acceptance(accepted)

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

    def commit(self) -> None:
        """Bring the accepted path to the front of cache, tokens and features, show it to the drafter, and advance."""
        batch, accepted = self._batch, self.accepted
        assert accepted.logprobs is not None
        emitted = (accepted.num_accepted + 1) * batch.active
        seen = self._observation(emitted)
        self._write_history(emitted)
        if self._needs.penalised:
            penalties = self._parts.state.penalties
            assert penalties is not None
            count_tokens(penalties.output_counts[batch.rows], accepted.tokens, emitted, impl=self._parts.resources.impl)
        self._parts.algorithm.observe(seen)
        batch.lengths.add_(emitted)
        batch.last_tokens.copy_(torch.where(batch.active > 0, accepted.bonus, batch.last_tokens))
        self.table = torch.cat(
            [
                accepted.tokens,
                accepted.logprobs.view(torch.int32).to(torch.int64),
                accepted.num_accepted[:, None],
                accepted.valid[:, None],
            ],
            dim=1,
        )

    def _observation(self, emitted: Tensor) -> Observation:
        batch, accepted, parts = self._batch, self.accepted, self._parts
        tokens, hidden, features = self.tree.tokens, self.hidden, self.features
        width, start = tokens.shape[1], batch.lengths.clone()
        if not parts.algorithm.chain:
            # A chain is in text order already.
            nodes = torch.where(batch.active[:, None] > 0, accepted.nodes, -1)
            move_accepted(parts.cache.kv, batch.page_table, start, nodes, impl=parts.resources.impl)
            path, width = accepted.nodes.clamp(min=0).long(), accepted.nodes.shape[1]
            tokens = tokens.gather(1, path)
            hidden, *features = (x.gather(1, path[..., None].expand(-1, -1, x.shape[-1])) for x in (hidden, *features))
        return Observation(
            batch=replace(batch, lengths=start),
            tokens=tokens,
            next_tokens=accepted.tokens[:, :width].clamp(min=0),
            features=features,
            hidden=hidden,
            positions=start[:, None] + torch.arange(width, device=start.device),
            counts=emitted,
        )

    def _write_history(self, emitted: Tensor) -> None:
        """Put the emitted tokens behind the last one; what was not emitted goes to the scratch column."""
        batch, tokens = self._batch, self.accepted.tokens
        column = torch.arange(tokens.shape[1], device=tokens.device)
        place = batch.lengths[:, None] + 1 + column
        scratch = batch.history.shape[1] - 1
        batch.history.scatter_(1, torch.where(column < emitted[:, None], place, scratch), tokens)
