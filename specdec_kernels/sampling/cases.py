"""Named inputs of the sampling family."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec_kernels.cases import Comparison, Maker, WorkModel, bytes_of, case_of, tree_masks
from specdec_kernels.sampling.types import MASK_BITS, SamplingTensors

_FILTERS = ("top_k", "top_p", "min_p")


def random_sampling(make: Maker, requests: int) -> SamplingTensors:
    """Temperatures (every third request greedy) and seeds over the whole int64 range."""
    temperature = torch.rand(requests, generator=make.generator) * 1.5 + 0.1
    temperature[::3] = 0.0
    seeds = make.integers(-(1 << 62), 1 << 62, requests) * 2 + 1
    return SamplingTensors(temperature=temperature.to(make.device), seeds=seeds)


def with_filters(make: Maker, sampling: SamplingTensors, requests: int, vocab: int = 0) -> SamplingTensors:
    """Every filter on in some rows and off in others, alone and together; in row 5 all are off, except in the cases of
    a shipped `vocab`, which are timed: there row 5 has a top-p alone, the filter that costs most."""
    row = torch.arange(requests)
    top_k = torch.randint(1, 60, (requests,), generator=make.generator).int()
    top_p = torch.rand(requests, generator=make.generator) * 0.9 + 0.05
    min_p = torch.rand(requests, generator=make.generator) * 0.2
    top_k[row % 4 == 1] = 0
    top_p[row % 4 == 2] = 1.0
    min_p[row % 3 > 0] = 0.0
    if vocab < _SHIPPED["vocab"]:
        top_k[row % 7 == 5], top_p[row % 7 == 5] = 0, 1.0
    return sampling._replace(top_k=top_k.to(make.device), top_p=top_p.to(make.device), min_p=min_p.to(make.device))


def _at_one(make: Maker, rows: int, **filters: Tensor) -> SamplingTensors:
    return SamplingTensors(temperature=torch.ones(rows, device=make.device), **filters)


def _draw(make: Maker, rows: int, vocab: int, scale: float = 2.0, padded: int = 0) -> dict[str, Any]:
    logits = make.normal(rows, vocab + padded, scale=scale)
    if padded:
        logits[:, vocab:] = 1e4
        logits = logits[:, :vocab]
    return dict(logits=logits, positions=make.integers(0, 1 << 40, rows), sampling=random_sampling(make, rows))


def _filtered(make: Maker, **sizes: Any) -> dict[str, Any]:
    inputs = _draw(make, **sizes)
    sampling = with_filters(make, inputs["sampling"], sizes["rows"], sizes["vocab"])
    return inputs | dict(sampling=sampling, return_logprobs=True)


def _filtered_alone(make: Maker, only: str, **sizes: Any) -> dict[str, Any]:
    """One filter, the others off."""
    inputs = _draw(make, **sizes)
    every = with_filters(make, inputs["sampling"], sizes["rows"])
    return inputs | dict(sampling=every._replace(**{other: None for other in _FILTERS if other != only}))


def _greedy(make: Maker, rows: int, vocab: int) -> dict[str, Any]:
    return dict(logits=make.normal(rows, vocab))


def _ties(make: Maker, rows: int, vocab: int) -> dict[str, Any]:
    return dict(logits=make.integers(0, 3, rows, vocab).to(make.dtype))


def _hostile(make: Maker, vocab: int, filtered: bool = False) -> dict[str, Any]:
    """One kind of bad row after the other, each as a greedy and as a sampled row, between two ordinary rows."""
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
    sampling = SamplingTensors(temperature=temperature, seeds=make.integers(0, 1 << 40, 16))
    inputs = dict(logits=logits, positions=make.integers(0, 1 << 40, 16))
    if filtered:
        sampling = with_filters(make, sampling, 16)
    return inputs | dict(sampling=sampling, return_logprobs=filtered)


def _edges(make: Maker, vocab: int) -> dict[str, Any]:
    """Uniforms at the ends of [0, 1) where first and last tokens are banned; also extreme temperatures."""
    logits = make.normal(8, vocab)
    logits[:, :3] = float("-inf")
    logits[:, vocab - 3 :] = float("-inf")
    below_one = 1.0 - 2.0**-53
    uniforms = make.tensor([0.0, below_one, 2.0**-53, 0.5, 0.0, below_one, 0.0, below_one], torch.float64)
    temperature = make.tensor([1.0, 1.0, 1.0, 1.0, 1e-40, 1e-40, 1e4, 1e4], torch.float32)
    return dict(logits=logits, sampling=SamplingTensors(temperature=temperature), uniforms=uniforms)


def _filtered_ties(make: Maker, rows: int, vocab: int) -> dict[str, Any]:
    """Few distinct logits: the thresholds fall among equals, and more groups share a maximum than there are slots."""
    inputs = _ties(make, rows, vocab)
    sampling = with_filters(make, random_sampling(make, rows), rows)
    return inputs | dict(sampling=sampling, positions=make.integers(0, 99, rows))


def _neighbours(make: Maker, vocab: int, equal: int = 1, both: bool = False) -> dict[str, Any]:
    """Logits without a number of their type between them: a threshold that is off by one keeps a token too many or too
    few. `equal`: tokens that share a logit. `both`: with a top-p that needs every token which top-k leaves."""
    top_k = make.tensor([1, 2, 3, 5, 9, 16, 17, 33, 64, 65, vocab // 2, vocab - 1], torch.int32)
    order = torch.rand(len(top_k), vocab, generator=make.generator).argsort(-1) // equal
    bits = {2: torch.int16, 4: torch.int32}[make.dtype.itemsize]
    logits = (torch.ones(1, dtype=make.dtype).view(bits) + order.to(bits)).view(make.dtype).to(make.device)
    share = torch.full((len(top_k),), 1 - 1e-6, device=make.device)
    return dict(logits=logits, sampling=_at_one(make, len(top_k), top_k=top_k, **(dict(top_p=share) if both else {})))


def _filter_limits(make: Maker, vocab: int) -> dict[str, Any]:
    """Filters at and beyond the ends of their ranges."""
    inputs = _draw(make, 8, vocab)
    limits = _at_one(
        make, 8, seeds=inputs["sampling"].seeds,
        top_k=make.tensor([1, vocab, vocab + 5, -3, 0, 0, 0, vocab - 1], torch.int32),
        top_p=make.tensor([1.0, 0.0, -1.0, 1.5, float("nan"), 1e-6, 1 - 1e-6, 1.0], torch.float32),
        min_p=make.tensor([0.0, 0.0, 0.0, 1.0, 2.0, -1.0, 0.0, float("nan")], torch.float32),
    )  # fmt: skip
    return inputs | dict(sampling=limits)


def _spread(make: Maker, rows: int, vocab: int) -> dict[str, Any]:
    """One likely token in each group holds most of the mass that top-p wants; the rest lies under every group's
    maximum, in steps that a threshold can fall between."""
    logits = torch.linspace(0, 0.5, vocab)[torch.randperm(vocab, generator=make.generator)].repeat(rows, 1)
    logits[:, 3::64] = torch.arange(len(logits[0, 3::64])) / 8 + 4.5
    top_p = torch.linspace(0.5, 0.99, rows).to(make.device)
    return dict(logits=logits.to(make.device, make.dtype), sampling=_at_one(make, rows, top_p=top_p))


def _misled(make: Maker, rows: int, vocab: int, stride: int) -> dict[str, Any]:
    """Every `stride`-th group of 64, from which the threshold is guessed, is unlike the others: above or below them."""
    logits = make.normal(rows, vocab)
    away = torch.linspace(-4.0, 4.0, rows)[:, None] * (torch.arange(vocab) // 64 % stride == 0)
    top_p = torch.tensor([0.3, 0.6, 0.9, 0.97]).repeat(rows)[:rows].to(make.device)
    logits = (logits.float() + away.to(make.device)).to(make.dtype)
    return dict(logits=logits, sampling=_at_one(make, rows, top_p=top_p))


def _two_limits(make: Maker, rows: int, vocab: int) -> dict[str, Any]:
    """Min-p cuts from far below to far above where top-p does."""
    logits = make.normal(rows, vocab, scale=2.0).clamp(max=4.0)
    top_p, min_p = torch.full((rows,), 0.7), torch.exp(torch.linspace(-5.0, -1.0, rows))
    return dict(logits=logits, sampling=_at_one(make, rows, top_p=top_p.to(make.device), min_p=min_p.to(make.device)))


def _probs(make: Maker, rows: int, vocab: int, scale: float = 2.0) -> dict[str, Any]:
    sampling = random_sampling(make, rows)._replace(seeds=None)
    logits = make.normal(rows, vocab, scale=scale)
    return dict(logits=logits, sampling=with_filters(make, sampling, rows))


def _renorm(
    make: Maker, rows: int, vocab: int, only: str, hostile: bool = False, everywhere: bool = False
) -> dict[str, Any]:
    """`everywhere`: no row is without the filter, which other libraries express in another way."""
    probs = torch.softmax(make.normal(rows, vocab, scale=3.0).float(), -1)
    if hostile:
        probs[0], probs[1] = float("nan"), 0.0
        probs[2, ::2] = -0.5
        probs[3] = 1.0 / vocab
    limit = getattr(with_filters(make, SamplingTensors(), rows), only)
    if everywhere:
        limit = torch.where((limit > 0) & (limit != 1), limit, limit[0])
    return dict(probs=probs, **{only: limit})


def _penalties(
    make: Maker, batch: int, num_nodes: int, vocab: int, extras: bool = True, padded: int = 0
) -> dict[str, Any]:
    """Every kind of penalty alone and together on some request; request 1 has none unless there is a bias. Tokens
    repeat on paths."""
    _, mask = tree_masks(make.parents(batch, num_nodes, unused=True))
    request = torch.arange(batch)
    strength = torch.rand(3, batch, generator=make.generator).to(make.device)
    none = request % 5 == 1
    without = torch.stack([none | (request % 5 == kind) for kind in (2, 3, 4)]).to(make.device)
    tokens = make.integers(0, min(vocab, 7), batch, num_nodes)
    tokens[:, num_nodes - 1 :] = -1 if num_nodes > 1 else 3
    tokens[1::2, num_nodes - 1 :] = vocab
    return dict(
        logits=make.normal(batch, num_nodes, vocab + padded, scale=3.0)[..., :vocab],
        tokens=tokens,
        mask=mask,
        output_counts=make.integers(-3, 4, batch, vocab).clamp(min=0).int(),
        prompt_seen=make.integers(0, 5, batch, vocab) == 0 if extras else None,
        repetition=torch.where(without[1] | without[2], 1.0, 0.5 + strength[0] * 1.5),
        presence=torch.where(without[0] | without[2], 0.0, strength[1] - 0.3),
        frequency=torch.where(without[0] | without[1], 0.0, strength[2]),
        bias=make.normal(batch, vocab).float() if extras else None,
    )


def _counts(make: Maker, batch: int, width: int, vocab: int) -> dict[str, Any]:
    """Many equal tokens, some outside the vocabulary, any number of them counted."""
    return dict(
        counts=make.integers(0, 100, batch, vocab, dtype=torch.int32),
        tokens=make.integers(-1, vocab + 1, batch, width),
        num=make.integers(0, width + 2, batch, dtype=torch.int32),
    )


def _forbidden(
    make: Maker, batch: int, num_nodes: int, vocab: int, count: int, width: int, padded: int = 0, longest: int = 8
) -> dict[str, Any]:
    """Histories of few distinct tokens, so that sequences of every length end in them; some begin before the text."""
    lengths = make.integers(0, longest + 1, batch)
    lengths[-1:] = longest
    depths, mask = tree_masks(make.parents(batch, num_nodes, unused=True))
    words, column = make.integers(0, 2, batch, count, width), torch.arange(width, device=make.device)
    words[..., -1] = make.integers(-1, vocab + 1, batch, count)
    words[column < width - make.integers(1, width + 1, batch, count)[..., None]] = -1
    until = make.integers(0, 20, batch, count)
    return dict(
        logits=make.normal(batch, num_nodes, vocab + padded, scale=3.0)[..., :vocab],
        tokens=make.integers(0, 2, batch, num_nodes),
        mask=mask,
        positions=lengths[:, None] + depths,
        history=make.integers(0, 2, batch, 30)[:, 6:],
        lengths=lengths,
        words=words,
        until=until,
    )


def _masked(make: Maker, batch: int, num_nodes: int, vocab: int, padded: int = 0) -> dict[str, Any]:
    """Masks of every density: none allowed, one, half of them, all; every third request is not constrained."""
    words = -(-vocab // MASK_BITS)
    bits = make.integers(-(1 << 31), 1 << 31, batch, num_nodes, words)
    kind = (torch.arange(num_nodes, device=make.device) + torch.arange(batch, device=make.device)[:, None]) % 5
    one = torch.where(torch.arange(words, device=make.device) == words - 1, 1 << (vocab - 1) % MASK_BITS, 0)
    bits = torch.where((kind == 1)[..., None], one, bits)
    bits = torch.where((kind == 2)[..., None], 0, bits)
    bits = torch.where((kind == 3)[..., None], -1, bits)
    return dict(
        logits=make.normal(batch, num_nodes, vocab + padded, scale=3.0)[..., :vocab],
        bits=bits.to(torch.int32),
        constrained=(torch.arange(batch, device=make.device) % 3 != 1).to(torch.int32),
    )


_pick = partial(case_of, "pick_tokens", _draw)
_pick_filtered = partial(case_of, "pick_tokens", _filtered)
_written = partial(case_of, "filtered_probs", _probs)
_penalised = partial(case_of, "apply_penalties", _penalties)
_forbids = partial(case_of, "forbid_tokens", _forbidden)
_masks = partial(case_of, "mask_tokens", _masked)
_LARGE = ("large",)
_SHIPPED: dict[str, Any] = dict(catches="the shipped vocabulary", vocab=151936)

CASES = (
    _pick("pick_empty", catches="launch on an empty grid", rows=0, vocab=9),
    _pick("pick_vocab_1", catches="a scan of one entry", gate=True, rows=3, vocab=1),
    _pick("pick_vocab_100", catches="lanes past the vocabulary", gate=True, rows=33, vocab=100),
    _pick("pick_tile_edge", catches="an empty second tile", gate=True, rows=6, vocab=2048),
    _pick("pick_tile_plus_one", catches="a tile of one token", rows=6, vocab=2049),
    _pick("pick_vocab_8193", catches="tiles not a power of two", gate=True, rows=7, vocab=8193),
    _pick("pick_flat", catches="mass spread over all tiles", rows=9, vocab=4100, scale=0.01),
    _pick("pick_padded", catches="a padded vocabulary's tail", rows=5, vocab=100, padded=28),
    case_of("pick_tokens", _greedy, "pick_greedy", "no sampling arguments", gate=True, rows=7, vocab=8193),
    case_of("pick_tokens", _ties, "pick_ties", "the lowest id among equals", rows=40, vocab=2049),
    case_of("pick_tokens", _hostile, "pick_hostile", "NaN and infinities", vocab=100),
    case_of("pick_tokens", _hostile, "pick_hostile_tiles", "a tile without a usable logit", vocab=4100),
    case_of("pick_tokens", _edges, "pick_edges", "banned tokens at u = 0 and u = 1", vocab=100),
    _pick_filtered("pick_filtered", catches="order of the filters", gate=True, rows=25, vocab=100),
    case_of("pick_tokens", _filtered_alone, "pick_top_k", "k off by one", rows=9, vocab=100, only="top_k"),
    case_of("pick_tokens", _filtered_alone, "pick_top_p", "p off by one token", rows=9, vocab=100, only="top_p"),
    case_of("pick_tokens", _filtered_alone, "pick_min_p", "temperature twice", rows=9, vocab=100, only="min_p"),
    _pick_filtered("pick_filtered_empty", catches="empty grid", rows=0, vocab=700),
    _pick_filtered("pick_filtered_1", catches="a distribution of one token", gate=True, rows=3, vocab=1),
    _pick_filtered("pick_filtered_512", catches="as many groups as slots", rows=9, vocab=512),
    _pick_filtered("pick_filtered_slots", catches="groups chosen", gate=True, rows=9, vocab=2049),
    _pick_filtered("pick_filtered_flat", catches="threshold below slots", rows=6, vocab=2049, scale=0.1),
    _pick_filtered("pick_filtered_wide", catches="more strips than slots", rows=6, vocab=8300),
    case_of("filtered_probs", _spread, "probs_spread", "slots that are nearly enough", rows=12, vocab=1200),
    case_of("filtered_probs", _misled, "probs_misled", "guesses far off the threshold", rows=12, vocab=2049, stride=4),
    case_of("filtered_probs", _two_limits, "probs_two_limits", "min-p above the threshold", rows=16, vocab=1200),
    case_of("filtered_probs", _neighbours, "probs_neighbours", "a threshold off by one", vocab=100),
    case_of("filtered_probs", _neighbours, "probs_neighbours_tiles", "a threshold off by one", vocab=2049),
    case_of("filtered_probs", _neighbours, "probs_neighbours_both", "the last token of both", vocab=2049, both=True),
    _pick_filtered("pick_filtered_padded", catches="tail of the last group", rows=5, vocab=600, padded=40),
    case_of("pick_tokens", _filtered_ties, "pick_filtered_ties", "ties at a threshold", rows=12, vocab=1025),
    case_of("pick_tokens", _hostile, "pick_filtered_hostile", "NaN under a filter", vocab=700, filtered=True),
    case_of("pick_tokens", _filter_limits, "pick_filter_limits", "filters that are off", vocab=100),
    _written("probs_empty", catches="empty grid", rows=0, vocab=700),
    _written("probs_small", catches="greedy rows are one-hot", gate=True, rows=13, vocab=37),
    case_of("filtered_probs", _greedy, "probs_greedy", "no temperature", rows=3, vocab=37),
    _written("probs_tiles", catches="a distribution over several tiles", rows=6, vocab=4100),
    case_of("top_k_renorm", _renorm, "top_k_renorm", "k of probabilities", gate=True, rows=9, vocab=700, only="top_k"),
    case_of("top_p_renorm", _renorm, "top_p_renorm", "p of probabilities", gate=True, rows=9, vocab=700, only="top_p"),
    case_of(
        "top_p_renorm", _renorm, "top_p_renorm_hostile", "negative and NaN probabilities, equal ones",
        rows=6, vocab=100, only="top_p", hostile=True,
    ),
    _penalised("penalties_empty", catches="empty grid", batch=0, num_nodes=3, vocab=9),
    _penalised("penalties_chain", catches="path counts", gate=True, batch=5, num_nodes=6, vocab=40),
    _penalised(
        "penalties_plain", catches="requests without penalties, no bias, no prompt, a padded vocabulary", gate=True,
        batch=5, num_nodes=5, vocab=33, extras=False, padded=7,
    ),
    _penalised("penalties_words", catches="the second mask word", batch=1, num_nodes=66, vocab=20),
    _penalised("penalties_tiles", catches="tokens of a second tile", batch=2, num_nodes=3, vocab=8200),
    case_of("count_tokens", _counts, "count_tokens", "equal tokens lose one", gate=True, batch=7, width=9, vocab=5),
    _forbids("forbid_empty", catches="empty grid", batch=0, num_nodes=3, vocab=9, count=2, width=2),
    _forbids("forbid_none", catches="no sequences", batch=2, num_nodes=3, vocab=9, count=0, width=2),
    _forbids("forbid_tokens", catches="until off by one", gate=True, batch=5, num_nodes=4, vocab=9, count=3, width=1),
    _forbids("forbid_words", catches="paths and text", gate=True, batch=6, num_nodes=9, vocab=40, count=30, width=5),
    _forbids("forbid_full", catches="a full history", batch=6, num_nodes=9, vocab=9, count=9, width=3, longest=24),
    _forbids("forbid_bits", catches="the second mask word", batch=1, num_nodes=66, vocab=20, count=40, width=4),
    _forbids(
        "forbid_qwen", gate=True, bench=True, tags=_LARGE, batch=8, num_nodes=16, count=256, width=16, **_SHIPPED
    ),
    _masks("mask_empty", catches="empty grid", batch=0, num_nodes=3, vocab=9),
    _masks("mask_word", catches="bit 31, which is the sign", gate=True, batch=4, num_nodes=3, vocab=32),
    _masks("mask_odd", catches="the last word, in part", gate=True, batch=5, num_nodes=6, vocab=61),
    _masks("mask_tiles", catches="words of a second tile", gate=True, batch=2, num_nodes=3, vocab=8193),
    _masks("mask_qwen", gate=True, bench=True, tags=_LARGE, batch=8, num_nodes=16, **_SHIPPED),
    _pick("pick_qwen", gate=True, bench=True, tags=_LARGE, rows=16, **_SHIPPED),
    _pick_filtered("pick_filtered_b8x16_peaked", gate=True, bench=True, tags=_LARGE, rows=128, scale=4.0, **_SHIPPED),
    _pick_filtered("pick_filtered_b8x16_flat", bench=True, tags=_LARGE, rows=128, scale=1.0, **_SHIPPED),
    _written("probs_b8x16_peaked", gate=True, bench=True, tags=_LARGE, rows=128, scale=4.0, **_SHIPPED),
    _written("probs_b8x16_flat", bench=True, tags=_LARGE, rows=128, scale=1.0, **_SHIPPED),
    case_of(
        "top_p_renorm", _renorm, "top_p_renorm_qwen", bench=True, tags=_LARGE, rows=16, only="top_p", everywhere=True,
        **_SHIPPED,
    ),
    case_of(
        "top_k_renorm", _renorm, "top_k_renorm_qwen", bench=True, tags=_LARGE, rows=16, only="top_k", everywhere=True,
        **_SHIPPED,
    ),
    _penalised("penalties_qwen", gate=True, bench=True, tags=_LARGE, batch=8, num_nodes=16, **_SHIPPED),
    case_of("count_tokens", _counts, "count_tokens_b64", bench=True, tags=_LARGE, batch=64, width=16, **_SHIPPED),
)  # fmt: skip


def _masks_read(inputs: dict[str, Any]) -> tuple[int, int]:
    """The masks, and half of the constrained logits written."""
    share = int(inputs["constrained"].sum()) / max(1, len(inputs["logits"]))
    moved = share * (bytes_of(inputs, "bits") + bytes_of(inputs, "logits") / 2)
    return int(moved), inputs["logits"].numel()


COMPARISON = Comparison(draws=("pick_tokens",))
WORK: dict[str, WorkModel] = {
    "apply_penalties": lambda i: (
        2 * bytes_of(i, "logits") + bytes_of(i, "output_counts", "prompt_seen", "bias"),
        3 * i["logits"].numel(),
    ),
    "count_tokens": lambda i: (16 * i["tokens"].numel(), i["tokens"].numel()),
    "forbid_tokens": lambda i: (bytes_of(i, "words") * i["logits"].shape[1], i["words"].numel()),
    "mask_tokens": _masks_read,
}
