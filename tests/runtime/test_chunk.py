"""Chunks of prompts: their sizes, what they tell the device, and what they leave in the state."""

from __future__ import annotations

import pytest
import torch

from algorithms.runtime.chunk import Chunk, every_second, tile_counts
from algorithms.runtime.engine import Engine
from algorithms.runtime.prefill import chunk_for
from algorithms.runtime.request import Completion, Request
from algorithms.runtime.sampling_params import SamplingParams
from algorithms.runtime.scheduler import Piece, Running
from algorithms.runtime.staging import NUM_BUFFERS
from tests.algorithms.toy import Setup, autoregressive, engine_of, random_target, requests

TARGET = random_target()
PROMPT = tuple(range(1, 12))  # ten tokens are prefilled


def test_padding_holds_nothing_of_an_earlier_chunk() -> None:
    engine = engine_of(autoregressive(TARGET), Setup(prefill_chunk=16, prefill_tile=4), TARGET)
    engine.generate(requests(8, 2))
    spare = engine.parts.state.spare_row
    for chunk in engine.prefiller.chunks:
        for _ in range(NUM_BUFFERS):
            chunk.send(())
            sent = chunk.sent
            assert not any(bool(sent[name].any()) for name in ("counts", "prompt_counts", "tokens", "prompt_last"))
            assert bool((sent["rows"] == spare).all() and (sent["prompt_rows"] == spare).all())


def test_sizes_of_a_forward() -> None:
    assert tile_counts(1) == (1,)
    assert tile_counts(5) == (1, 2, 3, 4, 5)
    assert tile_counts(32) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    assert tile_counts(14, dense=10) == (1, 2, 3, 4, 6, 8, 12, 14), "10 tiles take no time yet"
    assert tile_counts(32, dense=8) == (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32)


def test_every_second_size_has_the_largest() -> None:
    assert [tuple(every_second(range(1, count + 1))) for count in (1, 2, 3, 4)] == [(1,), (2,), (1, 3), (2, 4)]


@pytest.fixture
def engine() -> Engine:
    return engine_of(autoregressive(TARGET), Setup(prefill_chunk=20, prefill_tile=4, max_batch=2), TARGET)


def pieces(engine: Engine, cut: int) -> list[Piece]:
    """The first piece, of `cut` tokens, of a prompt in row 1, and the one piece of another in row 0."""
    long = Running(Request(0, PROMPT, SamplingParams(max_new_tokens=3, seed=5)), Completion(0), [4, 2], 1, 0.0)
    short = Running(Request(1, (40, 41, 42), SamplingParams(max_new_tokens=3)), Completion(1), [3], 0, 0.0)
    return [Piece(long, 0, cut), Piece(short, 0, 2)]


@pytest.mark.parametrize(("cut", "size"), [(8, 3), (10, 4)], ids=["a part", "all"])
def test_a_chunk_tells_what_its_tiles_and_prompts_are(engine: Engine, cut: int, size: int) -> None:
    """A tile has its tokens and the one behind them, and a prompt says where its last token stands among the tiles."""
    chunk = next(chunk for chunk in engine.prefiller.chunks if chunk.size == size)
    given = pieces(engine, cut)
    chunk.send(given)
    sent = {name: tensor.tolist() for name, tensor in chunk.sent.items()}
    tiles = [(1, 0, 4), (1, 4, 4), *([(1, 8, 2)] if cut == 10 else []), (0, 0, 2)]
    assert list(zip(sent["rows"], sent["starts"], sent["counts"], strict=True)) == tiles
    texts = {1: PROMPT, 0: (40, 41, 42)}
    for (row, start, count), tokens in zip(tiles, sent["tokens"], strict=True):
        assert tokens == [*texts[row][start : start + count + 1], *[0] * (4 - count)]
    spare = engine.parts.state.spare_row
    assert sent["prompt_rows"] == [1, 0, *[spare] * (size - 2)] and sent["prompt_starts"] == [0] * size
    assert sent["prompt_counts"] == [cut, 2, *[0] * (size - 2)]
    assert sent["prompt_last"][:2] == [cut - 1, 4 * (size - 1) + 1]
    assert sent["complete"] == [int(cut == 10), 1, *[0] * (size - 2)]
    assert sent["longs"][0][:2] == [10 if cut == 10 else 0, 2] and sent["longs"][1][:2] == [11, 42]
    assert sent["pages"][0][:2] == [4, 2] and sent["pages"][1][0] == 3


def test_a_prompt_of_one_token_has_a_tile(engine: Engine) -> None:
    chunk = engine.prefiller.chunks[0]
    alone = Running(Request(0, (9,), SamplingParams(max_new_tokens=3)), Completion(0), [1], 0, 0.0)
    chunk.send([Piece(alone, 0, 0)])
    sent = {name: tensor.tolist() for name, tensor in chunk.sent.items()}
    assert (sent["counts"], sent["tokens"]) == ([0], [[9, 0, 0, 0, 0]])
    assert (sent["prompt_counts"], sent["prompt_last"], sent["complete"]) == ([0], [0], [1])


def test_the_text_of_a_prompt_is_written_with_the_token_behind_it(engine: Engine) -> None:
    """Whatever is drafted from the text reads the last token of the prompt, which no tile runs over."""
    state = engine.parts.state
    chunk = chunk_for(engine.prefiller.chunks, pieces(engine, 10))
    chunk.send(pieces(engine, 10))
    mixer = chunk.begin(8)
    assert state.history[1, :12].tolist() == [*PROMPT, 0] and state.history[0, :4].tolist() == [40, 41, 42, 0]
    assert chunk.tokens.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 0], [40, 41, 42, 0]]
    assert mixer.positions.view(4, 4)[:3].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert state.active.tolist() == [0, 0], "the prompts are not prefilled yet"
    hidden = torch.zeros(4, 4, TARGET.config.hidden_size)
    chunk.finish(hidden, [])
    assert state.active.tolist() == [1, 1] and state.lengths.tolist() == [2, 10]


def test_a_tile_may_reach_behind_the_context() -> None:
    """A long prompt ends in a tile whose padding would stand where no text is."""
    engine = engine_of(autoregressive(TARGET), Setup(prefill_tile=25, max_batch=1), TARGET)
    state, prompt = engine.parts.state, tuple(range(60))
    long = Running(Request(0, prompt, SamplingParams(max_new_tokens=4)), Completion(0), [0, 1, 2, 3], 0, 0.0)
    chunk = engine.prefiller.chunks[0]
    assert state.history.shape[1] == 65 and (chunk.size, chunk.tile) == (1, 25)
    chunk.send([Piece(long, 50, 9)])
    mixer = chunk.begin(50)
    assert state.history[0, 50:].tolist() == [*prompt[50:], *[0] * 5]
    assert mixer.positions.tolist() == [*range(50, 65), *[64] * 10]


def test_a_piece_takes_the_smallest_chunk_that_holds_it(engine: Engine) -> None:
    sizes = [chunk.size for chunk in engine.prefiller.chunks]
    assert sizes == [1, 2, 3, 4, 5]
    for cut, size in ((4, 2), (5, 3), (8, 3), (9, 4), (10, 4)):
        chosen: Chunk = chunk_for(engine.prefiller.chunks, pieces(engine, cut))
        assert chosen.size == size and chosen.num_tokens == 4 * size
