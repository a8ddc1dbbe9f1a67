"""Batching, limits and refusals of the engine."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from algorithms.engine.engine import check_tree, default_tile, prompts_ahead
from algorithms.engine.request import EngineError
from algorithms.engine.session import StepReport
from algorithms.engine.settings import RuntimeSettings
from algorithms.registry import algorithms_in, available
from algorithms.step.prefill_batch import tile_counts
from algorithms.step.sampling_params import SamplingNeeds
from tests.algorithms import toy

TARGET = toy.random_target()


@pytest.mark.parametrize(("group", "tile"), [(1, 64), (2, 32), (3, 32), (4, 16), (5, 16), (8, 16), (64, 16), (128, 16)])
def test_a_tile_of_a_gpu_is_as_narrow_as_fills_the_matrix_unit(group: int, tile: int) -> None:
    config = replace(toy.CONFIG, num_heads=2 * group, num_kv_heads=2)
    assert [default_tile(config, torch.device(kind)) for kind in ("cuda", "cpu")] == [tile, 64]


def test_how_many_prompts_are_prefilled_ahead() -> None:
    assert [prompts_ahead(RuntimeSettings(max_batch=n)) for n in (1, 3, 4, 8, 16, 48, 64)] == [1, 3, 4, 6, 12, 12, 16]


@pytest.mark.parametrize(
    ("graph", "asked", "ahead"), [("step", None, 6), ("step", 2, 2), ("step", 0, 0), ("none", 2, 0)]
)
def test_rows_for_prompts_that_ride_ahead(graph: str, asked: int | None, ahead: int) -> None:
    """They hold pages too, and there are none where prompts do not ride."""
    engine = toy.engine_of(toy.autoregressive(TARGET), toy.Setup(max_batch=8, graph=graph, prefill_ahead=asked), TARGET)
    assert engine.parts.resources.max_batch == 8 + ahead == engine.parts.state.dummy_slot
    pages = engine.parts.state.page_table.shape[1]
    assert engine.scheduler.num_pages == (8 + ahead) * pages


@pytest.mark.parametrize(
    ("changes", "sizes", "tile"),
    [
        (dict(), (1, 2, 3, 4, 6, 8, 12), 16),  # three rows of four tiles
        (dict(max_length=63), (1, 2, 3, 4, 6, 8, 12), 16),
        (dict(max_length=65), (1, 2, 3, 4, 6, 8, 12, 15), 16),
        (dict(prefill_chunk=40), (1, 2), 16),
        (dict(prefill_chunk=12), (1,), 12),
        (dict(prefill_tile=64), (1, 2, 3), 64),
        (dict(prefill_tile=None), (1, 2, 3), 64),
        (dict(prefill_tile=3, max_batch=9), tile_counts(9 * 22, dense=85), 3),
    ],
)
def test_a_chunk_between_steps_is_no_larger_than_all_rows(changes: dict, sizes: tuple[int, ...], tile: int) -> None:
    chunks = toy.engine_of(toy.autoregressive(TARGET), toy.Setup(**changes), TARGET).prefiller.prefills
    assert (tuple(chunk.size for chunk in chunks), {chunk.tile for chunk in chunks}) == (sizes, {tile})


@pytest.mark.parametrize(
    ("changes", "sizes", "tile"),
    [
        (dict(max_batch=9), (4, 6, 8, 12, 16, 24), 16),  # of 64 to 384 tokens
        (dict(max_batch=9, prefill_chunk=200), (4, 6, 8, 12), 16),
        (dict(prefill_chunk=48), (3,), 16),
        (dict(prefill_chunk=12), (1,), 12),
        (dict(max_batch=9, prefill_tile=64), (1, 2, 3, 4, 6), 64),
    ],
)
def test_a_chunk_in_a_step_has_room_for_some_prompts(changes: dict, sizes: tuple[int, ...], tile: int) -> None:
    setup = toy.Setup(**({"graph": "step"} | changes))
    engine = toy.engine_of(toy.autoregressive(TARGET), setup, TARGET)
    chunks = engine.runner.mixed_prefills(SamplingNeeds(), setup.max_batch)
    assert (tuple(chunk.size for chunk in chunks), {chunk.tile for chunk in chunks}) == (sizes, {tile})


@pytest.mark.parametrize(("longest", "tile"), [(512, 16), (513, 32), (900, 32), (901, 64)])
def test_tiles_are_narrow_where_requests_are_short_and_wide_where_they_are_long(
    monkeypatch: pytest.MonkeyPatch, longest: int, tile: int
) -> None:
    """On a GPU, where tiles are as narrow as the matrix unit lets them."""
    monkeypatch.setattr("algorithms.engine.engine._LONG_REQUEST", 900)
    monkeypatch.setattr("algorithms.engine.engine._narrow", lambda config, device: 8 * config.num_kv_heads)
    monkeypatch.setattr(
        "algorithms.engine.engine.default_tile", lambda config, device, rows: rows // 4 * config.num_kv_heads
    )
    target = toy.random_target()
    target = replace(target, config=replace(target.config, max_position_embeddings=1024))
    chunks = toy.engine_of(
        toy.autoregressive(target), toy.Setup(max_length=longest, prefill_tile=None), target
    ).prefiller.prefills
    assert {chunk.tile for chunk in chunks} == {tile}


def test_requests_wait_for_pages() -> None:
    """A pool that holds one request at a time serves them all, with the answers of an ample pool."""
    asked = toy.requests(5)
    needed = max(-(-(r.max_length + 1) // 16) for r in asked)
    scarce = toy.Setup(max_batch=4, num_pages=needed)
    assert toy.answers(asked, scarce, TARGET) == toy.answers(asked, toy.Setup(max_batch=4), TARGET)


def test_a_request_larger_than_the_pool_is_refused_before_anything_runs() -> None:
    engine = toy.engine_of(toy.autoregressive(TARGET), toy.Setup(num_pages=2), TARGET)
    with pytest.raises(EngineError, match=r"request 3: needs 4 pages of 16 tokens, the KV pool has 2.*num_pages"):
        engine.generate([toy.changed(r, max_new_tokens=24) for r in toy.requests(4)[:1] + toy.requests(4)[3:]])
    assert engine.scheduler.num_free_pages == 2


def test_bad_requests() -> None:
    engine = toy.engine_of(toy.autoregressive(TARGET), toy.Setup(), TARGET)
    for change, message in (
        ({"max_new_tokens": 60}, "= 65 is longer than the context of 64 tokens"),
        ({"prompt_ids": (1, toy.VOCAB)}, f"outside the vocabulary of {toy.VOCAB}"),
    ):
        with pytest.raises(EngineError, match=message):
            engine.generate([toy.changed(toy.requests(1)[0], **change)])


@pytest.mark.parametrize(
    ("nodes", "depth", "chain", "expected"),
    [
        (5, 3, True, "expected 4 for a chain of 5 nodes, got 3"),
        (5, 5, True, "expected 4 for a chain of 5 nodes, got 5"),
        (5, 0, False, "expected 1 to 4 for a tree of 5 nodes, got 0"),
        (5, 5, False, "expected 1 to 4 for a tree of 5 nodes, got 5"),
        (2, 0, False, "expected 1 for a tree of 2 nodes, got 0"),
        (1, 1, False, "expected 0 for a tree of 1 nodes, got 1"),
        (1, 1, True, "expected 0 for a chain of 1 nodes, got 1"),
    ],
)
def test_trees_that_do_not_exist(nodes: int, depth: int, chain: bool, expected: str) -> None:
    algorithm = SimpleNamespace(name="toy", num_nodes=nodes, max_depth=depth, chain=chain)
    with pytest.raises(EngineError, match=f"^algo=toy: max_depth: {expected}$"):
        check_tree(algorithm)


def test_an_interrupted_run_gives_its_pages_back() -> None:
    engine = toy.engine_of(toy.autoregressive(TARGET), toy.Setup(), TARGET)

    def interrupt(report: StepReport) -> None:
        if report.emitted_tokens > 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(toy.requests(5), interrupt)
    assert engine.scheduler.num_free_pages == engine.scheduler.num_pages
    assert [c.token_ids for c in engine.generate(toy.requests(2)).completions] == toy.answers(
        toy.requests(2), toy.Setup(), TARGET
    )


def test_phase_times_account_for_every_step() -> None:
    seen: list[StepReport] = []
    generation = toy.engine_of(toy.autoregressive(TARGET), toy.Setup(), TARGET).generate(toy.requests(4), seen.append)
    assert len(seen) == generation.num_steps == len(generation.step_ms)
    assert seen[-1].num_finished == 4
    assert seen[-1].emitted_tokens == sum(len(c.token_ids) for c in generation.completions)
    assert set(generation.phase_times_ms) == {"draft", "verify", "accept", "commit", "host"}
    assert sum(generation.phase_times_ms.values()) == pytest.approx(generation.decode_ms, rel=0.02)
    assert generation.prefill_ms + generation.decode_ms <= generation.wall_ms * 1.001


def test_every_shipped_algorithm_is_found() -> None:
    found = available()
    assert {"autoregressive", "dflash"} <= set(found)
    assert all(found[name].name == name and found[name].Config().name == name for name in found)
    assert algorithms_in("tests.algorithms")["scripted"].__name__ == "Scripted"


@pytest.mark.parametrize("decoys", [False, True])
def test_a_rejected_draft_is_told_from_none(decoys: bool) -> None:
    """Every third position gets wrong drafts; the others are accepted to the end, where nothing more was drafted."""
    asked = toy.requests(3)
    texts = toy.scripts(asked, toy.answers(asked, toy.Setup(), TARGET))
    scripted = toy.Scripted(texts, 3, lambda position, depth: position % 3 > 0, decoys=decoys)
    for request, completion in zip(asked, toy.run(scripted, asked, toy.Setup(), TARGET).completions, strict=True):
        position = len(request.prompt_ids) - 1
        for accepted, ran_out in zip(completion.accepted_counts[:-1], completion.ran_out, strict=False):
            assert (accepted, ran_out) == ((3, True) if position % 3 else (0, False))
            position += accepted + 1
        assert set(completion.drafted_counts) == {6 if decoys else 3}
