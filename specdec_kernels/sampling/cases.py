"""Named inputs of the sampling family."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from specdec_kernels.cases import Case, Maker


def sampling_keys(make: Maker, requests: int) -> dict[str, torch.Tensor]:
    """Temperatures (every third request greedy) and seeds over the whole int64 range."""
    temperature = torch.rand(requests, generator=make.generator) * 1.5 + 0.1
    temperature[::3] = 0.0
    seeds = make.integers(-(1 << 62), 1 << 62, requests) * 2 + 1
    return dict(temperature=temperature.to(make.device), seeds=seeds)


def _draw(make: Maker, rows: int, vocab: int, scale: float = 2.0, padded: int = 0) -> dict[str, Any]:
    logits = make.normal(rows, vocab + padded, scale=scale)
    if padded:
        logits[:, vocab:] = 1e4
        logits = logits[:, :vocab]
    return dict(logits=logits, positions=make.integers(0, 1 << 40, rows), **sampling_keys(make, rows))


def _greedy(make: Maker, rows: int, vocab: int) -> dict[str, Any]:
    return dict(logits=make.normal(rows, vocab))


def _ties(make: Maker, rows: int, vocab: int) -> dict[str, Any]:
    return dict(logits=make.integers(0, 3, rows, vocab).to(make.dtype))


def _hostile(make: Maker, vocab: int) -> dict[str, Any]:
    """One trouble a row, each as a greedy and as a drawn row, between two ordinary rows."""
    inf, nan = float("inf"), float("nan")
    logits = make.normal(16, vocab)
    logits[2:4] = nan
    logits[4:6] = -inf
    logits[6:8, vocab // 2] = inf
    logits[8:10, ::2] = nan
    logits[10:12] = -inf
    logits[10:12, vocab - 1] = -3.0
    logits[12:14] *= 1e30
    logits[14:16, : vocab // 2] = -inf
    temperature = torch.tensor([0.0, 0.8]).repeat(8).to(make.device)
    return dict(
        logits=logits,
        temperature=temperature,
        seeds=make.integers(0, 1 << 40, 16),
        positions=make.integers(0, 1 << 40, 16),
    )


def _edges(make: Maker, vocab: int) -> dict[str, Any]:
    """Uniforms at the ends of [0, 1) where first and last tokens are banned; also extreme temperatures."""
    logits = make.normal(8, vocab)
    logits[:, :3] = float("-inf")
    logits[:, vocab - 3 :] = float("-inf")
    below_one = 1.0 - 2.0**-24
    uniforms = make.tensor([0.0, below_one, 2.0**-24, 0.5, 0.0, below_one, 0.0, below_one], torch.float32)
    temperature = make.tensor([1.0, 1.0, 1.0, 1.0, 1e-40, 1e-40, 1e4, 1e4], torch.float32)
    return dict(logits=logits, temperature=temperature, uniforms=uniforms)


CASES = (
    Case("pick_empty", "pick_tokens", partial(_draw, rows=0, vocab=9), "launch on an empty grid"),
    Case("pick_vocab_1", "pick_tokens", partial(_draw, rows=3, vocab=1), "no scan to speak of", gate=True),
    Case("pick_vocab_2", "pick_tokens", partial(_draw, rows=5, vocab=2), "off by one in the scan"),
    Case(
        "pick_vocab_100",
        "pick_tokens",
        partial(_draw, rows=33, vocab=100),
        "lanes past the vocabulary",
        gate=True,
    ),
    Case("pick_tile_edge", "pick_tokens", partial(_draw, rows=6, vocab=2048), "an empty second tile", gate=True),
    Case("pick_tile_plus_one", "pick_tokens", partial(_draw, rows=6, vocab=2049), "a tile of one token"),
    Case(
        "pick_vocab_8193",
        "pick_tokens",
        partial(_draw, rows=7, vocab=8193),
        "tiles not a power of two",
        gate=True,
    ),
    Case(
        "pick_flat",
        "pick_tokens",
        partial(_draw, rows=9, vocab=4100, scale=0.01),
        "mass spread over all tiles",
    ),
    Case(
        "pick_padded",
        "pick_tokens",
        partial(_draw, rows=5, vocab=100, padded=28),
        "a padded vocabulary's tail",
    ),
    Case("pick_greedy", "pick_tokens", partial(_greedy, rows=7, vocab=8193), "no sampling arguments", gate=True),
    Case("pick_ties", "pick_tokens", partial(_ties, rows=40, vocab=2049), "the lowest id among equals"),
    Case("pick_hostile", "pick_tokens", partial(_hostile, vocab=100), "NaN and infinities"),
    Case("pick_hostile_tiles", "pick_tokens", partial(_hostile, vocab=4100), "a tile without a usable logit"),
    Case("pick_edges", "pick_tokens", partial(_edges, vocab=100), "banned tokens at u = 0 and u = 1"),
    Case("pick_edges_tiles", "pick_tokens", partial(_edges, vocab=2051), "a last tile without mass"),
    Case(
        "pick_qwen",
        "pick_tokens",
        partial(_draw, rows=16, vocab=151936),
        "the shipped vocabulary",
        gate=True,
        bench=True,
        tags=("large",),
    ),
)
