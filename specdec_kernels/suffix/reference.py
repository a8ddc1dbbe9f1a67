"""Definition of suffix drafting in plain Python over torch tensors, following the package's docstring."""

from __future__ import annotations

from typing import NamedTuple

import torch

from specdec_kernels.suffix.types import CONFIDENCE_STEPS, WEIGHT_STEPS, SuffixDraft, SuffixStore


class Match(NamedTuple):
    """A place where the end of a request stands in a text; ordered from the worst to the best."""

    length: int
    own: bool
    stamp: int
    position: int
    slot: int


def suffix_insert(
    store: SuffixStore,
    history: torch.Tensor,
    rows: torch.Tensor,
    start: torch.Tensor,
    counts: torch.Tensor,
    width: int,
) -> None:
    """See `specdec_kernels.suffix_insert`, which has checked the arguments."""
    entries = zip(rows.tolist(), start.tolist(), counts.clamp(max=width).tolist(), strict=True)
    for text, (row, first, count) in zip(history, entries, strict=True):
        if count < 1 or first < 0:
            continue
        slot = _new_text(store, row) if first == 0 else int(store.slots[row])
        if slot < 0:
            continue
        end = min(first + count + 1, len(text))
        store.tokens[slot, first:end] = text[first:end].int()
        store.lengths[slot] = end


def _new_text(store: SuffixStore, row: int) -> int:
    """The oldest text without a row becomes an empty one of `row`."""
    if store.slots[row] >= 0:
        store.owners[store.slots[row]] = -1
    free = torch.where(store.owners < 0, store.stamps, torch.iinfo(torch.int64).max)
    slot = int(free.argmin())
    store.clock.add_(1)
    store.stamps[slot] = store.clock[0]
    store.owners[slot], store.slots[row] = row, slot
    return slot


def suffix_match(
    store: SuffixStore,
    history: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor,
    num_nodes: int,
    window: int,
    matches: int,
    per_text: int,
    per_token: int,
    least_share: int,
    shared: bool,
) -> SuffixDraft:
    """See `specdec_kernels.suffix_match`, which has checked the arguments. `per_token`, the drafts of a path per token
    of the longest match, and `least_share` count in 1 / 1024."""
    batch = len(lengths)
    tokens = torch.zeros(batch, num_nodes, dtype=torch.int64)
    parents = torch.full((batch, num_nodes), -2, dtype=torch.int32)
    parents[:, 0] = -1
    strength = torch.zeros(batch)
    confidence = torch.zeros(batch, num_nodes)
    confidence[:, 0] = 1
    for b, (length, row) in enumerate(zip(lengths.tolist(), rows.tolist(), strict=True)):
        if not 0 <= length < history.shape[1]:
            continue
        suffix = history[b, max(0, length + 1 - window) : length + 1].flip(0)
        tokens[b, 0] = suffix[0]
        found = _best_matches(store, suffix, row, per_text, shared)[:matches]
        if not found:
            continue
        depth = min(found[0].length * per_token // 1024, num_nodes)
        drafts, total = _drafts(store, found, depth, least_share)
        numbers: dict[tuple[int, ...], int] = {(): 0}
        for number, (value, path) in enumerate(drafts[: num_nodes - 1], start=1):
            numbers[path] = number
            confidence[b, number] = torch.tensor(float(value)) / (total * CONFIDENCE_STEPS)
            tokens[b, number], parents[b, number] = path[-1], numbers[path[:-1]]
        values = sum(value for value, _ in drafts[: num_nodes - 1])
        strength[b] = torch.tensor(float(values)) / (total * CONFIDENCE_STEPS)
    device = history.device
    return SuffixDraft(tokens.to(device), parents.to(device), strength.to(device), confidence.to(device))


def _best_matches(store: SuffixStore, suffix: torch.Tensor, row: int, per_text: int, shared: bool) -> list[Match]:
    """The best matches of every text that is read, the best of all first. `suffix` runs backwards."""
    own = int(store.slots[row])
    found: list[Match] = []
    for slot in range(len(store.lengths)) if shared else [own] if own >= 0 else []:
        size, stamp = int(store.lengths[slot]), int(store.stamps[slot])
        if size >= 2:
            matched = _match_lengths(store.tokens[slot, :size], suffix)
            here = matched.nonzero()[:, 0].tolist()
            all_here = [Match(int(matched[p]), slot == own, stamp, p, slot) for p in here]
            found += sorted(all_here, reverse=True)[:per_text]
    return sorted(found, reverse=True)


def _match_lengths(text: torch.Tensor, suffix: torch.Tensor) -> torch.Tensor:
    """[n - 1] int64: how many tokens of `suffix` stand at each position of `text` that has a token behind it."""
    matched = torch.zeros(len(text) - 1, dtype=torch.int64, device=text.device)
    same = torch.ones_like(matched, dtype=torch.bool)
    for back, token in enumerate(suffix):
        if back >= len(matched):
            break
        same[:back] = False
        same[back:] &= text[: len(matched) - back] == token
        if not bool(same.any()):
            break
        matched += same
    return matched


def _drafts(
    store: SuffixStore, found: list[Match], depth: int, least_share: int
) -> tuple[list[tuple[int, tuple[int, ...]]], int]:
    """(confidence, path) of every draft in the order in which drafts are taken, and the weight of all matches. A
    confidence counts in parts of a vote."""
    weights: dict[tuple[int, ...], int] = {}
    ranks: dict[tuple[int, ...], int] = {}
    total, longest = 0, found[0].length
    for rank, match in enumerate(found):
        behind = longest - match.length
        weight = 4 ** (WEIGHT_STEPS - behind) if behind <= WEIGHT_STEPS else 0
        total += weight
        end = min(match.position + 1 + depth, int(store.lengths[match.slot]))
        path = tuple(store.tokens[match.slot, match.position + 1 : end].tolist())
        for size in range(1, len(path) + 1):
            weights[path[:size]] = weights.get(path[:size], 0) + weight
            ranks.setdefault(path[:size], rank)
    kept = {path: weight for path, weight in weights.items() if weight and weight * 1024 >= least_share * total}
    values = {path: w * longest * CONFIDENCE_STEPS // (longest + len(path)) for path, w in kept.items()}
    order = sorted(values, key=lambda path: (-values[path], len(path), ranks[path]))
    return [(values[path], path) for path in order], total
