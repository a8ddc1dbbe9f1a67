"""The price of `runtime.deterministic`: the time of a target's forward with and without it.

    python -m experiments.determinism shapes=[tiny,qwen3_8b]

A forward is what a step asks of the target: hidden states and logits of one token, a chain or a tree of drafts for each
request, and a chunk of a prompt. Weights and stored keys are random, which changes no time. On a GPU a forward is
replayed from a CUDA graph; without one it runs in Triton's interpreter, which shows that the path works. The run folder
outputs/determinism/<time>/ receives results.jsonl, one row per forward.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from torch import Tensor

from experiments.app import cli
from experiments.app.errors import user_errors
from experiments.app.hardware import INTERPRETER
from experiments.app.schema import REPO_ROOT
from experiments.bench.timing import Limits, Timing, provenance, time_function
from experiments.inflate import SHAPES
from experiments.kernel_bench import choose_device
from experiments.report.console import plain_console
from experiments.report.metrics import NOT_A_GPU
from experiments.report.tables import Column, console_table, number, text
from specdec_kernels.checks import expect_at_least, expect_choice

if TYPE_CHECKING:
    from algorithms.runtime.models.config import DecoderConfig
    from algorithms.runtime.models.decoder import Decoder

TINY = "tiny"
BRANCHES = 4  # children of node 0 in a measured tree, each with a chain behind it
PREFILL_TILE = 64
COLUMNS = (
    text("shape", "shape"),
    text("forward", "forward"),
    number("requests", "batch", 0),
    number("ms", "plain_ms", 3),
    number("deterministic ms", "deterministic_ms", 3),
    Column("price", lambda row: f"{row['price']:.3f}"),
)


@dataclass
class DeterminismConfig:
    """Schema of `configs/determinism.yaml`. `nodes` is the number of drafts with the last token of a chain or tree,
    `context` the committed tokens of each request, `prefill` the tokens of a chunk behind none; 0 leaves it out."""

    shapes: list[str] = field(default_factory=lambda: [TINY, "qwen3_8b"])
    batches: list[int] = field(default_factory=lambda: [1, 8, 32])
    nodes: int = 16
    context: int = 1024
    prefill: int = 2048
    device: str = "auto"
    repeats: int = 20
    rounds: int = 2
    """How often the two are timed in turn; the smaller median counts."""

    def __post_init__(self) -> None:
        for shape in self.shapes:
            expect_choice("shapes", shape, (TINY, *SHAPES))
        for batch in self.batches:
            expect_at_least("batches", batch, 1)
        expect_at_least("nodes", self.nodes, BRANCHES + 1)
        expect_at_least("context", self.context, 1)
        expect_at_least("prefill", self.prefill, 0)
        expect_at_least("repeats", self.repeats, 1)
        expect_at_least("rounds", self.rounds, 1)
        expect_choice("device", self.device, ("auto", "cpu", "cuda"))


ConfigStore.instance().store(name="determinism_schema", node=DeterminismConfig)


class Forwards:
    """The forwards of one target over `batch` requests of `context` tokens, on pages of 16 tokens."""

    def __init__(self, model: Decoder, batch: int, context: int, nodes: int) -> None:
        self._model, self._context = model, context
        weight = model.model.norm.weight
        self._device, self._dtype = weight.device, weight.dtype
        self._pages = -(-(context + nodes) // 16)
        self._table = torch.randperm(batch * self._pages, device=self._device).view(batch, -1).to(torch.int32)

    def times(self, forward: str, nodes: int, config: DeterminismConfig) -> tuple[float, float]:
        """Median milliseconds without and with determinism; the smaller of `config.rounds` each."""
        found: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(config.rounds):
            for deterministic in found:
                timing = self._time(forward, nodes, deterministic, Limits(2, config.repeats, 2000.0))
                found[deterministic].append(timing.median_ms)
        return min(found[False]), min(found[True])

    def _time(self, forward: str, nodes: int, deterministic: bool, limits: Limits) -> Timing:
        with torch.inference_mode():
            return time_function(self.prepared(forward, nodes, deterministic), [{}], self._device, limits)

    def prepared(self, forward: str, nodes: int, deterministic: bool) -> Callable[[], Tensor]:
        """A function that runs `nodes` tokens of each request as a `chain`, `tree` or `prefill`."""
        from algorithms.runtime.algorithm import Batch, Resources
        from algorithms.runtime.backends.registry import backends
        from algorithms.runtime.cache import KVCache
        from algorithms.runtime.models.loading import Target
        from algorithms.runtime.paged_attention import PagedMixer
        from specdec_kernels import build_chain, build_tree, mask_paths

        kind, device, dtype = backends()["fa4"], self._device, self._dtype
        target = Target(model=self._model, config=self._model.config, path=Path("random"))
        resources = Resources(
            target=target, backend=kind(kind.Config(), "triton", deterministic), device=device, dtype=dtype,
            kv_dtype=dtype, num_pages=self._table.numel(), page_size=16, context=self._pages * 16,
            max_batch=len(self._table), impl="triton", fused=True, deterministic=deterministic,
        )  # fmt: skip
        resources.choose_forward(self._model)
        cache = KVCache.allocate(self._model.config, resources)
        table, starts = self._table, torch.full((len(self._table),), self._context, device=device)
        if forward == "prefill":
            # Tiles of one prompt, each a row with a first position of its own.
            starts = torch.arange(0, nodes, PREFILL_TILE, device=device)
            table, nodes = self._table[:1].expand(len(starts), -1).contiguous(), PREFILL_TILE
        rows = len(starts)
        tokens = torch.randint(self._model.config.vocab_size, (rows, nodes), device=device)
        batch = Batch(
            lengths=starts, last_tokens=tokens[:, 0].contiguous(), page_table=table, history=tokens,
            active=torch.ones(rows, dtype=torch.int32, device=device), sampling=None,  # type: ignore[arg-type]
            rows=slice(0, rows), max_length=self._pages * 16,
        )  # fmt: skip
        links = build_chain(starts, nodes)
        if forward == "tree":
            links = build_tree(_branches(rows, nodes, device), starts)

        def run() -> Tensor:
            options: dict[str, Any] = dict(phase="prefill" if forward == "prefill" else "verify")
            if forward == "tree":
                paths = mask_paths(links.mask, -(-(nodes - 1) // BRANCHES) + 1) if deterministic else None
                options |= dict(mode="tree", mask=links.mask, depths=links.depth, paths=paths)
            mixer = PagedMixer.over(batch, links.positions, cache, resources, **options)
            hidden, _ = self._model(tokens, mixer)
            return hidden if forward == "prefill" else self._model.logits(hidden)

        return run


def _branches(rows: int, nodes: int, device: torch.device) -> Tensor:
    """Parents [rows, nodes] int32 of a tree of `BRANCHES` chains behind node 0."""
    parents = [-1] + [max(0, node - BRANCHES) for node in range(1, nodes)]
    return torch.tensor(parents, dtype=torch.int32, device=device).repeat(rows, 1)


def config_of(shape: str) -> DecoderConfig:
    """The shape of a target: the tiny one's, or its architecture in another family's sizes."""
    from algorithms.runtime.models.loading import read_target

    config = read_target(str(REPO_ROOT / "assets/tiny/target")).config
    return config if shape == TINY else replace(config, **asdict(SHAPES[shape].target))


def random_model(config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """A target of random weights."""
    from algorithms.runtime.models.decoder import Decoder

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return Decoder(config).requires_grad_(False).eval()
    finally:
        torch.set_default_dtype(before)


def measure(model: Decoder, shape: str, config: DeterminismConfig) -> Iterator[dict[str, Any]]:
    """A row for each forward."""
    kinds = [("decode", "chain", 1), ("chain", "chain", config.nodes), ("tree", "tree", config.nodes)]
    for batch in config.batches:
        forwards = Forwards(model, batch, config.context, config.nodes)
        for name, forward, nodes in kinds:
            yield _row(shape, f"{name} {nodes}", batch, forwards.times(forward, nodes, config))
    if config.prefill:
        forwards = Forwards(model, 1, config.prefill, 0)
        yield _row(shape, f"prefill {config.prefill}", 1, forwards.times("prefill", config.prefill, config))


def _row(shape: str, forward: str, batch: int, times: tuple[float, float]) -> dict[str, Any]:
    plain, deterministic = times
    figures = dict(plain_ms=plain, deterministic_ms=deterministic, price=deterministic / plain)
    return dict(shape=shape, forward=forward, batch=batch, **figures)


def job(config: DeterminismConfig, composed: DictConfig) -> None:
    """Measure, print and write."""
    with user_errors(ValueError):
        device = choose_device(config.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    folder, console = Path(HydraConfig.get().runtime.output_dir), plain_console()
    folder.mkdir(parents=True, exist_ok=True)
    conditions = provenance(device.type) | dict(device=device.type, dtype=str(dtype)[6:], config=asdict(config))
    rows = []
    with (folder / "results.jsonl").open("w", encoding="utf-8") as file:
        for shape in config.shapes:
            model = random_model(config_of(shape), device, dtype)
            for row in measure(model, shape, config):
                rows.append(row)
                file.write(json.dumps(row | conditions) + "\n")
                file.flush()
            del model
    console.print(console_table(f"price of determinism on {conditions['machine']}", COLUMNS, rows))
    if device.type != "cuda":
        console.print(NOT_A_GPU[INTERPRETER], style="yellow")
    console.print(f"wrote {folder / 'results.jsonl'}")


def main() -> None:
    """Command line entry."""
    cli.main(job, "determinism")


if __name__ == "__main__":
    main()
