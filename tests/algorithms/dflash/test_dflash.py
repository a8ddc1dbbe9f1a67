"""What DFlash drafts from the distributions of a block, and the sizes that it declares."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from algorithms.algorithm import Batch
from algorithms.dflash.config import default_target_layer_ids
from algorithms.dflash.drafting import DFlash
from algorithms.step.sampling_params import SamplingNeeds
from tests.algorithms.drafters import TARGET
from tests.algorithms.toy import Setup, engine_of, random_drafter

BLOCK = 5


@pytest.fixture(params=[0, 4], ids=["plain", "markov"])
def rank(request: pytest.FixtureRequest) -> int:
    """Of a head that corrects each draft by the one before it; 0: there is none."""
    return int(request.param)


def made(monkeypatch: pytest.MonkeyPatch, rank: int = 0, **config: Any) -> DFlash:
    drafter = random_drafter(block_size=BLOCK, markov_rank=rank)
    monkeypatch.setattr("algorithms.dflash.loading.load_dflash", lambda *_: drafter)
    return DFlash(DFlash.Config(**config), TARGET, "random")


def batch_of(algorithm: DFlash, needs_path_probs: bool = False) -> Batch:
    """Two requests behind contexts of random keys and values."""
    engine = engine_of(algorithm, Setup(max_batch=2, page_size=4), TARGET)
    if needs_path_probs:
        scored = replace(algorithm._resources, needs_path_probs=True)
        algorithm._resources, algorithm._drafts = scored, replace(algorithm._drafts, resources=scored)
    state, generator = engine.parts.state, torch.Generator().manual_seed(2)
    state.make_room(SamplingNeeds(), algorithm.num_nodes, algorithm.max_depth)
    state.page_table.copy_(torch.arange(state.page_table.numel()).view_as(state.page_table))
    state.lengths.copy_(torch.tensor([9, 6]))
    state.last_tokens.copy_(torch.tensor([3, 8]))
    state.active.fill_(1)
    kv = algorithm._memory.cache.kv
    kv.copy_(torch.randn(kv.shape, generator=generator))
    return state.batch(0, 2, 16)


def behind(algorithm: DFlash, batch: Batch, row: int, path: list[int]) -> torch.Tensor:
    """Logits behind the drafts `path`, the last committed token first."""
    hidden, marginals = algorithm._block_outputs(batch, BLOCK - 1)
    head, logits = algorithm._drafter.markov_head, marginals[row, len(path) - 1]
    return logits if head is None else logits + head.bias(torch.tensor(path[-1]), hidden)


@pytest.mark.parametrize("nodes", [2, 4, 5])
def test_a_chain_is_the_likeliest_token_of_each_place(monkeypatch: pytest.MonkeyPatch, rank: int, nodes: int) -> None:
    """Of fewer nodes it is the beginning of the whole one; its path_probs is the product along the chain."""
    algorithm = made(monkeypatch, rank)
    batch = batch_of(algorithm, needs_path_probs=True)
    draft = algorithm.propose_few(batch, nodes)
    assert draft.tokens.shape == (2, nodes) == draft.links.positions.shape
    assert draft.links.positions.tolist() == [list(range(start, start + nodes)) for start in (9, 6)]
    assert draft.path_probs is not None
    for row, last in enumerate((3, 8)):
        path, sure = [last], [1.0]
        for _ in range(nodes - 1):
            probs = behind(algorithm, batch, row, path).softmax(0)
            path.append(int(probs.argmax()))
            sure.append(sure[-1] * float(probs.max()))
        assert draft.tokens[row].tolist() == path
        assert draft.path_probs[row].tolist() == pytest.approx(sure, rel=1e-4)


@pytest.mark.parametrize(
    ("target", "draft", "layers"),
    [(36, 5, (1, 9, 17, 25, 33)), (36, 2, (1, 33)), (28, 3, (1, 13, 25)), (4, 2, (1, 1)), (36, 1, (18,)), (3, 1, (1,))],
)
def test_layers_that_are_read_where_a_config_names_none(target: int, draft: int, layers: tuple[int, ...]) -> None:
    assert default_target_layer_ids(target, draft) == layers


def test_several_layers_need_four_of_the_target() -> None:
    with pytest.raises(ValueError, match="default target_layer_ids need num_target_layers >= 4, got 3"):
        default_target_layer_ids(3, 2)


@pytest.mark.parametrize("nodes", [3, 9])
def test_a_tree_has_the_likeliest_paths(monkeypatch: pytest.MonkeyPatch, rank: int, nodes: int) -> None:
    algorithm = made(monkeypatch, rank, topk=3, num_nodes=9)
    batch = batch_of(algorithm)
    draft = algorithm.propose_few(batch, nodes)
    assert draft.tokens.shape == (2, nodes) and draft.path_probs is not None
    for row, last in enumerate((3, 8)):
        frontier: list[tuple[float, list[int]]] = [(1.0, [last])]
        offered: list[tuple[float, list[int]]] = []
        for _ in range(min(BLOCK, nodes) - 1):
            tops = [(score, path, behind(algorithm, batch, row, path).softmax(0).topk(3)) for score, path in frontier]
            new = [
                (score * share, [*path, token])
                for score, path, top in tops
                for share, token in zip(top.values.tolist(), top.indices.tolist(), strict=True)
            ]
            offered += new
            frontier = sorted(new, reverse=True)[:3] if rank else new
        best = sorted(offered, reverse=True)[: nodes - 1]
        scores = sorted(draft.path_probs[row, 1:].tolist(), reverse=True)
        assert scores == pytest.approx([score for score, _ in best], rel=1e-4)
        assert sorted(draft.tokens[row, 1:].tolist()) == sorted(path[-1] for _, path in best)


@pytest.mark.parametrize(
    ("config", "chain", "nodes", "depth"),
    [
        (dict(), True, 5, 4),
        (dict(block_size=3), True, 3, 2),
        (dict(block_size=1), True, 1, 0),
        (dict(block_size=1, topk=3), True, 1, 0),
        (dict(topk=3), False, 32, 4),
        (dict(topk=3, num_nodes=4), False, 4, 3),
        (dict(topk=3, num_nodes=5), False, 5, 4),
        (dict(topk=3, num_nodes=11), False, 11, 4),
        (dict(draft_sampling="sample"), True, 5, 4),
        (dict(topk=2, num_nodes=3, draft_sampling="sample"), False, 3, 2),
    ],
)
def test_declared_sizes(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], chain: bool, nodes: int, depth: int
) -> None:
    """A tree of fewer nodes than the block has is not as deep."""
    algorithm = made(monkeypatch, **config)
    assert (algorithm.chain, algorithm.num_nodes, algorithm.max_depth) == (chain, nodes, depth)
    assert algorithm.draft_slots == (config.get("block_size") or BLOCK)
    assert (algorithm.rule == "target_only") == ("draft_sampling" not in config) == (algorithm._nodes is None)


@pytest.mark.parametrize(
    ("causal", "mode"), [((False, False), "block"), ((True, False), "block"), ((True, True), "chain")]
)
def test_the_backend_serves_blocks_or_chains(
    monkeypatch: pytest.MonkeyPatch, causal: tuple[bool, ...], mode: str
) -> None:
    """The drafter never runs over a prompt. Sizes that do not fit are refused before a weight is read."""
    asked: list[Any] = []
    config = random_drafter(block_size=BLOCK, causal_layers=causal).config
    monkeypatch.setattr(
        "algorithms.dflash.loading.read_dflash", lambda *given: asked.append(given) or ("folder", config)
    )
    calls = DFlash.check(DFlash.Config(), TARGET, "folder")
    assert asked == [("folder", TARGET)] and calls.config == config.decoder and calls.modes == {"draft": mode}
    with pytest.raises(ValueError, match="algo.block_size: expected at most 5, as trained, got 6"):
        DFlash.check(DFlash.Config(block_size=6), TARGET, "folder")


@pytest.mark.parametrize(
    ("config", "rank", "message"),
    [
        (dict(block_size=3, topk=2, num_nodes=8), 4, "2 steps with topk 2 draft 2 to 7 nodes, node 0 included, got 8"),
        (dict(block_size=3, topk=2, num_nodes=8, draft_sampling="sample"), 0, "2 steps with topk 2 draft 2 to 7 nodes"),
        (dict(num_nodes=8), 0, "algo.num_nodes is the size of a tree: expected algo.topk above 1, got 1"),
        (dict(block_size=0), 0, "1 to 256 or null"),
        (dict(window=0), 0, "algo.window: expected at least 1 or null, got 0"),
        (dict(window=4), 0, "algo.window: expected at least the block of 5, got 4"),
    ],
)
def test_sizes_that_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], rank: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        made(monkeypatch, rank, **config)
