"""What DFlash drafts from the distributions of a block, and the sizes that it declares."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from algorithms.dflash import DFlash
from algorithms.runtime.algorithm import Batch
from algorithms.runtime.models.config.dflash import default_target_layer_ids
from algorithms.runtime.sampling_params import SamplingNeeds
from tests.algorithms.drafters import LOADING, TARGET
from tests.algorithms.toy import CONFIG, VOCAB, Setup, engine_of, random_drafter

BLOCK = 5


@pytest.fixture(params=[0, 4], ids=["plain", "markov"])
def rank(request: pytest.FixtureRequest) -> int:
    """Of a head that corrects each draft by the one before it; 0: there is none."""
    return int(request.param)


def made(monkeypatch: pytest.MonkeyPatch, rank: int = 0, **config: Any) -> DFlash:
    drafter = random_drafter(block_size=BLOCK, markov_rank=rank)
    monkeypatch.setattr(f"{LOADING}.load_dflash", lambda *_: drafter)
    return DFlash(DFlash.Config(**config), TARGET, "random")


def batch_of(algorithm: DFlash, confidence: bool = False) -> Batch:
    """Two requests behind contexts of random keys and values."""
    engine = engine_of(algorithm, Setup(max_batch=2, page_size=4), TARGET)
    if confidence:
        algorithm._resources = replace(algorithm._resources, confidence=True)
    state, generator = engine.parts.state, torch.Generator().manual_seed(2)
    state.make_room(SamplingNeeds(), algorithm.num_nodes, algorithm.max_depth)
    state.page_table.copy_(torch.arange(state.page_table.numel()).view_as(state.page_table))
    state.lengths.copy_(torch.tensor([9, 6]))
    state.last_tokens.copy_(torch.tensor([3, 8]))
    state.active.fill_(1)
    algorithm._cache.kv.copy_(torch.randn(algorithm._cache.kv.shape, generator=generator))
    return state.batch(0, 2, 16)


def behind(algorithm: DFlash, batch: Batch, row: int, path: list[int]) -> torch.Tensor:
    """Logits behind the drafts `path`, the last committed token first."""
    marginals = algorithm._marginals(batch, batch.lengths[:, None] + torch.arange(BLOCK), BLOCK - 1)
    head = algorithm._drafter.markov_head
    logits = marginals[row, len(path) - 1]
    return logits if head is None else logits + head(torch.tensor(path[-1]))


@pytest.mark.parametrize("nodes", [2, 4, 5])
def test_a_chain_is_the_likeliest_token_of_each_place(monkeypatch: pytest.MonkeyPatch, rank: int, nodes: int) -> None:
    """Of fewer nodes it is the beginning of the whole one; its confidence is the product along the chain."""
    algorithm = made(monkeypatch, rank)
    batch = batch_of(algorithm, confidence=True)
    draft = algorithm.propose_few(batch, nodes)
    assert draft.tokens.shape == (2, nodes) == draft.links.positions.shape
    assert draft.links.positions.tolist() == [list(range(start, start + nodes)) for start in (9, 6)]
    assert draft.confidence is not None
    for row, last in enumerate((3, 8)):
        path, sure = [last], [1.0]
        for _ in range(nodes - 1):
            probs = behind(algorithm, batch, row, path).softmax(0)
            path.append(int(probs.argmax()))
            sure.append(sure[-1] * float(probs.max()))
        assert draft.tokens[row].tolist() == path
        assert draft.confidence[row].tolist() == pytest.approx(sure, rel=1e-4)


def test_a_block_is_the_last_token_and_masks() -> None:
    """The mask is a token of the target, or a row of the drafter's own."""
    last, embedded = torch.tensor([3, 8]), TARGET.model.model.embed_tokens.weight
    own = random_drafter(mask_token_id=VOCAB)
    for drafter, mask in ((random_drafter(), embedded[VOCAB - 1]), (own, own.mask_embedding)):
        block = drafter.embed_block(TARGET.model, last, 4)
        assert mask is not None and block.shape == (2, 4, len(mask))
        assert torch.equal(block[:, 0], embedded[last]) and torch.equal(block[:, 1:], mask.expand(2, 3, -1))


@pytest.mark.parametrize(
    ("target", "draft", "layers"),
    [(36, 5, (1, 9, 17, 25, 33)), (36, 2, (1, 33)), (28, 3, (1, 13, 25)), (4, 2, (1, 1)), (36, 1, (18,)), (3, 1, (1,))],
)
def test_layers_that_are_read_where_a_config_names_none(target: int, draft: int, layers: tuple[int, ...]) -> None:
    assert default_target_layer_ids(target, draft) == layers


def test_several_layers_need_four_of_the_target() -> None:
    with pytest.raises(ValueError, match="default target_layer_ids need num_target_layers >= 4, got 3"):
        default_target_layer_ids(3, 2)


@pytest.mark.parametrize("layers", [(1, 2), (1, 3)])
def test_of_the_last_target_layer_the_normed_states_are_read(layers: tuple[int, ...]) -> None:
    drafter = random_drafter(target_layer_ids=layers)
    low, high, hidden = torch.randn(3, 1, 5, CONFIG.hidden_size, generator=torch.Generator().manual_seed(1))
    read = torch.cat([low, hidden if layers[-1] == CONFIG.num_layers - 1 else high], -1)
    assert torch.equal(drafter.context([low, high], hidden), drafter.hidden_norm(drafter.fc(read)))


@pytest.mark.parametrize("nodes", [3, 9])
def test_a_tree_has_the_likeliest_paths(monkeypatch: pytest.MonkeyPatch, rank: int, nodes: int) -> None:
    algorithm = made(monkeypatch, rank, topk=3, num_nodes=9)
    batch = batch_of(algorithm)
    draft = algorithm.propose_few(batch, nodes)
    assert draft.tokens.shape == (2, nodes) and draft.confidence is not None
    for row, last in enumerate((3, 8)):
        frontier: list[tuple[float, list[int]]] = [(1.0, [last])]
        offered: list[float] = []
        for _ in range(min(BLOCK, nodes) - 1):
            tops = [(score, path, behind(algorithm, batch, row, path).softmax(0).topk(3)) for score, path in frontier]
            new = [
                (score * share, [*path, token])
                for score, path, top in tops
                for share, token in zip(top.values.tolist(), top.indices.tolist(), strict=True)
            ]
            offered += [score for score, _ in new]
            frontier = sorted(new, reverse=True)[:3] if rank else new
        best = sorted(offered, reverse=True)[: nodes - 1]
        assert sorted(draft.confidence[row, 1:].tolist(), reverse=True) == pytest.approx(best, rel=1e-4)


@pytest.mark.parametrize("topk", [1, 2])
def test_what_is_drawn_comes_from_the_distribution_behind_its_parent(
    monkeypatch: pytest.MonkeyPatch, rank: int, topk: int
) -> None:
    algorithm = made(monkeypatch, rank, topk=topk, num_nodes=None if topk == 1 else 8, draw="sample")
    batch = batch_of(algorithm)
    temperature = batch.sampling.temperature
    assert temperature is not None and algorithm._nodes is not None
    temperature.fill_(0.7)
    draft = algorithm.propose(batch)
    parents = algorithm._nodes.parents
    assert draft.tokens.shape == (2, algorithm.num_nodes) == (2, len(parents)) and draft.draft_probs is not None
    for row in range(2):
        for node in range(len(parents)):
            if not algorithm._nodes.children(node):
                continue
            path, above = [int(draft.tokens[row, node])], node
            while above:
                above = parents[above]
                path.insert(0, int(draft.tokens[row, above]))
            index = node if draft.draft_rows is None else int(draft.draft_rows[row, node])
            expected = (behind(algorithm, batch, row, path) / 0.7).softmax(0)
            torch.testing.assert_close(draft.draft_probs[row, index], expected, rtol=1e-4, atol=1e-6)


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
        (dict(draw="sample"), True, 5, 4),
        (dict(block_size=1, draw="sample"), True, 1, 0),
        (dict(topk=2, num_nodes=3, draw="sample"), False, 3, 2),
    ],
)
def test_declared_sizes(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], chain: bool, nodes: int, depth: int
) -> None:
    """A tree of fewer nodes than the block has is not as deep."""
    algorithm = made(monkeypatch, **config)
    assert (algorithm.chain, algorithm.num_nodes, algorithm.max_depth) == (chain, nodes, depth)
    assert algorithm.draft_slots == (config.get("block_size") or BLOCK)


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        (dict(), "target_only"),
        (dict(topk=3), "target_only"),
        (dict(draw="sample"), "block"),
        (dict(rule="rejection"), "rejection"),
        (dict(topk=2, num_nodes=8, draw="sample"), "traversal"),
        (dict(topk=2, num_nodes=8, rule="k_seq"), "k_seq"),
        (dict(block_size=1, rule="block"), "target_only"),  # nothing is drawn
    ],
)
def test_rules_of_chains_and_of_trees(monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], rule: str) -> None:
    algorithm = made(monkeypatch, **config)
    assert algorithm.rule == rule and (algorithm._nodes is None) == (rule == "target_only")


@pytest.mark.parametrize(
    ("causal", "mode"), [((False, False), "block"), ((True, False), "block"), ((True, True), "chain")]
)
def test_the_backend_serves_blocks_or_chains(
    monkeypatch: pytest.MonkeyPatch, causal: tuple[bool, ...], mode: str
) -> None:
    """The drafter never runs over a prompt. Sizes that do not fit are refused before a weight is read."""
    asked: list[Any] = []
    config = random_drafter(block_size=BLOCK, causal_layers=causal).config
    monkeypatch.setattr(f"{LOADING}.read_dflash", lambda *given: asked.append(given) or ("folder", config))
    calls = DFlash.check(DFlash.Config(), TARGET, "folder")
    assert asked == [("folder", TARGET)] and calls.config == config.decoder and calls.modes == {"draft": mode}
    with pytest.raises(ValueError, match="algo.block_size: expected at most 5, as trained, got 6"):
        DFlash.check(DFlash.Config(block_size=6), TARGET, "folder")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dict(draw="without_replacement"), "draws siblings: expected algo.topk above 1, got a chain"),
        (dict(rule="k_seq"), "algo.rule: expected one of target_only, block, rejection for a chain, got 'k_seq'"),
        (dict(topk=2, rule="block"), "algo.rule: expected one of .* for a tree, got 'block'"),
        (dict(num_nodes=8), "algo.num_nodes is the size of a tree: expected algo.topk above 1, got 1"),
    ],
)
def test_settings_that_do_not_fit(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DFlash.Config(**config)


@pytest.mark.parametrize(
    ("config", "rank", "message"),
    [
        (dict(block_size=3, topk=2, num_nodes=8), 4, "2 steps with topk 2 draft 2 to 7 nodes, node 0 included, got 8"),
        (dict(block_size=3, topk=2, num_nodes=8, draw="sample"), 0, "2 steps with topk 2 draft 2 to 7 nodes"),
        (dict(block_size=6), 0, "algo.block_size: expected at most 5, as trained, got 6"),
        (dict(window=4), 0, "algo.window: expected at least the block of 5, got 4"),
    ],
)
def test_sizes_that_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], rank: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        made(monkeypatch, rank, **config)


@pytest.mark.parametrize(
    ("config", "rank"),
    [
        (dict(block_size=3, topk=2, num_nodes=7), 4),
        (dict(block_size=3, topk=2, num_nodes=8), 0),  # whole distributions hold a path for every pair of ids
        (dict(topk=2, num_nodes=3), 4),
        (dict(block_size=1, topk=2, num_nodes=3), 4),
        (dict(block_size=5, window=5), 0),
    ],
)
def test_sizes_that_just_fit(monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], rank: int) -> None:
    assert made(monkeypatch, rank, **config).num_nodes == config.get("num_nodes", 5) or config["block_size"] == 1
