"""Tests sampled tokens against the target's exact distribution.

An acceptance rule for sampled drafts promises the target's distribution and not its tokens. So the first two tokens of
many seeds are counted, and Pearson's chi-square test compares the counts with the exact joint distribution.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch

from algorithms.engine.request import Request
from algorithms.models.dense_mixer import DenseMixer
from algorithms.models.loading import Target

TOP_K = 8  # the test samples from this many tokens, so that its cells are few and well filled
MIN_CELLS, MIN_EXPECTED = 8, 5  # cells that a test should have, and draws that a cell must expect to be tested alone
Outcome = tuple[int, ...]
Distribution = dict[Outcome, float]


def next_logits(target: Target, tokens: Sequence[int]) -> torch.Tensor:
    """[V] float32 logits of the token after `tokens`, from a forward without a cache."""
    model = target.model
    device = model.model.norm.weight.device
    with torch.inference_mode():
        hidden, _ = model(torch.tensor([list(tokens)], device=device), DenseMixer(target.config, len(tokens), device))
        return model.logits(hidden[0, -1]).float()


def pair_distribution(target: Target, request: Request, temperature: float) -> Distribution:
    """Probability of each pair of first tokens under temperature and top-k; a stop token ends its outcome."""

    def following(tokens: Sequence[int]) -> list[tuple[int, float]]:
        top = (next_logits(target, tokens) / temperature).topk(TOP_K)
        return list(zip(top.indices.tolist(), top.values.double().softmax(0).tolist(), strict=True))

    prompt = request.prompt_ids
    found: Distribution = {}
    for first, chance in following(prompt):
        for second, share in following([*prompt, first]):
            outcome = (first,) if first in request.ends else (first, second)
            found[outcome] = found.get(outcome, 0.0) + chance * share
    return found


def testable(target: Target, request: Request, temperature: float, draws: int) -> tuple[float, Distribution]:
    """(temperature, distribution), where the temperature is doubled until enough outcomes are expected often enough: a
    distribution of one outcome would test nothing."""
    for doubled in range(9):
        distribution = pair_distribution(target, request, temperature * 2**doubled)
        if filled_cells(distribution.values(), draws) >= min(MIN_CELLS, draws // (4 * MIN_EXPECTED)):
            break
    return temperature * 2**doubled, distribution


def filled_cells(chances: Iterable[float], draws: int) -> int:
    """Outcomes that are expected often enough to be tested by themselves."""
    return sum(p * draws >= MIN_EXPECTED for p in chances)


def chi_square_p(counts: Mapping[Outcome, int], distribution: Mapping[Outcome, float]) -> float:
    """Pearson's test, with the cells that expect fewer than five draws pooled; 0 for an impossible draw. A pool that
    expects less than one draw is no cell. Poisson's tail judges a surplus in it instead, and the smaller of the two
    chances counts twice (Bonferroni)."""
    if any(outcome not in distribution for outcome in counts):
        return 0.0
    draws = sum(counts.values())
    cells = [(p * draws, counts.get(outcome, 0)) for outcome, p in distribution.items()]
    large, small = ([c for c in cells if (c[0] >= MIN_EXPECTED) == often] for often in (True, False))
    expected, observed = sum(e for e, _ in small), sum(o for _, o in small)
    if expected < 1:
        return min(1.0, 2 * min(pearson_p(large), at_least_p(observed, expected))) if small else pearson_p(large)
    return pearson_p([*large, (expected, observed)])


def pearson_p(cells: Sequence[tuple[float, int]]) -> float:
    """Chance of cells, as pairs of expected and observed draws, that fit no better; 1 for fewer than two."""
    if len(cells) < 2:
        return 1.0
    statistic, freedom = sum((o - e) ** 2 / e for e, o in cells), len(cells) - 1
    halves = (torch.tensor(value / 2, dtype=torch.float64) for value in (freedom, statistic))
    return float(torch.special.gammaincc(*halves))


def at_least_p(observed: int, expected: float) -> float:
    """Chance that a Poisson variable of mean `expected` reaches `observed`."""
    if observed == 0:
        return 1.0
    reached, mean = (torch.tensor(value, dtype=torch.float64) for value in (float(observed), expected))
    return float(torch.special.gammainc(reached, mean))
