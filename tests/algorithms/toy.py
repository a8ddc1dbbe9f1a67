"""Small models and drafters with known behaviour, shared by the tests of the engine and its algorithms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

import specdec_kernels as kernels
from algorithms.autoregressive import Autoregressive
from algorithms.runtime.adaptive import StepCosts
from algorithms.runtime.algorithm import Algorithm, Batch, DraftTree, Resources
from algorithms.runtime.backends.registry import backends
from algorithms.runtime.cache import KVScales
from algorithms.runtime.engine import Engine
from algorithms.runtime.engine_settings import EngineSettings
from algorithms.runtime.grammar import Grammars
from algorithms.runtime.models.config import DecoderConfig, DFlashConfig
from algorithms.runtime.models.decoder import Decoder
from algorithms.runtime.models.drafters.dflash import DFlashDrafter
from algorithms.runtime.models.loading import Target
from algorithms.runtime.request import Request
from algorithms.runtime.sampling_params import SamplingParams
from algorithms.runtime.session import Generation

VOCAB = 61
CONFIG = DecoderConfig(
    architecture="qwen3",
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    rope_scaling=None,
    max_position_embeddings=128,
    tie_word_embeddings=False,
    qk_norm=True,
    mlp_bias=False,
    eos_token_ids=(),
)


def randomise(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Weights large enough that logits are far apart and every token depends on the whole text."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.1 * noise if "norm" in name else 0.25 * noise
    return module.requires_grad_(False)


def random_target(seed: int = 0) -> Target:
    return Target(model=randomise(Decoder(CONFIG), seed), config=CONFIG, path=Path("toy"))


def random_drafter(block_size: int = 16, seed: int = 1, **changes: Any) -> DFlashDrafter:
    layers = 2
    config = DFlashConfig(
        decoder=replace(CONFIG, num_layers=layers),
        block_size=block_size,
        target_layer_ids=(1, 2),
        mask_token_id=VOCAB - 1,
        num_target_layers=CONFIG.num_layers,
        causal_layers=(False,) * layers,
    )
    return randomise(DFlashDrafter(replace(config, **changes)), seed)


def requests(count: int, max_new_tokens: int = 24, **changes: Any) -> list[Request]:
    """Prompts of unequal lengths, one of them a single token."""
    generator = torch.Generator().manual_seed(7)
    lengths = [(5, 2, 17, 30, 9, 16, 1, 33)[i % 8] for i in range(count)]
    prompts = [tuple(torch.randint(VOCAB, (n,), generator=generator).tolist()) for n in lengths]
    made = [Request(i, ids, SamplingParams(max_new_tokens=max_new_tokens, seed=i)) for i, ids in enumerate(prompts)]
    return [changed(request, **changes) for request in made]


def changed(request: Request, **changes: Any) -> Request:
    """The request with other fields, of its own or of its sampling parameters."""
    own = {field.name for field in fields(Request)}
    sampled = request.with_sampling(**{name: value for name, value in changes.items() if name not in own})
    return replace(sampled, **{name: value for name, value in changes.items() if name in own})


def spell(ids: Sequence[int]) -> str:
    """A decoder without a tokenizer: one character a token."""
    return "".join(chr(ord("0") + token) for token in ids)


@dataclass(frozen=True)
class Setup:
    backend: str = "fa4"
    page_size: int = 16
    max_batch: int = 3
    num_pages: int | None = None
    impl: str = "reference"
    max_length: int = 64
    graph: str = "none"
    overlap: int | None = None
    prefill_chunk: int = 2048
    prefill_tile: int = 16
    piggyback: bool = True
    prefill_ahead: int | None = None
    fused: bool = False
    deterministic: bool = False
    kv_dtype: torch.dtype | None = None
    kv_scales: KVScales | None = None
    grammars: Grammars | None = None
    adaptive: bool = False
    step_costs: StepCosts | None = None


BACKEND_OPTIONS: dict[str, dict[str, str]] = {"hybrid": {"prefill": "torch", "decode": "fa4", "verify": "prefill"}}
"""Prompts and verification by one backend, decoding and drafting by the other."""


def engine_of(algorithm: Algorithm, setup: Setup, target: Target) -> Engine:
    kind = backends()[setup.backend]
    config = kind.Config(**BACKEND_OPTIONS.get(setup.backend, {}))
    settings = EngineSettings(
        page_size=setup.page_size,
        max_batch=setup.max_batch,
        num_pages=setup.num_pages,
        max_length=setup.max_length,
        impl=setup.impl,
        graph=setup.graph,
        overlap=setup.overlap,
        prefill_chunk=setup.prefill_chunk,
        prefill_tile=setup.prefill_tile,
        piggyback=setup.piggyback,
        prefill_ahead=setup.prefill_ahead,
        fused=setup.fused,
        deterministic=setup.deterministic,
        kv_dtype=setup.kv_dtype,
        kv_scales=setup.kv_scales,
        adaptive=setup.adaptive,
        step_costs=setup.step_costs,
    )
    capture = Replayed if setup.graph != "none" and target.model.model.norm.weight.device.type == "cpu" else None
    backend = kind(config, setup.impl, setup.deterministic)
    return Engine(target, algorithm, backend, settings, spell, capture, setup.grammars)


class Replayed:
    """Stands for a CUDA graph where there is no GPU: the same work again, on the same tensors, for the whole bucket."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


def run(algorithm: Algorithm, asked: Sequence[Request], setup: Setup, target: Target) -> Generation:
    """Serve `asked`, and check what is true of every run."""
    engine = engine_of(algorithm, setup, target)
    generation = engine.generate(asked)
    assert engine.scheduler.num_free_pages == engine.scheduler.num_pages
    assert [c.request_id for c in generation.completions] == [r.id for r in asked]
    for completion in generation.completions:
        emitted = sum(accepted + 1 for accepted in completion.accepted_counts)
        assert len(completion.token_ids) == emitted - completion.num_truncated
        assert max(completion.accepted_counts) <= algorithm.max_depth
        drafts = zip(completion.accepted_counts, completion.drafted_counts, completion.ran_out, strict=True)
        for accepted, drafted, ran_out in drafts:
            assert accepted <= drafted < algorithm.num_nodes and (ran_out or accepted < drafted)
    return generation


def texts_of(store: kernels.TextStore) -> list[list[int]]:
    """The texts that a store holds, the oldest request first."""
    order = sorted(range(len(store.lengths)), key=lambda text: int(store.stamps[text]))
    held = [store.tokens[text, : int(store.lengths[text])].tolist() for text in order]
    return [text for text in held if text]


def autoregressive(target: Target) -> Autoregressive:
    return Autoregressive(Autoregressive.Config(), target, None)


_answers: dict[tuple[str, str, int], list[list[int]]] = {}


def answers(asked: Sequence[Request], setup: Setup, target: Target) -> list[list[int]]:
    """What the target alone writes; found once for each of these requests, setups and targets."""
    key = (repr(asked), repr(setup), id(target))
    if key not in _answers:
        _answers[key] = [c.token_ids for c in run(autoregressive(target), asked, setup, target).completions]
    return [list(ids) for ids in _answers[key]]


class Scripted(Algorithm):
    """Drafts a known text, wrong at chosen places, so that a test can choose how much is accepted.

    `correct(position, depth)` says whether the draft at `depth` behind a last token at `position` is the scripted one.
    With `decoys` every depth has a wrong sibling before the right one, which scatters the accepted path over the nodes.
    """

    name = "scripted"

    def __init__(
        self,
        texts: Sequence[Sequence[int]],
        depth: int,
        correct: Callable[[int, int], bool] = lambda position, depth: True,
        decoys: bool = False,
    ) -> None:
        self._texts, self._correct, self._width = texts, correct, 2 if decoys else 1
        self.chain = not decoys
        self.max_depth = depth
        self.num_nodes = 1 + depth * self._width

    def attach(self, resources: Resources) -> None:
        self._impl = resources.impl

    def propose(self, batch: Batch) -> DraftTree:
        rows = zip(batch.lengths.tolist(), batch.last_tokens.tolist(), batch.history.tolist(), strict=True)
        tokens = [self._nodes(length, last, self._text_of(history[: length + 1])) for length, last, history in rows]
        parents = [-1] + [max(0, d * self._width) for d in range(self.max_depth) for _ in range(self._width)]
        tree = torch.tensor([parents] * len(tokens), dtype=torch.int32)
        links = kernels.build_tree(tree, batch.lengths, impl=self._impl)
        return DraftTree(torch.tensor(tokens), links)

    def _text_of(self, committed: list[int]) -> Sequence[int]:
        """The script that begins like this; nothing for a request that has ended and is stepped once more."""
        return next((t for t in self._texts if list(t[: len(committed)]) == committed), ())

    def _nodes(self, length: int, last: int, text: Sequence[int]) -> list[int]:
        nodes = [last]
        for depth in range(1, self.max_depth + 1):
            place = length + depth
            right = text[place] if place < len(text) else 0
            wrong = (right + 1) % VOCAB
            nodes += [wrong] * (self._width - 1)
            nodes.append(right if self._correct(length, depth) else wrong)
        return nodes


def scripts(asked: Sequence[Request], written: Sequence[Sequence[int]]) -> list[list[int]]:
    """Prompt and answer of each request as one text."""
    return [list(request.prompt_ids) + list(ids) for request, ids in zip(asked, written, strict=True)]
