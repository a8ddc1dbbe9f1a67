"""Definition of drafting from histories in plain Python over torch tensors, following the package's docstring."""

from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels.history.types import (
    FULL_SHARE,
    MAX_AGE,
    MAX_BETTER_SIBLINGS,
    MAX_SHORTFALL,
    MIN_PROB_UNIT,
    PROB_UNIT,
    HistoryDraft,
    HistoryStore,
    MatchOptions,
)

Path = tuple[int, ...]


class Match(NamedTuple):
    """A place in a history where the end of a request occurs. The larger one of two is better."""

    length: int
    own: bool
    late: int
    history: int
    position: int


class Draft(NamedTuple):
    """A node of the trie; ordered from the worst to the best."""

    value: int  # path probability, in parts of `PROB_UNIT` of a share
    negative_depth: int
    rank: int  # larger for the better candidate
    path: Path


def insert_histories(
    store: HistoryStore, history: Tensor, slots: Tensor, start: Tensor, counts: Tensor, width: int
) -> None:
    entries = zip(slots.tolist(), start.tolist(), counts.clamp(max=width).tolist(), strict=True)
    for tokens, (slot, first, count) in zip(history, entries, strict=True):
        if count < 1 or first < 0:
            continue
        if first == 0:
            _replace(store, slot)
        own, end = int(store.of_slot[slot]), min(first + count + 1, len(tokens))
        if first < end:
            store.tokens[own, first:end] = tokens[first:end].int()
            store.lengths[own] = end


def _replace(store: HistoryStore, slot: int) -> None:
    """The slot's history joins the kept ones; the slot gets the oldest of these, emptied."""
    clock, ring = int(store.clock), len(store.ring)
    store.ring[(clock + store.num_kept) % ring] = store.of_slot[slot]
    oldest = int(store.ring[clock % ring])
    store.of_slot[slot] = oldest
    store.lengths[oldest] = 0
    store.stamps[oldest] = clock + 1
    store.clock.add_(1)


def match_histories(
    store: HistoryStore, history: Tensor, lengths: Tensor, slots: Tensor, options: MatchOptions
) -> HistoryDraft:
    num_nodes, order, max_ngram, max_candidates, least, shared = options
    batch, device = len(lengths), history.device
    host, history = HistoryStore(*(tensor.cpu() for tensor in store)), history.cpu()
    draft = HistoryDraft(
        tokens=history.new_zeros(batch, num_nodes),
        parents=history.new_full((batch, num_nodes), -2, dtype=torch.int32),
        expected_accepted=history.new_zeros(batch, dtype=torch.float32),
        path_probs=history.new_zeros(batch, num_nodes, dtype=torch.float32),
    )
    draft.parents[:, 0], draft.path_probs[:, 0] = -1, 1
    for b, (length, slot) in enumerate(zip(lengths.tolist(), slots.tolist(), strict=True)):
        if not 0 <= length < history.shape[1]:
            continue
        suffix = history[b, max(0, length + 1 - max_ngram) : length + 1].tolist()[::-1]
        draft.tokens[b, 0] = suffix[0]
        own = int(host.of_slot[slot]) if length > 0 else -1
        found = _matches(host, suffix, own, shared)[:max_candidates]
        drafts, whole = _drafts(host, found, num_nodes - 1, order)
        kept = [one for one in drafts if one.value * MIN_PROB_UNIT >= least * whole][: num_nodes - 1]
        numbers: dict[Path, int] = {(): 0}
        for number, one in enumerate(kept, start=1):
            numbers[one.path] = number
            draft.path_probs[b, number] = torch.tensor(float(one.value)) / whole
            draft.tokens[b, number] = one.path[-1]
            draft.parents[b, number] = numbers[one.path[:-1]]
        draft.expected_accepted[b] = torch.tensor(float(sum(one.value for one in kept))) / whole
    return HistoryDraft(*(tensor.to(device) for tensor in draft))


def _matches(store: HistoryStore, suffix: list[int], own: int, shared: bool) -> list[Match]:
    """All matches in the histories that are read, the best first. `suffix` runs backwards."""
    number, place = torch.where(store.tokens == suffix[0])
    readable = (place < store.lengths[number] - 1) & (shared | (number == own))
    number, place = number[readable], place[readable]
    matched, still = torch.ones_like(place), torch.arange(len(place), device=place.device)
    for back, token in enumerate(suffix[1:], start=1):
        if not len(still):
            break
        still = still[place[still] >= back]
        still = still[store.tokens[number[still], place[still] - back] == token]
        matched[still] += 1
    late = MAX_AGE - (store.clock - store.stamps).clamp(max=MAX_AGE)
    columns = (matched, number == own, late[number], number, place)
    order = torch.arange(len(place), device=place.device)
    for column in reversed(columns):
        order = order[column[order].argsort(descending=True, stable=True)]
    return [Match(*entry) for entry in zip(*(column[order].tolist() for column in columns), strict=True)]


def _drafts(store: HistoryStore, found: list[Match], depth: int, order: str) -> tuple[list[Draft], int]:
    """Every draft, the best first, and the value of probability 1."""
    if not found:
        return [], 1
    continuations = [
        store.tokens[match.history, match.position + 1 : int(store.lengths[match.history])][:depth].tolist()
        for match in found
    ]
    owners: dict[Path, int] = {}
    for candidate, tokens in enumerate(continuations):
        for size in range(1, len(tokens) + 1):
            owners.setdefault(tuple(tokens[:size]), candidate)
    longest, whole = found[0].length, FULL_SHARE
    if order == "frequent":
        shortfalls = [longest - match.length for match in found]
        weights = [FULL_SHARE // 4**short if short <= MAX_SHORTFALL else 0 for short in shortfalls]
        shares, whole = _votes(continuations, weights), sum(weights)
    else:
        shares = _latest_shares(owners)
    drafts = []
    for path, candidate in owners.items():
        held = longest if order == "frequent" else found[candidate].length
        value = shares[path] * held * PROB_UNIT // (held + len(path))
        if shares[path]:
            drafts.append(Draft(value, -len(path), -candidate, path))
    return sorted(drafts, reverse=True), whole * PROB_UNIT


def _votes(continuations: list[list[int]], weights: list[int]) -> dict[Path, int]:
    """Weight of the candidates that run through every path."""
    votes: Counter[Path] = Counter()
    for tokens, weight in zip(continuations, weights, strict=True):
        for size in range(1, len(tokens) + 1):
            votes[tuple(tokens[:size])] += weight
    return votes


def _latest_shares(owners: dict[Path, int]) -> dict[Path, int]:
    """Share of every path: an eighth less than its parent's for each better sibling, up to a bound."""
    shares: dict[Path, int] = {(): FULL_SHARE}
    siblings: Counter[Path] = Counter()
    for path in sorted(owners, key=lambda path: (len(path), owners[path])):
        shares[path] = shares[path[:-1]]
        for _ in range(min(siblings[path[:-1]], MAX_BETTER_SIBLINGS)):
            shares[path] = shares[path] * 7 // 8
        siblings[path[:-1]] += 1
    return shares
