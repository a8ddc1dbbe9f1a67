"""Targets whose layers are not all attention and SwiGLU: what the engine writes, with and without drafts, is what the
plain definition over whole texts writes."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import specdec_kernels as kernels
from algorithms.algorithm import Prompts
from algorithms.dflash.drafting import DFlash
from algorithms.engine.request import Request
from algorithms.models.experts.module import Experts
from algorithms.models.linear import memory
from algorithms.models.loading import load_target
from algorithms.models.tokenizer import Tokenizer
from algorithms.mtp.drafting import MTP
from algorithms.step.runner import StepRunner
from algorithms.step.sampling_params import SamplingParams
from algorithms.step.step import Step
from experiments.data.arithmetic import heldout_problems
from tests.algorithms.layer_kinds import KINDS, LINEAR, check_drafts, check_text, target_of
from tests.algorithms.toy import Scripted, Setup, autoregressive, changed, requests, run
from tests.exact_products import add_products_in_order

TARGETS = {kind: target_of(kind) for kind in KINDS}


SETUPS = {
    "chunks of prompts": Setup(page_size=1, max_batch=2, prefill_chunk=8, prefill_tile=4),
    "captured": Setup(graph="step", prefill_tile=4, max_batch=2),
    "kernels": Setup(impl="triton", fused=True, page_size=8, max_batch=2),
}

ON_KERNELS = ("experts and latent", "linear, attention and experts")
"""A kind on its own runs the same kernels as one beside others."""
PAIRS = [
    (kind, name)
    for number, kind in enumerate(KINDS)
    for place, name in enumerate(SETUPS)
    if kind in ON_KERNELS or place == number % 2
]


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_drafts_do_not_change_the_text(kind: str, name: str) -> None:
    count, tokens, decoys = (2, 2, (True,)) if name == "kernels" else (3, 8, (False, True))
    check_drafts(TARGETS[kind], requests(count, max_new_tokens=tokens), SETUPS[name], decoys=decoys)


def test_prompts_by_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the prefill schedule, with the same outputs."""
    target, chunks, in_chunks = TARGETS["linear and attention"], 0, kernels.delta_rule_chunks

    def counted(inputs: Any, plan: Any, *call: Any, **how: Any) -> torch.Tensor:
        nonlocal chunks
        chunks += int(plan.whole.sum())
        return in_chunks(inputs, plan, *call, **how)

    monkeypatch.setattr(kernels, "delta_rule_chunks", counted)
    asked = [changed(each, prompt_ids=(each.prompt_ids * 60)[: 50 + 35 * each.id]) for each in requests(3, 5)]
    setup = Setup(max_length=128, prefill_tile=64)
    setups = [setup, replace(setup, prefill_chunk=64, max_batch=2, graph="step")]
    written = [[c.token_ids for c in run(autoregressive(target), asked, each, target).completions] for each in setups]
    assert written[0] == written[1] and chunks == 2 * 2 * 2  # of two prompts, in two layers, twice
    for request, tokens in zip(asked, written[0], strict=True):
        check_text(target, request, tokens)


@pytest.mark.parametrize(("tile", "deterministic"), [(64, False), (64, True), (32, False), (128, False)])
def test_prompts_by_the_recurrence(tile: int, deterministic: bool) -> None:
    """With `deterministic`, and where tiles are no whole chunks."""
    resources: Any = SimpleNamespace(
        max_batch=2, device="cpu", dtype=torch.float32, impl="reference", deterministic=deterministic
    )
    kept = memory.StateMemory(TARGETS["linear and attention"].config, LINEAR, resources)
    one = torch.zeros(1, dtype=torch.int64)
    prompts = Prompts(slots=one, start=one, counts=one.int() + tile, last=one + tile - 1, width=tile)
    batch: Any = None
    (group,) = kept.tiles(batch, torch.zeros(1, tile, dtype=torch.int64), prompts.counts, prompts).groups
    assert (group.chunks is not None) == (tile % 64 == 0 and not deterministic)


@pytest.mark.parametrize(
    ("nodes", "chain", "deterministic", "solved"),
    [(64, False, False, True), (64, False, True, False), (65, False, False, False), (9, True, False, False)],
)
def test_which_trees_are_solved_at_once(nodes: int, chain: bool, deterministic: bool, solved: bool) -> None:
    """Not chains, not trees of more nodes than a chunk has rows, and none with `deterministic`."""
    resources: Any = SimpleNamespace(
        max_batch=2, device="cpu", dtype=torch.float32, impl="reference", deterministic=deterministic
    )
    kept = memory.StateMemory(TARGETS["linear and attention"].config, LINEAR, resources)
    slots = torch.tensor([1, 0])
    parents = (torch.arange(nodes).int() - (1 if chain else 3)).clamp(min=-1).expand(2, nodes).contiguous()
    links = kernels.build_tree(parents, torch.zeros_like(slots), impl="reference")
    batch: Any = SimpleNamespace(slots=slots)
    (group,) = kept.nodes(batch, links, chain, nodes).groups
    assert isinstance(group.paths, kernels.Trees) == solved
    assert group.links.parents.view(2, nodes)[1].tolist() == [p + nodes if p >= 0 else -1 for p in parents[1].tolist()]


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_slot_is_used_again(kind: str) -> None:
    """A request after others, in their slots and pages, writes what it writes alone."""
    target = TARGETS[kind]
    asked = [changed(request, max_new_tokens=2 + 3 * (request.id % 3)) for request in requests(5)]
    alone = [run(autoregressive(target), [each], Setup(), target).completions[0].token_ids for each in asked]
    together = run(autoregressive(target), asked, Setup(max_batch=3, num_pages=9), target).completions
    assert [c.token_ids for c in together] == alone


@pytest.mark.parametrize("kind", ["experts", "experts and latent"])
def test_padding_runs_through_no_expert(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Rows of a step or a prefill that are no tokens have the sentinel expert; all others have all of theirs."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    route = kernels.route_and_schedule

    def noted(logits: torch.Tensor, routing: Any, bias: Any, real: torch.Tensor, **how: Any) -> Any:
        routed, schedule = route(logits, routing, bias, real, **how)
        seen.append((real.clone(), (routed.experts < logits.shape[1]).clone()))
        return routed, schedule

    monkeypatch.setattr(kernels, "route_and_schedule", noted)
    setup = Setup(graph="step", prefill_tile=4, max_batch=3)
    run(autoregressive(TARGETS[kind]), requests(4, max_new_tokens=6), setup, TARGETS[kind])
    assert all(torch.equal(chosen, real[:, None].expand_as(chosen)) for real, chosen in seen)
    assert {bool(real.all()) for real, _ in seen} == {False, True}


@pytest.mark.parametrize(("kind", "graph"), [("experts", "none"), ("experts and latent", "step")])
def test_touched_experts_are_counted(monkeypatch: pytest.MonkeyPatch, kind: str, graph: str) -> None:
    """Of steps alone, not of prompts before them, of captures or of padding."""
    seen: list[tuple[int, int]] = []
    verify = Step.verify

    def noted(step: Step) -> None:
        verify(step)
        layers = [module for module in target.model.modules() if isinstance(module, Experts)]
        for layer in layers:
            assert layer.schedule is not None
            order, rows = layer.schedule.starts.tolist(), layer.schedule.starts[-1].item() / layer.routing.topk
            seen.append((sum(order[i + 1] > order[i] for i in range(len(order) - 1)), rows))

    def launched(runner: StepRunner) -> None:
        reset(runner)
        seen.clear()

    reset = StepRunner.reset
    target = TARGETS[kind]
    monkeypatch.setattr(Step, "verify", noted)
    monkeypatch.setattr(StepRunner, "reset", launched)
    setup = Setup(graph=graph, prefill_tile=4, max_batch=3)
    found = run(autoregressive(target), requests(4, max_new_tokens=6), setup, target).experts
    assert found is not None and seen
    touched, rows = (sum(values) / len(seen) for values in zip(*seen, strict=True))
    assert found["touched_per_step"] == pytest.approx(touched) and found["rows_per_step"] == pytest.approx(rows)
    assert found["touched_per_row"] == pytest.approx(touched / rows)
    dense = TARGETS["latent"]
    assert run(autoregressive(dense), requests(1, max_new_tokens=2), Setup(), dense).experts is None


ASSETS = Path(__file__).parents[2] / "assets"
SHIPPED = sorted(folder.name for folder in ASSETS.glob("tiny_*"))
"""Families of other layers."""
DRAFTERS: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "dflash": (DFlash, [{}, {"topk": 2, "num_nodes": 12}]),
    "mtp": (MTP, [{"steps": 3}, {"steps": 3, "topk": 2, "num_nodes": 8}]),
}


@pytest.mark.parametrize(
    ("family", "kind"), [(name, kind) for name in SHIPPED for kind in DRAFTERS if (ASSETS / name / kind).is_dir()]
)
def test_shipped_drafters_of_other_layers(family: str, kind: str) -> None:
    """Their drafts are accepted, in chains and trees, and change nothing."""
    folder = ASSETS / family
    target = load_target(folder / "target", "cpu", torch.float32)
    tokenizer = Tokenizer.load(folder / "target")
    questions = [problem.question for problem in heldout_problems(2)]
    asked = [
        Request(index, tuple(tokenizer.encode_chat([question])), SamplingParams(max_new_tokens=16), tokenizer.eos_ids)
        for index, question in enumerate(questions)
    ]
    setup = Setup(max_length=128)
    alone = [c.token_ids for c in run(autoregressive(target), asked, setup, target).completions]
    algorithm, shapes = DRAFTERS[kind]
    for shape in shapes:
        drafter = algorithm(algorithm.Config(**shape), target, folder / kind)
        drafted = run(drafter, asked, setup, target).completions
        assert [c.token_ids for c in drafted] == alone
        assert sum(len(c.token_ids) for c in drafted) > 2 * sum(len(c.accepted_counts) for c in drafted)


def test_latent_attention_is_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities have the same bits alone with chunks of prompts, in a batch, and with drafts."""
    add_products_in_order(monkeypatch)
    target, asked = TARGETS["latent"], requests(3, 3, logprobs=True)[::2]
    setup = Setup(impl="triton", deterministic=True, page_size=8, max_batch=2)
    together = run(autoregressive(target), asked, setup, target).completions
    scripts = [[*r.prompt_ids, *c.token_ids] for r, c in zip(asked, together, strict=True)]
    alone = replace(setup, max_batch=1, prefill_chunk=8)
    for algorithm, how in ((autoregressive(target), alone), (Scripted(scripts, 2), setup)):
        found = run(algorithm, asked, how, target).completions
        assert [c.token_ids for c in found] == [c.token_ids for c in together]
        assert [c.logprobs for c in found] == [c.logprobs for c in together] and found[0].logprobs
