"""The rules for sampled trees and chains, judged by their exact distribution.

A draft of fixed shape is sampled over a vocabulary of three tokens; every outcome is enumerated. A node is accepted
below a threshold of its own uniform, and the last token follows from a series of thresholds of another; bisection over
`accept` finds all of them, so that no formula of the rules is repeated here. The distribution of three tokens must be
the target's. One batch holds all draws at several temperatures, 0 among them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import product

import pytest
import torch

from specdec_kernels import Accepted, SamplingTensors, TreeLinks, accept, build_tree
from specdec_kernels.verify import draft_by_node, expected_accepted
from specdec_kernels.verify.types import BOTTOM_UP_RULES, CHAIN_RULES, TREE_RULES, WITHOUT_REPLACEMENT_RULES
from tests.kernels.distributions import OFF, AcceptFunction, Filter
from tests.kernels.test_verify import case_inputs

if torch.cuda.is_available():
    pytest.skip("these run on the CPU, where reference and interpreter can be compared", allow_module_level=True)

RULES = list(TREE_RULES)
FROM_BELOW = (*BOTTOM_UP_RULES, "block")
INDEPENDENT = [rule for rule in RULES if rule not in WITHOUT_REPLACEMENT_RULES]
VOCAB = 3
TEMPERATURES = (0.7, 0.0)


@dataclass(frozen=True)
class Shape:
    """The parents of a draft's nodes, and those whose tokens are sampled."""

    parents: tuple[int, ...]
    sampled: tuple[int, ...]

    @property
    def nodes(self) -> int:
        return len(self.parents)

    @property
    def linked(self) -> list[int]:
        return [0, *(node for node in range(1, self.nodes) if self.parents[node] >= 0)]

    def children(self, node: int) -> list[int]:
        return [child for child in range(1, self.nodes) if self.parents[child] == node]

    def path_to(self, node: int) -> list[int]:
        """Nodes from below the root to `node`."""
        return [*self.path_to(self.parents[node]), node] if node > 0 else []

    def from_below(self, node: int = 0) -> list[int]:
        """The node and all below it, children first."""
        return [each for child in self.children(node) for each in self.from_below(child)] + [node]

    def before(self, rule: str, node: int) -> list[int]:
        """Nodes that must be rejected before `node` may be accepted: the earlier siblings of its path, or from the
        leaves up all nodes that are judged earlier."""
        if rule in FROM_BELOW:
            return self.from_below()[: self.from_below().index(node)]
        return [
            earlier for step in self.path_to(node) for earlier in self.children(self.parents[step]) if earlier < step
        ]

    def links(self, lengths: torch.Tensor) -> TreeLinks:
        """Of requests of one length."""
        one = build_tree(torch.tensor([self.parents], dtype=torch.int32), lengths[:1], impl="reference")
        return TreeLinks(*(each.expand(len(lengths), *each.shape[1:]).contiguous() for each in one))


# Node 6 is padding outside the tree. Node 7 is a child that was not sampled, of a token without draft probability.
TREE = Shape((-1, 0, 0, 1, 1, 2, -2, 0), sampled=(1, 2, 3, 4, 5))
SHAPES = dict.fromkeys(RULES, TREE) | dict.fromkeys(CHAIN_RULES, Shape((-1, 0, 1, -2), sampled=(1, 2)))
NEVER = 1 - 2.0**-53
BISECTIONS = 23
ROUNDING = 2.0**-21  # of a threshold: the kernel's probabilities are float32, and a handful of them meet in each
BOUND = {"reference": 1e-6, "triton": 1e-6}


def models(name: str, rule: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    """Target logits and draft distributions by context, both [V, V].

    `spread`: every token may be sampled but the filler of the root. `narrow`: a context draws one token only, so that
    there is nothing to draw without replacement after it; the target rules out a token that is sampled.
    """
    generator = torch.Generator().manual_seed(5)
    target = torch.randn(VOCAB, VOCAB, generator=generator)
    draft = torch.softmax(torch.randn(VOCAB, VOCAB, generator=generator) * 1.5, -1)
    draft[0, 0] = 0.0
    if name == "narrow":
        draft[2] = torch.tensor([0.0, 1.0, 0.0])
        target[1, 2] = float("-inf")
    if rule in CHAIN_RULES:  # they take the rows as they are
        draft = draft / draft.sum(-1, keepdim=True)
    return target, draft


def draws(rule: str, draft: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every tree [C, N] that may be sampled after token 0, and its probability [C] float64."""
    q, shape = (draft.double() / draft.double().sum(-1, keepdim=True)).tolist(), SHAPES[rule]
    found = []
    for sampled in product(range(VOCAB), repeat=len(shape.sampled)):
        tokens, weight = [0] * shape.nodes, 1.0
        for node, token in zip(shape.sampled, sampled, strict=True):
            tokens[node] = token
            parent = shape.parents[node]
            left = list(q[tokens[parent]])
            for sibling in range(1, node if rule in WITHOUT_REPLACEMENT_RULES else 0):
                if shape.parents[sibling] == parent:
                    left[tokens[sibling]] = 0.0
            # Where nothing is left to draw, the drafter fills the place with the most likely token, which is taken.
            filler = max(range(VOCAB), key=q[tokens[parent]].__getitem__)
            weight *= left[token] / sum(left) if sum(left) > 0 else float(token == filler)
        if weight > 0:
            found.append((tokens, weight))
    return torch.tensor([tokens for tokens, _ in found]), torch.tensor([w for _, w in found], dtype=torch.float64)


def scans(rule: str) -> list[tuple[list[int], list[int], int]]:
    """Each moves one uniform: the nodes whose uniforms are 0, the columns that move, the node or token in question. All
    other uniforms reject: from the root down a path must be accepted first, from the leaves up it is not judged."""
    shape, down = SHAPES[rule], rule not in FROM_BELOW
    of_nodes = [(shape.path_to(shape.parents[node]) if down else [], [node - 1], node) for node in shape.linked[1:]]
    at_ends, last = [shape.path_to(end) if down else [end] * (end > 0) for end in shape.linked], shape.nodes
    return of_nodes + [(passed, [last - 1, last], token) for passed in at_ends for token in range(VOCAB - 1)]


Ask = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Whether the uniforms [R] accept the node, or give no later token, in the cases [R] of all scans, temperatures and
draws, counted through."""


def answers(
    rule: str, tokens: torch.Tensor, target: torch.Tensor, draft: torch.Tensor, chosen: Filter, judge: AcceptFunction,
    impl: str, at: torch.Tensor, cases: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    moved, nodes, rows = scans(rule), SHAPES[rule].nodes, len(at)
    fixed, moves = torch.full((len(moved), nodes + 1), NEVER, dtype=torch.float64), torch.zeros(len(moved), nodes + 1)
    for scan, (passed, columns, _) in enumerate(moved):
        fixed[scan, [node - 1 for node in passed]] = 0.0
        moves[scan, columns] = 1
    asked = torch.tensor([wanted for _, _, wanted in moved])
    scan, draw = cases // (len(TEMPERATURES) * len(tokens)), cases % len(tokens)
    temperature = torch.tensor(TEMPERATURES)[cases // len(tokens) % len(TEMPERATURES)]
    trees, lengths = tokens[draw], torch.full((rows,), 7)
    accepted = judge(
        rule, trees, SHAPES[rule].links(lengths), target[trees], lengths, nodes,
        sampling=SamplingTensors(temperature, **chosen.arguments(rows)), impl=impl,
        uniforms=torch.where(moves[scan] > 0, at[:, None], fixed[scan]), draft_probs=draft[trees[:, :-1]],
        return_logprobs=False,
    )  # fmt: skip
    assert accepted.valid.all()
    passes = (accepted.nodes == asked[scan][:, None]).any(-1)
    return torch.where(scan < len(SHAPES[rule].linked) - 1, passes, accepted.bonus <= asked[scan])


def bisected(rule: str, ask: Ask, draws: int, halvings: int = BISECTIONS) -> torch.Tensor:
    """[scans, T, C] float64: the thresholds below which the answers are yes. Those of 0 and 1 need no search."""
    shape = (len(scans(rule)), len(TEMPERATURES), draws)
    every = torch.arange(math.prod(shape))
    found = ask(torch.full(every.shape, NEVER, dtype=torch.float64), every).double()
    cases = (ask(torch.zeros_like(found), every) & (found == 0)).nonzero()[:, 0]
    low, high = torch.zeros(len(cases), dtype=torch.float64), torch.ones(len(cases), dtype=torch.float64)
    for _ in range(halvings):
        middle = (low + high) / 2
        below = ask(middle, cases)
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    found[cases] = low
    return found.view(shape)


@cache
def thresholds_of_reference(rule: str, design: str, chosen: Filter, sampled_for: str) -> torch.Tensor:
    """[scans, T, C] float64: the thresholds of `accept`, which several tests look at."""
    target, draft = models(design, rule)
    tokens, _ = draws(sampled_for, draft)
    return bisected(rule, partial(answers, rule, tokens, target, draft, chosen, accept, "reference"), len(tokens))


def confirmed(ask: Ask, found: torch.Tensor) -> torch.Tensor:
    """`found` where the answers change within ROUNDING of it, else 2, which is no probability and spoils the result."""
    every, flat = torch.arange(found.numel()), found.flatten()
    low, high = (flat - ROUNDING).clamp(min=0), (flat + ROUNDING).clamp(max=NEVER)
    changes = (ask(low, every) | (low == 0)) & (~ask(high, every) | (high == NEVER))
    return torch.where(changes.view_as(found), found, 2.0)


def thresholds(rule: str, found: torch.Tensor) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    """By node: the share of uniforms that accept it [T, C]; by last node: the distribution of the next token [T, C, V].

    Both where the traversal comes by; else they are meaningless and count with weight zero.
    """
    linked = SHAPES[rule].linked
    shares = dict(zip(linked[1:], found, strict=False))
    running = found[len(shares) :].view(len(linked), VOCAB - 1, *found.shape[1:])
    edges = torch.cat([torch.zeros_like(running[:, :1]), running, torch.ones_like(running[:, :1])], 1)
    return shares, {end: edges[place].diff(dim=0).movedim(0, -1) for place, end in enumerate(linked)}


def own_steps(target: torch.Tensor, chosen: Filter = OFF) -> torch.Tensor:
    """[T, V, V] float64: the target's distribution after each context, one-hot at temperature 0."""
    steps = [
        torch.softmax(target.double() / t, -1) if t else torch.nn.functional.one_hot(target.argmax(-1), VOCAB).double()
        for t in TEMPERATURES
    ]
    return torch.tensor([[chosen(row) for row in rows] for rows in torch.stack(steps).tolist()], dtype=torch.float64)


def ended(rule: str, weights: torch.Tensor, shares: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """By last node: the probability of each draw, and that its path ends there, [T, C]."""
    found, shape = {}, SHAPES[rule]
    for end in shape.linked:
        down = rule not in FROM_BELOW
        accepted = shape.path_to(end) if down else [end] * (end > 0)
        reached = weights.expand(len(TEMPERATURES), -1)
        for node in accepted:
            reached = reached * shares[node]
        for node in shape.before(rule, end) + (shape.children(end) if down else []):
            reached = reached * (1 - shares[node])
        found[end] = reached
    return found


def three_tokens(
    judge: AcceptFunction,
    rule: str,
    design: str,
    impl: str = "reference",
    *,
    chosen: Filter = OFF,
    sampled_for: str | None = None,
    halvings: int = BISECTIONS,
) -> torch.Tensor:
    """[T, V, V, V] float64: the distribution of what a step emits, continued by the target where it is shorter."""
    target, draft = models(design, rule)
    tokens, weights = draws(sampled_for or rule, draft)
    ask = partial(answers, rule, tokens, target, draft, chosen, judge)
    if judge is accept and halvings == BISECTIONS:
        found = thresholds_of_reference(rule, design, chosen, sampled_for or rule)
    else:
        found = bisected(rule, partial(ask, "reference"), len(tokens), halvings)
    if impl == "triton":
        found = confirmed(partial(ask, "triton"), found)
    shares, ends = thresholds(rule, found)
    steps = own_steps(target, chosen)
    emitted = [torch.zeros(len(TEMPERATURES), VOCAB**drafts, VOCAB, dtype=torch.float64) for drafts in range(3)]
    for end, reached in ended(rule, weights, shares).items():
        path = SHAPES[rule].path_to(end)
        place = (tokens[:, path] * torch.tensor([VOCAB, 1])[2 - len(path) :]).sum(1)
        emitted[len(path)].index_add_(1, place, reached[..., None] * ends[end])
    pairs = emitted[1] + emitted[0].mT * steps
    return emitted[2].view(-1, VOCAB, VOCAB, VOCAB) + pairs[..., None] * steps[:, None]


def expected_joint(target: torch.Tensor, chosen: Filter = OFF) -> torch.Tensor:
    steps = own_steps(target, chosen)
    return steps[:, 0, :, None, None] * steps[:, :, :, None] * steps[:, None]


def distance(seen: torch.Tensor, target: torch.Tensor, chosen: Filter = OFF) -> torch.Tensor:
    """[T] total variation from the target's distribution."""
    return 0.5 * (seen - expected_joint(target, chosen)).abs().sum((1, 2, 3))


@pytest.mark.parametrize("impl, design", [("reference", "spread"), ("reference", "narrow"), ("triton", "narrow")])
@pytest.mark.parametrize("rule", SHAPES)
def test_exact_distribution_of_three_tokens(rule: str, impl: str, design: str) -> None:
    target, _ = models(design)
    chosen = Filter(top_k=2) if design == "narrow" and rule in CHAIN_RULES else OFF
    seen = three_tokens(accept, rule, design, impl, chosen=chosen)
    bound = BOUND["triton" if rule in CHAIN_RULES else impl]  # rows of float32 sum to 1 within a rounding
    assert (distance(seen, target, chosen) <= bound).all()
    assert (seen[expected_joint(target, chosen) == 0] <= bound).all()


@pytest.mark.parametrize("rule", WITHOUT_REPLACEMENT_RULES)
def test_independent_draws_may_be_judged_without_replacement(rule: str) -> None:
    """Equal siblings are passed over, and independent draws that differ are draws without replacement."""
    seen = three_tokens(accept, rule, "spread", sampled_for="multi_round")
    assert (distance(seen, models("spread")[0]) <= BOUND["reference"]).all()


@pytest.mark.parametrize("rule", INDEPENDENT)
def test_draws_without_replacement_must_not_be_judged_as_independent(rule: str) -> None:
    seen = three_tokens(accept, rule, "spread", sampled_for="without_replacement", halvings=12)
    assert distance(seen, models("spread")[0]).max() > 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_expected_number_of_accepted_drafts(rule: str) -> None:
    """The formula against the thresholds that bisection finds."""
    target, draft = models("narrow")
    tokens, weights = draws(rule, draft)
    found = thresholds_of_reference(rule, "narrow", OFF, rule)
    by_end = ended(rule, weights, thresholds(rule, found)[0])
    wanted = sum(len(TREE.path_to(end)) * reached for end, reached in by_end.items())
    links = TREE.links(torch.zeros(len(tokens)).long())
    by_node = draft_by_node(draft[tokens[:, :-1]], None, TREE.nodes)
    for row, temperature in enumerate(TEMPERATURES):
        sampling = SamplingTensors(torch.full((len(tokens),), temperature))
        mean = expected_accepted(rule, tokens, links, target[tokens], TREE.nodes, sampling, by_node)
        assert torch.allclose(weights * mean, wanted[row], rtol=0, atol=1e-6)


@pytest.mark.parametrize("num_drafts", [1, 2, 3, 6])
def test_k_seq_accepts_what_it_promises(num_drafts: int) -> None:
    """At one node at least 1 - 1/e of the best rule's share, by the formula of that for independent drafts: one less
    the largest q(H)^k - p(H) over sets H of tokens."""
    target, draft = models("spread")
    p, q = torch.softmax(target[1].double(), -1), draft[1].double() / draft[1].double().sum()
    sets = torch.tensor(list(product([0.0, 1.0], repeat=VOCAB)), dtype=torch.float64)
    best = 1 - ((sets @ q) ** num_drafts - sets @ p).max()
    tokens = torch.tensor([(0, *sampled) for sampled in product(range(VOCAB), repeat=num_drafts)])
    weights, lengths = q[tokens[:, 1:]].prod(1), torch.zeros(len(tokens), dtype=torch.int64)
    parents = torch.tensor([-1] + [0] * num_drafts, dtype=torch.int32).repeat(len(tokens), 1)
    by_node, logits = (rows[1].expand(len(tokens), num_drafts + 1, VOCAB) for rows in (draft.double(), target))
    arguments = tokens, build_tree(parents, lengths), logits, 1, SamplingTensors(torch.ones(len(tokens))), by_node
    share = {rule: (weights * expected_accepted(rule, *arguments)).sum() for rule in INDEPENDENT}
    assert (1 - 1 / torch.e) * best <= share["k_seq"] <= best + 1e-9
    assert share["multi_round"] <= best + 1e-9


@pytest.mark.parametrize("rule", RULES)
def test_on_a_chain_it_is_a_rule_for_chains(rule: str, impl: str) -> None:
    """One child a node: the same uniforms keep the same drafts and draw the same token."""
    inputs = case_inputs("rejection_near")
    of_chains = "block" if rule in BOTTOM_UP_RULES else "rejection"
    along, chain = (accept(**inputs | {"rule": name}, impl=impl) for name in (rule, of_chains))
    assert all(torch.equal(left, right) for left, right in zip(along, chain, strict=True))
    assert (along.num_accepted > 0).any() and (along.num_accepted < 4).any()


def siblings(
    rule: str, impl: str, drafted: list[int], target: list[float], draft: list[float], uniforms: list[float]
) -> Accepted:
    """A root with the given children, over given distributions."""
    nodes, lengths = len(drafted) + 1, torch.zeros(1, dtype=torch.int64)
    parents = torch.tensor([[-1] + [0] * len(drafted)], dtype=torch.int32)
    return accept(
        rule, torch.tensor([[0, *drafted]]), build_tree(parents, lengths, impl="reference"), None, lengths, 2,
        probs=torch.tensor([[target] * nodes]), draft_probs=torch.tensor([[draft] * (nodes - 1)]),
        uniforms=torch.tensor([uniforms], dtype=torch.float64), impl=impl,
    )  # fmt: skip


@pytest.mark.parametrize(
    "rule, drafted, uniforms, nodes, bonus",
    [
        # p = (0.1, 0.3, 0.6), q = (0.5, 0.25, 0.25): after a rejected 0 the residual is (0, 1, 7) / 8.
        ("multi_round", [0, 1], [0.21, 0.49, 0.0, 0.0], [0, 2, -1], 0),
        ("multi_round", [0, 1], [0.21, 0.51, 0.0, 0.0], [0, -1, -1], 2),
        ("without_replacement", [0, 1], [0.21, 0.24, 0.0, 0.0], [0, 2, -1], 0),
        ("without_replacement", [0, 1], [0.21, 0.26, 0.0, 0.0], [0, -1, -1], 2),
        # A token sampled twice is judged twice under one rule, and is no sample under the other.
        ("multi_round", [0, 0], [0.21, 0.0, 0.05, 0.0], [0, -1, -1], 2),
        ("without_replacement", [0, 0], [0.21, 0.0, 0.05, 0.0], [0, -1, -1], 1),
        ("traversal", [0, 1], [0.21, 0.24, 0.0, 0.0], [0, 2, -1], 0),
        ("traversal", [0, 1], [0.21, 0.26, 0.0, 0.0], [0, -1, -1], 2),
        # rho = 1.47967: token 1 is accepted below 0.3 / (rho / 4) = 0.81099, and only token 2 has p > rho q.
        ("k_seq", [1, 0], [0.81098, 0.0, 0.0, 0.0], [0, 1, -1], 0),
        ("k_seq", [1, 0], [0.81100, 0.99, 0.0, 0.0], [0, -1, -1], 2),
        ("multi_round", [0, 7], [0.21, 0.0, 0.05, 0.0], [0, -1, -1], 1),
    ],
)
def test_two_siblings_by_hand(
    rule: str, impl: str, drafted: list[int], uniforms: list[float], nodes: list[int], bonus: int
) -> None:
    result = siblings(rule, impl, drafted, [0.1, 0.3, 0.6], [0.5, 0.25, 0.25], uniforms)
    assert result.nodes.tolist() == [nodes] and result.bonus.tolist() == [bonus]
