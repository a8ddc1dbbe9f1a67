"""Drafters with a model: their output is exact whatever they draft, and they draft what the model says."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from algorithms.algorithm import Algorithm, Batch, DraftTree
from algorithms.attention.paged_attention import PagedMixer
from algorithms.dflash.drafting import DFlash
from algorithms.drafting.tree_drafter import RunLevel, TreeDrafter
from algorithms.eagle.drafting import Eagle, Eagle3, NaiveEagle
from algorithms.eagle.model import Eagle3Drafter, EagleDrafter
from algorithms.models.dense_mixer import DenseMixer
from algorithms.standalone import Standalone
from tests.algorithms.drafters import (
    LOADING,
    MAKERS,
    TARGET,
    Watched,
    blurred_target,
    chi_square_p,
    draft_model,
    eagle3_head,
    eagle_head,
)
from tests.algorithms.toy import CONFIG, VOCAB, Setup, answers, changed, engine_of, random_drafter, requests, run

pytestmark = pytest.mark.usefixtures("random_drafters")


@cache
def mixed_answers() -> list[list[int]]:
    return answers(mixed(), Setup(backend="torch", max_batch=1), TARGET)


def mixed() -> list:
    return [changed(r, temperature=(0.0, 0.8)[r.id % 2]) for r in requests(8, max_new_tokens=18)]


@pytest.mark.parametrize("maker", ["eagle3_tree", "standalone_tree", "dflash_tree"])
def test_kernels_in_the_engine(maker: str) -> None:
    """The same through the Triton kernels (interpreted where there is no GPU)."""
    asked = [changed(r, max_new_tokens=2) for r in mixed()[:2]]
    got = run(MAKERS[maker](), asked, Setup(impl="triton", max_batch=2), TARGET)
    assert [c.token_ids for c in got.completions] == [ids[:2] for ids in mixed_answers()[:2]]


def dense_features(text: list[int], layers: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
    """The hidden states, and the outputs of `layers`, of which -1 is the embedding."""
    tokens, after = torch.tensor([text]), [layer for layer in layers if layer >= 0]
    hidden, outputs = TARGET.model(tokens, DenseMixer(CONFIG, len(text), "cpu"), tuple(after))
    found = dict(zip(after, outputs, strict=True)) | {-1: TARGET.model.embed(tokens)}
    return hidden, [found[layer] for layer in layers]


def dense_eagle_chain(head: EagleDrafter | Eagle3Drafter, text: list[int], steps: int) -> list[int]:
    """A chain drafted without any cache."""
    drafts: list[int] = []
    for _ in range(steps):
        drafts.append(int(head.to_target(dense_path_logits(head, text, drafts).argmax(-1))))
    return drafts


@pytest.mark.parametrize("maker", ["eagle_chain", "eagle3_chain"])
def test_eagle_drafts_what_its_head_says(maker: str) -> None:
    """Against a head without cache: catches features of the wrong token, stale slots and positions off by one."""
    algorithm = MAKERS[maker]()
    head = eagle_head() if maker == "eagle_chain" else eagle3_head()
    watched = Watched(algorithm)
    run(algorithm, requests(5, max_new_tokens=10), Setup(max_batch=2, page_size=4), TARGET)
    checked = [d for d in watched.drafts if len(d[0]) > 1]
    assert len(checked) > 20
    for text, nodes, _ in checked:
        assert nodes[1:] == dense_eagle_chain(head, text, len(nodes) - 1)


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


def test_tokens_of_wide_trees_see_their_paths_alone() -> None:
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


def dense_path_logits(head: EagleDrafter | Eagle3Drafter, text: list[int], path: list[int]) -> Tensor:
    """[V]: the head's logits behind `text` and `path`, by the head over the whole text, then over its own features."""
    hidden, features = dense_features(text, getattr(head, "layer_ids", ()))
    feature, tokens = head.fuse(features, hidden)[:, :-1], list(text[1:])
    for token in [None, *path]:
        tokens += [] if token is None else [token]
        out = head(torch.tensor([tokens]), feature, DenseMixer(CONFIG, len(tokens), "cpu"))
        feature = torch.cat([feature, out[:, -1:]], 1)
    return head.logits(out[0, -1])


def test_standalone_drafts_what_its_model_says() -> None:
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
def test_sampled_chains_follow_the_targets_distribution(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    """The joint distribution of the first two tokens, over many seeds, with a draft model that is often wrong."""
    temperature, seeds, likely = 0.6, 2000, 8
    monkeypatch.setattr(f"{LOADING}.load_draft", lambda *_: blurred_target())
    algorithm = Standalone(Standalone.Config(steps=2, rule=rule), TARGET, "random")
    prompt = requests(1)[0].prompt_ids
    asked = [changed(requests(1, 2)[0], id=i, seed=i, temperature=temperature, top_k=likely) for i in range(seeds)]
    got = run(algorithm, asked, Setup(max_batch=250), TARGET).completions
    counts = Counter(tuple(c.token_ids) for c in got)
    assert chi_square_p(two_token_distribution(prompt, temperature, likely), counts) > 1e-6
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
        ((-1, 0), False, None, (128, 6)),
        ((-1, 0), True, None, (128, 6)),
        ((0, -1), False, 5, (5, 5)),
        ((0, -1), False, 9, (9, 6)),
        ((1, 0), False, None, (128, 6)),
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
    monkeypatch.setattr("algorithms.dflash.loading.load_dflash", lambda *_: drafter)
    algorithm = DFlash(DFlash.Config(window=window), TARGET, "random")
    watched = Watched(algorithm)
    run(algorithm, requests(4, max_new_tokens=9), Setup(max_batch=2, page_size=4), TARGET)
    assert len(watched.drafts) > 10
    for text, nodes, _ in watched.drafts:
        assert nodes[1:] == dense_block(drafter, text, causal, seen)


def dense_block(drafter: torch.nn.Module, text: list[int], causal: bool, seen: tuple[int, int]) -> list[int]:
    """The block behind `text` with attention spelled out: context keys from features, block keys from the block."""
    from algorithms.models.dense_mixer import head_norm
    from algorithms.models.layers import apply_rope, rope_table

    config, committed = drafter.config, len(text) - 1
    table, eps = rope_table(CONFIG, 128, "cpu"), CONFIG.rms_norm_eps
    context = None
    if committed:
        last, features = dense_features(text[:-1], config.target_layer_ids)
        read = {CONFIG.num_layers - 1: last}
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
        if config.head:
            head = drafter.markov_head
            row = row + head.markov_w2.weight @ head.markov_w1.weight[drafts[-1]]
        drafts.append(int(row.argmax()))
    return drafts[1:]


@pytest.mark.parametrize("changes", [{"mask_token_id": VOCAB}, {"markov_rank": 5}], ids=["own mask", "markov head"])
def test_dflash_drafts_by_parts_of_its_own(monkeypatch: pytest.MonkeyPatch, changes: dict[str, int]) -> None:
    """A mask's embedding, and a head that reads the draft before, belong to the drafter."""
    drafter = random_drafter(block_size=4, **changes)
    monkeypatch.setattr("algorithms.dflash.loading.load_dflash", lambda *_: drafter)
    algorithm, asked = DFlash(DFlash.Config(), TARGET, "random"), requests(4, max_new_tokens=9)
    watched = Watched(algorithm)
    completions = run(algorithm, asked, Setup(max_batch=2, page_size=4), TARGET).completions
    assert [c.token_ids for c in completions] == answers(asked, Setup(), TARGET)
    assert len(watched.drafts) > 10
    for text, nodes, _ in watched.drafts:
        assert nodes[1:] == dense_block(drafter, text, False, (128, 128))


def test_dflash_caps_its_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cap changes the products of probabilities, and so the tree; what is written stays."""
    drafts = {}
    for cap in (None, 2.0):
        drafter = random_drafter(block_size=5)
        drafter.config = replace(drafter.config, logit_soft_cap=cap)
        monkeypatch.setattr("algorithms.dflash.loading.load_dflash", lambda *_, drafter=drafter: drafter)
        algorithm = DFlash(DFlash.Config(topk=3, num_nodes=8), TARGET, "random")
        watched, asked = Watched(algorithm), requests(2, max_new_tokens=4)
        wanted = answers(asked, Setup(), TARGET)
        assert [c.token_ids for c in run(algorithm, asked, Setup(), TARGET).completions] == wanted
        drafts[cap] = watched.drafts
    assert drafts[None] != drafts[2.0]
    logits = torch.tensor([-300.0, 0.0, 1.0, 300.0])
    torch.testing.assert_close(drafter.cap(logits), 2 * torch.tanh(logits / 2))


@pytest.mark.parametrize("algorithm", [Eagle, Eagle3, NaiveEagle, Standalone, DFlash])
def test_a_drafter_must_be_named(algorithm: type[Algorithm]) -> None:
    with pytest.raises(ValueError, match="set model.draft_path"):
        algorithm(algorithm.Config(), TARGET, None)
