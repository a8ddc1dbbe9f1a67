"""A deterministic target gives a token the same bits in a prompt, a chunk of one, alone, in a chain and in a tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.algorithm import Batch, Resources
from algorithms.attention.backends.protocol import BackendError
from algorithms.attention.backends.selection import backends
from algorithms.attention.cache import KVCache
from algorithms.attention.memory import PagedMemory
from algorithms.attention.paged_attention import PagedMixer, split_rows
from algorithms.engine.engine import check_backend
from algorithms.engine.request import EngineError
from algorithms.engine.settings import RuntimeSettings
from algorithms.models.decoder import Decoder
from algorithms.models.latent.memory import LatentMemory, LatentMixer
from algorithms.models.loading import Target
from experiments.app.hardware import resolve_hardware
from specdec_kernels import build_tree, mask_paths
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


class Runs:
    """Forwards of a deterministic target over one cache of two requests."""

    def __init__(self) -> None:
        config = replace(CONFIG, num_layers=2, sliding_windows=(None, 20))
        self.model = Decoder(config).requires_grad_(False)
        randomise(self.model, 2)
        self.model.to(DEVICE, DTYPE)
        target = Target(model=self.model, config=config, path=Path("toy"))
        backend = backends()["fa4"]
        self.resources = Resources(
            target=target,
            backend=backend(backend.Config(), "triton", True),
            device=torch.device(DEVICE),
            dtype=DTYPE,
            kv_dtype=DTYPE,
            num_pages=2 * PAGES,
            page_size=PAGE,
            context=PAGE * PAGES,
            max_batch=2,
            impl="triton",
            fused=True,
            deterministic=True,
        )
        self.resources.choose_forward(self.model)
        self.cache = KVCache.allocate(config, self.resources)

    def __call__(self, start: int, tokens: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """Hidden states and logits of `tokens` [B, N] behind the first `start` tokens of each request."""
        starts = torch.full((len(tokens),), start, device=DEVICE)
        hidden, _ = self.model(tokens, self.mixer(starts, tokens, torch.arange(len(tokens)), **options))
        return hidden, self.model.logits(hidden)

    def beside(self, groups: list[tuple[PagedMixer, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Hidden states and logits of each of `groups` in one forward."""
        joint = PagedMemory(self.cache, self.resources).joint([mixer for mixer, _ in groups])
        hidden, _ = self.model(torch.cat([tokens.flatten() for _, tokens in groups]), joint)
        shapes = [tokens.shape for _, tokens in groups]
        return list(zip(split_rows(hidden, shapes), split_rows(self.model.logits(hidden), shapes), strict=True))

    def mixer(self, starts: Tensor, tokens: Tensor, requests: Tensor, **options: Any) -> PagedMixer:
        """Plan `tokens` [B, N], row b behind the first `starts[b]` tokens of `requests[b]`."""
        width = tokens.shape[1]
        pages = torch.arange(2 * PAGES, dtype=torch.int32).view(2, PAGES).flip(1)[requests].contiguous().to(DEVICE)
        batch = len(tokens)
        at = Batch(
            lengths=starts,
            last_tokens=tokens[:, 0],
            page_table=pages,
            history=tokens,
            active=torch.ones(batch, dtype=torch.int32, device=DEVICE),
            sampling=None,  # type: ignore[arg-type]
            slots=slice(0, batch),
            max_length=int(starts.max()),
        )
        positions = options.pop("positions", starts[:, None] + torch.arange(width, device=DEVICE))
        return PagedMixer.over(at, positions, self.cache, self.resources, **options)


@torch.no_grad()
def test_a_token_has_the_same_bits_wherever_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    add_products_in_order(monkeypatch)
    run, text = Runs(), torch.randint(VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    whole = run(0, text, phase="prefill")

    def same(found: tuple[Tensor, Tensor], start: int, stop: int, what: str, rows: Any = slice(None)) -> None:
        for ours, expected in zip(found, whole, strict=True):
            assert torch.equal(ours[0, rows], expected[0, start:stop]), what

    same(run(0, text[:, :41], phase="prefill"), 0, 41, "the first chunk")
    same(run(41, text[:, 41:], phase="prefill"), 41, LENGTH, "the second chunk")
    same(run(LENGTH - 1, text[:, -1:], phase="decode"), LENGTH - 1, LENGTH, "one token")
    start = LENGTH - len(PATH)
    same(run(start, text[:, start:].repeat(2, 1)), start, LENGTH, "a chain among others")
    drafted = torch.zeros(1, len(PARENTS), dtype=torch.int64, device=DEVICE)
    drafted[0, list(PATH)] = text[0, start:]
    parents = torch.tensor([PARENTS], dtype=torch.int32, device=DEVICE)
    links = build_tree(parents, torch.tensor([start], device=DEVICE), impl="triton")
    paths = mask_paths(links.mask, len(PATH), impl="triton")
    tree = dict(mode="tree", mask=links.mask, depths=links.depth, positions=links.positions, paths=paths)
    same(run(start, drafted, **tree), start, LENGTH, "a path of a tree", list(PATH))
    # Request 1 gets the cache of request 0, which then loses what two tiles store again.
    run.cache.kv[:, :, PAGES:] = run.cache.kv[:, :, :PAGES]
    run.cache.kv[:, :, : PAGES - 41 // PAGE - 1] = 0.0
    tiles = torch.zeros(2, 16, dtype=torch.int64, device=DEVICE)
    tiles[0], tiles[1, : LENGTH - 57] = text[0, 41:57], text[0, 57:]
    counts = torch.tensor([16, LENGTH - 57], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([41, 57], device=DEVICE)
    riding = run.mixer(starts, tiles, torch.zeros(2, dtype=torch.int64), counts=counts, phase="prefill")
    ours = text[:, start:].clone()
    verified = run.mixer(torch.tensor([start], device=DEVICE), ours, torch.ones(1, dtype=torch.int64))
    chain, prompt = run.beside([(verified, ours), (riding, tiles)])
    same(chain, start, LENGTH, "a chain beside tiles of a prompt")
    same(
        (prompt[0].flatten(0, 1)[None], prompt[1].flatten(0, 1)[None]),
        41,
        LENGTH,
        "tiles of a prompt beside a chain",
        list(range(16 + LENGTH - 57)),
    )


class LatentRuns:
    """Forwards of a deterministic target with latent attention over one cache of two requests."""

    def __init__(self) -> None:
        target = target_of("latent")
        self.model = target.model.to(DEVICE, DTYPE)
        resources: Any = SimpleNamespace(
            num_pages=2 * PAGES, page_size=PAGE, context=PAGE * PAGES, device=DEVICE, dtype=DTYPE, kv_dtype=DTYPE,
            deterministic=True, impl="triton", caches=[],
        )  # fmt: skip
        self.memory = LatentMemory(target.config, LATENT, resources)
        self.model.set_forward("triton", batch_invariant=True)

    def batch(self, starts: list[int], requests: list[int]) -> Batch:
        pages = torch.arange(2 * PAGES, dtype=torch.int32).view(2, PAGES).flip(1)[requests].contiguous().to(DEVICE)
        lengths = torch.tensor(starts, device=DEVICE)
        active = torch.ones(len(starts), dtype=torch.int32, device=DEVICE)
        return SimpleNamespace(page_table=pages, lengths=lengths, active=active, max_length=max(starts))  # type: ignore[return-value]

    def chunk(self, starts: list[int], tokens: Tensor, requests: Sequence[int] = (0,)) -> LatentMixer:
        at = self.batch(starts, list(requests))
        positions = at.lengths[:, None] + torch.arange(tokens.shape[1], device=DEVICE)
        counts = torch.full_like(at.active, tokens.shape[1])
        return self.memory.tiles(at, positions, counts, None)  # type: ignore[arg-type]

    def verified(self, starts: list[int], parents: Sequence[int], chain: bool) -> LatentMixer:
        at, rows = self.batch(starts, list(range(len(starts)))), len(starts)
        links = build_tree(torch.tensor([parents] * rows, dtype=torch.int32, device=DEVICE), at.lengths, impl="triton")
        return self.memory.nodes(at, links, chain, len(PATH) - 1)

    def __call__(self, mixer: LatentMixer, tokens: Tensor) -> Tensor:
        return self.model.logits(self.model(tokens, mixer)[0])


@torch.no_grad()
def test_a_token_of_latent_attention_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of a prompt, alone, in a chain among others, on a path of a tree, and beside tiles of a prompt."""
    add_products_in_order(monkeypatch)
    run, text = LatentRuns(), torch.randint(VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    whole = run(run.chunk([0], text), text)[0]
    start = LENGTH - len(PATH)
    ours = text[:, start:]
    assert torch.equal(run(run.chunk([0], text[:, :41]), text[:, :41])[0], whole[:41])
    assert torch.equal(run(run.chunk([41], text[:, 41:]), text[:, 41:])[0], whole[41:])
    assert torch.equal(run(run.verified([LENGTH - 1], (-1,), True), text[:, -1:])[0], whole[-1:])
    chain = run(run.verified([start, 3], (-1, 0, 1, 2), True), ours.repeat(2, 1))
    assert torch.equal(chain[0], whole[start:]) and not torch.equal(chain[1], whole[start:])
    drafted = torch.zeros(1, len(PARENTS), dtype=torch.int64, device=DEVICE)
    drafted[0, list(PATH)] = ours[0]
    tree = run(run.verified([start], PARENTS, False), drafted)
    assert torch.equal(tree[0, list(PATH)], whole[start:])
    run(run.chunk([start], ours), ours)  # the tree has stored its nodes in these places
    mixers = [run.verified([start], (-1, 0, 1, 2), True), run.chunk([0], text[:, :9], (1,))]
    joint, groups = run.memory.joint(mixers), (ours, text[:, :9])
    found = run(joint, torch.cat([group.flatten() for group in groups]))
    verified, prompt = split_rows(found, [group.shape for group in groups])
    assert torch.equal(verified[0], whole[start:]) and torch.equal(prompt[0], whole[:9])


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
    for fused in (False, True):
        with pytest.raises(EngineError, match=f"expected fused kernels and a backend built for it, got fused={fused}"):
            check_backend(backend, target, engine.parts.algorithm, settings, "none", fused)
    assert resolve_hardware(RuntimeSettings(device="cpu", deterministic=True)).forward == "fused"
