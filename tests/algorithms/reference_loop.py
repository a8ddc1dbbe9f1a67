"""Decoding by a loop without drafts and caches: what every algorithm writes, whatever the sampling parameters."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from algorithms.engine.request import Request
from algorithms.models.dense_mixer import DenseMixer
from specdec_kernels import SamplingTensors, pick_tokens
from tests.algorithms.drafters import TARGET
from tests.algorithms.toy import CONFIG

Allowed = Callable[[Request, list[int]], Tensor]
"""[V] bool: the tokens that may follow the output of a request."""


@cache
def _following(text: tuple[int, ...]) -> Tensor:
    hidden, _ = TARGET.model(torch.tensor([text]), DenseMixer(CONFIG, len(text), "cpu"), ())
    return TARGET.model.logits(hidden[0, -1]).double()


def following(text: Sequence[int]) -> Tensor:
    """[V] float64 logits after `text`, by a forward over all of it."""
    return _following(tuple(text)).clone()


def penalised(logits: Tensor, request: Request, output: list[int]) -> Tensor:
    """Penalties and bias one token at a time, from their definitions."""
    adjusted, counts, sampling = logits.clone(), Counter(output), request.sampling
    for token in {*request.prompt_ids, *output}:
        factor = sampling.repetition_penalty
        adjusted[token] = adjusted[token] / factor if adjusted[token] > 0 else adjusted[token] * factor
    for token, count in counts.items():
        adjusted[token] -= sampling.presence_penalty + sampling.frequency_penalty * count
    for token, bias in sampling.logit_bias.items():
        adjusted[token] += bias
    return adjusted


def forbidden(request: Request, output: list[int]) -> set[int]:
    """The tokens that cannot follow, from the definitions of bad words and of the least length."""
    text, sampling = [*request.prompt_ids, *output], request.sampling
    ends = request.stop_token_ids | request.eos_token_ids if len(output) < sampling.min_tokens else set()
    fits = [word[-1] for word in sampling.bad_words if text[len(text) - len(word) + 1 :] == list(word[:-1])]
    return {*ends, *fits}


def logits_after(request: Request, output: list[int], allowed: Allowed | None = None) -> Tensor:
    """[V] float64: the logits of the token after `output`, -inf where it is ruled out."""
    logits = penalised(following([*request.prompt_ids, *output]), request, output)
    logits[list(forbidden(request, output))] = -torch.inf
    if allowed is not None:
        logits[~allowed(request, output)] = -torch.inf
    return logits


def plainly(request: Request, allowed: Allowed | None = None) -> tuple[list[int], list[float]]:
    """The tokens of a request and their log-probabilities."""
    output: list[int] = []
    logprobs: list[float] = []
    sampling = request.sampling
    parameters = SamplingTensors(
        temperature=torch.tensor([sampling.temperature]),
        top_k=torch.tensor([sampling.top_k], dtype=torch.int32),
        top_p=torch.tensor([sampling.top_p]),
        min_p=torch.tensor([sampling.min_p]),
        seeds=torch.tensor([sampling.seed]),
    )
    while len(output) < sampling.max_new_tokens and (not output or output[-1] not in request.ends):
        logits = logits_after(request, output, allowed)
        position = torch.tensor([len(request.prompt_ids) + len(output) - 1])
        picked = pick_tokens(logits.float()[None], parameters, position, impl="reference")
        output.append(int(picked.tokens))
        logprobs.append(float(logits.log_softmax(-1)[output[-1]]))
    return output, logprobs
