"""Targets whose layers are not all attention and SwiGLU: what the engine writes, with and without drafts, is what the
plain definition over whole texts writes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from algorithms.engine.request import Request
from algorithms.models.dense_mixer import DenseMixer
from algorithms.models.loading import Target
from tests.algorithms.layer_kinds import KINDS, target_of
from tests.algorithms.toy import Scripted, Setup, autoregressive, changed, requests, run

TARGETS = {kind: target_of(kind) for kind in KINDS}


def check_text(target: Target, request: Request, written: Sequence[int]) -> None:
    """Each token is the most likely one of the plain definition, or within rounding of it."""
    text = torch.tensor([[*request.prompt_ids, *written]])
    hidden, _ = target.model(text, DenseMixer(target.config, text.shape[1], "cpu"))
    logits = target.model.logits(hidden)[0, len(request.prompt_ids) - 1 : -1]
    chosen = logits.gather(1, text[0, len(request.prompt_ids) :, None])[:, 0]
    assert (logits.max(1).values - chosen).max() < 1e-4 and logits.std() > 0.5


SETUPS = {
    "pages of one": Setup(page_size=1, max_batch=2),
    "chunks of prompts": Setup(page_size=4, prefill_chunk=8, prefill_tile=4),
    "captured": Setup(graph="step", prefill_tile=4, max_batch=2),
    "kernels": Setup(impl="triton", fused=True, page_size=8, max_batch=2),
}


@pytest.mark.parametrize("name", list(SETUPS))
@pytest.mark.parametrize("kind", list(KINDS))
def test_drafts_do_not_change_the_text(kind: str, name: str) -> None:
    """By chains and by trees whose accepted paths are scattered, of every length."""
    target, setup = TARGETS[kind], SETUPS[name]
    count, tokens = (2, 4) if name == "kernels" else (6, 20)
    asked = requests(count, max_new_tokens=tokens)
    alone = [c.token_ids for c in run(autoregressive(target), asked, setup, target).completions]
    for request, written in zip(asked, alone, strict=True):
        check_text(target, request, written)
    scripts = [[*request.prompt_ids, *written] for request, written in zip(asked, alone, strict=True)]
    for decoys in (False, True):
        drafter = Scripted(scripts, 4, lambda at, depth: (at * 7 + depth * 3) % 5 != 0, decoys)
        drafted = run(drafter, asked, setup, target)
        assert [c.token_ids for c in drafted.completions] == alone
        assert name == "kernels" or len({a for c in drafted.completions for a in c.accepted_counts}) > 2


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_slot_is_used_again(kind: str) -> None:
    """A request after others, in their slots and pages, writes what it writes alone."""
    target = TARGETS[kind]
    asked = [changed(request, max_new_tokens=3 + 5 * (request.id % 3)) for request in requests(8)]
    alone = [run(autoregressive(target), [each], Setup(), target).completions[0].token_ids for each in asked]
    together = run(autoregressive(target), asked, Setup(max_batch=3, num_pages=9), target).completions
    assert [c.token_ids for c in together] == alone
