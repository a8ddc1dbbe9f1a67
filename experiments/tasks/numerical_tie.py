"""Compares the logits where two outputs differ, to distinguish a numerical tie from a fault.

Two computations of one logit, of one row and of many rows, round differently. So the order of two logits may change
where they are as close as their rounding errors. A sampled token is the one whose interval of the cumulative
distribution contains the request's uniform, so it may change where the uniform is as close to a border as rounding
moves the borders. A larger difference is a fault.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from algorithms.engine.grammar import Grammars
from algorithms.engine.request import Completion, Request
from algorithms.models.loading import Target
from algorithms.step.batch import PenaltyState
from algorithms.step.sampling_params import SamplingParams
from experiments.report import summarize
from experiments.report.metrics import Lossless
from experiments.report.summarize import Look
from experiments.tasks.distribution import next_logits
from specdec_kernels import apply_penalties, mask_tokens
from specdec_kernels.sampling import SamplingTensors, philox_uniform, row_distribution

ROUNDINGS = {"float32": 64, "float16": 8, "bfloat16": 8}
"""Rounding errors of the largest logit that two computations may be apart. Sums are taken in float32: so float32 adds
those of a long sum, and half precision only those of the values between two layers."""


Compared = tuple["Request", "Completion", "Completion"]
"""A request, its completion, and the completion of autoregressive decoding."""


def lossless(
    target: Target, compared: Sequence[Compared], deterministic: bool = False, grammars: Grammars | None = None
) -> Lossless:
    """How many of `compared` have the same tokens twice, with the logits where the others differ; as `look_at`."""
    requests, ours, plain = ([r for r, _, _ in compared], [c for _, c, _ in compared], [c for _, _, c in compared])
    look = look_at(target, requests, plain, deterministic, grammars)
    return summarize.lossless(ours, plain, look, ties_possible(target, requests, deterministic))


def look_at(
    target: Target,
    requests: Sequence[Request],
    baseline: Sequence[Completion],
    deterministic: bool = False,
    grammars: Grammars | None = None,
) -> Look:
    """A function that adds to a difference `logit`, `baseline_logit`, `gap`, `bound` and `numerical_tie`.

    The logits are those of a forward without a cache, with the penalties of the request and, by `grammars`, in its
    grammar. They are None where an output has ended. `gap` is the distance of the two logits, and for sampled tokens
    the distance of the uniform from the further one of their two intervals. `bound` is the largest gap of a tie, None
    where there are none. Half precision moves the borders so far that the bound would excuse every sampled token, so
    sampled tokens have ties in float32 alone. A `deterministic` target has none: both computations have the same bits.
    """

    def look(index: int, found: Mapping[str, Any]) -> dict[str, Any]:
        request, output = requests[index], baseline[index].token_ids[: found["position"]]
        tokens = [found["token"], found["baseline_token"]]
        if any(token is None or not 0 <= token < target.config.vocab_size for token in tokens):
            return dict.fromkeys(("logit", "baseline_logit", "gap", "bound")) | {"numerical_tie": False}
        logits = next_logits(target, [*request.prompt_ids, *output])
        dtype = target.dtype
        error = ROUNDINGS[str(dtype).removeprefix("torch.")] * torch.finfo(dtype).eps * float(logits.abs().max())
        changed = penalised(logits, request, output)
        if grammars is not None and request.sampling.constrained:
            changed = _in_grammar(changed, request, output, grammars)
        ours, plain = (float(changed[token]) for token in tokens)
        gap, bound = abs(ours - plain), error
        if request.sampling.temperature > 0:
            gap = distance_of_uniform(changed, request, len(output), tokens, error)
            bound = moved_borders(error, request.sampling.temperature)
        possible = ties_possible(target, [request], deterministic)
        tie = {"bound": bound if possible else None, "numerical_tie": possible and gap <= bound}
        return {"logit": ours, "baseline_logit": plain, "gap": gap, **tie}

    return look


def ties_possible(target: Target, requests: Sequence[Request], deterministic: bool) -> bool:
    """Whether a difference in one of `requests` may be a numerical tie; see `look_at`."""
    sampled = all(request.sampling.temperature > 0 for request in requests)
    return not deterministic and not (sampled and target.dtype != torch.float32)


def moved_borders(error: float, temperature: float) -> float:
    """How far logits that are off by `error` can move a border of the cumulative distribution. The odds of the tokens
    below a border change by exp(2 error / temperature) at most. A share x of odds y then becomes xy / (1 - x + xy),
    which is at most (sqrt(y) - 1) / (sqrt(y) + 1) from x."""
    return math.tanh(error / (2 * temperature))


def distance_of_uniform(
    logits: torch.Tensor, request: Request, num_output: int, tokens: Sequence[int], error: float = 0.0
) -> float:
    """The largest distance of the request's uniform from the intervals of `tokens` in the cumulative distribution of
    `logits` [V] under the request's temperature and filters; infinite where a filter removes one. Each token has the
    nearest of its intervals under the filters that logits off by `error` may meet."""
    position = torch.tensor([len(request.prompt_ids) + num_output - 1])
    place = float(philox_uniform(torch.tensor([request.sampling.seed]), position))
    distances = []
    for weights in _filtered(logits, request.sampling, error):
        shares = weights / weights.sum()
        ends = shares.cumsum(0)
        distances.append(
            [
                max(float(ends[t] - shares[t]) - place, place - float(ends[t]), 0.0) if shares[t] > 0 else math.inf
                for t in tokens
            ]
        )
    return max(map(min, zip(*distances, strict=True)))


def _filtered(logits: torch.Tensor, params: SamplingParams, error: float) -> list[torch.Tensor]:
    """Weights [V] of `logits` [V] under the filters of `params`; where `error` may change what they keep, also with as
    much, and with as little, as they may keep then."""

    def kept(top_k: int, top_p: float, min_p: float) -> torch.Tensor:
        temperature, p, m = torch.tensor([[params.temperature], [top_p], [min_p]], device=logits.device)
        k = torch.tensor([top_k], dtype=torch.int32, device=logits.device)
        tensors = SamplingTensors(temperature=temperature, top_k=k, top_p=p, min_p=m)
        return row_distribution(logits[None], tensors).weights[0]

    found = [kept(params.top_k, params.top_p, params.min_p)]
    everything = kept(0, 1.0, 0.0)
    if error == 0 or torch.equal(found[0], everything):
        return found
    values, moved = logits.double(), moved_borders(error, params.temperature)
    for sign in (1, -1):
        top_p = min(max(params.top_p + sign * moved, 0.0), 1.0) if params.top_p < 1 else params.top_p
        min_p = min(params.min_p * math.exp(-sign * 2 * error / params.temperature), 1.0)
        floor = values[kept(params.top_k, top_p, min_p) > 0].min() - sign * 2 * error
        found.append(torch.where(values >= torch.minimum(floor, values.max()), everything, 0.0))
    return found


def penalised(logits: torch.Tensor, request: Request, output: Sequence[int]) -> torch.Tensor:
    """[V] `logits` of the token after `output`, with the penalties and biases of `request`; -inf at the tokens that it
    forbids."""
    changed, vocab, device = logits.clone(), logits.shape[0], logits.device
    if request.sampling.penalised:
        state = PenaltyState(1, vocab, device)
        state.fill(0, request)
        state.output_counts[0] = torch.bincount(torch.tensor(output, dtype=torch.int64, device=device), minlength=vocab)
        one = torch.ones((1, 1, 1), dtype=torch.int64, device=device)
        names = ("repetition", "presence", "frequency", "bias")
        options: Any = {name: getattr(state, name) for name in names}
        counts = state.output_counts, state.prompt_seen
        apply_penalties(changed[None, None], one[0] - 1, one, *counts, **options, impl="reference")
    history = (*request.prompt_ids, *output)
    for word, allowed in request.forbidden:
        if len(history) < allowed and history[len(history) - len(word) + 1 :] == word[:-1]:
            changed[word[-1]] = -float("inf")
    return changed


def _in_grammar(logits: torch.Tensor, request: Request, output: Sequence[int], grammars: Grammars) -> torch.Tensor:
    matcher = grammars.matcher(request.sampling.grammar, request.ends)
    matcher.follow(output)
    masked, constrained = logits[None, None].clone(), torch.ones(1, dtype=torch.int32, device=logits.device)
    mask_tokens(masked, matcher.allowed().to(logits.device)[None, None], constrained, impl="reference")
    return masked[0, 0]
