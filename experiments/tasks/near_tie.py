"""Looks at the logits where two greedy texts part, to tell a near tie from a fault.

Two computations of one logit, of one row and of many rows, round differently. So the larger of two logits may change
its place where the two are as close as their rounding errors. Anything further apart is no matter of rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from experiments.report.metrics import Look
from experiments.tasks.distribution import next_logits

if TYPE_CHECKING:
    import torch

    from algorithms.runtime.models.loading import Target
    from algorithms.runtime.request import Completion, Request

ROUNDINGS = {"float32": 64, "float16": 8, "bfloat16": 8}
"""Rounding errors of the largest logit that two computations may be apart. Sums are taken in float32: so float32 adds
those of a long sum, and half precision only those of the values between two layers."""


def look_at(
    target: Target, requests: Sequence[Request], baseline: Sequence[Completion], deterministic: bool = False
) -> Look:
    """A function that adds to a difference `logit`, `baseline_logit`, `gap`, `bound` and `near_tie`.

    The logits are those of a forward without a cache, with the penalties of the request. They are None where a text
    has ended. Drawn tokens have no near ties: what decides between them is not the gap of their logits. A target that
    is `deterministic` has none either: both texts come from the same bits.
    """

    def look(index: int, found: Mapping[str, Any]) -> dict[str, Any]:
        import torch

        request, output = requests[index], baseline[index].token_ids[: found["position"]]
        tokens = [found["token"], found["baseline_token"]]
        if any(token is None or not 0 <= token < target.config.vocab_size for token in tokens):
            return dict.fromkeys(("logit", "baseline_logit", "gap", "bound")) | {"near_tie": False}
        logits = next_logits(target, [*request.prompt_ids, *output])
        dtype = target.model.model.norm.weight.dtype
        steps = ROUNDINGS[str(dtype).removeprefix("torch.")]
        bound = steps * torch.finfo(dtype).eps * float(logits.abs().max())
        ours, plain = (float(penalised(logits, request, output)[token]) for token in tokens)
        gap = abs(ours - plain)
        near = not deterministic and request.sampling.temperature == 0 and gap <= bound
        return {"logit": ours, "baseline_logit": plain, "gap": gap, "bound": bound, "near_tie": near}

    return look


def penalised(logits: torch.Tensor, request: Request, output: Sequence[int]) -> torch.Tensor:
    """[V] `logits` of the token behind `output`, with the penalties and biases that `request` asks for; -inf at the
    tokens that it forbids."""
    text = (*request.prompt_ids, *output)
    changed = _with_penalties(logits, request, output) if request.sampling.penalised else logits.clone()
    for word, allowed in request.forbidden:
        if len(text) < allowed and text[len(text) - len(word) + 1 :] == word[:-1]:
            changed[word[-1]] = -float("inf")
    return changed


def _with_penalties(logits: torch.Tensor, request: Request, output: Sequence[int]) -> torch.Tensor:
    import torch

    from algorithms.runtime.batch import PenaltyState
    from specdec_kernels import apply_penalties

    vocab, device = logits.shape[0], logits.device
    state = PenaltyState(1, vocab, device)
    state.fill(0, request)
    state.output_counts[0] = torch.bincount(torch.tensor(output, dtype=torch.int64, device=device), minlength=vocab)
    changed = logits[None, None].clone()
    apply_penalties(
        changed,
        torch.zeros((1, 1), dtype=torch.int64, device=device),
        torch.ones((1, 1, 1), dtype=torch.int64, device=device),
        state.output_counts,
        state.prompt_seen,
        repetition=state.repetition,
        presence=state.presence,
        frequency=state.frequency,
        bias=state.bias,
        impl="reference",
    )
    return changed[0, 0]
