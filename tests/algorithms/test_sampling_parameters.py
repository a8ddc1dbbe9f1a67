"""Sampling parameters of each request, bad words and `min_tokens` among them: whole decodings against a loop without
drafts and caches."""

from functools import cache
from typing import Any

import pytest
import torch

import specdec_kernels as kernels
from algorithms.engine.request import Completion, EngineError, Request
from algorithms.standalone import Standalone
from algorithms.step.sampling_params import MAX_BAD_WORD, SamplingNeeds, SamplingParams
from experiments.tasks.numerical_tie import penalised as looked_at
from specdec_kernels import Accepted, forbid_tokens
from tests.algorithms.drafters import ALL_MAKERS, TARGET, blurred_target, hinted
from tests.algorithms.reference_loop import following, forbidden, logits_after, penalised, plainly
from tests.algorithms.toy import VOCAB, Setup, answers, autoregressive, changed, engine_of, requests, run, scripts

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
FORBIDDING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9},
    {"temperature": 0.6, "repetition_penalty": 1.3},
    {"logit_bias": {3: 4.0}},
    {"temperature": 0.8, "top_k": 5},
)
"""Of requests that have bad words too, and some of them `min_tokens`."""
FREE = len(PARAMETERS)
"""Requests before those that forbid something."""
CAPTURED = Setup(page_size=4, graph="step", async_steps=1, prefill_chunk=4, prefill_tile=4)
CASES = {
    "autoregressive": Setup(page_size=4), "standalone_chain": CAPTURED, "standalone_tree": CAPTURED,
    "eagle3_tree": Setup(page_size=4), "naive_eagle": Setup(page_size=4), "dflash_tree": Setup(page_size=4),
    "ngram": Setup(page_size=4),
}  # fmt: skip


def bare() -> list[Request]:
    """The requests without what forbids."""
    parameters = PARAMETERS + FORBIDDING
    return [changed(r, **parameters[r.id]) for r in requests(len(parameters), TOKENS)]


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
    written = answers(bare()[FREE:], Setup(), TARGET)
    return bare()[:FREE] + [forbid(r, plain) for r, plain in zip(bare()[FREE:], written, strict=True)]


def with_logprobs() -> list[Request]:
    """With as many of the likeliest tokens as the request's number says: requests of one step differ in it."""
    return [changed(request, logprobs=True, top_logprobs=request.id) for request in asked()]


@cache
def expected() -> list[tuple[list[int], list[float]]]:
    return [plainly(request) for request in asked()]


@cache
def logits_by_place() -> list[list[torch.Tensor]]:
    """[V] logits of the loop, before each token of each request."""
    return [
        [logits_after(r, ids[:at]) for at in range(len(ids))] for r, (ids, _) in zip(asked(), expected(), strict=True)
    ]


def served(maker: str, some: list[Request], setup: Setup) -> list[Completion]:
    texts = scripts(asked(), [tokens for tokens, _ in expected()])
    return run(hinted(ALL_MAKERS[maker](), texts), some, setup, TARGET).completions


@pytest.mark.parametrize("maker", CASES)
def test_all_parameters_side_by_side(maker: str) -> None:
    """Tokens and log-probabilities of a mixed batch are those of the loop, whatever was drafted and accepted, and so
    are the likeliest tokens in the place of each. Captured steps read parameters anew: rows change hands between
    replays, and padding rows have none."""
    completions = served(maker, with_logprobs(), CASES[maker])
    for request, completion, (tokens, logprobs) in zip(with_logprobs(), completions, expected(), strict=True):
        assert completion.token_ids == tokens
        assert completion.logprobs == pytest.approx(logprobs, abs=1e-4)
        count = request.sampling.top_logprobs
        assert len(completion.top_logprobs) == (len(tokens) if count else 0)
        for at, found in enumerate(completion.top_logprobs):
            values, ids = logits_by_place()[request.id][at].log_softmax(-1).topk(count)
            assert [token for token, _ in found] == ids.tolist()
            assert [value for _, value in found] == pytest.approx(values.tolist(), abs=1e-4)
    assert maker in ("autoregressive", "naive_eagle") or max(max(c.accepted_counts) for c in completions) >= 2


def test_kernels_in_the_engine() -> None:
    """The same through the Triton kernels (interpreted where there is no GPU)."""
    few = (3, 4, 9)
    got = served("dflash_tree", [changed(asked()[i], max_new_tokens=4) for i in few], Setup(impl="triton", max_batch=2))
    assert [c.token_ids for c in got] == [expected()[i][0][:4] for i in few]


def test_kernels_and_tokens_of_no_probability() -> None:
    """Forbidden tokens are left out; a likeliest token far above the others does not hide them."""
    few = ((5,), (6,), (7,))
    request = changed(requests(1, 2)[0], top_logprobs=VOCAB, bad_words=few, logit_bias={9: 300.0})
    (completion,) = run(autoregressive(TARGET), [request], Setup(impl="triton"), TARGET).completions
    for found in completion.top_logprobs:
        assert {token for token, _ in found} == {*range(VOCAB)} - {5, 6, 7} and found[0] == (9, pytest.approx(0.0))
        assert all(value > -float("inf") and value < -100 for _, value in found[1:])


def test_a_difference_is_looked_at_in_the_same_logits() -> None:
    for request, (written, _) in zip(asked(), expected(), strict=True):
        for at in range(len(written)):
            found = looked_at(following([*request.prompt_ids, *written[:at]]).float(), request, written[:at])
            assert torch.allclose(found, logits_by_place()[request.id][at].float())


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_sampled_drafts_write_nothing_forbidden(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    """The drafter knows of no bad words and draws them; the target gives them no probability."""
    monkeypatch.setattr("algorithms.models.loading.load_draft", lambda *_: blurred_target())
    algorithm, few = Standalone(Standalone.Config(steps=3, rule=rule), TARGET, "random"), asked()[FREE:]
    written = run(algorithm, [changed(r, temperature=1.0) for r in few], Setup(), TARGET).completions
    for request, completion in zip(few, written, strict=True):
        for at, token in enumerate(completion.token_ids):
            assert token not in forbidden(request, completion.token_ids[:at])
    assert max(max(c.accepted_counts) for c in written) == 3


def test_steps_that_nobody_needs_it_in_forbid_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(logits: torch.Tensor, *args: Any, **options: Any) -> None:
        calls.append(len(logits))
        forbid_tokens(logits, *args, **options)

    monkeypatch.setattr("specdec_kernels.forbid_tokens", counted)
    engine, free, few = engine_of(autoregressive(TARGET), Setup(), TARGET), bare()[FREE:], asked()[FREE:]
    plain = engine.generate(free[:2]).completions
    assert not calls and engine.parts.state.forbidden is None
    assert engine.generate(few[:2]).completions[0].token_ids == expected()[FREE][0] and calls
    # Rows that forbade are used again by requests that do not.
    mixed = [*free[:2], few[2]]
    assert [c.token_ids for c in engine.generate(mixed).completions][:2] == [c.token_ids for c in plain]


@pytest.mark.parametrize(
    ("rule", "setup"), [("rejection", Setup(page_size=4)), ("block", Setup(page_size=4, graph="step", async_steps=1))]
)
def test_log_probabilities_of_sampled_chains(monkeypatch: pytest.MonkeyPatch, rule: str, setup: Setup) -> None:
    """Drafts come from another distribution; emitted tokens are still reported with the target's probability."""
    monkeypatch.setattr("algorithms.models.loading.load_draft", lambda *_: blurred_target())
    algorithm = Standalone(Standalone.Config(steps=3, rule=rule), TARGET, "random")
    accepted, few = list[int](), with_logprobs()[:FREE]
    for request, completion in zip(few, run(algorithm, few, setup, TARGET).completions, strict=True):
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


def test_every_parameter_changes_something() -> None:
    """Every request of the mixed batch would get other tokens without its parameters, or without what it forbids."""
    for request, free, (tokens, _) in zip(asked(), bare(), expected(), strict=True):
        kept = {name: getattr(request.sampling, name) for name in ("max_new_tokens", "temperature", "seed")}
        plain = Request(request.id, request.prompt_ids, SamplingParams(**kept)) if request.id < FREE else free
        assert request == plain or plainly(plain)[0] != tokens
        assert len(tokens) >= request.sampling.min_tokens


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
