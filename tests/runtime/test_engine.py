"""What an engine derives from its settings: sizes of chunks on each device, and what is adaptive."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from algorithms.runtime import engine as engines
from algorithms.runtime.engine import default_ahead, default_tile
from algorithms.runtime.engine_settings import EngineSettings
from tests.algorithms.toy import Setup, autoregressive, engine_of, random_target

TARGET = random_target()
GPU, CPU = torch.device("cuda"), torch.device("cpu")


def parts(device: torch.device, group: int = 4, sized: bool = False) -> Any:
    """Of a model with `group` query heads a KV head."""
    config = SimpleNamespace(num_heads=2 * group, num_kv_heads=2)
    resources = SimpleNamespace(target=SimpleNamespace(config=config), device=device)
    return SimpleNamespace(resources=resources, sizing=object() if sized else None)


@pytest.fixture(autouse=True)
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "Chunk", lambda parts, size, tile: SimpleNamespace(size=size, tile=tile))


@pytest.mark.parametrize(("group", "tile"), [(1, 64), (2, 32), (3, 32), (4, 16), (5, 16), (8, 16), (64, 16), (128, 16)])
def test_a_tile_of_a_gpu_is_as_narrow_as_fills_the_matrix_unit(group: int, tile: int) -> None:
    config = parts(GPU, group).resources.target.config
    assert (default_tile(config, GPU), default_tile(config, CPU)) == (tile, 64)


@pytest.mark.parametrize(
    ("device", "longest", "tile"), [(GPU, 512, 8), (GPU, 513, 16), (CPU, 512, 64), (CPU, 513, 64)], ids=str
)
def test_short_requests_have_half_as_wide_tiles_on_a_gpu(device: torch.device, longest: int, tile: int) -> None:
    made = engines._chunks_between(parts(device), EngineSettings(max_batch=8), longest)
    assert {chunk.tile for chunk in made} == {tile}
    assert made[-1].size == min(2048 // tile, 8 * -(-longest // tile))


def test_sizes_between_steps_follow_the_settings() -> None:
    made = engines._chunks_between(parts(CPU), EngineSettings(max_batch=3, prefill_chunk=100, prefill_tile=16), 70)
    assert [(chunk.size, chunk.tile) for chunk in made] == [(1, 16), (2, 16), (3, 16), (4, 16), (6, 16)]
    made = engines._chunks_between(parts(CPU), EngineSettings(max_batch=1, prefill_tile=16), 40)
    assert [chunk.size for chunk in made] == [1, 2, 3], "no chunk is larger than all rows together"
    made = engines._chunks_between(parts(CPU), EngineSettings(prefill_chunk=5, prefill_tile=16), 40)
    assert {chunk.tile for chunk in made} == {5}


@pytest.mark.parametrize(
    ("device", "sized", "tile", "sizes"),
    [
        (GPU, False, 8, [8, 12, 16, 24, 32, 48]),
        (GPU, True, 8, [8, 16, 32, 48]),
        (CPU, False, 16, [4, 6, 8, 12, 16, 24]),
    ],
    ids=str,
)
def test_sizes_in_steps_go_from_64_to_384_tokens(
    device: torch.device, sized: bool, tile: int, sizes: list[int]
) -> None:
    largest: Any = SimpleNamespace(size=40, tile=16)
    made = engines._chunks_in_steps(parts(device, sized=sized), EngineSettings(), largest)
    assert [(chunk.size, chunk.tile) for chunk in made] == [(size, tile) for size in sizes]


def test_no_chunk_in_a_step_is_larger_than_the_largest_between_steps() -> None:
    small: Any = SimpleNamespace(size=3, tile=16)
    for settings, sizes in ((EngineSettings(), [(6, 8)]), (EngineSettings(prefill_tile=16), [(3, 16)])):
        made = engines._chunks_in_steps(parts(GPU), settings, small)
        assert [(chunk.size, chunk.tile) for chunk in made] == sizes


def test_how_many_prompts_are_prefilled_ahead() -> None:
    assert [default_ahead(batch) for batch in (1, 3, 4, 8, 16, 48, 64)] == [1, 3, 4, 6, 12, 12, 16]


@pytest.mark.parametrize(
    ("graph", "asked", "ahead"), [("step", None, 6), ("step", 2, 2), ("step", 0, 0), ("none", 2, 0)]
)
def test_rows_for_prompts_that_ride_ahead(
    monkeypatch: pytest.MonkeyPatch, graph: str, asked: int | None, ahead: int
) -> None:
    """They hold pages too, and there are none where prompts do not ride."""
    monkeypatch.undo()
    engine = engine_of(autoregressive(TARGET), Setup(max_batch=8, graph=graph, prefill_ahead=asked), TARGET)
    assert engine.parts.resources.max_batch == 8 + ahead == engine.parts.state.spare_row
    pages = engine.parts.state.page_table.shape[1]
    assert engine.scheduler.num_pages == (8 + ahead) * pages


def test_an_algorithm_without_drafts_has_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    engine = engine_of(autoregressive(TARGET), Setup(adaptive=True), TARGET)
    assert engine.parts.sizing is None and engine.parts.backlog is None
