"""Drafting from the texts of requests, by n-grams and by suffixes: lossless in every setting, fewer steps where a text
repeats itself, and one store whose texts live and end with the requests."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from algorithms.engine.request import Request
from algorithms.lookup import Lookup, NGram, Suffix
from algorithms.models.loading import load_target
from algorithms.models.tokenizer import Tokenizer
from algorithms.step.sampling_params import SamplingNeeds, SamplingParams
from experiments.data.code import function_beginnings
from tests.algorithms.drafters import mixed
from tests.algorithms.toy import Setup, answers, changed, engine_of, random_target, requests, run, texts_of

TARGET = random_target()
TINY = Path(__file__).parents[2] / "assets/tiny/target"
TOKENS = 12
CODE = Setup(backend="torch", max_batch=2, max_length=400)
KINDS = {"ngram": NGram, "suffix": Suffix}


def lookup(kind: str, **changes: Any) -> Lookup:
    return KINDS[kind](KINDS[kind].Config(**({"num_nodes": 8} | changes)), TARGET, None)


def twice(asked: list[Request]) -> list[Request]:
    """The requests, and the same requests again with other ids."""
    return asked + [changed(request, id=request.id + len(asked)) for request in asked]


@cache
def written(temperature: float = 0.0) -> list[list[int]]:
    return answers(requests(5, TOKENS, temperature=temperature), Setup(backend="torch", max_batch=3), TARGET)


@pytest.mark.parametrize(
    ("backend", "page_size", "max_batch", "kind", "temperature"),
    [
        ("fa4", 1, 3, "ngram", 0.0),
        ("fa4", 16, 3, "suffix", 0.9),
        ("torch", 1, 3, "suffix", 0.0),
        ("torch", 16, 1, "ngram", 0.9),
    ],
)
def test_lossless(backend: str, page_size: int, max_batch: int, kind: str, temperature: float) -> None:
    """All requests twice with one store: the second time most drafts are right, and the output is the same."""
    asked = requests(5, TOKENS, temperature=temperature)
    setup = Setup(backend=backend, page_size=page_size, max_batch=max_batch)
    got = run(lookup(kind), twice(asked), setup, TARGET)
    assert [c.token_ids for c in got.completions] == written(temperature) * 2
    accepted = [sum(c.accepted_counts) / len(c.accepted_counts) for c in got.completions]
    assert sum(accepted[5:]) > sum(accepted[:5])
    assert sum(accepted[5:]) / 5 > 1.5
    without = [step for c in got.completions for step in zip(c.drafted_counts, c.ran_out, strict=True) if not step[0]]
    assert without and all(ran_out for _, ran_out in without), "a store that knows no continuation drafts nothing"


@pytest.mark.parametrize(
    ("kind", "graph", "mixed_prefill"),
    [("ngram", "draft", True), ("suffix", "step", False), ("ngram", "step", True), ("suffix", "step", True)],
)
def test_captured_steps_write_nothing_twice(kind: str, graph: str, mixed_prefill: bool) -> None:
    """Warm-up and padding rows do not change the store: same tokens, same acceptance, same texts.

    Prompts that ride in steps begin their texts in another order.
    """
    assert served(kind, graph, mixed_prefill) == served(kind, "none", mixed_prefill)


@cache
def served(kind: str, graph: str, mixed_prefill: bool) -> tuple[list[list[int]], list[list[int]]]:
    """The tokens of some requests, and the texts that the store has then."""
    engine = engine_of(lookup(kind), Setup(max_batch=3, graph=graph, mixed_prefill=mixed_prefill), TARGET)
    got = engine.generate(requests(5, max_new_tokens=8))
    (texts,) = engine.parts.resources.histories
    held = texts_of(texts.store)
    assert int(texts.store.clock) == 5
    return [c.token_ids for c in got.completions], sorted(held) if mixed_prefill else held


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_in_the_engine(kind: str) -> None:
    """The same identity through the Triton kernels (interpreted where there is no GPU)."""
    asked = requests(1, max_new_tokens=4)
    got = run(lookup(kind, num_nodes=5, max_ngram=2), twice(asked), Setup(impl="triton", max_batch=1), TARGET)
    assert [c.token_ids for c in got.completions] == [written()[0][:4]] * 2
    assert max(got.completions[1].accepted_counts) >= 2


@pytest.mark.parametrize("graph", ["none", "step"])
def test_two_drafters_read_one_store(graph: str) -> None:
    """Each token is written once, and each drafter drafts what it would have drafted alone."""
    asked = requests(4, TOKENS)
    parts = {"first": {"name": "suffix", "num_nodes": 8}, "second": {"name": "ngram", "num_nodes": 8}}
    engine = engine_of(mixed(**parts), Setup(max_batch=1, graph=graph), TARGET)
    both = engine.generate(asked).completions
    (texts,) = engine.parts.resources.histories
    assert int(texts.store.clock) == len(asked)
    assert [c.token_ids for c in both] == written()[:4]
    for of_both, *of_parts in zip(both, *map(steps_alone, KINDS), strict=True):
        assert len(of_both.accepted_counts) <= min(of_parts)


@cache
def steps_alone(kind: str) -> list[int]:
    """Of the first requests, one after another."""
    alone = run(lookup(kind), requests(4, TOKENS), Setup(max_batch=1), TARGET).completions
    return [len(completion.accepted_counts) for completion in alone]


@pytest.mark.parametrize(("kind", "graph"), [("ngram", "step"), ("suffix", "none")])
def test_own_texts_make_drafts_independent_of_other_requests(kind: str, graph: str) -> None:
    """Requests in other company, in other rows and behind others, one of them with a prompt of one token."""
    asked = requests(8, 6)
    counts = {}
    for batch, order in ((1, list(range(8))), (3, [6, 3, 0, 7, 1, 5, 2, 4])):
        setup = Setup(max_batch=batch, graph=graph)
        got = run(lookup(kind, shared=False), [asked[i] for i in order], setup, TARGET).completions
        counts[batch] = {c.request_id: (c.token_ids, c.accepted_counts, c.drafted_counts) for c in got}
    assert counts[1] == counts[3]
    assert not lookup(kind, shared=False).learns and lookup(kind).learns


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_requests_that_end_in_every_way(kind: str) -> None:
    """A request that is aborted, one that fails, and one that ends by itself leave what they have written; the rows
    behind them go on with their own."""
    engine = engine_of(lookup(kind, histories=4), Setup(max_batch=3), TARGET)
    asked = requests(4, 10)
    with engine.session(SamplingNeeds()) as session:
        for request in asked[:3]:
            session.submit(request)
        done = session.step() + session.step()
        aborted = session.abort(0)
        session.submit(asked[3])
        done += session.step()
        broken = next(running for running in engine.scheduler.running if running.request.id == 1)
        session._move_slots([session._fail(broken)])  # type: ignore[list-item]
        while not session.idle:
            done += session.step()
    (texts,) = engine.parts.resources.histories
    held = texts_of(texts.store)
    assert aborted is not None and len(held) == 4
    got = {c.request_id: c.token_ids for c in done} | {0: aborted.token_ids, 1: broken.completion.token_ids}
    for request in asked:
        whole = [*request.prompt_ids, *got[request.id]]
        assert [text[: len(whole)] for text in held].count(whole) == 1, request.id
    expected = answers(asked, Setup(max_batch=3), TARGET)
    assert [got[2], got[3]] == expected[2:] and got[1] == expected[1][: len(got[1])]


@cache
def tiny() -> tuple[Tokenizer, Any]:
    return Tokenizer.load(TINY), load_target(TINY, torch.device("cpu"), torch.float32)


def code_requests(count: int, max_new_tokens: int) -> list[Request]:
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    tokenizer, _ = tiny()
    return [
        Request(i, tuple(tokenizer.encode(item.prompt)), sampling, stop_token_ids=tokenizer.eos_ids)
        for i, item in enumerate(function_beginnings(count))
    ]


def tokens_per_step(counts: list[list[int]]) -> float:
    return sum(a + 1 for row in counts for a in row) / sum(len(row) for row in counts)


@cache
def code_answers(count: int, max_new_tokens: int) -> list[list[int]]:
    _, target = tiny()
    return answers(code_requests(count, max_new_tokens), CODE, target)


@pytest.mark.parametrize("kind", KINDS)
def test_code_that_repeats_is_drafted_well(kind: str) -> None:
    """The shipped target on beginnings of functions, asked for twice: at least 1.5 tokens per step from the start."""
    _, target = tiny()
    asked = code_requests(2, 32)
    got = run(KINDS[kind](KINDS[kind].Config(), target, None), twice(asked), CODE, target).completions
    counts = [c.accepted_counts for c in got]
    assert tokens_per_step(counts[:2]) >= 1.5
    assert tokens_per_step(counts[2:]) >= 3
    assert [c.token_ids for c in got[2:]] == [c.token_ids for c in got[:2]] == code_answers(2, 32)


@pytest.mark.parametrize("kind", KINDS)
def test_a_corpus_is_looked_up(tmp_path: Path, kind: str) -> None:
    """A file with the answers of a run makes the same run take fewer steps, also when the store has forgotten."""
    tokenizer, target = tiny()
    asked = code_requests(2, 16)
    alone = run(KINDS[kind](KINDS[kind].Config(), target, None), asked, CODE, target)
    corpus = tmp_path / "answers.txt"
    corpus.write_text(
        "\n".join(
            tokenizer.decode([*r.prompt_ids, *c.token_ids]) for r, c in zip(asked, alone.completions, strict=True)
        )
    )
    engine = engine_of(KINDS[kind](KINDS[kind].Config(corpus=str(corpus)), target, None), CODE, target)
    helped = engine.generate(asked)
    assert [c.token_ids for c in helped.completions] == [c.token_ids for c in alone.completions]
    assert helped.num_steps < alone.num_steps
    engine.reset()
    assert engine.generate(asked).num_steps == helped.num_steps


def test_a_corpus_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path in ("missing.txt", "binary"):
        with pytest.raises(ValueError, match="algo.corpus: expected a text file in UTF-8, got"):
            lookup("suffix", corpus=str(tmp_path / path))
