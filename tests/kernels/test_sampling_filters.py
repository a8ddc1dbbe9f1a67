"""Filters against sorting in Python, written distributions against the draws, penalties against sequential decoding."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import specdec_kernels as kernels
from specdec_kernels.cases import Maker
from specdec_kernels.sampling import kernel_nucleus as nucleus
from specdec_kernels.sampling.cases import CASES
from tests.kernels.distributions import Filter
from tests.kernels.test_tree import parent_arrays

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Quarter steps make ties frequent; no p below makes a border fall on a sum of these distributions but for rounding.
rows_of_quarters = st.lists(st.integers(-8, 8).map(lambda quarter: quarter / 4), min_size=1, max_size=9)
filters = st.builds(
    Filter,
    top_k=st.integers(0, 10),
    top_p=st.sampled_from([0.013, 0.237, 0.511, 0.777, 0.918, 1.0]),
    min_p=st.sampled_from([0.0, 0.011, 0.133, 0.4711, 1.0]),
)


def _inputs(name: str) -> dict[str, Any]:
    """The inputs of a case."""
    return next(case for case in CASES if case.name == name).build(Maker.seeded(DEVICE))


def chosen_at(chosen: Filter, rows: int, temperature: float = 1.0) -> kernels.SamplingTensors:
    tensors = {name: tensor.to(DEVICE) for name, tensor in chosen.arguments(rows).items()}
    return kernels.SamplingTensors(torch.full((rows,), temperature, device=DEVICE), **tensors)


def with_ties(chosen: Filter, probs: list[float]) -> list[float]:
    """`Filter` of the distribution, plus what equals the smallest probability that it keeps."""
    kept = [p for p, left in zip(probs, chosen(probs), strict=True) if left > 0]
    if not (chosen.top_p < 1 and chosen.top_k):
        left = [p if p >= min(kept) * (1 - 1e-9) else 0.0 for p in probs]
        return [p / sum(left) for p in left]
    by_count = with_ties(Filter(top_k=chosen.top_k), probs)
    by_mass = with_ties(Filter(top_p=chosen.top_p), by_count)
    limit = chosen.min_p * max(by_mass)
    left = [p if p >= limit else 0.0 for p in by_mass]
    return [p / sum(left) for p in left]


@settings(max_examples=30)
@given(
    rows=st.lists(rows_of_quarters, min_size=1, max_size=4),
    chosen=filters,
    temperature=st.sampled_from([0.5, 1.0, 1.6]),
)
@example([[0.0, -0.5]], Filter(min_p=0.4711), 0.5)  # kept if it were measured at temperature 1
def test_any_filter(impl: str, rows: list[list[float]], chosen: Filter, temperature: float) -> None:
    vocab = max(map(len, rows))
    logits = torch.tensor([row + [float("-inf")] * (vocab - len(row)) for row in rows], device=DEVICE)
    probs = kernels.filtered_probs(logits, chosen_at(chosen, len(rows), temperature), impl=impl).cpu()
    plain = torch.softmax(logits.cpu().double() / temperature, -1).tolist()
    expected = torch.tensor([with_ties(chosen, row) for row in plain], dtype=torch.float64)
    assert torch.equal(probs > 0, expected > 0)
    assert (probs - expected).abs().max() < 1e-6


@pytest.mark.skipif(DEVICE == "cuda", reason="a row of this size fits the slots of a GPU")
def test_rows_of_more_groups_than_slots_are_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the cases would not reach the search in memory."""
    list_values, deferred = nucleus.list_values, []
    monkeypatch.setattr(nucleus, "list_values", lambda *a, **k: deferred.append(a) or list_values(*a, **k))
    kernels.pick_tokens(**_inputs("pick_filtered_flat"), impl="triton")
    kernels.pick_tokens(**_inputs("pick_filtered"), impl="triton")
    assert len(deferred) == 1


@pytest.mark.parametrize("name", ["pick_filtered", "pick_filtered_slots", "pick_filtered_ties"])
def test_a_sample_follows_the_written_distribution(name: str, impl: str) -> None:
    """At u the sampled token is the one in which the running sum of the written probabilities passes u."""
    inputs = _inputs(name)
    logits, sampling = inputs["logits"], inputs["sampling"]
    generator = torch.Generator().manual_seed(3)
    uniforms = torch.rand(len(logits), dtype=torch.float64, generator=generator).to(DEVICE)
    tokens = kernels.pick_tokens(logits, sampling, uniforms=uniforms, impl=impl).tokens
    probs = kernels.filtered_probs(logits, sampling, impl=impl).double()
    at = probs.cumsum(-1).gather(1, tokens[:, None])[:, 0]
    before = at - probs.gather(1, tokens[:, None])[:, 0]
    assert (before <= uniforms + 1e-5).all() and (at >= uniforms - 1e-5).all()
    assert (probs.gather(1, tokens[:, None]) > 0).all()


def test_top_p_of_one_behind_a_top_k_filters_nothing(impl: str) -> None:
    """So many tokens that the threshold is looked for in the whole row, most of them too unlikely to change a sum."""
    logits = torch.where(torch.arange(1200, device=DEVICE) < 300, 0.0, -45.0)[None].repeat(2, 1)
    logits[:, 900:] = -50.0
    limits = kernels.SamplingTensors(
        torch.ones(2, device=DEVICE), top_k=torch.full((2,), 900, dtype=torch.int32, device=DEVICE),
        top_p=torch.tensor([1.0, 0.999999], device=DEVICE),
    )  # fmt: skip
    probs = kernels.filtered_probs(logits, limits, impl=impl)
    assert (probs > 0).sum(1).tolist() == [900, 300]


@pytest.mark.parametrize("name", ["probs_spread", "probs_misled", "probs_two_limits"])
def test_what_memory_held_before_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons with NaN, which fills new memory in other tests, are false and may hide that it is read."""
    inputs, empty, found = _inputs(name), torch.empty, []
    for held in (0, 3):
        monkeypatch.setattr(torch, "empty", lambda *a, held=held, **k: empty(*a, **k).fill_(held))
        found.append(kernels.filtered_probs(**inputs, impl="triton"))
    assert torch.equal(*found)


def test_renormalising_is_filtering_logarithms(impl: str) -> None:
    probs = torch.softmax(torch.randn(6, 300, generator=torch.Generator().manual_seed(4)) * 2, -1).to(DEVICE)
    one = torch.ones(6, device=DEVICE)
    top_k = torch.tensor([1, 2, 50, 299, 0, 300], dtype=torch.int32, device=DEVICE)
    top_p = torch.tensor([0.0, 0.1, 0.5, 0.93, 1.0, 0.999], device=DEVICE)
    for mine, filters in (
        (kernels.top_k_renorm(probs, top_k, impl=impl), kernels.SamplingTensors(one, top_k=top_k)),
        (kernels.top_p_renorm(probs, top_p, impl=impl), kernels.SamplingTensors(one, top_p=top_p)),
    ):
        theirs = kernels.filtered_probs(probs.log(), filters, impl="reference")
        assert torch.equal(mine > 0, theirs > 0)
        assert (mine - theirs).abs().max() < 1e-6


def penalised(logit: float, said: int, in_prompt: bool, repetition: float, presence: float, frequency: float) -> float:
    """One logit, as the docstring of `apply_penalties` has it."""
    if said or in_prompt:
        logit = logit / repetition if logit > 0 else logit * repetition
    return logit - frequency * said - (presence if said else 0.0)


@settings(max_examples=10)
@given(rows=parent_arrays(max_nodes=9), seed=st.integers(0, 1000))
def test_penalties_count_the_path(impl: str, rows: list[list[int]], seed: int) -> None:
    if not rows:
        return
    batch, nodes, vocab = len(rows), len(rows[0]), 5
    make = Maker.seeded(DEVICE, seed=seed)
    tree = kernels.build_tree(
        torch.tensor(rows, dtype=torch.int32, device=DEVICE), make.integers(0, 9, batch), impl="reference"
    )
    tokens, counts = make.integers(0, vocab, batch, nodes), make.integers(0, 2, batch, vocab).int()
    prompt = make.integers(0, 3, batch, vocab) == 0
    strengths = [make.tensor([value] * batch, torch.float32) for value in (1.3, 0.4, 0.25)]
    logits = make.normal(batch, nodes, vocab)
    changed = logits.clone()
    kernels.apply_penalties(changed, tokens, tree.mask, counts, prompt, *strengths, impl=impl)
    for b, parents in enumerate(rows):
        for n in range(nodes):
            said, node = Counter(), n
            while node > 0:
                said[tokens[b, node].item()] += 1
                node = parents[node] if 0 <= parents[node] < node else 0
            for v in range(vocab):
                expected = penalised(
                    logits[b, n, v].item(), int(counts[b, v]) + said[v], bool(prompt[b, v]), 1.3, 0.4, 0.25
                )
                assert abs(changed[b, n, v].item() - expected) < 1e-5


@settings(max_examples=15)
@given(said=st.lists(st.integers(-1, 4), min_size=1, max_size=9), num=st.integers(-1, 10))
def test_counts(impl: str, said: list[int], num: int) -> None:
    counts = torch.full((2, 4), 7, dtype=torch.int32, device=DEVICE)
    tokens = torch.tensor([said, said], device=DEVICE)
    kernels.count_tokens(counts, tokens, torch.tensor([num, 0], dtype=torch.int32, device=DEVICE), impl=impl)
    expected = Counter(token for token in said[: max(num, 0)] if 0 <= token < 4)
    assert counts.tolist() == [[7 + expected[v] for v in range(4)], [7] * 4]


def is_forbidden(text: list[int], word: list[int], token: int) -> bool:
    """Whether `token` after `text` completes `word`."""
    return [*text, token][-len(word) :] == word


@settings(max_examples=20)
@given(rows=parent_arrays(max_nodes=7), seed=st.integers(0, 1000))
def test_bad_words_of_any_length(impl: str, rows: list[list[int]], seed: int) -> None:
    """Words of one to seven tokens that nodes' texts begin, and the same words with their first token changed, which
    their last tokens alone do not complete. Texts cross from the committed tokens to the draft."""
    if not rows:
        return
    make, vocab, longest = Maker.seeded(DEVICE, seed=seed), 3, 7
    batch, nodes = len(rows), len(rows[0])
    tokens, history = make.integers(0, 2, batch, nodes), make.integers(0, 2, batch, 9)
    lengths = make.integers(3, 9, batch)
    tree = kernels.build_tree(torch.tensor(rows, dtype=torch.int32, device=DEVICE), lengths, impl="reference")
    texts = [
        [history[b, : lengths[b]].tolist() + [tokens[b, m].item() for m in range(nodes) if sees(tree.mask, b, n, m)]
         for n in range(nodes)]
        for b in range(batch)
    ]  # fmt: skip
    words = []
    for b in range(batch):
        begun = [texts[b][k % nodes][-k:] if k else [] for k in range(longest)]
        found = [[*tail, k % vocab] for k, tail in enumerate(begun)]
        words.append(found + [[1 - word[0], *word[1:]] for word in found if len(word) > 1])
    padded = torch.tensor([[[-1] * (longest - len(word)) + word for word in own] for own in words], device=DEVICE)
    logits = torch.zeros(batch, nodes, vocab, device=DEVICE)
    until = torch.full(padded.shape[:2], 1 << 40, device=DEVICE)
    kernels.forbid_tokens(logits, tokens, tree.mask, tree.positions, history, lengths, padded, until, impl=impl)
    expected = [
        [[any(is_forbidden(text, word, v) for word in words[b]) for v in range(vocab)] for text in texts[b]]
        for b in range(batch)
    ]
    assert torch.isinf(logits).tolist() == expected


def sees(mask: torch.Tensor, request: int, node: int, other: int) -> bool:
    return bool(mask[request, node, 0] >> other & 1)
