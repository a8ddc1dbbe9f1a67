"""A short soak of every algorithm over random models; `make soak` is the long one, with the shipped models."""

from __future__ import annotations

from functools import cache

import pytest

from tests.algorithms.drafters import ALL_MAKERS, TARGET, hinted, load_random_drafters
from tests.algorithms.soak import Soak, World, learn, plan, varied
from tests.algorithms.toy import VOCAB, Setup, requests, scripts

STEPS = 70
PLAN = {maker: (setup, steps) for maker, setup, steps in plan(list(ALL_MAKERS), STEPS * len(ALL_MAKERS))}


@cache
def world() -> World:
    asked = [varied(request, VOCAB) for request in requests(24, max_new_tokens=22)]
    known = learn(TARGET, asked, Setup())
    texts = scripts(asked, [ids for _, ids in known])
    makers = {name: lambda make=make: hinted(make(), texts) for name, make in ALL_MAKERS.items()}
    return World(TARGET, known, makers, longest=56)


@pytest.mark.parametrize("maker", ALL_MAKERS)
def test_traffic_of_every_kind(monkeypatch: pytest.MonkeyPatch, maker: str) -> None:
    load_random_drafters(monkeypatch)
    setup, steps = PLAN[maker]
    soak = Soak(world(), maker, setup, seed=0)
    soak.run(steps)
    counts = soak.counts
    assert counts["finished"] >= 8 and counts["aborted"] >= 1 and counts["steps with an exhausted pool"] >= 10
    assert maker == "autoregressive" or counts["ended inside a block"] >= 2
