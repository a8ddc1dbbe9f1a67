"""Named inputs of the sampling family."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from specdec_kernels.cases import Case, Comparison, Maker
from specdec_kernels.tree.cases import random_parents
from specdec_kernels.tree.reference import build_tree


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


def row_filters(make: Maker, requests: int) -> dict[str, torch.Tensor]:
    """Every filter on in some rows and off in others, alone and together."""
    row = torch.arange(requests)
    top_k = torch.randint(1, 60, (requests,), generator=make.generator).int()
    top_p = torch.rand(requests, generator=make.generator) * 0.9 + 0.05
    min_p = torch.rand(requests, generator=make.generator) * 0.2
    top_k[row % 4 == 1] = 0
    top_p[row % 4 == 2] = 1.0
    min_p[row % 3 > 0] = 0.0
    return dict(top_k=top_k.to(make.device), top_p=top_p.to(make.device), min_p=min_p.to(make.device))


def _filtered(make: Maker, rows: int, vocab: int, scale: float = 2.0, padded: int = 0) -> dict[str, Any]:
    return _draw(make, rows, vocab, scale, padded) | row_filters(make, rows) | dict(return_logprobs=True)


def _filtered_alone(make: Maker, rows: int, vocab: int, name: str) -> dict[str, Any]:
    return _draw(make, rows, vocab) | {name: row_filters(make, rows)[name]}


def _filtered_hostile(make: Maker, vocab: int) -> dict[str, Any]:
    return _hostile(make, vocab) | row_filters(make, 16) | dict(return_logprobs=True)


def _filtered_ties(make: Maker, rows: int, vocab: int) -> dict[str, Any]:
    """Few distinct logits: the thresholds fall among equals, and more groups share a maximum than there are slots."""
    inputs = _ties(make, rows, vocab) | sampling_keys(make, rows) | row_filters(make, rows)
    return inputs | dict(positions=make.integers(0, 99, rows))


def _filter_limits(make: Maker, vocab: int) -> dict[str, Any]:
    """Filters at and beyond the ends of their ranges."""
    inputs = _draw(make, 8, vocab) | dict(temperature=make.tensor([1.0] * 8, torch.float32))
    return inputs | dict(
        top_k=make.tensor([1, vocab, vocab + 5, -3, 0, 0, 0, vocab - 1], torch.int32),
        top_p=make.tensor([1.0, 0.0, -1.0, 1.5, float("nan"), 1e-6, 1 - 1e-6, 1.0], torch.float32),
        min_p=make.tensor([0.0, 0.0, 0.0, 1.0, 2.0, -1.0, 0.0, float("nan")], torch.float32),
    )


def _spread(make: Maker, rows: int, vocab: int) -> dict[str, Any]:
    """One likely token in each group holds most of the mass that top-p wants; the rest lies under every group's
    maximum, in steps that a threshold can fall between."""
    logits = torch.linspace(0, 0.5, vocab)[torch.randperm(vocab, generator=make.generator)].repeat(rows, 1)
    logits[:, 3::64] = torch.arange(len(logits[0, 3::64])) / 8 + 4.5
    one = torch.ones(rows, device=make.device)
    top_p = torch.linspace(0.5, 0.99, rows).to(make.device)
    return dict(logits=logits.to(make.device, make.dtype), temperature=one, top_p=top_p)


def _misled(make: Maker, rows: int, vocab: int, stride: int) -> dict[str, Any]:
    """Every `stride`-th group of 64, from which the threshold is guessed, is unlike the others: above or below them."""
    logits = make.normal(rows, vocab)
    away = torch.linspace(-4.0, 4.0, rows)[:, None] * (torch.arange(vocab) // 64 % stride == 0)
    one = torch.ones(rows, device=make.device)
    top_p = torch.tensor([0.3, 0.6, 0.9, 0.97]).repeat(rows)[:rows].to(make.device)
    return dict(logits=(logits.float() + away.to(make.device)).to(make.dtype), temperature=one, top_p=top_p)


def _law(make: Maker, rows: int, vocab: int, scale: float = 2.0, greedy: bool = False) -> dict[str, Any]:
    if greedy:
        return dict(logits=make.normal(rows, vocab, scale=scale))
    temperature = sampling_keys(make, rows)["temperature"]
    return dict(logits=make.normal(rows, vocab, scale=scale), temperature=temperature, **row_filters(make, rows))


def _renorm(make: Maker, rows: int, vocab: int, name: str, hostile: bool = False) -> dict[str, Any]:
    probs = torch.softmax(make.normal(rows, vocab, scale=3.0).float(), -1)
    if hostile:
        probs[0], probs[1] = float("nan"), 0.0
        probs[2, ::2] = -0.5
        probs[3] = 1.0 / vocab
    return dict(probs=probs, **{name: row_filters(make, rows)[name]})


def _penalties(
    make: Maker, batch: int, num_nodes: int, vocab: int, extras: bool = True, padded: int = 0
) -> dict[str, Any]:
    """Every kind of penalty on some request; request 1 has none unless there is a bias. Tokens repeat on paths."""
    lengths = make.integers(0, 50, batch)
    tree = build_tree(random_parents(make, batch, num_nodes, unused=True), lengths)
    request = torch.arange(batch)
    strength = torch.rand(3, batch, generator=make.generator).to(make.device)
    off = (request % 4 == 1).to(make.device)
    tokens = make.integers(0, min(vocab, 7), batch, num_nodes)
    tokens[:, num_nodes - 1 :] = -1 if num_nodes > 1 else 3
    return dict(
        logits=make.normal(batch, num_nodes, vocab + padded, scale=3.0)[..., :vocab],
        tokens=tokens,
        mask=tree.mask,
        output_counts=make.integers(-3, 4, batch, vocab).clamp(min=0).int(),
        prompt_seen=make.integers(0, 5, batch, vocab) == 0 if extras else None,
        repetition=torch.where(off, 1.0, 0.5 + strength[0] * 1.5),
        presence=torch.where(off, 0.0, strength[1] - 0.3),
        frequency=torch.where(off, 0.0, strength[2]),
        bias=make.normal(batch, vocab).float() if extras else None,
    )


def _counts(make: Maker, batch: int, width: int, vocab: int) -> dict[str, Any]:
    """Many equal tokens, some outside the vocabulary, any number of them said."""
    return dict(
        counts=make.integers(0, 100, batch, vocab, dtype=torch.int32),
        tokens=make.integers(-1, vocab + 1, batch, width),
        num=make.integers(0, width + 2, batch, dtype=torch.int32),
    )


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
    Case("pick_filtered", "pick_tokens", partial(_filtered, rows=25, vocab=100), "order of the filters", gate=True),
    Case("pick_top_k", "pick_tokens", partial(_filtered_alone, rows=9, vocab=100, name="top_k"), "k off by one"),
    Case("pick_top_p", "pick_tokens", partial(_filtered_alone, rows=9, vocab=100, name="top_p"), "p off by one token"),
    Case("pick_min_p", "pick_tokens", partial(_filtered_alone, rows=9, vocab=100, name="min_p"), "temperature twice"),
    Case("pick_filtered_1", "pick_tokens", partial(_filtered, rows=3, vocab=1), "a law of one token", gate=True),
    Case("pick_filtered_slots", "pick_tokens", partial(_filtered, rows=9, vocab=2049), "groups chosen", gate=True),
    Case(
        "pick_filtered_flat", "pick_tokens", partial(_filtered, rows=6, vocab=2049, scale=0.1), "threshold below slots"
    ),
    Case("probs_spread", "filtered_probs", partial(_spread, rows=12, vocab=1200), "slots that are nearly enough"),
    Case(
        "probs_misled",
        "filtered_probs",
        partial(_misled, rows=12, vocab=2049, stride=4),
        "guesses far off the threshold",
    ),
    Case(
        "pick_filtered_padded",
        "pick_tokens",
        partial(_filtered, rows=5, vocab=600, padded=40),
        "tail of the last group",
    ),
    Case("pick_filtered_ties", "pick_tokens", partial(_filtered_ties, rows=12, vocab=1025), "ties at a threshold"),
    Case("pick_filtered_hostile", "pick_tokens", partial(_filtered_hostile, vocab=700), "NaN under a filter"),
    Case("pick_filter_limits", "pick_tokens", partial(_filter_limits, vocab=100), "filters that are off"),
    Case("probs_small", "filtered_probs", partial(_law, rows=13, vocab=37), "greedy rows are one-hot", gate=True),
    Case("probs_greedy", "filtered_probs", partial(_law, rows=3, vocab=37, greedy=True), "no temperature"),
    Case("probs_tiles", "filtered_probs", partial(_law, rows=6, vocab=4100), "law over several tiles"),
    Case(
        "top_k_renorm",
        "top_k_renorm",
        partial(_renorm, rows=9, vocab=700, name="top_k"),
        "k of probabilities",
        gate=True,
    ),
    Case(
        "top_p_renorm",
        "top_p_renorm",
        partial(_renorm, rows=9, vocab=700, name="top_p"),
        "p of probabilities",
        gate=True,
    ),
    Case(
        "top_p_renorm_hostile",
        "top_p_renorm",
        partial(_renorm, rows=6, vocab=100, name="top_p", hostile=True),
        "negative and NaN probabilities, equal ones",
    ),
    Case("penalties_empty", "apply_penalties", partial(_penalties, batch=0, num_nodes=3, vocab=9), "empty grid"),
    Case(
        "penalties_chain",
        "apply_penalties",
        partial(_penalties, batch=5, num_nodes=6, vocab=40),
        "path counts",
        gate=True,
    ),
    Case(
        "penalties_plain",
        "apply_penalties",
        partial(_penalties, batch=4, num_nodes=5, vocab=33, extras=False, padded=7),
        "requests without penalties, no bias, no prompt, a padded vocabulary",
        gate=True,
    ),
    Case(
        "penalties_words",
        "apply_penalties",
        partial(_penalties, batch=1, num_nodes=66, vocab=20),
        "the second mask word",
    ),
    Case(
        "count_tokens", "count_tokens", partial(_counts, batch=7, width=9, vocab=5), "equal tokens lose one", gate=True
    ),
    Case("count_one", "count_tokens", partial(_counts, batch=3, width=1, vocab=100), "a single token"),
    Case(
        "pick_qwen",
        "pick_tokens",
        partial(_draw, rows=16, vocab=151936),
        "the shipped vocabulary",
        gate=True,
        bench=True,
        tags=("large",),
    ),
    *(
        Case(
            f"{name}_b8x16_{kind}",
            function,
            partial(build, rows=128, vocab=151936, scale=scale),
            "the shipped vocabulary",
            gate=kind == "peaked",
            bench=True,
            tags=("large",),
        )
        for name, function, build in (("pick_filtered", "pick_tokens", _filtered), ("probs", "filtered_probs", _law))
        for kind, scale in (("peaked", 4.0), ("flat", 1.0))
    ),
    Case(
        "top_p_renorm_qwen",
        "top_p_renorm",
        partial(_renorm, rows=16, vocab=151936, name="top_p"),
        "the shipped vocabulary",
        bench=True,
        tags=("large",),
    ),
    Case(
        "top_k_renorm_qwen",
        "top_k_renorm",
        partial(_renorm, rows=16, vocab=151936, name="top_k"),
        "the shipped vocabulary",
        bench=True,
        tags=("large",),
    ),
    Case(
        "penalties_qwen",
        "apply_penalties",
        partial(_penalties, batch=8, num_nodes=16, vocab=151936),
        "the shipped vocabulary",
        gate=True,
        bench=True,
        tags=("large",),
    ),
    Case(
        "count_tokens_b64",
        "count_tokens",
        partial(_counts, batch=64, width=16, vocab=151936),
        "the shipped vocabulary",
        bench=True,
        tags=("large",),
    ),
)


def _logits_once(inputs: dict[str, Any]) -> tuple[int, int]:
    """Bytes of one read of the logits, and a subtraction, product and exponential an entry."""
    logits = inputs["logits"]
    return logits.numel() * logits.element_size(), 3 * logits.numel()


def _law_written(inputs: dict[str, Any]) -> tuple[int, int]:
    read, flop = _logits_once(inputs)
    return read + 4 * inputs["logits"].numel(), flop


def _probs_written(inputs: dict[str, Any]) -> tuple[int, int]:
    return 8 * inputs["probs"].numel(), inputs["probs"].numel()


def _penalties_moved(inputs: dict[str, Any]) -> tuple[int, int]:
    """The logits there and back, the tables of each request once."""
    tables = (inputs[name] for name in ("output_counts", "prompt_seen", "bias"))
    held = sum(table.numel() * table.element_size() for table in tables if table is not None)
    read, flop = _logits_once(inputs)
    return 2 * read + held, flop


def _tokens_counted(inputs: dict[str, Any]) -> tuple[int, int]:
    tokens = inputs["tokens"].numel()
    return tokens * (8 + 2 * 4), tokens


COMPARISON = Comparison(draws=("pick_tokens",))
WORK = {
    "pick_tokens": _logits_once,
    "filtered_probs": _law_written,
    "top_k_renorm": _probs_written,
    "top_p_renorm": _probs_written,
    "apply_penalties": _penalties_moved,
    "count_tokens": _tokens_counted,
}
