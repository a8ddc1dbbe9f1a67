"""Backends inside captured steps, with stand-ins of the packages and of CUDA graphs.

A tape replays operations on tensors and no code of the host. So a backend that reads lengths back, or keeps a length of
the capture, fails here as it would on a GPU.
"""

from itertools import product
from typing import Any

import pytest

from tests.algorithms import fake_packages, tape, toy
from tests.algorithms.drafters import ALL_MAKERS, TARGET, blurred_target, load_random_drafters
from tests.algorithms.toy import Setup, answers, requests, run

PACKAGE = dict(dispatch="flash_attention_4")
SINGLE: dict[str, tuple[str, dict[str, Any]]] = {
    "triton": ("fa4", {}), "package": ("fa4", PACKAGE), "flashinfer": ("flashinfer", {}), "torch": ("torch", {}),
}  # fmt: skip
NAMES = ("fa4", "flashinfer", "torch")
PAIRS = {
    f"{prefill}+{decode}": ("hybrid", dict(prefill=prefill, decode=decode))
    for prefill, decode in product(NAMES, NAMES)
    if prefill != decode
}
ASKED = requests(3, 6)


@pytest.fixture(autouse=True)
def standins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafters whose drafts are accepted now and then, on packages and graphs that need no GPU."""
    load_random_drafters(monkeypatch)
    monkeypatch.setattr("algorithms.models.loading.load_draft", lambda *_: blurred_target())
    fake_packages.install(monkeypatch)
    fake_packages.take_float32(monkeypatch)
    tape.install(monkeypatch)


def check(monkeypatch: pytest.MonkeyPatch, maker: str, name: str, options: dict[str, Any]) -> None:
    expected = answers(ASKED, Setup(), TARGET)
    monkeypatch.setitem(toy.BACKEND_OPTIONS, name, options)
    setup = Setup(backend=name, graph="step", page_size=4, max_batch=2, prefill_chunk=16)
    generation = run(ALL_MAKERS[maker](), ASKED, setup, TARGET)
    assert [c.token_ids for c in generation.completions] == expected
    assert generation.graphs.level == "step" and generation.graphs.num_graphs >= 2


@pytest.mark.parametrize(
    ("maker", "backend"),
    [("standalone_tree", backend) for backend in SINGLE] + [("autoregressive", "package"), ("dflash_tree", "package")],
)
def test_captured_steps_are_lossless(monkeypatch: pytest.MonkeyPatch, maker: str, backend: str) -> None:
    check(monkeypatch, maker, *SINGLE[backend])


@pytest.mark.parametrize("pair", PAIRS)
def test_every_pair_is_captured(monkeypatch: pytest.MonkeyPatch, pair: str) -> None:
    check(monkeypatch, "standalone_tree", *PAIRS[pair])
