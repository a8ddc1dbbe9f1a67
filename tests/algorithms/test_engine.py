"""Batching, limits and refusals of the engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from algorithms.dflash import DFlash
from algorithms.registry import algorithms_in, available
from algorithms.runtime import step
from algorithms.runtime.chunk import tile_counts
from algorithms.runtime.engine import default_ahead, default_tile
from algorithms.runtime.models.decoder import Decoder
from algorithms.runtime.models.loading import Target
from algorithms.runtime.request import EngineError
from algorithms.runtime.sampling_params import SamplingNeeds
from algorithms.runtime.session import StepReport
from tests.algorithms.toy import (
    CONFIG,
    VOCAB,
    Scripted,
    Setup,
    answers,
    autoregressive,
    changed,
    engine_of,
    random_drafter,
    random_target,
    randomise,
    requests,
    run,
    scripts,
    spell,
)
from tests.exact_products import add_products_in_order

TARGET = random_target()


def test_tiles_are_as_narrow_as_the_matrix_unit_lets_them() -> None:
    for heads, keys, tile in ((32, 8, 16), (9, 3, 32), (4, 2, 32), (8, 8, 64), (64, 1, 16)):
        config = replace(TARGET.config, num_heads=heads, num_kv_heads=keys)
        assert default_tile(config, torch.device("cuda")) == tile
        assert default_tile(config, torch.device("cpu")) == 64


def test_a_chunk_holds_a_token() -> None:
    with pytest.raises(ValueError, match="^prefill_chunk: expected at least 1, got 0$"):
        engine_of(autoregressive(TARGET), Setup(prefill_chunk=0), TARGET)


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
    chunks = engine_of(autoregressive(TARGET), Setup(**changes), TARGET).prefiller.chunks
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
    setup = Setup(**({"graph": "step"} | changes))
    engine = engine_of(autoregressive(TARGET), setup, TARGET)
    chunks = engine.runner.riding(SamplingNeeds(), setup.max_batch)
    assert (tuple(chunk.size for chunk in chunks), {chunk.tile for chunk in chunks}) == (sizes, {tile})


def test_prompts_that_are_prefilled_ahead() -> None:
    """As many as may end in a step or two, four at least where there are so many rows."""
    counts = {1: 1, 2: 2, 4: 4, 8: 6, 12: 9, 16: 12, 32: 12, 64: 16}
    assert {rows: default_ahead(rows) for rows in counts} == counts


@pytest.mark.parametrize(("longest", "tile"), [(512, 16), (513, 32)])
def test_tiles_are_half_as_wide_where_requests_are_short(
    monkeypatch: pytest.MonkeyPatch, longest: int, tile: int
) -> None:
    """On a GPU, where tiles are as narrow as the matrix unit lets them."""
    monkeypatch.setattr("algorithms.runtime.engine._narrow", lambda config, device: 8 * config.num_kv_heads)
    monkeypatch.setattr("algorithms.runtime.engine.default_tile", lambda config, device: 16 * config.num_kv_heads)
    target = random_target()
    target = replace(target, config=replace(target.config, max_position_embeddings=1024))
    chunks = engine_of(autoregressive(target), Setup(max_length=longest, prefill_tile=None), target).prefiller.chunks
    assert {chunk.tile for chunk in chunks} == {tile}


def test_requests_wait_for_pages() -> None:
    """A pool that holds one request at a time serves them all, with the answers of an ample pool."""
    asked = requests(5)
    needed = max(-(-(r.max_length + 1) // 16) for r in asked)
    scarce = Setup(max_batch=4, num_pages=needed)
    assert answers(asked, scarce, TARGET) == answers(asked, Setup(max_batch=4), TARGET)


def test_a_request_larger_than_the_pool_is_refused_before_anything_runs() -> None:
    engine = engine_of(autoregressive(TARGET), Setup(num_pages=2), TARGET)
    with pytest.raises(EngineError, match=r"request 3: needs 4 pages of 16 tokens, the KV pool has 2.*num_pages"):
        engine.generate([changed(r, max_new_tokens=24) for r in requests(4)[:1] + requests(4)[3:]])
    assert engine.scheduler.num_free_pages == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": ()}, "no tokens"),
        ({"max_new_tokens": 60}, "= 65 is longer than the context of 64 tokens"),
        ({"prompt_ids": (1, VOCAB)}, f"outside the vocabulary of {VOCAB}"),
    ],
)
def test_bad_requests(change: dict, message: str) -> None:
    engine = engine_of(autoregressive(TARGET), Setup(), TARGET)
    with pytest.raises(EngineError, match=message):
        engine.generate([changed(requests(1)[0], **change)])


def test_an_interrupted_run_gives_its_pages_back() -> None:
    engine = engine_of(autoregressive(TARGET), Setup(), TARGET)

    def interrupt(report: StepReport) -> None:
        if report.emitted_tokens > 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(requests(5), interrupt)
    assert engine.scheduler.num_free_pages == engine.scheduler.num_pages
    assert [c.token_ids for c in engine.generate(requests(2)).completions] == answers(requests(2), Setup(), TARGET)


def test_nan_logits_are_reported() -> None:
    broken = random_target()
    broken.model.model.norm.weight.fill_(float("nan"))
    engine = engine_of(autoregressive(broken), Setup(), broken)
    for completion in engine.generate(requests(2)).completions:
        assert completion.finish_reason == "error" and "no finite logit" in completion.error
        assert completion.token_ids == []
    assert engine.scheduler.num_free_pages == engine.scheduler.num_pages


def test_ledger_accounts_for_every_step() -> None:
    seen: list[StepReport] = []
    generation = engine_of(autoregressive(TARGET), Setup(), TARGET).generate(requests(4), seen.append)
    assert len(seen) == generation.num_steps == len(generation.step_ms)
    assert seen[-1].num_finished == 4
    assert seen[-1].emitted_tokens == sum(len(c.token_ids) for c in generation.completions)
    assert set(generation.ledger_ms) == {"draft", "verify", "accept", "commit", "host"}
    assert sum(generation.ledger_ms.values()) == pytest.approx(generation.decode_ms, rel=0.02)
    assert generation.prefill_ms + generation.decode_ms <= generation.wall_ms * 1.001


def test_a_device_that_works_while_the_host_is_busy_elsewhere_counts_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(autoregressive(TARGET), Setup(), TARGET)
    busy = {"draft": 1e6, "verify": 2e6, "accept": 0.0, "commit": 0.0}
    monkeypatch.setattr(engine.runner.clock, "ledger_ms", lambda: busy)
    generation = engine.generate(requests(2))
    assert generation.decode_ms == 3e6 and generation.ledger_ms == busy | {"host": 0.0}


@pytest.mark.parametrize("cut", range(1, 9))
def test_stop_string_across_tokens_inside_a_block(cut: int) -> None:
    """The string may begin in one token and end in the next, at any place of a block; it is cut from the text."""
    asked = requests(2)
    written = answers(asked, Setup(), TARGET)
    strings = [spell(ids[cut - 1 : cut + 1]) for ids in written]
    stopping = [changed(r, stop_strings=(s, "never")) for r, s in zip(asked, strings, strict=True)]
    drafted = run(Scripted(scripts(asked, written), 5), stopping, Setup(), TARGET).completions
    alone = run(autoregressive(TARGET), stopping, Setup(), TARGET).completions
    for got, expected, string in zip(drafted, alone, strings, strict=True):
        assert (got.token_ids, got.text, got.finish_reason) == (expected.token_ids, expected.text, "stop_string")
        assert string not in got.text
        assert spell(got.token_ids).endswith(string)


def test_every_shipped_algorithm_is_found() -> None:
    found = available()
    assert {"autoregressive", "dflash"} <= set(found)
    assert all(found[name].name == name and found[name].Config().name == name for name in found)
    assert algorithms_in("tests.algorithms")["scripted"].__name__ == "Scripted"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (dict(block_size=17), "at most 16, as trained, got 17"),
        (dict(block_size=0), "1 to 256 or null"),
        (dict(block_size=2, topk=2, num_nodes=8, draw="sample"), "1 steps with topk 2 draft 2 to 3 nodes"),
        (dict(topk=2, num_nodes=2, draw="sample", window=15), "window: expected at least the block of 16, got 15"),
    ],
)
def test_dflash_block_size_is_checked(monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], message: str) -> None:
    monkeypatch.setattr("algorithms.runtime.models.loading.load_dflash", lambda *_: random_drafter())
    with pytest.raises(ValueError, match=message):
        DFlash(DFlash.Config(**asked), TARGET, "random")


@pytest.mark.parametrize("decoys", [False, True])
def test_a_rejected_draft_is_told_from_none(decoys: bool) -> None:
    """Every third position gets wrong drafts; the others are accepted to the end, where nothing more was drafted."""
    asked = requests(3)
    texts = scripts(asked, answers(asked, Setup(), TARGET))
    scripted = Scripted(texts, 3, lambda position, depth: position % 3 > 0, decoys=decoys)
    for request, completion in zip(asked, run(scripted, asked, Setup(), TARGET).completions, strict=True):
        position = len(request.prompt_ids) - 1
        for accepted, ran_out in zip(completion.accepted_counts[:-1], completion.ran_out, strict=False):
            assert (accepted, ran_out) == ((3, True) if position % 3 else (0, False))
            position += accepted + 1
        assert set(completion.drafted_counts) == {6 if decoys else 3}


def test_every_node_of_a_deterministic_tree_sees_its_whole_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of what a node sees ends with the node itself, however deep it is."""
    plan, seen = step.PagedMixer.over, []

    def noted(*arguments: Any, **options: Any) -> Any:
        if options.get("paths") is not None:
            seen.append(((options["paths"] >= 0).sum(2), options["depths"] + 1))
        return plan(*arguments, **options)

    monkeypatch.setattr(step.PagedMixer, "over", noted)
    add_products_in_order(monkeypatch)
    config = replace(CONFIG, num_layers=1)
    target = Target(model=randomise(Decoder(config), 0), config=config, path=Path("toy"))
    setup = Setup(deterministic=True, impl="triton", fused=True, max_length=32)
    asked = requests(1, max_new_tokens=4)
    written = answers(asked, setup, target)
    drafted = run(Scripted(scripts(asked, written), 3, decoys=True), asked, setup, target).completions
    assert [(c.token_ids, c.accepted_counts) for c in drafted] == [(written[0], [3])]
    assert seen and all(torch.equal(listed, expected) for listed, expected in seen)
