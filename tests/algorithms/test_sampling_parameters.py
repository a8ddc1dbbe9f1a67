"""Sampling parameters of each request: whole decodings against a loop without drafts and caches."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import specdec_kernels as kernels
from algorithms.runtime.models.dense_mixer import DenseMixer
from algorithms.runtime.request import Completion, EngineError, Request
from algorithms.runtime.sampling_params import SamplingNeeds, SamplingParams
from algorithms.standalone import Standalone
from specdec_kernels import Accepted, SamplingTensors, pick_tokens
from tests.algorithms.drafters import ALL_MAKERS, TARGET, blurred_target, hinted, load_random_drafters
from tests.algorithms.toy import (
    CONFIG,
    VOCAB,
    Setup,
    answers,
    autoregressive,
    changed,
    engine_of,
    requests,
    run,
    scripts,
)

TOKENS = 14
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.8}
PARAMETERS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9},
    PENALTIES,
    {"temperature": 1.1, **PENALTIES},
    {"temperature": 1.0, "top_k": 5, "top_p": 0.8},
    {"logit_bias": {3: 4.0, 17: -6.0, 40: 2.5}},
    {"temperature": 0.8, "min_p": 0.1, "repetition_penalty": 0.7, "logit_bias": {9: 3.0}},
    {"temperature": 1.3, "frequency_penalty": -1.5},
)
MAKERS = ("autoregressive", "standalone_chain", "standalone_tree", "eagle3_tree", "naive_eagle", "dflash_tree", "ngram")


def asked() -> list[Request]:
    return [changed(r, **PARAMETERS[r.id % len(PARAMETERS)]) for r in requests(len(PARAMETERS), TOKENS)]


def with_logprobs() -> list[Request]:
    return [changed(request, logprobs=True) for request in asked()]


def following(text: list[int]) -> Tensor:
    """[V] float64 logits behind `text`, by a forward over all of it."""
    hidden, _ = TARGET.model(torch.tensor([text]), DenseMixer(CONFIG, len(text), "cpu"), ())
    return TARGET.model.logits(hidden[0, -1]).double()


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


def plainly(request: Request, blind_to: int = 0) -> tuple[list[int], list[float]]:
    """Tokens and their log-probabilities; penalties miss the last `blind_to` tokens of the output."""
    output: list[int] = []
    logprobs: list[float] = []
    for _ in range(request.sampling.max_new_tokens):
        text = [*request.prompt_ids, *output]
        logits = penalised(following(text), request, output[: len(output) - blind_to] if blind_to else output)
        picked = pick_tokens(
            logits.float()[None],
            SamplingTensors(
                temperature=torch.tensor([request.sampling.temperature]),
                top_k=torch.tensor([request.sampling.top_k], dtype=torch.int32),
                top_p=torch.tensor([request.sampling.top_p]),
                min_p=torch.tensor([request.sampling.min_p]),
                seeds=torch.tensor([request.sampling.seed]),
            ),
            torch.tensor([len(text) - 1]),
            impl="reference",
        )
        output.append(int(picked.tokens))
        logprobs.append(float(logits.log_softmax(-1)[output[-1]]))
    return output, logprobs


@cache
def expected() -> list[tuple[list[int], list[float]]]:
    return [plainly(request) for request in asked()]


def served(maker: str, setup: Setup) -> list[Completion]:
    texts = scripts(asked(), [tokens for tokens, _ in expected()])
    return run(hinted(ALL_MAKERS[maker](), texts), with_logprobs(), setup, TARGET).completions


@pytest.mark.parametrize("maker", MAKERS)
def test_all_parameters_side_by_side(monkeypatch: pytest.MonkeyPatch, maker: str) -> None:
    """Tokens and log-probabilities of a mixed batch are those of the loop, whatever was drafted and accepted."""
    load_random_drafters(monkeypatch)
    for completion, (tokens, logprobs) in zip(served(maker, Setup(page_size=4)), expected(), strict=True):
        assert completion.token_ids == tokens
        assert completion.logprobs == pytest.approx(logprobs, abs=1e-4)
        assert maker in ("autoregressive", "naive_eagle") or max(completion.accepted_counts) >= 2


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("setup", [Setup(page_size=4), Setup(page_size=4, graph="step", overlap=1)])
def test_log_probabilities_of_drawn_chains(monkeypatch: pytest.MonkeyPatch, rule: str, setup: Setup) -> None:
    """Drafts come from another distribution; emitted tokens are still reported with the target's probability."""
    monkeypatch.setattr("algorithms.runtime.models.loading.load_draft", lambda *_: blurred_target())
    algorithm = Standalone(Standalone.Config(steps=3, rule=rule), TARGET, "random")
    accepted: list[int] = []
    for request, completion in zip(asked(), run(algorithm, with_logprobs(), setup, TARGET).completions, strict=True):
        tokens = completion.token_ids
        texts = [[*request.prompt_ids, *tokens[:at]] for at in range(len(tokens))]
        rows = [penalised(following(t), request, tokens[:at]).log_softmax(-1) for at, t in enumerate(texts)]
        expected = [float(row[token]) for row, token in zip(rows, tokens, strict=True)]
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)
        accepted += completion.accepted_counts
    assert {0, 3} <= set(accepted), "rejected drafts and a bonus behind a whole chain are both needed"


def test_log_probabilities_are_computed_where_one_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that does not ask has none, whoever shares its steps; steps that nobody asks of do not compute them."""
    computed: list[bool] = []

    def accept(*args: Any, return_logprobs: bool, **options: Any) -> Accepted:
        computed.append(return_logprobs)
        return kernels.accept(*args, return_logprobs=return_logprobs, **options)

    monkeypatch.setattr("algorithms.runtime.step.accept", accept)
    plain = run(autoregressive(TARGET), asked()[:3], Setup(), TARGET).completions
    assert not any(computed) and [c.logprobs for c in plain] == [[], [], []]
    computed.clear()
    mixed = [changed(request, logprobs=request.id == 1) for request in asked()[:3]]
    got = run(autoregressive(TARGET), mixed, Setup(), TARGET).completions
    assert all(computed) and [len(c.logprobs) for c in got] == [0, TOKENS, 0]
    assert [c.token_ids for c in got] == [c.token_ids for c in plain]


def test_padding_is_greedy() -> None:
    """A row that a sampled request has left asks for no draw and no filter."""
    engine = engine_of(autoregressive(TARGET), Setup(), TARGET)
    neutral = [tensor.tolist() for tensor in engine.parts.state.batch(0, 3, 0).sampling]
    sampled = [changed(r, temperature=0.9, top_k=5, top_p=0.8, min_p=0.1) for r in requests(3, TOKENS)]
    with engine.session(SamplingNeeds.of(r.sampling for r in sampled)) as session:
        for request, length in zip(sampled, (9, 3, 14), strict=True):
            session.submit(changed(request, max_new_tokens=length))
        while not session.idle:
            session.step()
            used = len(engine.scheduler.rows)
            rows = [tensor.tolist() for tensor in engine.parts.state.batch(0, 3, 0).sampling]
            assert [row[used:] for row in rows] == [row[used:] for row in neutral]
            assert all(value > 0 for value in rows[0][:used])


def test_captured_steps_read_parameters_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters live in device memory: rows change hands between replays, and padding rows have none."""
    load_random_drafters(monkeypatch)
    got = served("standalone_tree", Setup(page_size=4, graph="step", overlap=1))
    assert [c.token_ids for c in got] == [tokens for tokens, _ in expected()]


def test_kernels_in_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same through the Triton kernels (interpreted where there is no GPU)."""
    load_random_drafters(monkeypatch)
    short = [changed(asked()[i], max_new_tokens=4) for i in (3, 4)]
    texts = scripts(asked(), [tokens for tokens, _ in expected()])
    got = run(hinted(ALL_MAKERS["dflash_chain"](), texts), short, Setup(impl="triton", max_batch=2), TARGET)
    assert [c.token_ids for c in got.completions] == [expected()[i][0][:4] for i in (3, 4)]


@pytest.mark.parametrize("blind_to", [1, 2])
def test_what_was_accepted_in_the_same_block_counts(blind_to: int) -> None:
    """On the texts above, penalties that miss the block's own tokens give other tokens."""
    penalties = [request for request in asked() if request.sampling.penalised and not request.sampling.logit_bias]
    assert any(plainly(request, blind_to)[0] != plainly(request)[0] for request in penalties)


def test_every_parameter_changes_something() -> None:
    """Every request of the mixed batch would get other tokens without its parameters."""
    for request, (tokens, _) in zip(asked(), expected(), strict=True):
        kept = {name: getattr(request.sampling, name) for name in ("max_new_tokens", "temperature", "seed")}
        bare = Request(request.id, request.prompt_ids, SamplingParams(**kept))
        assert request == bare or plainly(bare)[0] != tokens


def test_bias_forces_and_forbids(monkeypatch: pytest.MonkeyPatch) -> None:
    load_random_drafters(monkeypatch)
    favourites = [tokens[0] for tokens in answers(requests(6, 1), Setup(), TARGET)]
    forced = [changed(r, logit_bias={r.id + 20: 100.0}, temperature=(0.0, 1.0)[r.id % 2]) for r in requests(3, 6)]
    forbidden = [changed(r, logit_bias={favourites[r.id]: -100.0}) for r in requests(6, 6)[3:]]
    got = run(ALL_MAKERS["eagle3_tree"](), forced + forbidden, Setup(), TARGET).completions
    assert [c.token_ids for c in got[:3]] == [[20] * 6, [21] * 6, [22] * 6]
    assert all(favourites[c.request_id] not in c.token_ids for c in got[3:])


@pytest.mark.parametrize("change", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}])
def test_a_filter_that_leaves_one_token_is_greedy(change: dict[str, Any]) -> None:
    narrow = [changed(r, temperature=1.5, **change) for r in requests(4, 8)]
    assert answers(narrow, Setup(), TARGET) == answers(requests(4, 8), Setup(), TARGET)


def test_end_of_text_may_be_ignored_and_stop_tokens_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    load_random_drafters(monkeypatch)
    plain = requests(4, TOKENS)
    written = answers(plain, Setup(), TARGET)
    first = [ids.index(ids[6]) for ids in written]
    ends = [frozenset({ids[6]}) for ids in written]
    texts = scripts(plain, written)

    def tokens(**change: Any) -> list[tuple[list[int], str]]:
        many = [changed(r, **{k: v[r.id] if isinstance(v, list) else v for k, v in change.items()}) for r in plain]
        done = run(hinted(ALL_MAKERS["dflash_chain"](), texts), many, Setup(), TARGET).completions
        return [(c.token_ids, c.finish_reason) for c in done]

    cut = [(ids[: at + 1], "stop_token") for ids, at in zip(written, first, strict=True)]
    assert tokens(eos_token_ids=ends) == cut
    assert tokens(eos_token_ids=ends, ignore_eos=True) == [(ids, "length") for ids in written]
    assert tokens(stop_token_ids=ends, ignore_eos=True) == cut


def test_a_session_serves_no_more_than_it_was_opened_for() -> None:
    engine = engine_of(autoregressive(TARGET), Setup(), TARGET)
    with engine.session(SamplingNeeds(sampled=True)) as session:
        session.submit(asked()[1])
        for request in (asked()[2], asked()[4]):
            with pytest.raises(EngineError, match=rf"request {request.id}: .* not opened for"):
                session.submit(request)
        with pytest.raises(EngineError, match="request 1: .* already here"):
            session.submit(asked()[1])
        with pytest.raises(EngineError, match="an open session already"), engine.session(SamplingNeeds()):
            pass
    with engine.session(SamplingNeeds()) as session:
        assert session.idle


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: expected at least 1, got 0"),
        ({"top_p": 0.0}, "top_p: expected above 0 and at most 1"),
        ({"top_k": -1}, r"top_k: expected 0 \(off\) to 2147483647, got -1"),
        ({"min_p": 1.5}, r"min_p: expected 0 \(off\) to 1"),
        ({"temperature": -1.0}, "temperature: expected a finite number, at least 0, got -1.0"),
        ({"temperature": float("nan")}, "temperature: expected a finite number, at least 0, got nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: expected a finite number above 0"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty: expected a finite number"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias: expected finite numbers, got"),
        ({"seed": 1 << 63}, "seed: expected 0 to 9223372036854775807, got"),
        ({"stop_strings": ("",)}, "stop_strings: expected no empty string"),
    ],
)
def test_bad_parameters(change: dict[str, Any], message: str) -> None:
    """They are refused where they are made, under the name that is typed on the command line."""
    with pytest.raises(ValueError, match=rf"sampling\.{message}"):
        SamplingParams(**change)
    with pytest.raises(ValueError, match=message):
        changed(requests(1)[0], **change)


def test_a_biased_token_outside_the_vocabulary_is_refused() -> None:
    engine = engine_of(autoregressive(TARGET), Setup(), TARGET)
    with pytest.raises(EngineError, match=f"request 0: .*token ids below the vocabulary of {VOCAB}, got \\[{VOCAB}\\]"):
        engine.generate([changed(requests(1)[0], logit_bias={VOCAB: 1.0})])
    assert engine.scheduler.num_free_pages == engine.scheduler.num_pages
