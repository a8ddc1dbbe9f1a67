"""Runs drafters over recorded outputs, one token a step, and records how much of each draft they confirm.

To the engine this is an algorithm without drafts. In each step every drafter proposes its tree, which is compared with
the recorded tokens and not verified. Then the engine commits one token, which the recorder replaces by the recorded
one. So every position is the start of a step, and all drafters see the recorded tokens.

The target's own token depends on context, seed and position alone. So a draft is accepted where it is the recorded
token, greedy or sampled, for every drafter with the rule `target_only`.

A step that begins where `i` of `n` tokens are committed, and accepts `a` drafts there, produces a + 1 of them. The next
one begins at i + a + 1. The last step may reach past the end; its tokens count as far as they are recorded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from algorithms.algorithm import Algorithm, Batch, DraftTree, Observation, Resources
from algorithms.engine.request import EngineError, Request
from algorithms.mixed import Wrapper
from algorithms.models.loading import Target
from algorithms.step.sampling_params import SamplingParams
from experiments.app.errors import user_errors
from experiments.app.plan import Plan
from experiments.data.prompt_files import read_records
from experiments.report.metrics import AcceptanceFigures
from experiments.report.run_folder import REQUESTS
from experiments.report.summarize import acceptance_figures
from experiments.tasks.decoding import engine_of
from specdec_kernels import build_chain


@dataclass(frozen=True)
class Drafts:
    """The drafts of one drafter for one output of n tokens: entry i is of a step that begins where i are committed."""

    accepted: list[int]
    ran_out: list[bool]  # whether the accepted path ends where nothing is drafted, or where the output ends


@dataclass(frozen=True)
class Step:
    """One step: accepted drafts, whether nothing more was drafted, tokens produced."""

    accepted: int
    ran_out: bool
    tokens: int


def steps_of(choices: Sequence[Drafts]) -> list[Step]:
    """The fewest steps that produce one output, each by one of the drafters `choices`. Dynamic programming from the end
    of the output; of equally short choices the one that accepts more, then the first."""
    length = len(choices[0].accepted)
    total, taken = [0] * (length + 1), list[Drafts]()
    for start in reversed(range(length)):

        def rank(drafts: Drafts, start: int = start) -> tuple[int, int]:
            accepted = drafts.accepted[start]
            return 1 + total[min(length, start + accepted + 1)], -accepted

        taken.insert(0, min(choices, key=rank))
        total[start] = rank(taken[0])[0]
    steps, start = [], 0
    while start < length:
        accepted = taken[start].accepted[start]
        steps.append(Step(accepted, taken[start].ran_out[start], min(accepted + 1, length - start)))
        start += accepted + 1
    return steps


def all_steps(methods: Sequence[Sequence[Drafts]]) -> list[list[Step]]:
    """`steps_of` for every output; `methods` has the outputs of each drafter."""
    return [steps_of(choices) for choices in zip(*methods, strict=True)]


def perfect(num_tokens: int, depth: int) -> Drafts:
    """A chain of `depth` drafts that are always right."""
    return Drafts([min(depth, num_tokens - start) for start in range(num_tokens)], [True] * num_tokens)


def summary(outputs: Sequence[Sequence[Step]], max_depth: int) -> AcceptanceFigures:
    """The figures of the steps of all outputs. The interval of tokens per step takes outputs as independent, not
    steps: those of one output are alike."""
    ends = [(step.accepted, step.ran_out) for steps in outputs for step in steps]
    tokens = [sum(step.tokens for step in steps) for steps in outputs]
    return acceptance_figures(ends, tokens, [len(steps) for steps in outputs], sum(tokens), max_depth)


UNKNOWN = -1  # entry of the script where no token is recorded. No draft equals it.
FIGURES = ("accepted", "ran_out")


class Recorder(Wrapper):
    """Lets `algorithms` draft at every position of `recorded`: prompts with outputs, by the seed of the request."""

    name = "replay"

    def __init__(self, algorithms: Sequence[Algorithm], recorded: Sequence[Sequence[int]]) -> None:
        self.wrap(*algorithms)
        self._recorded = recorded

    def bind(self, resources: Resources) -> None:
        super().bind(resources)
        self._impl, spare = resources.impl, len(self._recorded)
        width = resources.context + 1 + max(algorithm.max_depth for algorithm in self.inner)
        script = torch.full((spare + 1, width), UNKNOWN, dtype=torch.int64)
        for number, tokens in enumerate(self._recorded):
            script[number, : len(tokens)] = torch.tensor(tokens)
        self._script = script.to(resources.device)
        shape = (len(self.inner), len(FIGURES), spare + 1, resources.context)
        self._found = torch.zeros(shape, dtype=torch.int32, device=resources.device)

    def figures(self) -> Tensor:
        """[drafters, 2, outputs, positions] int32 on the host: `FIGURES` of a step whose last token is there."""
        return self._found[:, :, :-1].cpu()

    def propose(self, batch: Batch) -> DraftTree:
        numbers = self._numbers_of(batch)
        for number, algorithm in enumerate(self.inner):
            figures = confirmed(algorithm.propose(batch), batch.lengths, self._script[numbers])
            self._found[number][:, numbers, batch.lengths] = figures.int()
        return DraftTree(batch.last_tokens[:, None], build_chain(batch.lengths, 1, impl=self._impl))

    def observe(self, seen: Observation) -> None:
        super().observe(seen if seen.is_prefill else self._corrected(seen))

    def _numbers_of(self, batch: Batch) -> Tensor:
        """[B] int64: the output of each batch slot; the spare one where no request is."""
        assert batch.sampling.seeds is not None
        return torch.where(batch.active > 0, batch.sampling.seeds, len(self._recorded))

    def _corrected(self, seen: Observation) -> Observation:
        """Replace the target's own token by the recorded one, where one is recorded."""
        batch, place = seen.batch, (seen.batch.lengths + 1)[:, None]
        recorded = self._script[self._numbers_of(batch)].gather(1, place)
        token = torch.where(recorded == UNKNOWN, batch.last_tokens[:, None], recorded)
        kept = torch.where((batch.active > 0)[:, None], token, batch.history.gather(1, place))
        batch.history.scatter_(1, place, kept)
        batch.last_tokens.copy_(token[:, 0])
        return replace(seen, next_tokens=token)


def confirmed(tree: DraftTree, lengths: Tensor, script: Tensor) -> Tensor:
    """`FIGURES` [2, B] of `tree` after the tokens at `lengths [B]`, where `script [B, positions]` is recorded."""
    depth, node = tree.links.depth.long(), torch.arange(tree.tokens.shape[1], device=tree.tokens.device)
    inside = (depth > 0) | (node == 0)  # a node outside of the tree has depth 0 and is not the root
    seen = (tree.links.mask[:, :, node // 64] >> (node % 64)) & 1 > 0  # [B, N, N]: itself and its ancestors
    wrong = tree.tokens != script.gather(1, torch.where(inside, lengths[:, None] + depth, 0))
    wrong[:, 0] = False
    errors = (seen & wrong[:, None, :]).sum(-1)
    accepted = torch.where(inside & (errors == 0), depth, 0).amax(1)
    # Drafts whose parents are all accepted.
    offered = inside & (errors == wrong.int()) & (depth == accepted[:, None] + 1)
    return torch.stack([accepted, ~offered.any(1)])


class Recorded(NamedTuple):
    """One request and its output tokens."""

    request: Request
    tokens: list[int]


def read_trace(folder: str, data: str, requests: Sequence[Request]) -> list[Recorded]:
    """The outputs for `requests` in the folder of an earlier run over the prompt set `data`, of its first method.
    Raises ValueError where the folder has no outputs, or outputs for other prompts."""
    path = Path(folder) / REQUESTS
    try:
        entries = [record.fields for record in read_records(path)]
    except ValueError as error:
        raise ValueError(f"task.trace: expected the folder of a run with {REQUESTS}, got {folder}: {error}") from error
    entries = [entry for entry in entries if entry.get("data", data) == data]
    first = entries[0].get("method") if entries else None
    outputs = {entry["id"]: entry for entry in entries if entry.get("method") == first}
    found = []
    for request in requests:
        entry, where = outputs.get(request.id), f"task.trace: {folder}, request {request.id}: expected"
        if entry is None:
            raise ValueError(f"{where} an output for a prompt of data={data}, got none")
        length = entry.get("num_prompt_tokens", len(request.prompt_ids))
        if length != len(request.prompt_ids):
            raise ValueError(f"{where} {len(request.prompt_ids)} prompt tokens, as in this run, got {length}")
        tokens, most = entry["token_ids"], request.sampling.max_new_tokens
        if len(tokens) > most:
            raise ValueError(f"{where} at most sampling.max_new_tokens={most} tokens, got {len(tokens)}")
        found.append(Recorded(request, tokens))
    return found


def score(
    plan: Plan, target: Target, algorithms: Sequence[Algorithm], trace: Sequence[Recorded], whole: bool
) -> tuple[list[list[Drafts]], int]:
    """Let `algorithms` draft at every position of `trace`, in one pass of the target.

    Returns `drafts[drafter][output]`, and how many of the recorded tokens the target chooses now, greedily.

    An output is split into parts that fill the batch; all tokens before a part are its prompt. With `whole` outputs are
    not split: an algorithm that learns must see each of them once.
    """
    tokens = [[*each.request.prompt_ids, *each.tokens] for each in trace]
    recorder = Recorder(algorithms, tokens)
    engine = engine_of(plan, target, recorder, max(map(len, tokens)))
    parts = 1 if whole else -(-plan.config.runtime.max_batch // len(trace))
    requests: list[Request] = []
    for number, (request, output) in enumerate(trace):
        width = -(-len(output) // parts)
        for start in range(0, len(output), width):
            sampling = SamplingParams(max_new_tokens=min(width, len(output) - start), seed=number)
            requests.append(Request(len(requests), (*request.prompt_ids, *output[:start]), sampling))
    with user_errors(EngineError):
        completions = engine.generate(requests).completions
        if failed := [completion.error for completion in completions if completion.error]:
            raise EngineError(failed[0])
    num_chosen = sum(
        tokens[request.sampling.seed][start] == token
        for request, completion in zip(requests, completions, strict=True)
        for start, token in enumerate(completion.token_ids, len(request.prompt_ids))
    )
    return _drafts(recorder.figures().tolist(), trace), num_chosen


def _drafts(figures: list[list[list[list[int]]]], trace: Sequence[Recorded]) -> list[list[Drafts]]:
    """From `figures[drafter][figure][output][position]` to the drafts of each output."""
    found = []
    for accepted, ran_out in figures:
        outputs = []
        for number, (request, tokens) in enumerate(trace):
            first, length = len(request.prompt_ids) - 1, len(tokens)
            counts, outs = (each[number][first : first + length] for each in (accepted, ran_out))
            # After the end of the output nothing can be accepted or rejected.
            ends = [bool(out) or start + a == length for start, (a, out) in enumerate(zip(counts, outs, strict=True))]
            outputs.append(Drafts(counts, ends))
        found.append(outputs)
    return found
