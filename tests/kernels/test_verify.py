"""Acceptance against a walk over dictionaries, and the symmetries it must have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec_kernels import Accepted, TreeLinks, accept, build_chain, build_tree, pick_tokens
from specdec_kernels.cases import Maker
from specdec_kernels.verify.cases import CASES
from tests.kernels.test_tree import parent_arrays

IMPLS = ["reference", "triton"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 4  # small, so that drafts often agree and siblings often repeat


def walk_in_python(parents: list[int], tokens: list[int], targets: list[int], max_depth: int) -> list[int]:
    """Accepted nodes from the root on."""
    parent = [p if i > 0 and 0 <= p < i else None for i, p in enumerate(parents)]
    path = [0]
    while len(path) <= max_depth:
        children = [i for i, p in enumerate(parent) if p == path[-1] and tokens[i] == targets[path[-1]]]
        if not children:
            break
        path.append(children[0])
    return path


@pytest.mark.parametrize("impl", IMPLS)
@given(rows=parent_arrays(max_nodes=12), max_depth=st.integers(0, 6), seed=st.integers(0, 1000))
def test_any_tree(impl: str, rows: list[list[int]], max_depth: int, seed: int) -> None:
    batch, nodes = len(rows), len(rows[0]) if rows else 1
    make = Maker.seeded(DEVICE, seed=seed)
    parents = torch.tensor(rows, dtype=torch.int32, device=DEVICE).reshape(batch, nodes)
    lengths = make.integers(0, 50, batch)
    tree = build_tree(parents, lengths, impl="reference")
    tokens, logits = make.integers(0, VOCAB, batch, nodes), make.normal(batch, nodes, VOCAB)
    temperature = torch.where(torch.arange(batch) % 2 == 0, 0.0, 0.9).to(DEVICE)
    seeds = make.integers(0, 1 << 40, batch)
    targets = pick_tokens(
        logits.flatten(0, 1),
        temperature.repeat_interleave(nodes),
        seeds.repeat_interleave(nodes),
        tree.positions.flatten(),
        impl="reference",
    ).tokens.view(batch, nodes)
    result = accept(
        "target_only",
        tokens,
        tree,
        logits,
        lengths,
        max_depth,
        temperature=temperature,
        seeds=seeds,
        impl=impl,
    )
    for b in range(batch):
        path = walk_in_python(rows[b], tokens[b].tolist(), targets[b].tolist(), max_depth)
        behind = [-1] * (max_depth + 1 - len(path))
        bonus = targets[b, path[-1]].item()
        assert result.nodes[b].tolist() == path + behind
        assert result.tokens[b].tolist() == [tokens[b, n].item() for n in path[1:]] + [bonus] + behind
        assert result.num_accepted[b] == len(path) - 1
        assert result.bonus[b] == bonus
        assert result.new_lengths[b] == lengths[b] + len(path)
        assert result.valid[b]


def case_inputs(name: str) -> dict[str, Any]:
    return next(case for case in CASES if case.name == name).build(Maker.seeded(DEVICE))


@pytest.mark.parametrize("impl", IMPLS)
def test_permuted_requests_give_permuted_results(impl: str) -> None:
    inputs = case_inputs("accept_sampled")
    order = torch.randperm(len(inputs["tokens"]), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    shuffled = dict(inputs)
    for name in ("tokens", "logits", "lengths", "temperature", "seeds"):
        shuffled[name] = inputs[name][order].contiguous()
    shuffled["tree"] = TreeLinks(*(field[order].contiguous() for field in inputs["tree"]))
    whole, moved = accept(**inputs, impl=impl), accept(**shuffled, impl=impl)
    assert all(torch.equal(w[order], m) for w, m in zip(whole, moved, strict=True))


@pytest.mark.parametrize("impl", IMPLS)
def test_verifying_twice_is_verifying_once(impl: str) -> None:
    inputs = case_inputs("accept_tree")
    once, twice = accept(**inputs, impl=impl), accept(**inputs, impl=impl)
    assert all(torch.equal(o, t) for o, t in zip(once, twice, strict=True))


@pytest.mark.parametrize("impl", IMPLS)
def test_a_chain_is_a_degenerate_tree(impl: str) -> None:
    inputs = case_inputs("accept_saturated")
    batch, nodes = inputs["tokens"].shape
    parents = torch.arange(-1, nodes - 1, dtype=torch.int32, device=DEVICE).repeat(batch, 1)
    as_chain = accept(**inputs | {"tree": build_chain(inputs["lengths"], nodes, impl=impl)}, impl=impl)
    as_tree = accept(**inputs | {"tree": build_tree(parents, inputs["lengths"], impl=impl)}, impl=impl)
    assert all(torch.equal(c, t) for c, t in zip(as_chain, as_tree, strict=True))
    assert (as_chain.num_accepted == nodes - 1).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("first_miss", range(5))
def test_a_chain_keeps_the_agreeing_prefix(impl: str, first_miss: int) -> None:
    """Drafts equal to the target's own tokens up to one place: exactly that many are accepted."""
    make = Maker.seeded(DEVICE, seed=first_miss)
    lengths = make.integers(0, 9, 2)
    tree = build_chain(lengths, 5, impl="reference")
    logits = make.normal(2, 5, 50)
    wanted = logits.argmax(-1)
    tokens = torch.cat([make.integers(0, 50, 2, 1), wanted[:, :4]], 1)
    if first_miss < 4:
        tokens[:, first_miss + 1] = (tokens[:, first_miss + 1] + 1) % 50
    result: Accepted = accept("greedy", tokens, tree, logits, lengths, 4, impl=impl)
    assert result.num_accepted.tolist() == [first_miss] * 2
    assert torch.equal(result.bonus, wanted[:, first_miss])


@pytest.mark.parametrize("impl", IMPLS)
def test_the_walk_stops_at_a_row_of_nan(impl: str) -> None:
    result = accept(**case_inputs("accept_unusable"), impl=impl)
    assert result.valid.tolist() == [False, False, True]
    assert result.num_accepted.tolist() == [0, 2, 3]
    assert result.bonus[:2].tolist() == [0, 0]


@pytest.mark.parametrize("impl", IMPLS)
def test_malformed_links_end_the_walk(impl: str) -> None:
    """A cycle of siblings and a child outside the tree: cut short, nothing hangs or reads outside."""
    inputs = case_inputs("accept_tree")
    broken = inputs["tree"]._replace(
        first_child=torch.full_like(inputs["tree"].first_child, 10_000),
        next_sibling=torch.ones_like(inputs["tree"].next_sibling),
    )
    assert accept(**inputs | {"tree": broken}, impl=impl).num_accepted.tolist() == [0] * 5
    cyclic = broken._replace(first_child=torch.ones_like(broken.first_child))
    limited = accept(**inputs | {"tree": cyclic}, impl=impl)
    assert (limited.num_accepted <= inputs["max_depth"]).all()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rule": "lossy"}, "rule: expected one of greedy, target_only, rejection, block, got 'lossy'"),
        ({"rule": "greedy"}, "rule 'greedy' draws nothing"),
        ({"max_depth": -1}, "max_depth: expected at least 0"),
        ({"seeds": None}, "expected seeds and positions, or uniforms"),
        ({"lengths": torch.zeros(3, dtype=torch.int64)}, r"lengths: expected shape \[7\]"),
        ({"tokens": torch.zeros(7, 6, dtype=torch.int32)}, "tokens: expected dtype torch.int64"),
        ({"logits": torch.zeros(7, 5, 9)}, r"logits: expected shape \[7, 6, \*\]"),
        ({"logits": torch.zeros(6, 7, 9).transpose(0, 1)}, r"expected \[B, N\] to merge"),
        ({"uniforms": torch.zeros(7)}, r"uniforms: expected shape \[7, 6\]"),
    ],
)
def test_wrong_input_is_refused(changes: dict[str, Any], message: str) -> None:
    inputs = next(case for case in CASES if case.name == "accept_sampled").build(Maker.seeded("cpu"))
    with pytest.raises(ValueError, match=message):
        accept(**inputs | changes, impl="reference")
