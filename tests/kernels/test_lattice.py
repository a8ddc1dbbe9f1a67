"""Chains and trees over a lattice, against enumeration, the formulas of the published heads, and by their law."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from scipy.special import chdtri

from specdec_kernels import Accepted, SamplingTensors, accept, best_first_tree, build_tree, sample_children
from specdec_kernels.cases import Maker
from specdec_kernels.lattice import (
    Lattice,
    PairFactors,
    dense_probs,
    greedy_chain,
    gru_step,
    lattice_tree,
    pair_scores,
    rnn_step,
    sample_chain,
)
from specdec_kernels.lattice.cases import factors_of, gru, make_lattice, make_pairs, rnn, sampled, scored, tree
from tests.kernels.distributions import (
    ALPHA,
    DEPTH,
    AcceptFunction,
    Design,
    assert_distribution,
    emitted,
    greedy_continuation,
    make_design,
)

if torch.cuda.is_available():
    pytest.skip("these run on the CPU, where reference and interpreter can be compared", allow_module_level=True)

IMPLS = ["reference", "triton"]
Path = tuple[int, ...]


def softmax(values: list[float]) -> list[float]:
    top = max(values)
    weights = [math.exp(value - top) for value in values]
    return [weight / sum(weights) for weight in weights]


def after(inputs: dict[str, Any], request: int, path: Path) -> list[float]:
    """Values of the candidates of the position after a path of candidates; none after the last position."""
    lattice, pairs, place = inputs["lattice"], inputs["pairs"], len(path)
    depth = lattice.tokens.shape[1]
    if place >= (depth if lattice.counts is None else min(depth, int(lattice.counts[request]))):
        return []
    row = pairs[request, place, path[-1] if path else 0]
    return (lattice.logits[request, place] + row).tolist()


def enumerated(inputs: dict[str, Any], request: int) -> dict[Path, float]:
    """The probability of every path of candidates."""
    found: dict[Path, float] = {}
    level: dict[Path, float] = {(): 1.0}
    while level:
        following = {}
        for path, prob in level.items():
            if values := after(inputs, request, path):
                following |= {(*path, c): prob * share for c, share in enumerate(softmax(values))}
        found |= following
        level = following
    return found


def paths_of(parents: torch.Tensor, candidates: torch.Tensor, width: int) -> list[Path]:
    """Candidates on the way to each used node after the root, in the order of the nodes."""
    paths: dict[int, Path] = {0: ()}
    for node, parent in enumerate(parents.tolist()):
        if parent >= 0:
            assert int(candidates[node]) // width == len(paths[parent]), "a candidate of another position"
            paths[node] = (*paths[parent], int(candidates[node]) % width)
    return [paths[node] for node in sorted(paths) if node]


@pytest.mark.parametrize("num_nodes", [2, 9, 40, 45])
def test_the_tree_holds_the_best_paths(num_nodes: int, impl: str) -> None:
    """Of all 39 paths of three positions with three candidates, and of fewer where a request drafts less."""
    inputs = tree(Maker.seeded(seed=num_nodes), 3, 3, 3, num_nodes=num_nodes, counts=True)
    inputs["lattice"].counts[:2] = torch.tensor([3, 2])
    grown = lattice_tree(**inputs, impl=impl)
    for request in range(3):
        every = enumerated(inputs, request)
        best = sorted(every, key=lambda path: -every[path])[: num_nodes - 1]
        assert paths_of(grown.parents[request], grown.candidates[request], 3) == best
        scores = grown.scores[request, 1 : len(best) + 1].tolist()
        assert scores == pytest.approx([every[path] for path in best], rel=1e-5)
        for node in range(1, len(best) + 1):
            place, candidate = divmod(int(grown.candidates[request, node]), 3)
            assert grown.tokens[request, node] == inputs["lattice"].tokens[request, place, candidate]
        assert (grown.parents[request, len(best) + 1 :] == -2).all()


def test_depths_and_links(impl: str) -> None:
    inputs = tree(Maker.seeded(), 3, 5, 4, num_nodes=16, counts=True)
    grown = lattice_tree(**inputs, impl=impl)
    links = build_tree(grown.parents, torch.zeros(3, dtype=torch.int64), impl="reference")
    used = grown.candidates >= 0
    assert torch.equal(links.depth, torch.where(used, grown.candidates // 4 + 1, 0))
    assert torch.equal(used[:, 1:], grown.parents[:, 1:] >= 0)


def test_without_pairs_the_tree_is_that_of_the_marginals(impl: str) -> None:
    """Independent positions: the tree that `best_first_tree` grows from their probabilities."""
    lattice = make_lattice(Maker.seeded(), 2, 6, 5)
    pairs = torch.zeros(2, 6, 5, 5)
    probs = lattice.logits.double().softmax(-1).float()
    expected = best_first_tree(probs, lattice.tokens, lattice.last_tokens, 20, impl="reference")
    grown = lattice_tree(lattice, pairs, 20, impl=impl)
    for name in ("tokens", "parents", "candidates"):
        assert torch.equal(getattr(grown, name), getattr(expected, name)), name
    torch.testing.assert_close(grown.scores, expected.scores, rtol=1e-5, atol=0)


def test_one_candidate_is_a_chain(impl: str) -> None:
    inputs = scored(Maker.seeded(), 3, 5, 1, counts=True)
    chain = greedy_chain(**inputs, impl=impl)
    grown = lattice_tree(**inputs, num_nodes=6, impl=impl)
    assert all(torch.equal(*pair) for pair in zip(chain, grown, strict=True))
    assert (chain.scores == (chain.parents > -2).float()).all()


def test_the_greedy_chain_step_by_step(impl: str) -> None:
    inputs = scored(Maker.seeded(), 4, 5, 6, counts=True)
    inputs["lattice"].counts[0] = 5
    chain = greedy_chain(**inputs, impl=impl)
    for request in range(4):
        path: Path = ()
        prob = 1.0
        while values := after(inputs, request, path):
            path = (*path, values.index(max(values)))
            prob *= max(softmax(values))
        assert paths_of(chain.parents[request], chain.candidates[request], 6) == [
            path[: size + 1] for size in range(len(path))
        ]
        assert float(chain.scores[request, len(path)]) == pytest.approx(prob, rel=1e-5)


def test_greedy_requests_of_a_sampled_batch(impl: str) -> None:
    inputs = sampled(Maker.seeded(), 9, 6, 5, counts=True)
    greedy = inputs["temperature"] == 0
    chain = sample_chain(**inputs, impl=impl)
    expected = greedy_chain(inputs["lattice"], inputs["pairs"], impl=impl)
    assert greedy.any()
    assert all(torch.equal(got[greedy], want[greedy]) for got, want in zip(chain, expected, strict=False))
    at = dense_probs(inputs["lattice"], chain.probs, 97)[greedy].gather(2, chain.tokens[greedy, 1:, None])[..., 0]
    assert torch.equal(at, (chain.candidates[greedy, 1:] >= 0).float())


def test_a_request_alone(impl: str) -> None:
    """A request's chain, bits of its probabilities included, does not depend on its batch."""
    inputs = sampled(Maker.seeded(), 5, 6, 5)
    whole = sample_chain(**inputs, impl=impl)
    lattice, others = (
        inputs.pop("lattice"),
        {name: None if part is None else part[2:3] for name, part in inputs.items()},
    )
    alone = sample_chain(Lattice(*(None if part is None else part[2:3] for part in lattice)), **others, impl=impl)
    assert all(torch.equal(one, every[2:3]) for one, every in zip(alone, whole, strict=True))


def test_probabilities_against_float64() -> None:
    """Relative error of the kernel: 3 roundings of the exponent x in base 2, whose error is multiplied by ln 2 < 1, and
    16 more: 2 of exp2, 5 of a sum of 32 terms, 2 of the quotient, as many again for a chip's own exp2 and division.
    Numbers below the smallest normal one may be flushed to zero."""
    for depth, candidates in ((4, 16), (3, 32)):
        inputs = sampled(Maker.seeded(), 40, depth, candidates, scale=6.0)
        inputs["temperature"][inputs["temperature"] < 0.1] = 0.3
        chain = sample_chain(**inputs, impl="triton")
        lattice, chosen = inputs["lattice"], torch.zeros(40, dtype=torch.int64)
        for place in range(depth):
            row = inputs["pairs"][torch.arange(40), place, chosen]
            values = (lattice.logits[:, place] + row).double() / inputs["temperature"].double()[:, None]
            probs = values.softmax(-1)
            exponent = (values - values.amax(-1, keepdim=True)).abs() / math.log(2)
            error = (chain.probs[:, place].double() - probs).abs()
            assert (error <= probs * (3 * exponent + 16) * 2.0**-24 + 2.0**-126).all()
            chosen = chain.candidates[:, place + 1].long() % candidates


def test_joint_law_of_a_sampled_chain(impl: str) -> None:
    """Pearson's statistic of all chains of three tokens, of one lattice for every request with its own seed."""
    rows, width = 20_000, 3
    inputs = scored(Maker.seeded(seed=3), 1, 3, width, scale=0.5)
    inputs["pairs"] *= 0.25
    law = {path: prob for path, prob in enumerated(inputs, 0).items() if len(path) == 3}
    lattice = Lattice(
        *(None if part is None else part.expand(rows, *part.shape[1:]).contiguous() for part in inputs["lattice"])
    )
    pairs = inputs["pairs"].expand(rows, -1, -1, -1).contiguous()
    chain = sample_chain(lattice, pairs, torch.ones(rows), torch.arange(rows), torch.full((rows,), 7), impl=impl)
    code = (chain.candidates[:, 1:].long() % width * width ** torch.arange(2, -1, -1)).sum(-1)
    observed = torch.bincount(code, minlength=width**3).double()
    expected = torch.tensor([law[path] for path in product(range(width), repeat=3)], dtype=torch.float64) * rows
    assert expected.min() >= 5
    assert ((observed - expected) ** 2 / expected).sum() < chdtri(len(expected) - 1, ALPHA)


def test_the_uniforms_are_those_of_sampled_trees(impl: str) -> None:
    """With the whole vocabulary as candidates, in order, the chain is the one that `sample_children` samples."""
    vocab, depth, batch = 8, 4, 6
    make = Maker.seeded(seed=5)
    tokens = torch.arange(vocab).expand(batch, depth, vocab).contiguous()
    lattice = Lattice(tokens, make.normal(batch, depth, vocab), make.integers(0, vocab, batch))
    pairs = make_pairs(make, lattice)
    seeds, positions, temperature = (
        make.integers(0, 1 << 60, batch),
        make.integers(0, 1 << 40, batch),
        torch.ones(batch),
    )
    chain = sample_chain(lattice, pairs, temperature, seeds, positions, impl=impl)
    for node in range(1, depth + 1):
        expected = chain.tokens.clone()
        sample_children(
            expected, chain.probs, torch.tensor([[node]], dtype=torch.int32),
            torch.tensor([node - 1], dtype=torch.int32), chain.tokens[:, 1:, None].contiguous(), temperature, seeds,
            positions, replacement=True, impl="reference",
        )  # fmt: skip
        assert torch.equal(expected, chain.tokens)


def test_the_heads_of_published_drafters(impl: str) -> None:
    """Bias of a gated DSpark head over the vocabulary, and the selector of DFlash 2, at one pair of candidates."""
    make, vocab, rank, hidden = Maker.seeded(), 23, 12, 20
    w1, w2, states = make.normal(vocab, rank), make.normal(vocab, rank), make.normal(2, 3, hidden)
    of_hidden, of_token, bias = make.normal(rank, hidden), make.normal(rank, rank), make.normal(rank)
    lattice = make_lattice(make, 2, 3, 4, vocab=vocab)
    gated = pair_scores(lattice, PairFactors(w1, w2, states @ of_hidden.T + bias, w1 @ of_token.T), impl=impl)
    selector = pair_scores(lattice, PairFactors(w1, w2, states @ of_hidden.T), impl=impl)
    for place, before in ((0, lattice.last_tokens[1]), (2, lattice.tokens[1, 1, 3])):
        row, e, h = (0 if place == 0 else 3), w1[before], states[1, place]
        joint = torch.cat([of_hidden, of_token], 1) @ torch.cat([h, e]) + bias
        ids = lattice.tokens[1, place]
        torch.testing.assert_close(gated[1, place, row], (w2 @ (torch.sigmoid(joint) * e))[ids], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(selector[1, place, row], w2[ids] @ (e * (of_hidden @ h)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gating", ["", "position", "token"])
def test_half_precision_factors(gating: str) -> None:
    """float16, which the interpreter computes rightly: neither f nor a sum is rounded to it."""
    inputs = factors_of(Maker.seeded(dtype=torch.float16), 1, 2, 5, 40, gating=gating)
    expected = pair_scores(**inputs, impl="reference")
    gap = (pair_scores(**inputs, impl="triton") - expected).abs().max()
    assert gap <= 16 * 2.0**-24 * expected.abs().max()


def test_half_precision_logits(impl: str) -> None:
    inputs = scored(Maker.seeded(dtype=torch.float16), 3, 4, 5)
    wide = inputs["lattice"]._replace(logits=inputs["lattice"].logits.float())
    for function, options in ((greedy_chain, {}), (lattice_tree, dict(num_nodes=9))):
        half = function(**inputs, **options, impl=impl)
        assert all(
            torch.equal(*pair) for pair in zip(half, function(wide, inputs["pairs"], **options, impl=impl), strict=True)
        )


def test_the_recurrent_head_of_dspark(impl: str) -> None:
    """Four steps from a state of zeros, with the joint projection of [s; e; h] written out."""
    make, rows, size, hidden = Maker.seeded(), 3, 12, 20
    w1, joint, bias = make.normal(23, size), make.normal(3 * size, 2 * size + hidden, scale=0.2), make.normal(3 * size)
    state = expected = torch.zeros(rows, size)
    for _ in range(4):
        tokens, h = make.integers(0, 23, rows), make.normal(rows, hidden)
        of_hidden = h @ joint[:, 2 * size :].T + bias
        step = rnn_step(tokens, state, w1, joint[:, : 2 * size], of_hidden, impl=impl)
        gate, candidate, output = (torch.cat([expected, w1[tokens], h], -1) @ joint.T + bias).chunk(3, -1)
        expected = torch.sigmoid(gate) * expected + (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
        torch.testing.assert_close(step.output, torch.tanh(output), rtol=0, atol=2e-6)
        torch.testing.assert_close(step.state, expected, rtol=0, atol=2e-6)
        state = step.state


def test_the_gru_is_that_of_torch(impl: str) -> None:
    inputs = gru(Maker.seeded(), 5, 23, 37)
    inputs["tokens"].clamp_(0, 18)
    x = inputs["embedding"][inputs["tokens"]]
    expected = torch.gru_cell(x, inputs["state"], inputs["weight_ih"], inputs["weight_hh"])
    torch.testing.assert_close(gru_step(**inputs, impl=impl), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("function, inputs", [(rnn_step, rnn), (gru_step, gru)], ids=["rnn", "gru"])
def test_half_precision_states(function: Any, inputs: Any) -> None:
    """Computed in float32 and rounded once: at most one float16 unit of numbers up to 4."""
    arguments = inputs(Maker.seeded(dtype=torch.float16), 5, 23, *([37] if inputs is gru else []))
    results = [function(**arguments, impl=impl) for impl in IMPLS]
    pairs = [results] if inputs is gru else zip(*results, strict=True)
    for left, right in pairs:
        assert left.dtype == torch.float16 and (left - right).abs().max() <= 2.0**-9


def drafted(design: Design, context: torch.Tensor, counts: torch.Tensor) -> tuple[Lattice, torch.Tensor]:
    """A lattice of all tokens but one in each position, in an order of its own; pairs are the design's draft logits."""
    vocab, batch = design.vocab, len(context)
    tokens = torch.stack([(torch.arange(vocab - 1) * 2 + place) % vocab for place in range(DEPTH)])
    tokens = tokens.expand(batch, -1, -1).contiguous()
    logits = torch.linspace(-0.5, 0.5, DEPTH * (vocab - 1)).view(DEPTH, vocab - 1).expand(batch, -1, -1).contiguous()
    pairs = torch.zeros(batch, DEPTH, vocab - 1, vocab - 1)
    pairs[:, 0, 0] = design.draft_logits[context[:, None], tokens[:, 0]]
    pairs[:, 1:] = design.draft_logits[tokens[:, :-1, :, None], tokens[:, 1:, None, :]]
    return Lattice(tokens, logits, context, counts), pairs


def decode(
    judge: AcceptFunction, rule: str, temperature: torch.Tensor, impl: str = "reference", ragged: bool = False
) -> torch.Tensor:
    """Tokens of requests that draft chains from lattices over the design `agreeing`."""
    design = make_design("agreeing")

    def step(rows: torch.Tensor, context: torch.Tensor, lengths: torch.Tensor) -> Accepted:
        counts = (rows % (DEPTH + 1) if ragged else torch.full_like(rows, DEPTH)).int()
        lattice, pairs = drafted(design, context, counts)
        chain = sample_chain(lattice, pairs, temperature[rows], rows, lengths, impl=impl)
        return judge(
            rule, chain.tokens, build_tree(chain.parents, lengths, impl=impl), design.logits[chain.tokens], lengths,
            DEPTH, sampling=SamplingTensors(temperature[rows], seeds=rows),
            draft_probs=dense_probs(lattice, chain.probs, design.vocab), impl=impl,
        )  # fmt: skip

    return emitted(step, len(temperature))


@pytest.mark.parametrize("ragged", [False, True], ids=["full", "ragged"])
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_verified_chains_have_the_law_of_the_target(rule: str, ragged: bool) -> None:
    temperature = torch.full((40_000,), 0.7)
    temperature[::8] = 0.0
    tokens, design = decode(accept, rule, temperature, ragged=ragged), make_design("agreeing")
    assert_distribution(tokens[temperature > 0], design, 0.7)
    assert (tokens[::8] == greedy_continuation(design)).all()
