"""Definition of drafting from texts in plain Python over torch tensors, following the package's docstring."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch

from specdec_kernels.texts.types import (
    CONFIDENCE_STEPS,
    FULL_SHARE,
    LEAST_STEPS,
    MAX_AGE,
    MAX_SIBLINGS,
    WEIGHT_STEPS,
    TextDraft,
    TextStore,
)

Path = tuple[int, ...]


class Match(NamedTuple):
    """A place where the end of a request stands in a text. Of two, the one with the larger fields is better."""

    length: int
    own: bool
    late: int
    text: int
    position: int


class Draft(NamedTuple):
    """A node of the trie; ordered from the worst to the best, where the better match has the larger `rank`."""

    value: int
    """Confidence, in parts of `CONFIDENCE_STEPS` of a share."""
    depth: int
    """Negative: the deeper, the lower."""
    rank: int
    path: Path


def insert_texts(
    store: TextStore,
    history: torch.Tensor,
    rows: torch.Tensor,
    start: torch.Tensor,
    counts: torch.Tensor,
    width: int,
) -> None:
    """See `specdec_kernels.insert_texts`, which has checked the arguments."""
    entries = zip(rows.tolist(), start.tolist(), counts.clamp(max=width).tolist(), strict=True)
    for text, (row, first, count) in zip(history, entries, strict=True):
        if count < 1 or first < 0:
            continue
        if first == 0:
            _exchange(store, row)
        slot, end = int(store.slots[row]), min(first + count + 1, len(text))
        if first < end:
            store.tokens[slot, first:end] = text[first:end].int()
            store.lengths[slot] = end


def _exchange(store: TextStore, row: int) -> None:
    """Row `row` gives its text away for the oldest one that is kept, which becomes empty."""
    clock, ring = int(store.clock), len(store.queue)
    store.queue[(clock + store.num_kept) % ring] = store.slots[row]
    slot = int(store.queue[clock % ring])
    store.slots[row] = slot
    store.lengths[slot] = 0
    store.stamps[slot] = clock + 1
    store.clock.add_(1)


def match_texts(
    store: TextStore,
    history: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor,
    num_nodes: int,
    order: str,
    window: int,
    matches: int,
    least: int,
    shared: bool,
) -> TextDraft:
    """See `specdec_kernels.match_texts`, which has checked the arguments. `least` counts in parts of `LEAST_STEPS`."""
    with torch.device("cpu"):
        drafts = _match_on_host(
            TextStore(*(tensor.cpu() for tensor in store)),
            *(history.cpu(), lengths.tolist(), rows.tolist(), num_nodes, order, window, matches, least, shared),
        )
    return TextDraft(*(tensor.to(history.device) for tensor in drafts))


def _match_on_host(
    host: TextStore,
    history: torch.Tensor,
    lengths: list[int],
    rows: list[int],
    num_nodes: int,
    order: str,
    window: int,
    matches: int,
    least: int,
    shared: bool,
) -> TextDraft:
    """`match_texts` over tensors on the CPU."""
    batch = len(lengths)
    tokens = torch.zeros(batch, num_nodes, dtype=torch.int64)
    parents = torch.full((batch, num_nodes), -2, dtype=torch.int32)
    parents[:, 0] = -1
    strength = torch.zeros(batch)
    confidence = torch.zeros(batch, num_nodes)
    confidence[:, 0] = 1
    for b, (length, row) in enumerate(zip(lengths, rows, strict=True)):
        if not 0 <= length < history.shape[1]:
            continue
        suffix = history[b, max(0, length + 1 - window) : length + 1].tolist()[::-1]
        tokens[b, 0] = suffix[0]
        own = int(host.slots[row]) if length > 0 else -1
        found = _best_matches(host, suffix, own, shared)[:matches]
        drafts, whole = _drafts(host, found, num_nodes - 1, order)
        kept = [draft for draft in drafts if draft.value * LEAST_STEPS >= least * whole][: num_nodes - 1]
        numbers: dict[Path, int] = {(): 0}
        for number, draft in enumerate(kept, start=1):
            numbers[draft.path] = number
            confidence[b, number] = torch.tensor(float(draft.value)) / whole
            tokens[b, number], parents[b, number] = draft.path[-1], numbers[draft.path[:-1]]
        strength[b] = torch.tensor(float(sum(draft.value for draft in kept))) / whole
    return TextDraft(tokens, parents, strength, confidence)


def _best_matches(store: TextStore, suffix: list[int], own: int, shared: bool) -> list[Match]:
    """All matches in the texts that are read, the best first. `suffix` runs backwards."""
    texts, place = torch.where(store.tokens == suffix[0]) if shared else _places(store, own, suffix[0])
    inside = place < store.lengths[texts] - 1
    texts, place = texts[inside], place[inside]
    matched, still = torch.ones_like(place), torch.arange(len(place))
    for back, token in enumerate(suffix[1:], start=1):
        still = still[place[still] >= back]
        still = still[store.tokens[texts[still], place[still] - back] == token]
        matched[still] += 1
    late = MAX_AGE - (store.clock - store.stamps).clamp(max=MAX_AGE)
    columns = (matched, texts == own, late[texts], texts, place)
    order = torch.arange(len(place))
    for column in reversed(columns):
        order = order[column[order].argsort(descending=True, stable=True)]
    return [Match(*entry) for entry in zip(*(column[order].tolist() for column in columns), strict=True)]


def _places(store: TextStore, own: int, token: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The text `own` and the positions of `token` in it, as often as it stands there; nothing where `own` is -1."""
    place = (store.tokens[own] == token).nonzero()[:, 0] if own >= 0 else torch.zeros(0, dtype=torch.int64)
    return torch.full_like(place, own), place


def _drafts(store: TextStore, found: list[Match], depth: int, order: str) -> tuple[list[Draft], int]:
    """Every draft, the best first, and the value of full confidence."""
    if not found:
        return [], 1
    ways = [store.tokens[m.text, m.position + 1 : int(store.lengths[m.text])][:depth].tolist() for m in found]
    leaders: dict[Path, int] = {}
    for number, way in enumerate(ways):
        for size in range(1, len(way) + 1):
            leaders.setdefault(tuple(way[:size]), number)
    longest, whole = found[0].length, FULL_SHARE
    if order == "frequent":
        weights = [_weight(longest - match.length) for match in found]
        shares, whole = _votes(ways, weights), sum(weights)
    else:
        shares = _shares(leaders)
    drafts = []
    for path, number in leaders.items():
        held = longest if order == "frequent" else found[number].length
        value = shares[path] * held * CONFIDENCE_STEPS // (held + len(path))
        if shares[path]:
            drafts.append(Draft(value, -len(path), -number, path))
    return sorted(drafts, reverse=True), whole * CONFIDENCE_STEPS


def _weight(behind: int) -> int:
    """Votes of a match that is shorter than the longest by `behind`."""
    return FULL_SHARE // 4**behind if behind <= WEIGHT_STEPS else 0


def _votes(ways: list[list[int]], weights: list[int]) -> dict[Path, int]:
    """Weight of the matches that run through every path."""
    votes: Counter[Path] = Counter()
    for way, weight in zip(ways, weights, strict=True):
        for size in range(1, len(way) + 1):
            votes[tuple(way[:size])] += weight
    return votes


def _shares(leaders: dict[Path, int]) -> dict[Path, int]:
    """Share of every path: an eighth less than its parent's for each better sibling, `MAX_SIBLINGS` at most."""
    shares: dict[Path, int] = {(): FULL_SHARE}
    siblings: dict[Path, int] = {}
    for path in sorted(leaders, key=lambda path: (len(path), leaders[path])):
        shares[path] = shares[path[:-1]]
        for _ in range(min(siblings.get(path[:-1], 0), MAX_SIBLINGS)):
            shares[path] = shares[path] * 7 // 8
        siblings[path[:-1]] = siblings.get(path[:-1], 0) + 1
    return shares
