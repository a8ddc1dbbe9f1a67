"""Named inputs of linear attention."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec_kernels.attention import mask_paths
from specdec_kernels.cases import Comparison, Maker, WorkModel, case_of
from specdec_kernels.linear_attention.paths import (
    accepted_paths,
    chain_paths,
    chunk_paths,
    prompt_paths,
    tree_masks,
    tree_paths,
)
from specdec_kernels.linear_attention.types import CHUNK, DeltaInputs, DeltaState, DeltaWeights, Paths, RowLinks
from specdec_kernels.tree import build_tree, tree_parents

Heads = tuple[int, int, int, int]
"""(H, HV, dk, dv)."""
_SMALL: Heads = (2, 4, 8, 12)
_QWEN: Heads = (16, 32, 128, 128)


def channels_of(heads: Heads) -> int:
    groups, values, dk, dv = heads
    return 2 * groups * dk + values * dv


def make_state(make: Maker, heads: Heads, slots: int, taps: int = 4, layers: int | None = None) -> DeltaState:
    _, values, dk, dv = heads
    lead = () if layers is None else (layers,)
    ssm = make.normal(*lead, slots, values, dk, dv).float()
    return DeltaState(ssm, make.normal(*lead, slots, taps - 1, channels_of(heads)))


def make_weights(make: Maker, heads: Heads, taps: int = 4) -> DeltaWeights:
    conv = make.normal(channels_of(heads), taps, scale=taps**-0.5)
    return DeltaWeights(conv, make.normal(heads[1]).float(), make.normal(heads[1]).float())


def make_slots(make: Maker, batch: int, slots: int) -> Tensor:
    """[batch] int64: distinct slots; with several requests the second is padding."""
    chosen = torch.randperm(slots, generator=make.generator)[:batch]
    if batch > 2:
        chosen[1] = -1
    return chosen.to(make.device)


def make_tree(make: Maker, slots: Tensor, nodes: int, unused: bool = False) -> tuple[RowLinks, Paths]:
    """Random trees."""
    parents = make.parents(len(slots), nodes, unused)
    links = build_tree(parents, torch.zeros_like(slots), impl="reference")
    return tree_paths(slots, mask_paths(links.mask, nodes, impl="reference"))


def make_prompts(make: Maker, batch: int, tile: int, slots: Tensor) -> tuple[RowLinks, Paths]:
    """Segments of 0 to 2 tiles, every other one at the beginning of its text, with padding rows after each."""
    counts = make.integers(0, 2 * tile + 1, batch, dtype=torch.int32)
    counts[:1], counts[-1:] = 0, 2 * tile - 1
    rows = ((counts + tile - 1) // tile).clamp(min=1) * tile
    starts = tile * make.integers(1, 4, batch)
    starts[::2] = 0
    return prompt_paths(slots, starts, counts, rows.cumsum(0) - rows, int(rows.sum()))


def make_paths(make: Maker, kind: str, batch: int, nodes: int, slots: Tensor) -> tuple[RowLinks, Paths]:
    """`kind`: chain, tree, unused (a tree with unused nodes) or prompt, whose tiles have `nodes` tokens."""
    if kind == "chain":
        return chain_paths(slots, nodes)
    if kind == "prompt":
        return make_prompts(make, batch, nodes, slots)
    return make_tree(make, slots, nodes, unused=kind == "unused")


def inputs_of(
    make: Maker,
    kind: str,
    batch: int,
    nodes: int,
    heads: Heads = _SMALL,
    taps: int = 4,
    strided: bool = False,
    steep: bool = False,
) -> dict[str, Any]:
    """`strided`: rows are parts of projections. `steep`: softplus is its argument, or 0."""
    slots, width = batch + 3, channels_of(heads)
    links, _ = make_paths(make, kind, batch, nodes, make_slots(make, batch, slots))
    packed, weights = make.normal(len(links.parents), width + 2 * heads[1]), make_weights(make, heads, taps)
    parts = list(packed.split([width, heads[1], heads[1]], 1))
    if strided:  # each of another width
        parts[2] = make.normal(len(packed), width + 3 * heads[1])[:, : heads[1]]
    if steep:
        parts[2].mul_(30)
        weights.a_log.sub_(4)
    return dict(
        **dict(zip(("qkv", "b", "a"), parts if strided else map(Tensor.contiguous, parts), strict=True)),
        weights=weights,
        state=make_state(make, heads, slots, taps),
        links=links,
    )


def make_inputs(make: Maker, heads: Heads, *rows: int) -> DeltaInputs:
    """`rows` is R, or L and R."""
    _, values, dk, _ = heads
    decay, beta = (torch.rand(*rows, values, generator=make.generator).to(make.device) for _ in range(2))
    mixed = make.normal(*rows, channels_of(heads), scale=dk**-0.5).float()
    return DeltaInputs(mixed, decay, beta, make.normal(*rows, channels_of(heads)))


def rule(make: Maker, kind: str, batch: int, nodes: int, heads: Heads = _SMALL, taps: int = 4) -> dict[str, Any]:
    slots = batch + 3
    links, paths = make_paths(make, kind, batch, nodes, make_slots(make, batch, slots))
    inputs = make_inputs(make, heads, len(links.parents))
    return dict(inputs=inputs, paths=paths, state=make_state(make, heads, slots, taps))


def commit(
    make: Maker, batch: int, nodes: int, most: int, layers: int = 2, heads: Heads = _SMALL, taps: int = 4
) -> dict[str, Any]:
    """Paths of 0 to `most` nodes in ascending order."""
    slots = batch + 3
    order = torch.rand(batch, nodes, generator=make.generator).argsort(1)[:, :most].sort(1).values
    counts = torch.randint(0, most + 1, (batch, 1), generator=make.generator)
    counts[:1], counts[2:3] = most, 0
    chosen = torch.where(torch.arange(most) < counts, order, -1).int().to(make.device)
    return dict(
        inputs=make_inputs(make, heads, layers, batch * nodes),
        paths=accepted_paths(make_slots(make, batch, slots), chosen, nodes),
        state=make_state(make, heads, slots, taps, layers),
    )


def chunks(
    make: Maker, counts: tuple[int, ...], heads: Heads = _SMALL, taps: int = 4, kind: str = "random"
) -> dict[str, Any]:
    """Segments of `counts` tokens, every other one at the beginning of its text; the second is padding where there are
    several. `kind`: see `set_gates`."""
    slots = len(counts) + 3
    sizes = [max(1, -(-count // CHUNK)) * CHUNK for count in counts]
    firsts = make.tensor([sum(sizes[:place]) for place in range(len(counts))], torch.int64)
    starts = make.tensor([CHUNK * (place % 2) for place in range(len(counts))], torch.int64)
    given = make.tensor(counts, torch.int32)
    _, plan, _ = chunk_paths(make_slots(make, len(counts), slots), starts, given, firsts, sum(sizes))
    inputs = make_inputs(make, heads, sum(sizes))
    set_gates(inputs, heads, kind)
    return dict(inputs=inputs, chunks=plan, state=make_state(make, heads, slots, taps))


def tree(
    make: Maker,
    batch: int,
    nodes: int,
    shape: str = "random",
    gates: str = "random",
    heads: Heads = _SMALL,
    taps: int = 4,
) -> dict[str, Any]:
    """`shape`: random, unused (random with unused nodes), chain or star. `gates`: see `set_gates`."""
    parents = make.parents(batch, nodes, unused=shape == "unused")
    if shape in ("chain", "star"):
        node = torch.arange(nodes, dtype=torch.int32, device=make.device)
        parents[:] = node - 1 if shape == "chain" else node.clamp(max=1) - 1
    slots = make_slots(make, batch, batch + 3)
    mask = build_tree(parents, torch.zeros_like(slots), impl="reference").mask
    _, trees = tree_masks(slots, tree_parents(mask, impl="reference"), mask)
    inputs = make_inputs(make, heads, batch * nodes)
    set_gates(inputs, heads, gates)
    return dict(inputs=inputs, trees=trees, state=make_state(make, heads, batch + 3, taps))


def set_gates(inputs: DeltaInputs, heads: Heads, kind: str) -> None:
    """`kind`: random, repeated (the same key in all rows, and hardly any decay), forgotten (some decays of 0) or faint
    (many decays of almost 0, one after another, before others of almost 1)."""
    if kind == "repeated":
        keys = slice(heads[0] * heads[2], 2 * heads[0] * heads[2])
        inputs.mixed[:, keys] = torch.nn.functional.normalize(inputs.mixed[:1, keys], dim=1)
        inputs.decay.fill_(0.999)
        inputs.beta.fill_(0.98)
    if kind == "forgotten":
        inputs.decay[5::17] = 0
    if kind == "faint":
        inputs.decay.fill_(0.999)
        inputs.decay[: len(inputs.decay) // 2] = 1e-30


def norm(make: Maker, rows: int, heads: int, dim: int, scale: float = 1.0, strided: bool = False) -> dict[str, Any]:
    gate = make.normal(rows, 2 * heads * dim, scale=scale)[:, : heads * dim]
    gate = gate if strided else gate.contiguous()
    return dict(x=make.normal(rows, heads, dim), gate=gate, weight=make.normal(dim), eps=1e-5)


def _inputs_work(inputs: dict[str, Any]) -> tuple[int, int]:
    """Each row is read once and written twice, once in float32."""
    qkv = inputs["qkv"]
    return qkv.numel() * (2 * qkv.element_size() + 4), qkv.numel() * (2 * inputs["weights"].conv.shape[1] + 8)


def _rule_work(inputs: dict[str, Any]) -> tuple[int, int]:
    """The states are read once for each request, the inputs once and the outputs written once."""
    given, state = inputs["inputs"], inputs["state"]
    requests = len(inputs["paths"].starts.unique())
    rows, size = given.beta.shape[0], state.ssm[0].numel()
    moved = 4 * (requests * size + given.mixed.numel() + 2 * given.beta.numel())
    return moved + rows * state.ssm.shape[1] * state.ssm.shape[3] * given.raw.element_size(), 7 * rows * size


def _chunks_work(inputs: dict[str, Any]) -> tuple[int, int]:
    """The state is read and written once for each segment, the inputs once and the outputs written once."""
    given, state, rows = inputs["inputs"], inputs["state"], CHUNK * int(inputs["chunks"].whole.sum())
    _, heads, dk, dv = state.ssm.shape
    segments = int((inputs["chunks"].counts > 0).sum())
    moved = 8 * segments * heads * dk * dv + rows * 4 * (given.mixed.shape[1] + 2 * heads)
    products = CHUNK * (4 * dk + 2 * dv) + 6 * dk * dv + CHUNK * 2 * (dk + dv)
    return moved + rows * heads * dv * given.raw.element_size(), rows * heads * products


def _tree_work(inputs: dict[str, Any]) -> tuple[int, int]:
    """The state of a request is read once, the inputs of its nodes once and the outputs written once."""
    given, state, (batch, nodes, _) = inputs["inputs"], inputs["state"], inputs["trees"].mask.shape
    _, heads, dk, dv = state.ssm.shape
    moved = 4 * (batch * heads * dk * dv + given.mixed.numel() + 2 * given.beta.numel())
    products = 4 * dk * dv + nodes * (4 * dk + 4 * dv)
    return moved + batch * nodes * heads * dv * given.raw.element_size(), batch * nodes * heads * products


def _commit_work(inputs: dict[str, Any]) -> tuple[int, int]:
    """The states of requests with a path are read and written once, the inputs of its rows read once."""
    given, state, counts = inputs["inputs"], inputs["state"], inputs["paths"].counts
    layers, size = len(given.raw), state.ssm[0, 0].numel()
    rows = layers * int(counts.sum())
    return 8 * layers * int((counts > 0).sum()) * size + 4 * rows * given.mixed.shape[-1], 5 * rows * size


WORK: dict[str, WorkModel] = {
    "delta_rule_inputs": _inputs_work,
    "delta_rule": _rule_work,
    "delta_rule_chunks": _chunks_work,
    "delta_rule_tree": _tree_work,
    "commit_delta_rule": _commit_work,
}
COMPARISON = Comparison(float64=True)

_inputs = partial(case_of, "delta_rule_inputs", inputs_of)
_rule = partial(case_of, "delta_rule", rule)
_chunks = partial(case_of, "delta_rule_chunks", chunks)
_tree = partial(case_of, "delta_rule_tree", tree)
_commit = partial(case_of, "commit_delta_rule", commit)
_norm = partial(case_of, "gated_rms_norm", norm)
_BENCH: dict[str, Any] = dict(bench=True, tags=("large",), heads=_QWEN)
_SHIPPED: dict[str, Any] = dict(gate=True, tags=("large",), heads=_QWEN)

CASES = (
    _inputs("inputs_empty", "launch on an empty grid", "chain", 0, 4),
    _inputs("inputs_one", "one row, whose every ancestor is in the state", "chain", 1, 1),
    _inputs("inputs_chain", "ancestors in the call and in the state", "chain", 3, 6),
    _inputs("inputs_tree", "the row before in place of the parent", "tree", 2, 9),
    _inputs("inputs_unused", "unused nodes", "unused", 2, 9),
    _inputs("inputs_prompt", "a segment that starts its text, and padding rows", "prompt", 5, 4, strided=True),
    _inputs("inputs_two_taps", "a convolution of another width", "tree", 2, 5, taps=2),
    _inputs("inputs_steep", "an argument of softplus whose exponential overflows", "chain", 2, 9, steep=True),
    _inputs("inputs_wide_keys", "keys wider than values, and one key head", "chain", 2, 3, heads=(1, 3, 20, 7)),
    _inputs("inputs_shipped", "registers", "tree", 1, 4, **_SHIPPED),
    _inputs("inputs_8x16", "eight chains of sixteen nodes", "chain", 8, 16, **_BENCH),
    _rule("rule_empty", "launch on an empty grid", "chain", 0, 4),
    _rule("rule_chain", "padding, and heads that share a key", "chain", 3, 6),
    _rule("rule_tree", "states of the row before in place of the parent's", "tree", 2, 9),
    _rule("rule_unused", "unused nodes", "unused", 2, 9),
    _rule("rule_prompt", "states after segments, resets and padding rows", "prompt", 6, 4),
    _rule("rule_two_taps", "a convolution of another width", "prompt", 4, 3, taps=2),
    _rule("rule_wide_keys", "keys wider than values, and one key head", "tree", 2, 5, heads=(1, 3, 20, 7)),
    _rule("rule_shipped", "registers of verification", "tree", 1, 4, **_SHIPPED),
    _rule("rule_prompt_shipped", "registers of prompts", "prompt", 2, 4, **_SHIPPED),
    _rule("rule_8x1", "decode of eight requests", "chain", 8, 1, **_BENCH),
    _rule("rule_8x16", "eight chains of sixteen nodes", "chain", 8, 16, **_BENCH),
    _rule("rule_8x32_tree", "eight trees of 32 nodes", "tree", 8, 32, **_BENCH),
    _rule("rule_prompt_1024", "segments of up to 1024 tokens", "prompt", 4, 512, **_BENCH),
    _chunks("chunks_none", "segments without a whole chunk", (0, 5, 63)),
    _chunks("chunks_segments", "starts, padding, and chunks after which rows are left", (64, 130, 200, 33)),
    _chunks("chunks_wide_keys", "keys wider than values, and one key head", (128,), heads=(1, 3, 20, 7)),
    _chunks("chunks_repeated", "powers of the matrix of a chunk whose keys are the same", (64,), kind="repeated"),
    _chunks("chunks_forgotten", "the logarithm of a decay of zero", (128,), kind="forgotten"),
    _chunks("chunks_shipped", "registers", (64,), **_SHIPPED),
    _chunks("chunks_2048", "a prompt of 2048 tokens", (2048,), **_BENCH),
    _chunks("chunks_8x512", "eight prompts of 512 tokens", (512,) * 8, **_BENCH),
    _tree("tree_empty", "launch on an empty grid", 0, 4),
    _tree("tree_one", "a root alone, and a tile that is hardly filled", 1, 1),
    _tree("tree_15", "padding, and nodes behind the last in the tile", 3, 15),
    _tree("tree_16", "a block of the diagonal that is full", 2, 16),
    _tree("tree_17", "a row that needs the block beside its own", 2, 17),
    _tree("tree_63", "every merge of blocks", 1, 63),
    _tree("tree_64", "the sign bit of a mask word", 2, 64),
    _tree("tree_chain", "nodes that see all before them", 1, 64, "chain"),
    _tree("tree_star", "nodes that see the root alone", 2, 33, "star"),
    _tree("tree_unused", "unused nodes, which follow the state", 2, 40, "unused"),
    _tree("tree_forgotten", "the logarithm of a decay of zero", 1, 50, "random", "forgotten"),
    _tree("tree_faint", "digits that a long sum of log decays loses", 1, 64, "chain", "faint"),
    _tree("tree_repeated", "powers of the matrix of nodes whose keys are the same", 1, 64, "chain", "repeated"),
    _tree(
        "tree_odd_heads", "one key head for an odd number of values, keys wider than values", 2, 20, heads=(1, 3, 20, 7)
    ),
    _tree("tree_wide", "several parts of a key", 1, 18, heads=(1, 1, 256, 40)),
    _tree("tree_shipped", "registers and shared memory", 1, 64, **_SHIPPED),
    _tree("tree_shipped_small", "registers of a smaller tile", 1, 16, **_SHIPPED),
    _tree("tree_shipped_many", "registers of more columns", 8, 64, **_SHIPPED),
    _tree("tree_8x32", "eight trees of 32 nodes", 8, 32, **_BENCH),
    _tree("tree_16x64", "sixteen trees of 64 nodes", 16, 64, **_BENCH),
    _commit("commit_empty", "launch on an empty grid", 0, 4, 3),
    _commit("commit_tree", "paths without nodes, padding, and paths shorter than the convolution", 6, 9, 5),
    _commit("commit_two_taps", "a convolution of another width", 4, 5, 3, taps=2),
    _commit("commit_wide_keys", "keys wider than values, and one key head", 4, 5, 3, heads=(1, 3, 20, 7)),
    _commit("commit_shipped", "registers", 3, 4, 3, **_SHIPPED),
    _commit("commit_8x16", "eight paths of up to eight nodes in four layers", 8, 16, 8, layers=4, **_BENCH),
    _norm("norm_empty", "launch on an empty grid", 0, 4, 8),
    _norm("norm_odd", "lanes past the head", 3, 5, 13),
    _norm("norm_strided", "gates that are a part of a projection", 5, 3, 16, strided=True),
    _norm("norm_saturated", "an exponential that overflows", 3, 2, 16, scale=200.0),
    _norm("norm_shipped", "registers", 4, 32, 128, gate=True),
    _norm("norm_128", "sixteen nodes of eight requests", 128, 32, 128, bench=True, tags=("large",)),
)
