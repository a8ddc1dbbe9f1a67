"""Sampling parameters of each request: whole decodings against a loop without drafts and caches."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import specdec_kernels as kernels
from algorithms.engine.request import Completion, EngineError, Request
from algorithms.standalone import Standalone
from algorithms.step.sampling_params import SamplingNeeds, SamplingParams
from specdec_kernels import Accepted
from tests.algorithms.drafters import ALL_MAKERS, TARGET, blurred_target, hinted
from tests.algorithms.reference_loop import following, penalised, plainly
from tests.algorithms.toy import Setup, answers, autoregressive, changed, engine_of, requests, run, scripts

pytestmark = pytest.mark.usefixtures("random_drafters")

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
MAKERS = ("autoregressive", "standalone_tree", "eagle3_tree", "naive_eagle", "dflash_tree", "ngram")


def asked() -> list[Request]:
    return [changed(r, **PARAMETERS[r.id % len(PARAMETERS)]) for r in requests(len(PARAMETERS), TOKENS)]


def with_logprobs() -> list[Request]:
    return [changed(request, logprobs=True) for request in asked()]


@cache
def expected() -> list[tuple[list[int], list[float]]]:
    return [plainly(request) for request in asked()]


def served(maker: str, setup: Setup) -> list[Completion]:
    texts = scripts(asked(), [tokens for tokens, _ in expected()])
    return run(hinted(ALL_MAKERS[maker](), texts), with_logprobs(), setup, TARGET).completions


@pytest.mark.parametrize("maker", MAKERS)
def test_all_parameters_side_by_side(maker: str) -> None:
    """Tokens and log-probabilities of a mixed batch are those of the loop, whatever was drafted and accepted."""
    for completion, (tokens, logprobs) in zip(served(maker, Setup(page_size=4)), expected(), strict=True):
        assert completion.token_ids == tokens
        assert completion.logprobs == pytest.approx(logprobs, abs=1e-4)
        assert maker in ("autoregressive", "naive_eagle") or max(completion.accepted_counts) >= 2


@pytest.mark.parametrize(
    ("rule", "setup"),
    [("rejection", Setup(page_size=4)), ("block", Setup(page_size=4, graph="step", async_steps=1))],
)
def test_log_probabilities_of_sampled_chains(monkeypatch: pytest.MonkeyPatch, rule: str, setup: Setup) -> None:
    """Drafts come from another distribution; emitted tokens are still reported with the target's probability."""
    monkeypatch.setattr("algorithms.models.loading.load_draft", lambda *_: blurred_target())
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
    accept = kernels.accept

    def counted(*args: Any, return_logprobs: bool, **options: Any) -> Accepted:
        computed.append(return_logprobs)
        return accept(*args, return_logprobs=return_logprobs, **options)

    monkeypatch.setattr(kernels, "accept", counted)
    plain = run(autoregressive(TARGET), asked()[:3], Setup(), TARGET).completions
    assert not any(computed) and [c.logprobs for c in plain] == [[], [], []]
    computed.clear()
    mixed = [changed(request, logprobs=request.id == 1) for request in asked()[:3]]
    got = run(autoregressive(TARGET), mixed, Setup(), TARGET).completions
    assert all(computed) and [len(c.logprobs) for c in got] == [0, TOKENS, 0]
    assert [c.token_ids for c in got] == [c.token_ids for c in plain]


def test_captured_steps_read_parameters_anew() -> None:
    """Parameters live in device memory: rows change hands between replays, and padding rows have none."""
    got = served("standalone_tree", Setup(page_size=4, graph="step", async_steps=1))
    assert [c.token_ids for c in got] == [tokens for tokens, _ in expected()]


def test_kernels_in_the_engine() -> None:
    """The same through the Triton kernels (interpreted where there is no GPU)."""
    short = [changed(asked()[i], max_new_tokens=4) for i in (3, 4)]
    texts = scripts(asked(), [tokens for tokens, _ in expected()])
    got = run(hinted(ALL_MAKERS["dflash_chain"](), texts), short, Setup(impl="triton", max_batch=2), TARGET)
    assert [c.token_ids for c in got.completions] == [expected()[i][0][:4] for i in (3, 4)]


def test_every_parameter_changes_something() -> None:
    """Every request of the mixed batch would get other tokens without its parameters."""
    for request, (tokens, _) in zip(asked(), expected(), strict=True):
        kept = {name: getattr(request.sampling, name) for name in ("max_new_tokens", "temperature", "seed")}
        bare = Request(request.id, request.prompt_ids, SamplingParams(**kept))
        assert request == bare or plainly(bare)[0] != tokens


@pytest.mark.parametrize("change", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}])
def test_a_filter_that_leaves_one_token_is_greedy(change: dict[str, Any]) -> None:
    narrow = [changed(r, temperature=1.5, **change) for r in requests(4, 8)]
    assert answers(narrow, Setup(), TARGET) == answers(requests(4, 8), Setup(), TARGET)


def test_end_of_text_may_be_ignored_and_stop_tokens_may_not() -> None:
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
