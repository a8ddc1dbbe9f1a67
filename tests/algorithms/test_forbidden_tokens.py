"""Bad words and `min_tokens`: whole decodings against a loop without drafts and caches, and what is refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from algorithms.runtime.request import EngineError, Request
from algorithms.runtime.sampling_params import MAX_BAD_WORD, MAX_FORBIDDEN, SamplingParams
from algorithms.standalone import Standalone
from experiments.tasks.near_tie import penalised as looked_at
from specdec_kernels import SamplingTensors, forbid_tokens, pick_tokens
from tests.algorithms.drafters import ALL_MAKERS, TARGET, blurred_target, hinted, load_random_drafters
from tests.algorithms.test_sampling_parameters import following, penalised
from tests.algorithms.toy import VOCAB, Setup, answers, autoregressive, changed, engine_of, requests, run, scripts

TOKENS = 14
MAKERS = ("autoregressive", "standalone_chain", "standalone_tree", "eagle3_tree", "naive_eagle", "dflash_tree", "ngram")
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


def forbidden(request: Request, output: list[int]) -> set[int]:
    """The tokens that cannot follow, from the definitions."""
    text, sampling = [*request.prompt_ids, *output], request.sampling
    ends = request.stop_token_ids | request.eos_token_ids if len(output) < sampling.min_tokens else set()
    fits = [word[-1] for word in sampling.bad_words if text[len(text) - len(word) + 1 :] == list(word[:-1])]
    return {*ends, *fits}


def plainly(request: Request) -> list[int]:
    output: list[int] = []
    while len(output) < request.sampling.max_new_tokens and not (output and request.ends_at(output[-1])):
        text, sampling = [*request.prompt_ids, *output], request.sampling
        logits = penalised(following(text), request, output)
        logits[list(forbidden(request, output))] = -float("inf")
        assert torch.allclose(looked_at(following(text).float(), request, output), logits.float())
        drawn = SamplingTensors(
            temperature=torch.tensor([sampling.temperature]),
            top_k=torch.tensor([sampling.top_k], dtype=torch.int32),
            seeds=torch.tensor([sampling.seed]),
        )
        picked = pick_tokens(logits.float()[None], drawn, torch.tensor([len(text) - 1]), impl="reference")
        output.append(int(picked.tokens))
    return output


@cache
def asked() -> list[Request]:
    return [forbid(r, plain) for r, plain in zip(bare(), answers(bare(), Setup(), TARGET), strict=True)]


@cache
def expected() -> list[list[int]]:
    return [plainly(request) for request in asked()]


def served(maker: str, setup: Setup, some: slice = slice(None)) -> list[list[int]]:
    drafter = hinted(ALL_MAKERS[maker](), scripts(asked(), expected()))
    completions = run(drafter, asked()[some], setup, TARGET).completions
    if maker not in ("autoregressive", "naive_eagle"):
        assert max(max(c.accepted_counts) for c in completions) >= 2
    return [c.token_ids for c in completions]


@pytest.mark.parametrize("maker", MAKERS)
def test_every_algorithm_writes_what_the_loop_writes(monkeypatch: pytest.MonkeyPatch, maker: str) -> None:
    load_random_drafters(monkeypatch)
    assert served(maker, Setup(page_size=4)) == expected()


@pytest.mark.parametrize("maker", ["standalone_tree", "dflash_chain"])
def test_captured_steps(monkeypatch: pytest.MonkeyPatch, maker: str) -> None:
    """Rows change hands between replays, and padding rows forbid nothing."""
    load_random_drafters(monkeypatch)
    assert served(maker, Setup(page_size=4, graph="step", overlap=1, prefill_chunk=4, prefill_tile=4)) == expected()


def test_kernels_in_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    load_random_drafters(monkeypatch)
    assert served("dflash_tree", Setup(impl="triton", max_batch=1), slice(1, 2)) == expected()[1:2]


def test_something_was_forbidden_everywhere() -> None:
    plain = answers(bare(), Setup(), TARGET)
    assert all(with_words != without for with_words, without in zip(expected(), plain, strict=True))
    ends = [(r.sampling.min_tokens, len(ids)) for r, ids in zip(asked(), expected(), strict=True)]
    assert all(length >= least for least, length in ends)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_drawn_drafts_write_nothing_forbidden(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    """The drafter knows of no bad words and draws them; the target gives them no probability."""
    monkeypatch.setattr("algorithms.runtime.models.loading.load_draft", lambda *_: blurred_target())
    algorithm = Standalone(Standalone.Config(steps=3, rule=rule), TARGET, "random")
    written = run(algorithm, [changed(r, temperature=1.0) for r in asked()], Setup(), TARGET).completions
    for request, completion in zip(asked(), written, strict=True):
        for at, token in enumerate(completion.token_ids):
            assert token not in forbidden(request, completion.token_ids[:at])
    assert max(max(c.accepted_counts) for c in written) == 3


def test_an_end_that_is_ignored_is_not_held_back() -> None:
    request = changed(bare()[0], stop_token_ids=frozenset({4}), eos_token_ids=frozenset({5}), min_tokens=2)
    assert [word for word, _ in request.forbidden] == [(4,), (5,)]
    assert [word for word, _ in changed(request, ignore_eos=True).forbidden] == [(4,)]
    assert request.shortened(1).sampling.min_tokens == 1


def test_steps_that_nobody_needs_it_in_forbid_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(logits: torch.Tensor, *args: Any, **options: Any) -> None:
        calls.append(len(logits))
        forbid_tokens(logits, *args, **options)

    monkeypatch.setattr("algorithms.runtime.step.forbid_tokens", counted)
    engine = engine_of(autoregressive(TARGET), Setup(), TARGET)
    plain = engine.generate(bare()[:2]).completions
    assert not calls and engine.parts.state.forbidden is None
    assert engine.generate(asked()[:2]).completions[0].token_ids == expected()[0] and calls
    # Rows that forbade are used again by requests that do not.
    mixed = [bare()[0], bare()[1], changed(asked()[2], id=2)]
    assert [c.token_ids for c in engine.generate(mixed).completions][:2] == [c.token_ids for c in plain]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bad_words": ("",)}, "bad_words: expected strings, or lists of 1 to 16 token ids"),
        ({"bad_words": ((),)}, "bad_words: expected strings, or lists of 1 to 16 token ids"),
        ({"bad_words": ((1,) * 17,)}, "bad_words: expected strings, or lists of 1 to 16 token ids"),
        ({"bad_words": ((-1,),)}, "bad_words: expected strings, or lists of 1 to 16 token ids"),
        ({"bad_words": (7,)}, "bad_words: expected strings, or lists of 1 to 16 token ids"),
        ({"bad_words": "no"}, "bad_words: expected strings, or lists of 1 to 16 token ids"),
        ({"min_tokens": -1}, "min_tokens: expected 0 to max_new_tokens = 128, got -1"),
        ({"min_tokens": 129}, "min_tokens: expected 0 to max_new_tokens = 128, got 129"),
    ],
)
def test_bad_parameters(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"sampling\.{message}"):
        SamplingParams(**change)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("no",), r"request 0: sampling.bad_words: expected token ids .*got \['no'\]"),
        (((1, VOCAB),), rf"request 0: sampling.bad_words: .*below the vocabulary of {VOCAB}, got \[{VOCAB}\]"),
        (tuple((1,) for _ in range(MAX_FORBIDDEN + 1)), "expected at most 256 sequences, got 257"),
    ],
)
def test_words_that_cannot_be_served(words: tuple[Any, ...], message: str) -> None:
    engine = engine_of(autoregressive(TARGET), Setup(), TARGET)
    with pytest.raises(EngineError, match=message):
        engine.generate([changed(requests(1)[0], bad_words=words)])
