"""Grammars: every algorithm writes what a loop without drafts and caches writes, and all of it parses."""

import json
import re
import string
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from algorithms.engine.grammar import GrammarError, Grammars
from algorithms.engine.request import Completion, EngineError, Request
from algorithms.standalone import Standalone
from algorithms.step.sampling_params import GrammarParams, SamplingNeeds
from experiments.tasks.numerical_tie import look_at
from tests.algorithms.drafters import ALL_MAKERS, TARGET, blurred_target, chi_square_p, hinted
from tests.algorithms.reference_loop import following, plainly
from tests.algorithms.toy import VOCAB, Setup, autoregressive, changed, engine_of, requests, run, scripts

pytestmark = pytest.mark.usefixtures("random_drafters")

CHARACTERS = '{}[]":, -.' + string.digits + string.ascii_lowercase + string.ascii_uppercase[: 60 - 46]
END = VOCAB - 1
TOKENS = 40
SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "string", "pattern": "^[a-z]{2,4}$"},
        "k": {"enum": ["kilo", "kit", "moth"]},
        "on": {"type": "boolean"},
    },
    "required": ["n", "k", "on"],
    "additionalProperties": False,
}
REGEX = "[a-d]{3,9}(-[0-9]{2,4}){1,3}"
PAIRS = "[a-z0-9][a-z.:]"
NESTED = 'root ::= "[" (item ("," item)?)? "]"\nitem ::= root | [a-c] [a-c]?'
ASKED: tuple[dict[str, Any], ...] = (
    {"grammar": {"json_schema": SCHEMA}},
    {"grammar": {"regex": REGEX}, "temperature": 0.9},
    {},
    {"grammar": {"json_schema": SCHEMA}, "temperature": 0.8, "top_k": 7, "repetition_penalty": 1.2},
    {"grammar": {"regex": REGEX, "draft_forced": False}, "logit_bias": {12: 2.0}},
    {"grammar": {"ebnf": NESTED}, "temperature": 1.0, "bad_words": ((CHARACTERS.index("a"),),)},
    {"temperature": 0.7},
)


@cache
def grammars() -> Grammars:
    tokens = [character.encode() for character in CHARACTERS] + [b""]
    return Grammars(tokens, lambda text: [CHARACTERS.index(character) for character in text])


def setup(**changes: Any) -> Setup:
    return replace(Setup(page_size=4, max_length=96, grammars=grammars()), **changes)


def read(ids: list[int]) -> str:
    return "".join(CHARACTERS[token] for token in ids if token != END)


@cache
def asked() -> list[Request]:
    return [changed(r, eos_token_ids=frozenset({END}), **ASKED[r.id]) for r in requests(len(ASKED), TOKENS)]


def allowed(request: Request, output: list[int]) -> torch.Tensor:
    """[V] bool, by the text so far and nothing else."""
    if not request.sampling.constrained:
        return torch.ones(VOCAB, dtype=torch.bool)
    matcher = grammars().matcher(request.sampling.grammar, request.ends)
    matcher.follow(output)
    words = matcher.allowed()
    return torch.tensor([bool(int(words[token // 32]) >> (token % 32) & 1) for token in range(VOCAB)])


@cache
def expected() -> list[list[int]]:
    return [plainly(request, allowed)[0] for request in asked()]


def served(maker: str, how: Setup, some: slice = slice(None)) -> list[Completion]:
    drafter = hinted(ALL_MAKERS[maker](), scripts(asked(), expected()))
    return run(drafter, asked()[some], how, TARGET).completions


def in_schema(text: str) -> bool:
    """Whether `text` fits `SCHEMA`, by other means than the library's."""
    value = json.loads(text)
    name, kind, on = value["n"], value["k"], value["on"]
    fits = list(value) == list(SCHEMA["properties"]) and bool(re.fullmatch("[a-z]{2,4}", name))
    return fits and kind in ("kilo", "kit", "moth") and isinstance(on, bool)


def in_nested(text: str) -> bool:
    """Whether `text` is of the grammar `NESTED`."""
    while (shorter := re.sub(r"\[((X|[a-c][a-c]?)(,(X|[a-c][a-c]?))?)?\]", "X", text)) != text:
        text = shorter
    return text == "X"


def in_grammar(request: Request, text: str) -> bool:
    kind = request.sampling.grammar.kind
    if kind == "json_schema":
        return in_schema(text)
    return bool(re.fullmatch(REGEX, text)) if kind == "regex" else in_nested(text)


def test_what_is_written_parses() -> None:
    ended = 0
    for request, ids in zip(asked(), expected(), strict=True):
        if request.sampling.constrained and ids[-1] == END:
            assert in_grammar(request, read(ids))
            ended += 1
    assert ended >= 4


@pytest.mark.parametrize(
    "maker", ["eagle_tree", "mtp_tree", "standalone_tree", "dflash_tree", "dflash_chain", "ngram", "mixed"]
)
def test_every_algorithm_writes_what_the_loop_writes(maker: str) -> None:
    """Requests with and without grammars side by side, greedy and sampled, rows handed on."""
    completions = served(maker, setup())
    assert [c.token_ids for c in completions] == expected()
    for request, completion in zip(asked(), completions, strict=True):
        parsed = END in completion.token_ids if request.sampling.constrained else None
        assert (completion.parsed, completion.error) == (parsed, "")


@pytest.mark.parametrize(
    ("maker", "level", "async_steps"),
    [
        ("eagle3_tree", "step", 2),
        ("dflash_chain", "step", 1),
        ("autoregressive", "step", 0),
        ("standalone_chain", "verify", 1),
        ("ngram", "draft", 1),
    ],
)
def test_captured_steps(maker: str, level: str, async_steps: int) -> None:
    completions = served(maker, setup(graph=level, async_steps=async_steps, prefill_chunk=8, prefill_tile=4))
    assert [c.token_ids for c in completions] == expected()


def test_kernels_in_the_engine() -> None:
    (completion,) = served("dflash_tree", setup(impl="triton", max_batch=1), slice(1, 2))
    assert completion.token_ids == expected()[1]


@pytest.mark.parametrize("maker", ["standalone_chain", "mixed", "eagle_tree"])
def test_forced_tokens_are_drafts_that_cost_nothing(maker: str) -> None:
    """Random drafters are hardly ever right; the keys and the commas of the object are accepted all the same."""
    steps = []
    for drafts in (True, False):
        grammar = {"json_schema": SCHEMA, "draft_forced": drafts}
        request = changed(asked()[0], grammar=GrammarParams(**grammar))
        (completion,) = run(ALL_MAKERS[maker](), [request], setup(), TARGET).completions
        assert completion.token_ids == expected()[0]
        steps.append(len(completion.accepted_counts))
    assert steps[0] <= 0.7 * steps[1]


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_sampled_drafts_follow_the_constrained_distribution(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    """The joint distribution of two tokens. The drafter draws tokens outside of the grammar too, to which the target
    gives no probability."""
    temperature, seeds = 1.2, 1200
    monkeypatch.setattr("algorithms.models.loading.load_draft", lambda *_: blurred_target())
    algorithm = Standalone(Standalone.Config(steps=2, rule=rule), TARGET, "random")
    first = changed(asked()[0], max_new_tokens=2, temperature=temperature, grammar=GrammarParams(regex=PAIRS))
    got = run(
        algorithm, [changed(first, id=i, seed=i) for i in range(seeds)], setup(max_batch=200, prefill_tile=4), TARGET
    ).completions
    counts = Counter(tuple(c.token_ids) for c in got)

    def following_in(output: list[int]) -> dict[int, float]:
        logits = following([*first.prompt_ids, *output])
        logits[~allowed(first, output)] = -torch.inf
        return {token: p for token, p in enumerate((logits / temperature).softmax(0).tolist()) if p}

    exact = {(a, b): p * q for a, p in following_in([]).items() for b, q in following_in([a]).items()}
    assert chi_square_p(exact, counts) > 1e-6
    assert 0.02 < sum(c.accepted_counts[0] > 0 for c in got) / seeds < 0.95


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(GrammarError, match=r"xgrammar is missing; install it: pip install -e '.\[grammar\]'"):
        Grammars([b"a"], lambda text: [0])


@pytest.mark.parametrize("maker", ["autoregressive", "eagle3_tree", "ngram"])
def test_a_grammar_that_leaves_no_token_ends_its_request_alone(maker: str) -> None:
    """Bad words take away all that the grammar allows. What was accepted before stands, and may be all that is asked
    for."""
    few = ((CHARACTERS.index("a"),), (CHARACTERS.index("b"),))
    stuck = changed(asked()[1], grammar=GrammarParams(regex="cd[ab]"), bad_words=few, logprobs=True)
    ended = changed(stuck, id=2, max_new_tokens=2)
    done = run(ALL_MAKERS[maker](), [asked()[0], ended], setup(), TARGET).completions
    assert [c.finish_reason for c in done] == ["stop_token", "length"] and read(done[1].token_ids) == "cd"
    engine = engine_of(ALL_MAKERS[maker](), setup(), TARGET)
    done = engine.generate([asked()[0], stuck]).completions
    assert done[0].token_ids == expected()[0]
    assert (done[1].finish_reason, read(done[1].token_ids), done[1].parsed) == ("error", "cd", False)
    assert len(done[1].logprobs) == 2
    assert "sampling.grammar and sampling.bad_words leave no token" in done[1].error


def test_a_difference_is_looked_at_within_the_grammar() -> None:
    """A drawn token's interval holds the uniform that drew it, in the distribution that the grammar leaves."""
    request, written = asked()[1], expected()[1]

    def gaps(compiler: Grammars | None) -> list[float]:
        look = look_at(TARGET, [request], [Completion(1, token_ids=written)], grammars=compiler)
        same = [{"position": at, "token": token, "baseline_token": token} for at, token in enumerate(written)]
        return [look(0, found)["gap"] for found in same]

    assert max(gaps(grammars())) < 1e-6 and max(gaps(None)) > 0.01


@pytest.mark.parametrize(
    ("change", "compiler", "message"),
    [
        ({"grammar": GrammarParams(regex="a(b")}, True, "sampling.grammar.regex: it cannot be compiled: .*parenthesis"),
        ({"grammar": GrammarParams(ebnf="root ::= x")}, True, "sampling.grammar.ebnf: .*not defined"),
        ({"grammar": GrammarParams(json_schema='{"type": "so"}')}, True, "sampling.grammar.json_schema: .*so"),
        ({"eos_token_ids": frozenset()}, True, "sampling.grammar: expected a stop token"),
        ({}, False, "sampling.grammar: this engine was made without a compiler of grammars"),
    ],
)
def test_grammars_that_cannot_be_served(change: dict[str, Any], compiler: bool, message: str) -> None:
    engine = engine_of(autoregressive(TARGET), setup(grammars=grammars() if compiler else None), TARGET)
    with pytest.raises(EngineError, match=f"request 0: {message}"):
        engine.generate([changed(asked()[0], **change)])


def test_an_aborted_request_leaves_no_matcher() -> None:
    """Waiting or running; the others keep theirs."""
    few = [request for request in asked() if request.sampling.constrained][:3]
    engine = engine_of(ALL_MAKERS["autoregressive"](), setup(max_batch=2), TARGET)
    with engine.session(SamplingNeeds.of(request.sampling for request in few)) as session:
        for request in few:
            session.submit(request)
        session.step()
        assert set(session._matchers) == {request.id for request in few[:2]}
        for request in (few[0], few[2]):
            assert session.abort(request.id) is not None
        assert set(session._matchers) == {few[1].id}
