"""Named inputs of the lattice family."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec_kernels.cases import Comparison, Maker, WorkModel, case_of
from specdec_kernels.lattice.types import Lattice, PairFactors

_VOCAB = 151936


def make_lattice(
    make: Maker,
    batch: int,
    depth: int,
    candidates: int,
    *,
    vocab: int = 97,
    counts: bool = False,
    mapped: bool = False,
    scale: float = 2.0,
    levels: int = 0,
) -> Lattice:
    """Distinct ids in falling order of their logits, as `draft_topk` gives them. `counts`: requests draft 0 to D
    positions, and the last one has a count above D; `mapped`: target ids are 7 i + 3; `levels`: logits are whole
    numbers below it, in no order, so that values tie."""
    draws = torch.rand(batch, depth, vocab, generator=make.generator)
    tokens = draws.argsort(-1)[..., :candidates].contiguous().to(make.device)
    logits = make.normal(batch, depth, candidates, scale=scale).sort(-1, descending=True).values
    if levels:
        logits = make.integers(0, levels, batch, depth, candidates).to(make.dtype)
    drafted = make.integers(0, depth + 1, batch, dtype=torch.int32) if counts else None
    if drafted is not None:
        drafted[-1] = depth + 2
    return Lattice(
        tokens,
        logits,
        make.integers(0, vocab, batch),
        drafted,
        6 * torch.arange(vocab, device=make.device) + 3 if mapped else None,
    )


def make_pairs(make: Maker, lattice: Lattice, scale: float = 2.0, levels: int = 0) -> Tensor:
    batch, depth, candidates = lattice.tokens.shape
    shape = (batch, depth, candidates, candidates)
    if levels:
        return make.integers(0, levels, *shape).float()
    return make.normal(*shape, scale=scale).float()


def scored(make: Maker, *sizes: int, levels: int = 0, **options: Any) -> dict[str, Any]:
    lattice = make_lattice(make, *sizes, levels=levels, **options)
    return dict(lattice=lattice, pairs=make_pairs(make, lattice, levels=levels))


def hostile(make: Maker, depth: int = 4, candidates: int = 5) -> dict[str, Any]:
    """NaN and infinities in logits and pairs, a position without a usable candidate, and one that only some
    predecessors continue."""
    nan, inf = float("nan"), float("inf")
    inputs = scored(make, 6, depth, candidates)
    logits, pairs = inputs["lattice"].logits, inputs["pairs"]
    logits[0, 1] = -inf
    logits[1, 0, 0], logits[1, 1, :2] = nan, inf
    pairs[2, 0, 0, 1], pairs[2, 1, :, 2] = nan, inf
    pairs[3, 1, 0], pairs[3, 1, 2:] = -inf, -inf
    logits[4, 0], pairs[4, 0] = -inf, inf
    logits[5, 2], pairs[5, 2] = -3e38, -3e38
    return inputs


def factors_of(
    make: Maker,
    batch: int,
    depth: int,
    candidates: int,
    rank: int,
    *,
    vocab: int = 97,
    gating: str = "",
    **options: Any,
) -> dict[str, Any]:
    """`gating`: '', 'position' or 'token'; the predecessors' table has a row for every target id."""
    lattice = make_lattice(make, batch, depth, candidates, vocab=vocab, **options)
    targets = vocab if lattice.vocabulary is None else 7 * vocab + 3
    factors = PairFactors(
        make.normal(targets, rank),
        make.normal(vocab, rank),
        make.normal(batch, depth, rank) if gating else None,
        make.normal(targets, rank) if gating == "token" else None,
    )
    return dict(lattice=lattice, factors=factors)


def outside(make: Maker) -> dict[str, Any]:
    """Ids just before and after the tables, among candidates and last tokens."""
    inputs = factors_of(make, 2, 3, 5, 20, gating="token")
    lattice = inputs["lattice"]
    lattice.tokens[:, :, 0], lattice.tokens[:, :, 3], lattice.last_tokens[1] = 97, -1, 97
    return inputs


def sampled(make: Maker, *sizes: int, injected: bool = False, hard: bool = False, **options: Any) -> dict[str, Any]:
    inputs = hostile(make) if hard else scored(make, *sizes, **options)
    batch, depth, _ = inputs["lattice"].tokens.shape
    temperature = make.tensor([[0.7, 0.0, 1.0, 2.5, 1e-3][b % 5] for b in range(batch)], torch.float32)
    uniforms = None
    if injected:
        uniforms = torch.rand(batch, depth, generator=make.generator, dtype=torch.float64).to(make.device)
        uniforms[:, ::3], uniforms[:, 1::3] = 0.0, 1 - 2.0**-53
    return inputs | dict(
        temperature=temperature,
        seeds=make.integers(-(1 << 62), 1 << 62, batch),
        positions=make.integers(0, 1 << 40, batch),
        uniforms=uniforms,
    )


def tree(make: Maker, *sizes: int, num_nodes: int, hard: bool = False, **options: Any) -> dict[str, Any]:
    return (hostile(make) if hard else scored(make, *sizes, **options)) | dict(num_nodes=num_nodes)


def rnn(make: Maker, rows: int, size: int, *, vocab: int = 19, hidden: int = 5) -> dict[str, Any]:
    """The weight is a part of the joint projection; a token lies outside of the table."""
    tokens = make.integers(0, vocab, rows)
    tokens[1:2] = -1
    tokens[2:3] = vocab
    return dict(
        tokens=tokens,
        state=make.normal(rows, size),
        embedding=make.normal(vocab, size),
        weight=make.normal(3 * size, 2 * size + hidden, scale=0.25 * size**-0.5)[:, : 2 * size],
        hidden=make.normal(rows, 3 * size),
    )


def gru(make: Maker, rows: int, size: int, width: int, *, vocab: int = 19) -> dict[str, Any]:
    inputs = rnn(make, rows, size, vocab=vocab)
    return dict(
        tokens=inputs["tokens"],
        state=inputs["state"],
        embedding=make.normal(vocab, width),
        weight_ih=make.normal(3 * size, width, scale=0.5 * width**-0.5),
        weight_hh=make.normal(3 * size, size, scale=0.5 * size**-0.5),
    )


def _rnn_work(inputs: dict[str, Any]) -> tuple[int, int]:
    """The weights are read once; of the embedding a row per row of the state."""
    state = inputs["state"]
    elements = 6 * state.shape[1] ** 2 + 7 * state.numel()
    return elements * state.element_size(), 12 * state.numel() * state.shape[1]


def _gru_work(inputs: dict[str, Any]) -> tuple[int, int]:
    state, width = inputs["state"], inputs["embedding"].shape[1]
    per_row = state.shape[1] + width
    elements = 3 * state.shape[1] * per_row + len(state) * (per_row + state.shape[1])
    return elements * state.element_size(), 6 * state.numel() * per_row


def _pair_work(inputs: dict[str, Any]) -> tuple[int, int]:
    """Each candidate's two rows are read once, and each pair is a product of r factors."""
    tokens, rank = inputs["lattice"].tokens, inputs["factors"].predecessors.shape[1]
    pairs = tokens.numel() * tokens.shape[2]
    row_bytes = rank * inputs["factors"].predecessors.element_size()
    return tokens.numel() * (8 + 2 * row_bytes) + 4 * pairs, 2 * pairs * rank


WORK: dict[str, WorkModel] = {"pair_scores": _pair_work, "rnn_step": _rnn_work, "gru_step": _gru_work}
COMPARISON = Comparison(
    draws=("sample_chain",),
    # A gated factor is the sum of two bfloat16 numbers: 2^-17 of each product, of which few are as large as the result.
    compiled_roundings=64,
    # The reference sums in float64, the kernel 256 products in float32, in an order that differs by processor.
    interpreted_roundings=8,
)

_pair = partial(case_of, "pair_scores", factors_of)
_greedy = partial(case_of, "greedy_chain", scored)
_sampled = partial(case_of, "sample_chain", sampled)
_tree = partial(case_of, "lattice_tree", tree)
_rnn = partial(case_of, "rnn_step", rnn)
_gru = partial(case_of, "gru_step", gru)
_BENCH: dict[str, Any] = dict(bench=True, tags=("large",))

CASES = (
    _pair("pair_empty", "launch on an empty grid", 0, 3, 4, 8),
    _pair("pair_odd", "lanes past candidates and rank", 2, 3, 5, 20),
    _pair("pair_wide", "more candidates than rows of one matrix instruction", 1, 2, 17, 20),
    _pair("pair_gated", "the gate of another position", 2, 3, 5, 20, gating="position"),
    _pair("pair_token_gated", "the gate of the successor in place of the predecessor's", 2, 3, 5, 20, gating="token"),
    _pair("pair_mapped", "a predecessor by the drafter's id", 1, 3, 5, 20, mapped=True, gating="token"),
    _pair("pair_ragged", "scores where nothing is drafted", 3, 3, 5, 20, counts=True),
    case_of("pair_scores", outside, "pair_outside", "a row read outside of its table"),
    _pair("pair_shipped", "registers of DSpark", 1, 2, 16, 256, gate=True),
    _pair("pair_gated_shipped", "registers of DFlash 2", 1, 2, 16, 256, gate=True, gating="position"),
    _pair("pair_token_gated_shipped", "registers of a gated DSpark", 1, 2, 16, 256, gate=True, gating="token"),
    _pair("pair_8x15x16x256", "eight requests of DFlash 2", 8, 15, 16, 256, vocab=_VOCAB, gating="position", **_BENCH),
    _greedy("greedy_empty", "launch on an empty grid", 0, 3, 4),
    _greedy("greedy_odd", "lanes past the candidates, and several requests", 5, 7, 5),
    _greedy("greedy_ties", "equal values go to another id than the lowest", 7, 6, 8, levels=2),
    _greedy("greedy_ragged", "drafts past the request's positions", 5, 6, 4, counts=True),
    _greedy("greedy_mapped", "the drafter's id in place of the target's", 3, 4, 5, mapped=True),
    case_of("greedy_chain", hostile, "greedy_hostile", "NaN, infinities, nothing to choose from"),
    _greedy("greedy_shipped", "registers of a block of sixteen", 2, 15, 16, gate=True),
    _greedy("greedy_wide_shipped", "registers of the most candidates", 1, 7, 32, gate=True),
    _greedy("greedy_8x15x16", "eight requests", 8, 15, 16, **_BENCH),
    _sampled("sample_empty", "launch on an empty grid", 0, 3, 4),
    _sampled("sample_odd", "lanes past the candidates, and greedy requests among sampled ones", 11, 7, 5),
    _sampled("sample_edges", "a uniform of almost 0 or 1, and injected ones in another order", 7, 7, 9, injected=True),
    _sampled("sample_ragged", "probabilities past the request's positions", 7, 6, 4, counts=True),
    _sampled("sample_mapped", "the drafter's id in place of the target's", 5, 4, 5, mapped=True),
    _sampled("sample_hostile", "NaN, infinities, nothing to choose from", hard=True),
    _sampled("sample_shipped", "registers of a block of sixteen", 2, 15, 16, gate=True),
    _sampled("sample_wide_shipped", "registers of the most candidates", 1, 7, 32, gate=True, injected=True),
    _sampled("sample_8x15x16", "eight requests", 8, 15, 16, **_BENCH),
    _tree("tree_empty", "launch on an empty grid", 0, 3, 4, num_nodes=8),
    _tree("tree_root", "a tree without a draft", 2, 3, 4, num_nodes=1),
    _tree("tree_all", "more nodes than the lattice has paths", 1, 3, 2, num_nodes=17),
    _tree("tree_odd", "lanes past candidates and nodes", 2, 7, 5, num_nodes=23),
    _tree("tree_ties", "equal paths in another order", 2, 4, 4, num_nodes=24, levels=1),
    _tree("tree_two_values", "equal siblings in another order than their ids", 2, 4, 5, num_nodes=24, levels=2),
    _tree("tree_ragged", "paths past the request's positions", 3, 5, 4, num_nodes=16, counts=True),
    _tree("tree_mapped", "the drafter's id in place of the target's", 1, 4, 5, num_nodes=9, mapped=True),
    _tree("tree_hostile", "NaN, infinities, nothing to choose from", num_nodes=12, hard=True),
    _tree("tree_shipped", "registers of 64 nodes", 1, 15, 16, num_nodes=64, gate=True),
    _tree("tree_wide_shipped", "registers of the most candidates", 1, 7, 32, num_nodes=64, gate=True),
    _tree("tree_8x15x16x64", "eight requests", 8, 15, 16, num_nodes=64, **_BENCH),
    _rnn("rnn_empty", "launch on an empty grid", 0, 8),
    _rnn("rnn_odd", "lanes past rows and size, and tokens outside of the table", 5, 23),
    _rnn("rnn_several_programs", "rows and entries of another program, and a second block of inputs", 20, 70),
    _rnn("rnn_shipped", "registers of DSpark", 3, 256, hidden=256, gate=True),
    _rnn("rnn_8x256", "eight requests of DSpark", 8, 256, hidden=4096, vocab=_VOCAB, **_BENCH),
    _gru("gru_empty", "launch on an empty grid", 0, 8, 12),
    _gru("gru_odd", "lanes past rows, size and width, and tokens outside of the table", 5, 23, 37),
    _gru("gru_several_programs", "rows and entries of another program, and a second block of inputs", 20, 70, 90),
    _gru("gru_shipped", "registers of Domino", 3, 1024, 256, gate=True, tags=("large",)),
    _gru("gru_8x1024", "eight requests of Domino", 8, 1024, 4096, vocab=_VOCAB, **_BENCH),
)
