"""A deterministic target gives a token the same bits in a prompt, a chunk of one, alone, in a chain and in a tree."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.algorithm import Resources
from algorithms.attention.backends import backends
from algorithms.attention.backends.protocol import BackendError
from algorithms.attention.cache import KVCache
from algorithms.attention.memory import PagedMemory
from algorithms.attention.paged_attention import split_rows
from algorithms.engine.engine import check_backend
from algorithms.engine.request import EngineError
from algorithms.engine.settings import RuntimeSettings
from algorithms.models.decoder import Decoder
from algorithms.models.latent.memory import LatentMemory
from algorithms.models.loading import Target
from experiments.app.hardware import resolve_hardware
from specdec_kernels import build_tree
from tests.algorithms.layer_kinds import LATENT, target_of
from tests.algorithms.tiny_folders import randomise
from tests.algorithms.toy import CONFIG, VOCAB, Setup, autoregressive, engine_of, random_target
from tests.exact_products import add_products_in_order

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
PARENTS = (-1, 0, 0, 2, 1, 3)
PATH = (0, 2, 3, 5)
LENGTH, PAGE, PAGES = 70, 8, 12
"""More tokens than the projections take without being asked for the same bits."""


def target_with(kind: str) -> Target:
    if kind == "latent":
        return target_of("latent")
    config = replace(CONFIG, num_layers=2, sliding_windows=(None, 20))
    model = Decoder(config).requires_grad_(False)
    randomise(model, 2)
    return Target(model=model, config=config, path=Path("toy"))


class Runs:
    """Forwards of a deterministic target over what it keeps of two requests."""

    def __init__(self, target: Target) -> None:
        self.model = target.model.to(DEVICE, DTYPE)
        backend = backends()["fa4"]
        resources = Resources(
            target=target, backend=backend(backend.Config(), "triton", True), device=torch.device(DEVICE), dtype=DTYPE,
            kv_dtype=DTYPE, num_pages=2 * PAGES, page_size=PAGE, context=PAGE * PAGES, max_batch=2, impl="triton",
            fused=True, deterministic=True,
        )  # fmt: skip
        resources.choose_forward(self.model)
        self.memory: Any = (
            LatentMemory(target.config, LATENT, resources)
            if target.config.mixings
            else PagedMemory(KVCache.allocate(target.config, resources), resources)
        )

    def _batch(self, starts: list[int], requests: Sequence[int]) -> Any:
        pages = torch.arange(2 * PAGES, dtype=torch.int32).view(2, PAGES).flip(1)[list(requests)].contiguous()
        active = torch.ones(len(starts), dtype=torch.int32, device=DEVICE)
        lengths = torch.tensor(starts, device=DEVICE)
        return SimpleNamespace(page_table=pages.to(DEVICE), lengths=lengths, active=active, max_length=max(starts))

    def tiles(
        self, starts: list[int], tokens: Tensor, requests: Sequence[int] = (0,), counts: Sequence[int] = ()
    ) -> Any:
        """Of prompts: row b stands behind the first `starts[b]` tokens of `requests[b]`."""
        at, width = self._batch(starts, requests), tokens.shape[1]
        real = torch.tensor(counts or [width] * len(starts), dtype=torch.int32, device=DEVICE)
        return self.memory.tiles(at, at.lengths[:, None] + torch.arange(width, device=DEVICE), real, None)

    def nodes(self, starts: list[int], parents: Sequence[int], chain: bool) -> Any:
        """Of a draft of each request."""
        at, rows = self._batch(starts, range(len(starts))), len(starts)
        links = build_tree(torch.tensor([parents] * rows, dtype=torch.int32, device=DEVICE), at.lengths, impl="triton")
        return self.memory.nodes(at, links, chain, len(PATH) - 1)

    def __call__(self, mixer: Any, tokens: Tensor) -> Tensor:
        """Hidden states and logits of each token."""
        hidden = self.model(tokens, mixer)[0]
        return torch.cat([hidden, self.model.logits(hidden)], -1)


@pytest.mark.parametrize("kind", ["attention", "latent"])
@torch.no_grad()
def test_a_token_has_the_same_bits_wherever_it_is_computed(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    add_products_in_order(monkeypatch)
    run = Runs(target_with(kind))
    text = torch.randint(VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    start, chain = LENGTH - len(PATH), (-1, 0, 1, 2)
    ours, whole = text[:, start:].clone(), run(run.tiles([0], text), text)[0]

    def same(found: Tensor, first: int, what: str) -> None:
        assert torch.equal(found, whole[first : first + len(found)]), what

    same(run(run.tiles([0], text[:, :41]), text[:, :41])[0], 0, "the first chunk")
    same(run(run.tiles([41], text[:, 41:]), text[:, 41:])[0], 41, "the second chunk")
    same(run(run.nodes([LENGTH - 1], (-1,), True), text[:, -1:])[0], LENGTH - 1, "one token")
    both = run(run.nodes([start, 3], chain, True), ours.repeat(2, 1))
    same(both[0], start, "a chain among others")
    assert not torch.equal(both[1], whole[start:])
    drafted = torch.zeros(1, len(PARENTS), dtype=torch.int64, device=DEVICE)
    drafted[0, list(PATH)] = ours[0]
    same(run(run.nodes([start], PARENTS, False), drafted)[0, list(PATH)], start, "a path of a tree")
    run(run.tiles([start], ours), ours)  # the tree has stored its nodes in these places
    run(run.tiles([0], text[:, :41], [1]), text[:, :41])
    tiles = torch.zeros(2, 16, dtype=torch.int64, device=DEVICE)
    tiles[0], tiles[1, : LENGTH - 57] = text[0, 41:57], text[0, 57:]
    mixers = [run.nodes([start], chain, True), run.tiles([41, 57], tiles, [1, 1], [16, LENGTH - 57])]
    joint_rows = run(run.memory.joint(mixers), torch.cat([ours.flatten(), tiles.flatten()]))
    verified, prompt = split_rows(joint_rows, [ours.shape, tiles.shape])
    same(verified[0], start, "a chain beside tiles of a prompt")
    same(prompt.flatten(0, 1)[: LENGTH - 41], 41, "tiles of a prompt beside a chain")


@pytest.mark.parametrize(
    "name, options, impl",
    [
        ("torch", {}, "triton"),
        ("hybrid", dict(prefill="torch"), "triton"),
        ("fa4", dict(dispatch="auto"), "triton"),
        ("fa4", {}, "reference"),
    ],
)
def test_a_backend_that_promises_no_bits_is_refused(name: str, options: dict[str, str], impl: str) -> None:
    kind = backends()[name]
    with pytest.raises(BackendError, match="runtime.deterministic=true asks for"):
        kind(kind.Config(**options), impl, True)
    assert not kind(kind.Config(), impl).deterministic


def test_torch_operations_are_refused() -> None:
    target = random_target()
    for setting in (dict(forward="torch"), dict(impl="reference")):
        with pytest.raises(ValueError, match="runtime.deterministic=true needs the fused kernels, got runtime"):
            RuntimeSettings(deterministic=True, **setting)
    engine = engine_of(autoregressive(target), Setup(), target)
    backend, settings = engine.parts.resources.backend, RuntimeSettings(deterministic=True)
    with pytest.raises(EngineError, match="expected a backend built with deterministic, got backend=fa4"):
        check_backend(backend, target, engine.parts.algorithm, settings)
    assert resolve_hardware(RuntimeSettings(device="cpu", deterministic=True)).forward == "fused"
