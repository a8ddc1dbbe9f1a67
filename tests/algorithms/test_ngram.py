"""N-gram drafting is lossless in every setting, and saves steps where a text repeats itself."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from algorithms.ngram import NGram
from algorithms.runtime.models.loading import load_target
from algorithms.runtime.models.tokenizer import Tokenizer
from algorithms.runtime.request import Request
from algorithms.runtime.sampling_params import SamplingParams
from experiments.data.code import function_beginnings
from tests.algorithms.toy import Setup, answers, changed, random_target, requests, run

TARGET = random_target()
TINY = Path(__file__).parents[2] / "assets/tiny/target"
CODE = Setup(backend="torch", max_batch=2, max_length=400)


def ngram(**changes: Any) -> NGram:
    sizes: dict[str, Any] = dict(num_nodes=8, window=3, depth=6, max_breadth=3, capacity=1 << 14)
    return NGram(NGram.Config(**(sizes | changes)), TARGET, None)


def twice(asked: list[Request]) -> list[Request]:
    """The requests, and the same requests again with other ids."""
    return asked + [changed(request, id=request.id + len(asked)) for request in asked]


@cache
def written(temperature: float = 0.0) -> list[list[int]]:
    return answers(requests(5, temperature=temperature), Setup(backend="torch", max_batch=3), TARGET)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(
    ("backend", "page_size", "max_batch", "mode"),
    [("fa4", 1, 3, "bfs"), ("fa4", 16, 3, "prob"), ("torch", 1, 3, "prob"), ("torch", 16, 1, "bfs")],
)
def test_lossless(backend: str, page_size: int, max_batch: int, mode: str, temperature: float) -> None:
    """All requests twice with one store: the second time most drafts are right, and the output is the same."""
    asked = requests(5, temperature=temperature)
    setup = Setup(backend=backend, page_size=page_size, max_batch=max_batch)
    got = run(ngram(mode=mode), twice(asked), setup, TARGET)
    assert [c.token_ids for c in got.completions] == written(temperature) * 2
    accepted = [sum(c.accepted_counts) / len(c.accepted_counts) for c in got.completions]
    assert sum(accepted[5:]) > sum(accepted[:5])
    assert sum(accepted[5:]) / 5 > 1.5
    without = [step for c in got.completions for step in zip(c.drafted_counts, c.ran_out, strict=True) if not step[0]]
    assert without and all(ran_out for _, ran_out in without), "a store that knows no continuation drafts nothing"


@pytest.mark.parametrize("end", [1, 2, 5, 11])
def test_stops_inside_a_block(end: int) -> None:
    asked = requests(4)
    stopped = [changed(r, stop_token_ids=frozenset({ids[end - 1]})) for r, ids in zip(asked, written(), strict=False)]
    alone = answers(stopped, Setup(), TARGET)
    got = run(ngram(), twice(stopped), Setup(), TARGET).completions
    assert [c.token_ids for c in got] == alone * 2


@pytest.mark.parametrize(("graph", "piggyback"), [("draft", True), ("step", False), ("step", True)])
def test_captured_steps_count_nothing_twice(graph: str, piggyback: bool) -> None:
    """Warm-up and padding rows do not change the store: same tokens, same acceptance, same contents.

    Prompts that ride in steps enter the store in another order, which decides between continuations of equal count.
    """
    runs = []
    for level in ("none", graph):
        algorithm = ngram()
        got = run(
            algorithm, requests(5, max_new_tokens=14), Setup(max_batch=3, graph=level, piggyback=piggyback), TARGET
        )
        runs.append(([(c.token_ids, c.accepted_counts) for c in got.completions], algorithm._store.contents()))
    (eager, expected), (captured, found) = runs
    assert captured == eager
    for name in ("grams", "counts", *(() if graph == "step" and piggyback else ("lists",))):
        assert torch.equal(found[name], expected[name]), name


def test_a_full_store_is_still_lossless() -> None:
    """Evictions in almost every step."""
    got = run(ngram(capacity=400), requests(5), Setup(), TARGET)
    assert [c.token_ids for c in got.completions] == written()


def test_kernels_in_the_engine() -> None:
    """The same identity through the Triton kernels (interpreted where there is no GPU)."""
    asked = requests(1, max_new_tokens=4)
    got = run(ngram(num_nodes=5, window=2), twice(asked), Setup(impl="triton", max_batch=1), TARGET)
    assert [c.token_ids for c in got.completions] == [written()[0][:4]] * 2
    assert max(got.completions[1].accepted_counts) >= 2


def test_every_token_of_a_text_is_indexed_once() -> None:
    """After a run the store has counted each committed token: whole prompts, and answers up to the last token."""
    asked = requests(3)
    algorithm = ngram()
    got = run(algorithm, asked, Setup(max_batch=3), TARGET)
    contents = algorithm._store.contents()
    single = contents["grams"][:, 1] == -1
    counted = int(contents["counts"][single].sum())
    committed = [
        len(request.prompt_ids) - 1 + sum(a + 1 for a in completion.accepted_counts)
        for request, completion in zip(asked, got.completions, strict=True)
    ]
    assert counted >= sum(committed)
    # Late reading lets a finished request run on for a step or two.
    assert counted <= sum(committed) + 3 * 2 * (algorithm.max_depth + 1)


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


@pytest.mark.parametrize("mode", ["bfs", "prob"])
def test_code_that_repeats_is_drafted_well(mode: str) -> None:
    """The shipped target on beginnings of functions, asked for twice: at least 1.5 tokens per step from the start."""
    _, target = tiny()
    asked = code_requests(4, 40)
    algorithm = NGram(NGram.Config(mode=mode, capacity=1 << 16), target, None)
    got = run(algorithm, twice(asked), CODE, target).completions
    counts = [c.accepted_counts for c in got]
    assert tokens_per_step(counts[:4]) >= 1.5
    assert tokens_per_step(counts[4:]) >= 3
    assert [c.token_ids for c in got[4:]] == [c.token_ids for c in got[:4]] == code_answers(4, 40)


def test_a_corpus_is_counted_in_beforehand(tmp_path: Path) -> None:
    """A file with the answers of a run makes the same run take fewer steps."""
    tokenizer, target = tiny()
    asked = code_requests(2, 24)
    alone = run(NGram(NGram.Config(capacity=1 << 16), target, None), asked, CODE, target)
    corpus = tmp_path / "answers.txt"
    corpus.write_text(
        "\n".join(
            tokenizer.decode([*r.prompt_ids, *c.token_ids]) for r, c in zip(asked, alone.completions, strict=True)
        )
    )
    config = NGram.Config(capacity=1 << 16, corpus=str(corpus))
    helped = run(NGram(config, target, None), asked, CODE, target)
    assert [c.token_ids for c in helped.completions] == [c.token_ids for c in alone.completions]
    assert helped.num_steps < alone.num_steps


def test_a_corpus_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path in ("missing.txt", "binary"):
        with pytest.raises(ValueError, match="algo.corpus: expected a text file in UTF-8, got"):
            ngram(corpus=str(tmp_path / path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(num_nodes=1), "algo.num_nodes: expected 2 to 256, got 1"),
        (dict(depth=1), "algo.depth: expected 2 to 256, got 1"),
        (dict(window=16), "algo.window: expected 1 to 15, got 16"),
        (dict(max_breadth=33), "algo.max_breadth: expected 1 to 32, got 33"),
        (dict(min_breadth=9), "algo.min_breadth: expected 1 to 8, got 9"),
        (dict(capacity=10), "algo.capacity: expected 32 to 16777216, got 10"),
        (dict(mode="lru"), "algo.mode must be one of bfs, prob, got 'lru'"),
    ],
)
def test_ranges(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NGram.Config(**change)
