"""Verification against Python lists, and the symmetries it must have."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import specdec_kernels as kernels
from specdec_kernels.cases import Maker
from specdec_kernels.verify import RULES
from specdec_kernels.verify.cases import CASES
from specdec_kernels.verify.types import TREE_RULES
from tests.kernels.test_tree import parent_arrays

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 4  # small, so that drafts often agree and siblings often repeat


def path_in_python(parents: list[int], tokens: list[int], targets: list[int], max_depth: int) -> list[int]:
    """Accepted nodes from the root on."""
    parent = [p if i > 0 and 0 <= p < i else None for i, p in enumerate(parents)]
    path = [0]
    while len(path) <= max_depth:
        children = [i for i, p in enumerate(parent) if p == path[-1] and tokens[i] == targets[path[-1]]]
        if not children:
            break
        path.append(children[0])
    return path


@given(rows=parent_arrays(max_nodes=12), max_depth=st.integers(0, 6), seed=st.integers(0, 1000))
def test_any_tree(impl: str, rows: list[list[int]], max_depth: int, seed: int) -> None:
    batch, nodes = len(rows), len(rows[0]) if rows else 1
    make = Maker.seeded(DEVICE, seed=seed)
    parents = torch.tensor(rows, dtype=torch.int32, device=DEVICE).reshape(batch, nodes)
    lengths = make.integers(0, 50, batch)
    tree = kernels.build_tree(parents, lengths, impl="reference")
    tokens, logits = make.integers(0, VOCAB, batch, nodes), make.normal(batch, nodes, VOCAB)
    temperature = torch.where(torch.arange(batch) % 2 == 0, 0.0, 0.9).to(DEVICE)
    sampling = kernels.SamplingTensors(temperature, seeds=make.integers(0, 1 << 40, batch))
    targets = kernels.pick_tokens(
        logits.flatten(0, 1), sampling.repeated(nodes), tree.positions.flatten(), impl="reference"
    ).tokens.view(batch, nodes)
    result = kernels.accept("target_only", tokens, tree, logits, lengths, max_depth, sampling, impl=impl)
    for b in range(batch):
        path = path_in_python(rows[b], tokens[b].tolist(), targets[b].tolist(), max_depth)
        after = [-1] * (max_depth + 1 - len(path))
        bonus = targets[b, path[-1]].item()
        assert result.nodes[b].tolist() == path + after
        assert result.tokens[b].tolist() == [tokens[b, n].item() for n in path[1:]] + [bonus] + after
        assert result.num_accepted[b] == len(path) - 1
        assert result.bonus[b] == bonus
        assert result.new_lengths[b] == lengths[b] + len(path)
        assert result.valid[b]


def case_inputs(name: str) -> dict[str, Any]:
    return next(case for case in CASES if case.name == name).build(Maker.seeded(DEVICE))


def same(left: kernels.Accepted, right: kernels.Accepted) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True) if a is not None)


@pytest.mark.parametrize("name", ["accept_sampled", "accept_filtered", "rejection_filtered", "block_near"])
def test_permuted_requests_give_permuted_results(name: str, impl: str) -> None:
    inputs = case_inputs(name)
    order = torch.randperm(len(inputs["tokens"]), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    shuffled = dict(inputs)
    for key in {"tokens", "logits", "lengths", "draft_probs"} & {key for key in inputs if inputs[key] is not None}:
        shuffled[key] = inputs[key][order].contiguous()
    for key, kind in (("tree", kernels.TreeLinks), ("sampling", kernels.SamplingTensors)):
        shuffled[key] = kind(*(None if field is None else field[order].contiguous() for field in inputs[key]))
    whole, moved = kernels.accept(**inputs, impl=impl), kernels.accept(**shuffled, impl=impl)
    assert same(kernels.Accepted(*(field[order] for field in whole)), moved)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter runs one program after the other: a team needs a GPU")
@pytest.mark.parametrize("rule", TREE_RULES)
@pytest.mark.parametrize("processors", [1, 4, 100])
def test_a_team_of_any_size_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch, rule: str, processors: int) -> None:
    """Sums over the vocabulary do not depend on how many programs share them."""
    inputs = case_inputs(f"{rule}_tiles")
    whole = kernels.accept(**inputs)
    monkeypatch.setattr("specdec_kernels.verify.kernel_tree.num_processors", lambda tensor: processors)
    assert same(kernels.accept(**inputs), whole)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter runs one program after the other: a team needs a GPU")
@pytest.mark.parametrize("rule", TREE_RULES)
def test_a_team_ends_on_rows_that_are_no_distributions(rule: str) -> None:
    """The programs of a team are counted above their sum, which must not run over."""
    inputs = case_inputs(f"{rule}_tiles")
    inputs["draft_probs"] = inputs["draft_probs"] * 1e30
    assert kernels.accept(**inputs).valid.all()


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_tree_is_judged_along_its_first_chain(rule: str, impl: str) -> None:
    """Nodes that hang elsewhere than under their predecessor end the chain; links, not the node count, decide."""
    inputs = case_inputs(f"{rule}_near")
    batch, nodes = inputs["tokens"].shape
    parents = torch.arange(-1, nodes - 1, dtype=torch.int32, device=DEVICE).repeat(batch, 1)
    as_tree = inputs | {"tree": kernels.build_tree(parents, inputs["lengths"], impl="reference")}
    assert same(kernels.accept(**inputs, impl=impl), kernels.accept(**as_tree, impl=impl))
    parents[:, 3] = 0
    branched = inputs | {"tree": kernels.build_tree(parents, inputs["lengths"], impl="reference")}
    cut = kernels.accept(**branched, impl=impl)
    assert (cut.num_accepted <= 2).all() and (cut.num_accepted == 2).any()


@pytest.mark.parametrize("rule", RULES)
def test_rows_at_temperature_0_are_greedy_under_every_rule(rule: str, impl: str) -> None:
    inputs = case_inputs("rejection_near") | {"rule": rule}
    names = ("tokens", "tree", "logits", "lengths", "max_depth")
    greedy = kernels.accept(rule="greedy", **{name: inputs[name] for name in names}, impl=impl)
    if rule in ("greedy", "target_only"):
        inputs.pop("draft_probs")
    zero = torch.zeros_like(inputs["sampling"].temperature)
    inputs["sampling"] = inputs["sampling"]._replace(temperature=None if rule == "greedy" else zero)
    assert same(kernels.accept(**inputs, impl=impl), greedy)


def one_draft(
    rule: str, impl: str, target: list[float], draft: list[float], drafted: int, uniforms: list[float]
) -> kernels.Accepted:
    """A chain of one draft over given distributions; the bonus row is the target's too."""
    lengths = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    return kernels.accept(
        rule, torch.tensor([[0, drafted]], device=DEVICE), kernels.build_chain(lengths, 2, impl="reference"), None,
        lengths, 1, probs=torch.tensor([[target, target]], device=DEVICE),
        draft_probs=torch.tensor([[draft]], device=DEVICE),
        uniforms=torch.tensor([uniforms], dtype=torch.float64, device=DEVICE), impl=impl,
    )  # fmt: skip


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize(
    "target, draft, drafted, uniforms, tokens",
    [
        ([0.5, 0.5], [1.0, 0.0], 0, [0.499, 0.0, 0.6], [0, 1]),
        ([0.5, 0.5], [1.0, 0.0], 0, [0.5, 0.0, 0.0], [1, -1]),
        ([0.0, 1.0], [0.5, 0.5], 0, [0.0, 0.0, 0.0], [1, -1]),
        ([0.0, 1.0], [0.0, 1.0], 0, [0.0, 0.9, 0.0], [1, -1]),
        ([0.3, 0.7], [float("nan"), 0.0], 0, [0.999, 0.0, 0.0], [0, 0]),
        ([0.2, 0.3, 0.5], [0.2, 0.3, 0.5], 1, [0.999, 0.0, 0.999], [1, 2]),
        ([0.5, 0.5, 0.0], [0.5, 0.5, 1.0], 2, [0.0, 0.75, 0.0], [1, -1]),
        ([0.1, 0.4, 0.5], [0.6, 0.3, 0.1], 0, [0.9, 0.19, 0.0], [1, -1]),
        ([0.1, 0.4, 0.5], [0.6, 0.3, 0.1], 0, [0.9, 0.21, 0.0], [2, -1]),
        ([0.25, 0.75], [1.0, 0.0], 0, [0.25 - 2.0**-53, 0.5, 0.5], [0, 1]),
        ([0.25, 0.75], [1.0, 0.0], 0, [0.25, 0.5, 0.5], [1, -1]),
        ([1e-38, 1.0], [1.0, 0.0], 0, [2.0**-53, 0.5, 0.5], [1, -1]),
        ([0.0, 0.5, 0.5], [1.0, 0.0, 0.0], 0, [0.5, 0.5 - 2.0**-53, 0.5], [1, -1]),
        ([0.0, 0.5, 0.5], [1.0, 0.0, 0.0], 0, [0.5, 0.5, 0.5], [2, -1]),
        ([1.0, 2.0**-30], [1.0, 0.0], 0, [0.5, 0.5, 1 - 2.0**-53], [0, 1]),
    ],
)
def test_one_draft_by_hand(
    rule: str,
    impl: str,
    target: list[float],
    draft: list[float],
    drafted: int,
    uniforms: list[float],
    tokens: list[int],
) -> None:
    """Uniforms are compared strictly, with 53 bits; an empty residual gives way to the target, NaN counts as 0."""
    result = one_draft(rule, impl, target, draft, drafted, uniforms)
    assert result.tokens.tolist() == [tokens]
    assert result.num_accepted.tolist() == [int(tokens[1] >= 0)]
    assert result.valid.all()
    logs = torch.tensor(target)[torch.tensor([t for t in tokens if t >= 0])].log()
    assert torch.allclose(result.logprobs[0, : len(logs)].cpu(), logs, atol=1e-6)


def test_a_block_of_less_than_all_probability_leaves_less(impl: str) -> None:
    """P_1 = 1 / 2: of max(P_1 p - q, 0) token 2 alone is left, where max(p - q, 0) would have token 1 too."""
    lengths, p = torch.zeros(1, dtype=torch.int64, device=DEVICE), [0.2, 0.2, 0.6]
    result = kernels.accept(
        "block", torch.zeros(1, 3, dtype=torch.int64, device=DEVICE),
        kernels.build_chain(lengths, 3, impl="reference"), None, lengths, 2,
        probs=torch.tensor([[[0.5, 0.5, 0.0], p, p]], device=DEVICE),
        draft_probs=torch.tensor([[[1.0, 0.0, 0.0], [0.8, 0.1, 0.1]]], device=DEVICE),
        uniforms=torch.tensor([[0.2, 0.9, 0.05, 0.5]], dtype=torch.float64, device=DEVICE), impl=impl,
    )  # fmt: skip
    assert result.tokens.tolist() == [[0, 2, -1]]


def test_logprobs_are_those_of_the_plain_softmax(impl: str) -> None:
    """For any rule, temperature and filters: log softmax(logits) of what is emitted, then 0."""
    for name in ("accept_filtered", "rejection_filtered", "block_far", "accept_tree", "multi_round_far"):
        inputs = case_inputs(name)
        result = kernels.accept(**inputs, impl=impl)
        plain = torch.log_softmax(inputs["logits"].double(), -1)
        for b, (tokens, nodes) in enumerate(zip(result.tokens.tolist(), result.nodes.tolist(), strict=True)):
            expected = [plain[b, n, t].item() if t >= 0 else 0.0 for t, n in zip(tokens, nodes, strict=True)]
            assert torch.allclose(result.logprobs[b].double().cpu(), torch.tensor(expected).double(), atol=1e-5)


def test_a_row_of_nan_ends_the_path(impl: str) -> None:
    result = kernels.accept(**case_inputs("accept_unusable"), impl=impl)
    assert result.valid.tolist() == [False, False, True]
    assert result.num_accepted.tolist() == [0, 2, 3]
    assert result.bonus[:2].tolist() == [0, 0]


def test_known_targets_are_followed_as_their_logits_are(impl: str) -> None:
    inputs = case_inputs("accept_tree")
    targets = inputs["logits"].argmax(-1)
    from_logits = kernels.accept(**inputs, return_logprobs=False, impl=impl)
    names = ("tokens", "tree", "lengths", "max_depth")
    known = kernels.accept_targets(targets=targets, **{name: inputs[name] for name in names}, impl=impl)
    assert same(from_logits, known)
