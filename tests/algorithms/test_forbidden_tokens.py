"""Bad words and `min_tokens`: whole decodings against a loop without drafts and caches, and what is refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from algorithms.engine.request import Request
from algorithms.standalone import Standalone
from algorithms.step.sampling_params import MAX_BAD_WORD
from experiments.tasks.numerical_tie import penalised as looked_at
from specdec_kernels import forbid_tokens
from tests.algorithms.drafters import ALL_MAKERS, TARGET, blurred_target, hinted
from tests.algorithms.reference_loop import following, forbidden, logits_after, plainly
from tests.algorithms.toy import Setup, answers, autoregressive, changed, engine_of, requests, run, scripts

pytestmark = pytest.mark.usefixtures("random_drafters")

TOKENS = 14
MAKERS = ("autoregressive", "standalone_chain", "eagle3_tree", "naive_eagle", "ngram")
SAMPLED: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9},
    {"temperature": 0.6, "repetition_penalty": 1.3},
    {"logit_bias": {3: 4.0}},
    {"temperature": 0.8, "top_k": 5},
    {},
)


def bare() -> list[Request]:
    return [changed(r, **SAMPLED[r.id]) for r in requests(len(SAMPLED), TOKENS)]


def forbid(request: Request, plain: list[int]) -> Request:
    """Forbid what the request would write: sequences of every kind, and ends before the tenth token."""
    words = (
        (request.prompt_ids[-1], plain[0]),
        (plain[6],) if request.id % 2 else (plain[2], plain[3], plain[4]),
        tuple(plain[7:12]),
        (*request.prompt_ids[-MAX_BAD_WORD + 2 :], plain[1], plain[2])[-MAX_BAD_WORD:],
    )
    ends = {"stop_token_ids": frozenset(plain[1:2]), "eos_token_ids": frozenset(plain[3:5])}
    few = ({}, {"min_tokens": 10} | ends, {"min_tokens": TOKENS} | ends)[request.id % 3]
    return changed(request, bad_words=words, **few)


@cache
def asked() -> list[Request]:
    return [forbid(r, plain) for r, plain in zip(bare(), answers(bare(), Setup(), TARGET), strict=True)]


@cache
def expected() -> list[list[int]]:
    return [plainly(request)[0] for request in asked()]


def served(maker: str, setup: Setup, some: slice = slice(None)) -> list[list[int]]:
    drafter = hinted(ALL_MAKERS[maker](), scripts(asked(), expected()))
    completions = run(drafter, asked()[some], setup, TARGET).completions
    if maker not in ("autoregressive", "naive_eagle"):
        assert max(max(c.accepted_counts) for c in completions) >= 2
    return [c.token_ids for c in completions]


@pytest.mark.parametrize("maker", MAKERS)
def test_every_algorithm_writes_what_the_loop_writes(maker: str) -> None:
    assert served(maker, Setup(page_size=4)) == expected()


@pytest.mark.parametrize("maker", ["standalone_tree"])
def test_captured_steps(maker: str) -> None:
    """Rows change hands between replays, and padding rows forbid nothing."""
    assert served(maker, Setup(page_size=4, graph="step", async_steps=1, prefill_chunk=4, prefill_tile=4)) == expected()


def test_kernels_in_the_engine() -> None:
    assert served("dflash_tree", Setup(impl="triton", max_batch=1), slice(1, 2)) == expected()[1:2]


def test_a_difference_is_looked_at_in_the_same_logits() -> None:
    for request, written in zip(asked(), expected(), strict=True):
        for at in range(len(written)):
            output = written[:at]
            found = looked_at(following([*request.prompt_ids, *output]).float(), request, output)
            assert torch.allclose(found, logits_after(request, output).float())


def test_something_was_forbidden_everywhere() -> None:
    plain = answers(bare(), Setup(), TARGET)
    assert all(with_words != without for with_words, without in zip(expected(), plain, strict=True))
    ends = [(r.sampling.min_tokens, len(ids)) for r, ids in zip(asked(), expected(), strict=True)]
    assert all(length >= least for least, length in ends)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_sampled_drafts_write_nothing_forbidden(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    """The drafter knows of no bad words and draws them; the target gives them no probability."""
    monkeypatch.setattr("algorithms.models.loading.load_draft", lambda *_: blurred_target())
    algorithm = Standalone(Standalone.Config(steps=3, rule=rule), TARGET, "random")
    written = run(algorithm, [changed(r, temperature=1.0) for r in asked()], Setup(), TARGET).completions
    for request, completion in zip(asked(), written, strict=True):
        for at, token in enumerate(completion.token_ids):
            assert token not in forbidden(request, completion.token_ids[:at])
    assert max(max(c.accepted_counts) for c in written) == 3


def test_steps_that_nobody_needs_it_in_forbid_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(logits: torch.Tensor, *args: Any, **options: Any) -> None:
        calls.append(len(logits))
        forbid_tokens(logits, *args, **options)

    monkeypatch.setattr("specdec_kernels.forbid_tokens", counted)
    engine = engine_of(autoregressive(TARGET), Setup(), TARGET)
    plain = engine.generate(bare()[:2]).completions
    assert not calls and engine.parts.state.forbidden is None
    assert engine.generate(asked()[:2]).completions[0].token_ids == expected()[0] and calls
    # Rows that forbade are used again by requests that do not.
    mixed = [bare()[0], bare()[1], changed(asked()[2], id=2)]
    assert [c.token_ids for c in engine.generate(mixed).completions][:2] == [c.token_ids for c in plain]
