"""Drafters with a model: their output is exact whatever they draft, and they draft what the model says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from algorithms.dflash import DFlash
from algorithms.eagle import Eagle
from algorithms.eagle3 import Eagle3
from algorithms.naive_eagle import NaiveEagle
from algorithms.runtime.algorithm import Algorithm, Batch, DraftTree
from algorithms.runtime.models.dense_mixer import DenseMixer
from algorithms.runtime.models.drafters.eagle import Eagle3Drafter, EagleDrafter
from algorithms.runtime.paged_attention import PagedMixer
from algorithms.runtime.tree_drafting import RunLevel, TreeDrafter
from algorithms.runtime.tree_shape import TreeShape
from algorithms.standalone import Standalone
from tests.algorithms.drafters import (
    LOADING,
    MAKERS,
    TARGET,
    blurred_target,
    draft_model,
    eagle3_head,
    eagle_head,
    load_random_drafters,
)
from tests.algorithms.toy import CONFIG, VOCAB, Setup, answers, changed, engine_of, random_drafter, requests, run


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    load_random_drafters(monkeypatch)


@cache
def mixed_answers() -> list[list[int]]:
    return answers(mixed(), Setup(backend="torch", max_batch=1), TARGET)


def mixed() -> list:
    return [changed(r, temperature=(0.0, 0.8)[r.id % 2]) for r in requests(8, max_new_tokens=18)]


@pytest.mark.parametrize("maker", ["eagle3_tree", "standalone_tree", "dflash_tree"])
def test_kernels_in_the_engine(loaded: None, maker: str) -> None:
    """The same through the Triton kernels (interpreted where there is no GPU)."""
    asked = [changed(r, max_new_tokens=2) for r in mixed()[:2]]
    got = run(MAKERS[maker](), asked, Setup(impl="triton", max_batch=2), TARGET)
    assert [c.token_ids for c in got.completions] == [ids[:2] for ids in mixed_answers()[:2]]


@pytest.mark.parametrize("maker", [name for name in MAKERS if name != "naive_eagle"])
def test_captured_steps(loaded: None, maker: str) -> None:
    """Padding rows change neither caches nor row stores, also where ended requests are stepped once more."""
    setup = Setup(max_batch=3, graph="step", overlap=1, page_size=4)
    assert [c.token_ids for c in run(MAKERS[maker](), mixed(), setup, TARGET).completions] == mixed_answers()


class Watched:
    """Records every draft with the text that it was made for."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.drafts: list[tuple[list[int], list[int], list[int]]] = []
        propose = algorithm.propose

        def watched(batch: Batch) -> DraftTree:
            draft = propose(batch)
            rows = zip(batch.lengths.tolist(), batch.history.tolist(), draft.tokens.tolist(), strict=True)
            depths = draft.links.depth.tolist()
            self.drafts += [(text[: n + 1], nodes, depths[i]) for i, (n, text, nodes) in enumerate(rows)]
            return draft

        algorithm.propose = watched  # type: ignore[method-assign]


def dense_features(text: list[int], layers: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
    mixer = DenseMixer(CONFIG, len(text), "cpu")
    hidden, features = TARGET.model(torch.tensor([text]), mixer, layers)
    return hidden, features


def dense_eagle_chain(head: EagleDrafter | Eagle3Drafter, text: list[int], steps: int) -> list[int]:
    """A chain drafted without any cache: the head over the whole text, then over its own features."""
    hidden, features = dense_features(text, head.capture)
    feature = head.fuse(features, hidden)[:, :-1]
    tokens = list(text[1:])
    drafts: list[int] = []
    for _ in range(steps):
        out = head(torch.tensor([tokens]), feature, DenseMixer(CONFIG, len(tokens), "cpu"))
        drafts.append(int(head.to_target(head.logits(out[:, -1]).argmax(-1))))
        tokens.append(drafts[-1])
        feature = torch.cat([feature, out[:, -1:]], 1)
    return drafts


@pytest.mark.parametrize("maker", ["eagle_chain", "eagle3_chain"])
def test_eagle_drafts_what_its_head_says(loaded: None, maker: str) -> None:
    """Against a head without cache: catches features of the wrong token, stale slots and positions off by one."""
    algorithm = MAKERS[maker]()
    head = eagle_head() if maker == "eagle_chain" else eagle3_head()
    watched = Watched(algorithm)
    run(algorithm, requests(5, max_new_tokens=10), Setup(max_batch=2, page_size=4), TARGET)
    checked = [d for d in watched.drafts if len(d[0]) > 1]
    assert len(checked) > 20
    for text, nodes, _ in checked:
        assert nodes[1:] == dense_eagle_chain(head, text, len(nodes) - 1)


def test_tree_contains_the_chain(loaded: None) -> None:
    """The likeliest child of every level is in the tree: its first path is the chain's draft."""
    algorithm = MAKERS["eagle3_tree"]()
    watched = Watched(algorithm)
    run(algorithm, requests(4, max_new_tokens=8), Setup(max_batch=2), TARGET)
    for text, nodes, depths in (d for d in watched.drafts if len(d[0]) > 1):
        chain = dense_eagle_chain(eagle3_head(), text, 1)
        assert nodes[depths.index(1)] == chain[0]
        assert max(depths) <= 4


class SpiedTree:
    """A `TreeDrafter` that keeps what every level of its first tree was given and gave."""

    def __init__(self, drafter: TreeDrafter) -> None:
        self._drafter = drafter
        self.levels: list[tuple[list[int], list[int], Tensor]] = []
        self.text: list[int] = []

    def tree(self, batch: Batch, logits: Tensor, run_level: RunLevel) -> DraftTree:
        first = not self.text
        if first:
            self.text = batch.history[0, : int(batch.lengths[0]) + 1].tolist()

        def spied(tokens: Tensor, parents: Tensor | None, mixer: PagedMixer) -> Tensor:
            result = run_level(tokens, parents, mixer)
            if first:
                above = [0] * tokens.shape[1] if parents is None else parents[0].tolist()
                self.levels.append((tokens[0].tolist(), above, result[0].clone()))
            return result

        return self._drafter.tree(batch, logits, spied)


def test_tokens_of_wide_trees_see_their_paths_alone(loaded: None) -> None:
    """The logits of every token of the last level, stored at slot 64 and above, are those of its path as a chain."""
    algorithm = Eagle3(Eagle3.Config(steps=6, topk=16, num_nodes=40), TARGET, "random")
    engine = engine_of(algorithm, Setup(max_batch=1, page_size=8, max_length=32), TARGET)
    spy = algorithm._tree = SpiedTree(algorithm._tree)  # type: ignore[assignment]
    engine.generate(requests(1, max_new_tokens=1))
    assert len(spy.levels) == 5
    head, (tokens, _, logits) = eagle3_head(), spy.levels[-1]
    for column in range(len(tokens)):
        path, at = [], column
        for level, above, _ in reversed(spy.levels):
            path, at = [level[at], *path], above[at]
        found = dense_path_logits(head, spy.text, path)
        torch.testing.assert_close(logits[column], found, atol=1e-4, rtol=1e-4)


def dense_path_logits(head: Eagle3Drafter, text: list[int], path: list[int]) -> Tensor:
    """[V]: the head's logits behind `text` and `path`, without any cache."""
    hidden, features = dense_features(text, head.capture)
    feature, tokens = head.fuse(features, hidden)[:, :-1], list(text[1:])
    for token in [None, *path]:
        tokens += [] if token is None else [token]
        out = head(torch.tensor([tokens]), feature, DenseMixer(CONFIG, len(tokens), "cpu"))
        feature = torch.cat([feature, out[:, -1:]], 1)
    return head.logits(out[0, -1])


def test_standalone_drafts_what_its_model_says(loaded: None) -> None:
    algorithm, draft = MAKERS["standalone_chain"](), draft_model()
    watched = Watched(algorithm)
    run(algorithm, requests(5, max_new_tokens=12), Setup(max_batch=2, page_size=4), TARGET)
    for text, nodes, _ in watched.drafts:
        written = list(text)
        for _ in nodes[1:]:
            hidden, _ = draft.model(torch.tensor([written]), DenseMixer(draft.config, len(written), "cpu"))
            written.append(int(draft.model.logits(hidden[:, -1]).argmax(-1)))
        assert nodes[1:] == written[len(text) :]


@pytest.mark.parametrize("topk", [1, 2])
def test_a_drafter_that_is_the_target_is_always_accepted(monkeypatch: pytest.MonkeyPatch, topk: int) -> None:
    """Acceptance 1.0 with the target as its own drafter: nothing is lost between draft, verify and commit."""
    monkeypatch.setattr(f"{LOADING}.load_draft", lambda *_: TARGET)
    algorithm = Standalone(Standalone.Config(steps=3, topk=topk, num_nodes=None if topk == 1 else 11), TARGET, "self")
    completions = run(algorithm, requests(5, max_new_tokens=16), Setup(max_batch=3, page_size=4), TARGET).completions
    assert all(c.accepted_counts == [3, 3, 3, 3] for c in completions)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_drawn_chains(loaded: None, rule: str) -> None:
    """Drafts drawn from the draft model: greedy rows stay the target's own, and captured steps change nothing."""
    asked = mixed()
    plain, captured = (
        run(Standalone(Standalone.Config(steps=3, rule=rule), TARGET, "random"), asked, setup, TARGET).completions
        for setup in (Setup(max_batch=3), Setup(max_batch=3, graph="step", overlap=1, page_size=1))
    )
    assert [c.token_ids for c in plain] == [c.token_ids for c in captured]
    for request, completion, expected in zip(asked, plain, mixed_answers(), strict=True):
        assert request.sampling.temperature > 0 or completion.token_ids == expected


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_drawn_chains_follow_the_targets_distribution(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    """The joint distribution of the first two tokens, over many seeds, with a draft model that is often wrong."""
    temperature, seeds, likely = 0.6, 2000, 8
    monkeypatch.setattr(f"{LOADING}.load_draft", lambda *_: blurred_target())
    algorithm = Standalone(Standalone.Config(steps=2, rule=rule), TARGET, "random")
    prompt = requests(1)[0].prompt_ids
    asked = [changed(requests(1, 2)[0], id=i, seed=i, temperature=temperature, top_k=likely) for i in range(seeds)]
    got = run(algorithm, asked, Setup(max_batch=250), TARGET).completions
    counts: dict[tuple[int, ...], int] = {}
    for completion in got:
        pair = tuple(completion.token_ids)
        counts[pair] = counts.get(pair, 0) + 1
    exact = two_token_distribution(prompt, temperature, likely)
    assert set(counts) <= set(exact), "a token outside of the top 8"
    # Pearson's chi-square; cells that expect fewer than five draws are pooled.
    cells = sorted(((p * seeds, counts.get(pair, 0)) for pair, p in exact.items()), reverse=True)
    large, small = [c for c in cells if c[0] >= 5], [c for c in cells if c[0] < 5]
    pooled = large + ([(sum(e for e, _ in small), sum(o for _, o in small))] if small else [])
    assert chisquare([o for _, o in pooled], [e for e, _ in pooled], sum_check=False).pvalue > 1e-6
    assert 0.1 < sum(c.accepted_counts[0] > 0 for c in got) / seeds < 0.95


def two_token_distribution(prompt: tuple[int, ...], temperature: float, top_k: int) -> dict[tuple[int, ...], float]:
    def following(text: list[int]) -> dict[int, float]:
        hidden, _ = dense_features(text, ())
        top = (TARGET.model.logits(hidden[0, -1]) / temperature).topk(top_k)
        return dict(zip(top.indices.tolist(), top.values.double().softmax(0).tolist(), strict=True))

    first = following(list(prompt))
    return {(a, b): p * q for a, p in first.items() for b, q in following([*prompt, a]).items()}


@pytest.mark.parametrize(
    ("layers", "causal", "window", "seen"),
    [
        ((1, 2), False, None, (128, 6)),
        ((1, 2), True, None, (128, 6)),
        ((1, 2), False, 5, (5, 5)),
        ((1, 2), False, 9, (9, 6)),
        ((3, 0), False, None, (128, 6)),
    ],
    ids=["sliding", "causal", "a narrower window of the run", "a wider window of the run", "the target's last layer"],
)
def test_dflash_drafts_what_its_layers_say(
    monkeypatch: pytest.MonkeyPatch, layers: tuple[int, int], causal: bool, window: int | None, seen: tuple[int, int]
) -> None:
    """Layers with windows of their own, one of them causal, and what is read of the target, against the block computed
    without any cache. `seen` is how far back each layer sees."""
    drafter = random_drafter(block_size=4)
    decoder = replace(drafter.config.decoder, sliding_windows=(None, 6))
    drafter.config = replace(drafter.config, decoder=decoder, causal_layers=(False, causal), target_layer_ids=layers)
    monkeypatch.setattr(f"{LOADING}.load_dflash", lambda *_: drafter)
    algorithm = DFlash(DFlash.Config(window=window), TARGET, "random")
    watched = Watched(algorithm)
    run(algorithm, requests(4, max_new_tokens=9), Setup(max_batch=2, page_size=4), TARGET)
    assert len(watched.drafts) > 10
    for text, nodes, _ in watched.drafts:
        assert nodes[1:] == dense_block(drafter, text, causal, seen)


def dense_block(drafter: torch.nn.Module, text: list[int], causal: bool, seen: tuple[int, int]) -> list[int]:
    """The block behind `text` with attention spelled out: context keys from features, block keys from the block."""
    from algorithms.runtime.models.dense_mixer import head_norm
    from algorithms.runtime.models.rope import apply_rope, rope_table

    config, committed = drafter.config, len(text) - 1
    table, eps = rope_table(CONFIG, 128, "cpu"), CONFIG.rms_norm_eps
    context = None
    if committed:
        last, features = dense_features(text[:-1], config.target_layer_ids)
        read = {3: last}
        features = [read.get(index, f) for index, f in zip(config.target_layer_ids, features, strict=True)]
        fused = drafter.hidden_norm(drafter.fc(torch.cat(features, -1)))
        context = drafter.context_kv(fused)
    positions = torch.arange(committed + config.block_size)

    class Spelled:
        def __call__(self, layer, q, k, v, weights):  # type: ignore[no-untyped-def]
            if context is not None:
                k = torch.cat([context[0][:, :, layer], k], 1)
                v = torch.cat([context[1][:, :, layer], v], 1)
            q = apply_rope(head_norm(q, weights.q_norm, eps), table, positions[committed:])
            k = apply_rope(head_norm(k, weights.k_norm, eps), table, positions)
            k, v = (x.repeat_interleave(2, 2) for x in (k, v))
            scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
            distance = positions[committed:, None] - positions
            hidden = (distance >= seen[layer]) | ((causal and layer == 1) & (distance < 0))
            return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)

    table_of_inputs = TARGET.model.model.embed_tokens.weight
    if config.owns_mask:
        table_of_inputs = torch.cat([table_of_inputs, drafter.mask_embedding[None]])
    hidden = drafter(table_of_inputs[[text[-1]] + [config.mask_token_id] * (config.block_size - 1)][None], Spelled())
    drafts = [text[-1]]
    for row in TARGET.model.logits(hidden[0, 1:]):
        if config.markov_rank:
            head = drafter.markov_head
            row = row + head.markov_w2.weight @ head.markov_w1.weight[drafts[-1]]
        drafts.append(int(row.argmax()))
    return drafts[1:]


@pytest.mark.parametrize("changes", [{"mask_token_id": VOCAB}, {"markov_rank": 5}], ids=["own mask", "markov head"])
def test_dflash_drafts_by_parts_of_its_own(monkeypatch: pytest.MonkeyPatch, changes: dict[str, int]) -> None:
    """A mask's embedding, and a head that reads the draft before, belong to the drafter."""
    drafter = random_drafter(block_size=4, **changes)
    monkeypatch.setattr(f"{LOADING}.load_dflash", lambda *_: drafter)
    algorithm, asked = DFlash(DFlash.Config(), TARGET, "random"), requests(4, max_new_tokens=9)
    watched = Watched(algorithm)
    completions = run(algorithm, asked, Setup(max_batch=2, page_size=4), TARGET).completions
    assert [c.token_ids for c in completions] == answers(asked, Setup(), TARGET)
    assert len(watched.drafts) > 10
    for text, nodes, _ in watched.drafts:
        assert nodes[1:] == dense_block(drafter, text, False, (128, 128))


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_trees_of_dflash_score_a_child_behind_its_parent(monkeypatch: pytest.MonkeyPatch, impl: str) -> None:
    """Every node's children are the likeliest tokens behind it, and the kept nodes have the largest products."""
    drafter = random_drafter(block_size=4, markov_rank=5)
    monkeypatch.setattr(f"{LOADING}.load_dflash", lambda *_: drafter)
    algorithm, tokens = DFlash(DFlash.Config(topk=3, num_nodes=9), TARGET, "random"), 4 if impl == "reference" else 1
    asked = requests(3, max_new_tokens=tokens)
    marginals: list[Tensor] = []
    propose, compute = algorithm.propose, algorithm._marginals
    trees: list[tuple[int, Tensor, DraftTree]] = []

    def kept(*arguments: object) -> Tensor:
        marginals.append(compute(*arguments))  # type: ignore[arg-type]
        return marginals[-1]

    def watched(batch: Batch) -> DraftTree:
        draft = propose(batch)
        trees.extend((row, marginals[-1][row], draft) for row in range(len(draft.tokens)))
        return draft

    monkeypatch.setattr(algorithm, "_marginals", kept)
    monkeypatch.setattr(algorithm, "propose", watched)
    completions = run(algorithm, asked, Setup(max_batch=2, page_size=4, impl=impl), TARGET).completions
    assert [c.token_ids for c in completions] == answers(asked, Setup(), TARGET)
    for row, logits, draft in trees:
        wanted = level_by_level(drafter, logits, int(draft.tokens[row, 0]), topk=3, num_nodes=9)
        assert paths(draft, row) == wanted and len(wanted) == 8


def paths(draft: DraftTree, row: int) -> set[tuple[int, ...]]:
    """Every node of a tree by the tokens that lead to it, the root's not among them."""
    tokens, depths = draft.tokens[row].tolist(), draft.links.depth[row].tolist()
    found = set()
    for seen in draft.links.mask[row, 1:, 0].tolist():
        path = sorted((depths[node], token) for node, token in enumerate(tokens) if seen >> node & 1)
        found.add(tuple(token for _, token in path[1:]))
    return found


def level_by_level(
    drafter: torch.nn.Module, logits: Tensor, last: int, topk: int, num_nodes: int
) -> set[tuple[int, ...]]:
    """EAGLE-2's tree over `logits [K, V]` corrected behind each parent, by sorting lists."""
    head, frontier, offered = drafter.markov_head, [(1.0, (last,))], []
    for row in logits:
        level = []
        for score, path in frontier:
            corrected = row + head.markov_w2.weight @ head.markov_w1.weight[path[-1]]
            best = corrected.softmax(0).topk(topk)
            pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
            level += [(score * share, (*path, token)) for share, token in pairs]
        offered += level
        frontier = sorted(level, reverse=True)[:topk]
    return {path[1:] for _, path in sorted(offered, reverse=True)[: num_nodes - 1]}


def test_dflash_caps_its_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cap changes the products of probabilities, and so the tree; what is written stays."""
    drafts = {}
    for cap in (None, 2.0):
        drafter = random_drafter(block_size=5)
        drafter.config = replace(drafter.config, logit_soft_cap=cap)
        monkeypatch.setattr(f"{LOADING}.load_dflash", lambda *_, drafter=drafter: drafter)
        algorithm = DFlash(DFlash.Config(topk=3, num_nodes=8), TARGET, "random")
        watched, asked = Watched(algorithm), requests(2, max_new_tokens=4)
        wanted = answers(asked, Setup(), TARGET)
        assert [c.token_ids for c in run(algorithm, asked, Setup(), TARGET).completions] == wanted
        drafts[cap] = watched.drafts
    assert drafts[None] != drafts[2.0]
    logits = torch.tensor([-300.0, 0.0, 1.0, 300.0])
    torch.testing.assert_close(drafter.cap(logits), 2 * torch.tanh(logits / 2))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: Eagle.Config(steps=0), "algo.steps: expected at least 1, got 0"),
        (lambda: Eagle.Config(steps=2, topk=3, num_nodes=14), "draft 2 to 13 nodes, node 0 included, got 14"),
        (lambda: Eagle3.Config(topk=65), "algo.topk: expected 1 to 64, got 65"),
        (lambda: Standalone.Config(rule="greedy"), "expected one of target_only, block, rejection for a chain"),
        (lambda: Standalone.Config(rule="block", topk=2), "algo.rule: expected one of target_only, traversal"),
        (lambda: DFlash.Config(num_nodes=8), "expected algo.topk above 1, got 1"),
        (lambda: DFlash.Config(window=0), "algo.window: expected at least 1 or null, got 0"),
    ],
)
def test_bad_settings(config: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config()


def test_the_drafters_cache_has_room_for_what_it_stores() -> None:
    """Slots behind L: of a chain its drafts but the last, of a tree all levels but the last; node 0 where it runs."""
    shapes = [TreeShape.of(1, 1, None), TreeShape.of(4, 1, None), TreeShape.of(4, 3, 12)]
    assert [shape.draft_slots(0) for shape in shapes] == [0, 3, 9]
    assert [shape.draft_slots(1) for shape in shapes] == [1, 4, 10]


@pytest.mark.parametrize("algorithm", [Eagle, Eagle3, NaiveEagle, Standalone, DFlash])
def test_a_drafter_must_be_named(algorithm: type[Algorithm]) -> None:
    with pytest.raises(ValueError, match="set model.draft_path"):
        algorithm(algorithm.Config(), TARGET, None)
