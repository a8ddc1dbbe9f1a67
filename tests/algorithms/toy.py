"""Small models and drafters with known behaviour, shared by the tests of the engine and its algorithms."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import specdec_kernels as kernels
from algorithms.algorithm import Algorithm, Batch, DraftTree, Resources
from algorithms.attention.backends import backends
from algorithms.attention.cache import KVScales
from algorithms.autoregressive import Autoregressive
from algorithms.dflash.config import VANILLA, HeadConfig
from algorithms.dflash.model import DFlashDrafter
from algorithms.engine.engine import Engine
from algorithms.engine.grammar import Grammars
from algorithms.engine.request import Request
from algorithms.engine.session import Generation
from algorithms.engine.settings import RuntimeSettings
from algorithms.models.config import DecoderConfig
from algorithms.models.decoder import Decoder
from algorithms.models.loading import Target
from algorithms.step.adaptive import StepCosts
from algorithms.step.sampling_params import SamplingParams
from tests.algorithms.tiny_folders import small_config, small_dflash_config

VOCAB = 61
CONFIG = small_config(vocab_size=VOCAB, max_position_embeddings=128, eos_token_ids=(), num_layers=2)
DEEP_CONFIG = replace(CONFIG, num_layers=4)
"""For published drafters, which read features of several layers."""


def randomise(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Weights large enough that logits are far apart and every token depends on the whole text."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.1 * noise if "norm" in name else 0.25 * noise
    return module.requires_grad_(False)


def random_target(seed: int = 0, config: DecoderConfig = CONFIG) -> Target:
    return Target(model=randomise(Decoder(config), seed), config=config, path=Path("toy"))


def random_drafter(block_size: int = 16, seed: int = 1, markov_rank: int = 0, **changes: Any) -> DFlashDrafter:
    head = HeadConfig(VANILLA, markov_rank) if markov_rank else None
    sizes = dict(block_size=block_size, mask_token_id=VOCAB - 1, head=head, target_layer_ids=(0, 1))
    config = small_dflash_config(CONFIG, **{**sizes, **changes})
    return randomise(DFlashDrafter(config), seed)


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
    async_steps: int | None = None
    prefill_chunk: int = 2048
    prefill_tile: int = 16
    mixed_prefill: bool = True
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
    shared = {field.name for field in fields(Setup)} & {field.name for field in fields(RuntimeSettings)} - {"kv_dtype"}
    settings = RuntimeSettings(
        forward="fused" if setup.fused or setup.deterministic else "torch",
        kv_dtype="auto" if setup.kv_dtype is None else "fp8_e4m3",
        **{name: getattr(setup, name) for name in shared},
    )
    capture = Replayed if setup.graph != "none" and target.model.model.norm.weight.device.type == "cpu" else None
    backend = kind(config, setup.impl, setup.deterministic)
    return Engine(
        target, algorithm, backend, settings, spell, capture, setup.grammars, setup.kv_scales, setup.step_costs
    )


class Replayed:
    """Stands for a CUDA graph where there is no GPU: the same work again, on the same tensors, for the whole bucket."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


def time_once(patch: pytest.MonkeyPatch) -> None:
    """An engine times each captured step, and each size of a step, several times before the first request."""
    patch.setattr("algorithms.step.runner._IDLE_RUNS", 1)
    patch.setattr("algorithms.step.runner._TIMED_RUNS", 1)


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


def texts_of(store: kernels.HistoryStore) -> list[list[int]]:
    """The texts that a store holds, the oldest request first."""
    order = sorted(range(len(store.lengths)), key=lambda text: int(store.stamps[text]))
    held = [store.tokens[text, : int(store.lengths[text])].tolist() for text in order]
    return [text for text in held if text]


def autoregressive(target: Target) -> Autoregressive:
    return Autoregressive(Autoregressive.Config(), target, None)


_answers: dict[tuple[str, str, int], tuple[Target, list[list[int]]]] = {}
"""With the target, since Python gives the id of a target that is gone to the next one."""


def answers(asked: Sequence[Request], setup: Setup, target: Target) -> list[list[int]]:
    """What the target alone writes; found once for each of these requests, setups and targets."""
    key = (repr(asked), repr(setup), id(target))
    if key not in _answers:
        written = [c.token_ids for c in run(autoregressive(target), asked, setup, target).completions]
        _answers[key] = target, written
    return [list(ids) for ids in _answers[key][1]]


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

    def bind(self, resources: Resources) -> None:
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


def tokens_along(tokens: Sequence[int], parents: Sequence[int], node: int) -> list[int]:
    """The tokens of a tree from behind node 0 to `node`."""
    return [] if node <= 0 else [*tokens_along(tokens, parents, parents[node]), tokens[node]]
