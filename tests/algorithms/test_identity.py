"""Every algorithm on every backend, page size and batch size writes exactly what the target alone writes."""

from functools import cache
from typing import Any

import pytest

from algorithms.engine.engine import Engine
from algorithms.engine.request import Completion, Request
from algorithms.lookup import NGram
from tests.algorithms.drafters import ALL_MAKERS, TARGET, TWINS, hinted
from tests.algorithms.toy import Setup, autoregressive, changed, engine_of, requests, run, scripts, spell

pytestmark = pytest.mark.usefixtures("random_drafters")

TOKENS = 12


@cache
def reference() -> tuple[list[Request], list[Completion], list[list[int]]]:
    """Requests that end in every way, their autoregressive completions one by one, and the texts without an end."""
    free = [changed(r, temperature=(0.0, 0.8, 1.2)[r.id % 3]) for r in requests(7, TOKENS)]
    written = _alone(free)
    ends = ({}, {"stop_token_ids": 5}, {"stop_strings": 7}, {"max_new_tokens": 9})
    asked = []
    for request, completion in zip(free, written, strict=True):
        change = dict(ends[request.id % 4])
        if "stop_token_ids" in change:
            change["stop_token_ids"] = frozenset({completion.token_ids[change["stop_token_ids"]]})
        if "stop_strings" in change:
            at = change["stop_strings"]
            change["stop_strings"] = (spell(completion.token_ids[at : at + 2]),)
        asked.append(changed(request, logprobs=True, **change))
    return asked, _alone(asked), scripts(free, [completion.token_ids for completion in written])


def _alone(asked: list[Request]) -> list[Completion]:
    return run(autoregressive(TARGET), asked, Setup(backend="torch", max_batch=1), TARGET).completions


# Prompts of `requests` have 5, 2, 17, 30, 9, 16, 1 and 33 tokens, of which all but the last are prefilled.
CUTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "a tile a step": dict(prefill_chunk=4, prefill_tile=4),
    "tiles of one chunk": dict(prefill_chunk=13, prefill_tile=4),
    "one token a step": dict(prefill_chunk=1),
    "all at once": dict(prefill_tile=64),
}
SETUPS = (
    (("fa4", 1, 3), ("torch", 16, 3)),
    (("hybrid", 16, 3), ("torch", 1, 2)),
    (("fa4", 16, 2), ("torch", 1, 3)),
    (("hybrid", 1, 2), ("torch", 16, 3)),
)
"""Backend, page size and batch size: every two values of different ones meet. A hybrid one drafts by `fa4`."""
CASES = [
    (maker, list(CUTS)[(number + number // 4 + place) % len(CUTS)], *setup)
    for number, maker in enumerate(ALL_MAKERS)
    for place, setup in enumerate(SETUPS[number % 4])
    if maker not in TWINS or place == number % 2
]
"""Each kind of drafter drafts by each backend. A chain and a tree of one stand side by side, and take one row each."""


@pytest.mark.parametrize(("maker", "cut", "backend", "page_size", "max_batch"), CASES)
def test_output_is_the_targets_own(maker: str, cut: str, backend: str, page_size: int, max_batch: int) -> None:
    """Token for token, greedy and sampled side by side, in batches that requests enter and leave all the time. Prompts
    arrive whole, and by chunks while others decode. Log-probabilities are the target's own, and not after filters."""
    asked, alone, texts = reference()
    setup = Setup(backend=backend, page_size=page_size, max_batch=max_batch, **CUTS[cut])
    got = run(hinted(ALL_MAKERS[maker](), texts), asked, setup, TARGET).completions
    for ours, plain in zip(got, alone, strict=True):
        assert (ours.token_ids, ours.text, ours.finish_reason) == (plain.token_ids, plain.text, plain.finish_reason)
        assert ours.logprobs == pytest.approx(plain.logprobs, abs=1e-4) and max(ours.logprobs) < 0
    if maker != "autoregressive":
        assert any(0 < c.num_truncated < c.accepted_counts[-1] + 1 for c in got), "no request ended inside a block"
        assert len({count for c in got for count in c.accepted_counts}) > 1


def test_forgetting_makes_the_next_run_the_first() -> None:
    """A store of texts knows the answers the second time, unless it forgets them; captured steps go on."""
    asked = requests(5, TOKENS)

    def counts(engine: Engine) -> list[list[int]]:
        return [completion.accepted_counts for completion in engine.generate(asked).completions]

    engine = engine_of(NGram(NGram.Config(), TARGET, None), Setup(graph="step"), TARGET)
    first, second = counts(engine), counts(engine)
    assert sum(map(len, second)) < sum(map(len, first))
    engine.reset()
    assert counts(engine) == first


def test_reference_ends_in_every_way() -> None:
    asked, alone, _ = reference()
    assert {c.finish_reason for c in alone} == {"length", "stop_token", "stop_string"}
    assert {len(c.token_ids) for c in alone} >= {9, TOKENS}
    assert {r.sampling.temperature for r in asked} == {0.0, 0.8, 1.2}
