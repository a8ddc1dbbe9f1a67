"""Attention that a model's config asks for, through pages and backends: windows, soft cap, scale and sinks.

The truth is the dense mixer, which has a test of its own.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.algorithm import Batch, Resources
from algorithms.attention.backends import backends
from algorithms.attention.backends.protocol import BackendError
from algorithms.attention.cache import KVCache
from algorithms.attention.paged_attention import PagedMemory
from algorithms.models.decoder import Decoder
from algorithms.models.dense_mixer import DenseMixer
from algorithms.models.loading import Target
from algorithms.standalone import Standalone
from specdec_kernels import build_tree
from tests.algorithms import fake_packages
from tests.algorithms.toy import DEEP_CONFIG as CONFIG
from tests.algorithms.toy import VOCAB, Scripted, Setup, answers, randomise, requests, run, scripts

OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"sliding_windows": (None, 1, 3, 40)},
    "soft cap": {"soft_cap": 1.5},
    "scale": {"scale": 0.7},
    "sinks": {"sinks": True},
    "all": {"sliding_windows": (4, None, 4, 2), "soft_cap": 0.8, "scale": 0.5, "sinks": True},
}
PARENTS = (-1, 0, 0, 2, 2, 3)
PATHS = ((0, 1), (0, 2, 4), (0, 2, 3, 5))
PROMPT = 9


def target_of(options: str) -> Target:
    config = replace(CONFIG, **OPTIONS[options])
    return Target(model=randomise(Decoder(config), 2), config=config, path=Path("toy"))


def resources_of(target: Target, backend: str = "fa4", impl: str = "reference") -> Resources:
    kind = backends()[backend]
    return Resources(
        target=target, backend=kind(kind.Config(), impl), device=torch.device("cpu"), dtype=torch.float32,
        kv_dtype=torch.float32, num_pages=20, page_size=4, context=40, max_batch=2, impl=impl,
    )  # fmt: skip


def batch_at(length: int) -> Batch:
    """Two requests of `length` committed tokens on pages that are not adjacent."""
    return Batch(
        lengths=torch.full((2,), length),
        last_tokens=torch.zeros(2, dtype=torch.int64),
        page_table=torch.tensor([[3, 0, 7, 11, 2], [10, 5, 1, 8, 6]], dtype=torch.int32),
        history=torch.zeros(2, 41, dtype=torch.int64),
        active=torch.ones(2, dtype=torch.int32),
        sampling=None,  # type: ignore[arg-type]
        slots=slice(0, 2),
        max_length=length,
    )


def dense(target: Target, tokens: Tensor) -> Tensor:
    hidden, _ = target.model(tokens, DenseMixer(target.config, tokens.shape[1], "cpu"))
    return hidden


@pytest.mark.parametrize(
    ("backend", "impl", "options"),
    [(backend, "reference", options) for backend in ("fa4", "torch") for options in OPTIONS]
    + [("fa4", "triton", options) for options in ("window", "all")],
)
@torch.no_grad()
def test_prefill_chain_and_tree_are_the_dense_forward(backend: str, impl: str, options: str) -> None:
    target = target_of(options)
    resources = resources_of(target, backend, impl)
    memory = PagedMemory(KVCache.allocate(target.config, resources), resources)
    tokens = torch.randint(VOCAB, (2, PROMPT + len(PARENTS)), generator=torch.Generator().manual_seed(4))
    prompt, drafted = tokens[:, :PROMPT], tokens[:, PROMPT:]

    def forward(start: int, part: Tensor, **options: Any) -> Tensor:
        positions = options.pop("positions", start + torch.arange(part.shape[1]).repeat(2, 1))
        return target.model(part, memory.over(batch_at(start), positions, **options))[0]

    chain = torch.cat([forward(0, prompt[:, :5], phase="prefill"), forward(5, prompt[:, 5:])], 1)
    torch.testing.assert_close(chain, dense(target, prompt), rtol=1e-4, atol=1e-4)
    lengths = torch.full((2,), PROMPT)
    links = build_tree(torch.tensor([PARENTS, PARENTS], dtype=torch.int32), lengths, impl="reference")
    tree = forward(PROMPT, drafted, mode="tree", mask=links.mask, depths=links.depth, positions=links.positions)
    for path in PATHS:
        text = torch.cat([prompt, drafted[:, list(path)]], 1)
        torch.testing.assert_close(tree[:, list(path)], dense(target, text)[:, PROMPT:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", ["window", "all"])
@pytest.mark.parametrize("decoys", [False, True], ids=["chain", "tree"])
def test_the_engine_writes_what_the_dense_forward_writes(decoys: bool, options: str) -> None:
    target, asked = target_of(options), requests(4, max_new_tokens=10)
    texts = [list(request.prompt_ids) for request in asked]
    with torch.no_grad():
        for text in texts:
            for _ in range(10):
                text.append(int(target.model.logits(dense(target, torch.tensor([text]))[:, -1]).argmax()))
    written = [text[-10:] for text in texts]
    assert answers(asked, Setup(page_size=4), target) == written
    drafter = Scripted(scripts(asked, written), 3, lambda at, d: (at + d) % 3 != 0, decoys)
    assert [c.token_ids for c in run(drafter, asked, Setup(page_size=4), target).completions] == written


@pytest.mark.parametrize("topk", [1, 3], ids=["chain", "tree"])
def test_a_drafter_with_windows_sees_each_path_as_a_text(topk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token that the drafter runs has the logits that the dense forward has behind its path."""
    target, compared = target_of("all"), 0
    monkeypatch.setattr("algorithms.models.loading.load_draft", lambda *_: target)
    algorithm = Standalone(Standalone.Config(steps=4, topk=topk), target, "itself")
    propose, run_level = algorithm.propose, algorithm._run
    texts: list[list[list[int]]] = []  # per request the text up to each token of the last level

    def proposing(batch: Batch) -> Any:
        rows = zip(batch.history.tolist(), batch.lengths.tolist(), strict=True)
        texts[:] = [[history[:length]] for history, length in rows]
        return propose(batch)

    def running(tokens: Tensor, parents: Tensor | None, mixer: Any) -> Tensor:
        nonlocal compared
        logits = run_level(tokens, parents, mixer)
        columns = torch.zeros_like(tokens) if parents is None else parents
        for row, (level, own) in enumerate(zip(tokens.tolist(), columns.tolist(), strict=True)):
            texts[row] = [texts[row][column] + [token] for token, column in zip(level, own, strict=True)]
            for place, text in enumerate(texts[row]):
                expected = target.model.logits(dense(target, torch.tensor([text]))[:, -1])[0]
                torch.testing.assert_close(logits[row, place], expected, rtol=1e-4, atol=1e-4)
                compared += 1
        return logits

    algorithm.propose, algorithm._run = proposing, running  # type: ignore[method-assign]
    run(algorithm, requests(3, max_new_tokens=6), Setup(page_size=4), target)
    assert compared > 20


def test_layers_of_one_window_share_a_plan() -> None:
    target = target_of("all")
    resources = resources_of(target)
    memory = PagedMemory(KVCache.allocate(target.config, resources), resources)
    plans = memory.over(batch_at(5), torch.arange(3).repeat(2, 1)).groups[0].plans
    windows = [plan.metadata.window for plan in plans]
    assert windows == [4, None, 4, 2] and plans[0] is plans[2]


def test_a_backend_without_windows_over_trees_refuses_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_packages.install(monkeypatch)
    kind = backends()["fa4"]
    package = kind(kind.Config(dispatch="flash_attention_4"), "reference")
    arguments = (dict(decode="chain", verify="tree"), 16, torch.bfloat16, torch.device("cpu"))
    package.check(replace(CONFIG, head_dim=64), *arguments)
    windowed = replace(CONFIG, head_dim=64, sliding_windows=(None, 4, 4, 4))
    with pytest.raises(BackendError, match="verify of the target here: a window over a tree goes by depth"):
        package.check(windowed, *arguments)
