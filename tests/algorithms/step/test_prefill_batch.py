"""Chunks of prompts: their sizes, what they tell the device, and what they leave in the state."""

import pytest

from algorithms.engine.engine import Engine
from algorithms.engine.request import Completion, Request
from algorithms.engine.scheduler import PrefillSegment, Running
from algorithms.engine.transfers import NUM_BUFFERS
from algorithms.step.prefill_batch import tile_counts
from algorithms.step.sampling_params import SamplingParams
from tests.algorithms.toy import Setup, autoregressive, engine_of, random_target, requests

TARGET = random_target()
PROMPT = tuple(range(1, 12))  # ten tokens are prefilled


def test_padding_holds_nothing_of_an_earlier_chunk() -> None:
    engine = engine_of(autoregressive(TARGET), Setup(prefill_chunk=16, prefill_tile=4), TARGET)
    engine.generate(requests(8, 2))
    spare = engine.parts.state.dummy_slot
    for chunk in engine.prefiller.prefills:
        for _ in range(NUM_BUFFERS):
            chunk.send(())
            sent = chunk.sent
            assert not any(bool(sent[name].any()) for name in ("counts", "prompt_counts", "tokens", "prompt_last"))
            assert bool((sent["slots"] == spare).all() and (sent["prompt_slots"] == spare).all())


def test_sizes_of_a_forward() -> None:
    assert tile_counts(1) == (1,)
    assert tile_counts(5) == (1, 2, 3, 4, 5)
    assert tile_counts(32) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    assert tile_counts(14, dense=10) == (1, 2, 3, 4, 6, 8, 12, 14), "10 tiles take no time yet"
    assert tile_counts(32, dense=8) == (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32)


@pytest.fixture
def engine() -> Engine:
    return engine_of(autoregressive(TARGET), Setup(prefill_chunk=20, prefill_tile=4, max_batch=2), TARGET)


def pieces(engine: Engine, cut: int) -> list[PrefillSegment]:
    """The first piece, of `cut` tokens, of a prompt in row 1, and the one piece of another in row 0."""
    long = Running(Request(0, PROMPT, SamplingParams(max_new_tokens=3, seed=5)), Completion(0), [4, 2], 1, 0.0)
    short = Running(Request(1, (40, 41, 42), SamplingParams(max_new_tokens=3)), Completion(1), [3], 0, 0.0)
    return [PrefillSegment(long, 0, cut), PrefillSegment(short, 0, 2)]


@pytest.mark.parametrize(("cut", "size"), [(8, 3), (10, 4)], ids=["a part", "all"])
def test_a_chunk_tells_what_its_tiles_and_prompts_are(engine: Engine, cut: int, size: int) -> None:
    """A tile has its tokens and the one behind them, and a prompt says where its last token stands among the tiles."""
    chunk = next(chunk for chunk in engine.prefiller.prefills if chunk.size == size)
    given = pieces(engine, cut)
    chunk.send(given)
    sent = {name: tensor.tolist() for name, tensor in chunk.sent.items()}
    tiles = [(1, 0, 4), (1, 4, 4), *([(1, 8, 2)] if cut == 10 else []), (0, 0, 2)]
    assert list(zip(sent["slots"], sent["starts"], sent["counts"], strict=True)) == tiles
    texts = {1: PROMPT, 0: (40, 41, 42)}
    for (row, start, count), tokens in zip(tiles, sent["tokens"], strict=True):
        assert tokens == [*texts[row][start : start + count + 1], *[0] * (4 - count)]
    spare = engine.parts.state.dummy_slot
    assert sent["prompt_slots"] == [1, 0, *[spare] * (size - 2)] and sent["prompt_starts"] == [0] * size
    assert sent["prompt_counts"] == [cut, 2, *[0] * (size - 2)]
    assert sent["prompt_last"][:2] == [cut - 1, 4 * (size - 1) + 1]
    assert sent["complete"] == [int(cut == 10), 1, *[0] * (size - 2)]
    assert sent["longs"][0][:2] == [10 if cut == 10 else 0, 2] and sent["longs"][1][:2] == [11, 42]
    assert sent["pages"][0][:2] == [4, 2] and sent["pages"][1][0] == 3


def test_a_tile_may_reach_behind_the_context() -> None:
    """A long prompt ends in a tile whose padding would stand where no text is."""
    engine = engine_of(autoregressive(TARGET), Setup(prefill_tile=25, max_batch=1), TARGET)
    state, prompt = engine.parts.state, tuple(range(60))
    long = Running(Request(0, prompt, SamplingParams(max_new_tokens=4)), Completion(0), [0, 1, 2, 3], 0, 0.0)
    chunk = engine.prefiller.prefills[0]
    assert state.history.shape[1] == 65 and (chunk.size, chunk.tile) == (1, 25)
    chunk.send([PrefillSegment(long, 50, 9)])
    mixer = chunk.begin(50)
    assert state.history[0, 50:].tolist() == [*prompt[50:], *[0] * 5]
    assert mixer.positions.tolist() == [*range(50, 65), *[64] * 10]
