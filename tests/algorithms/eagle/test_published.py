"""Heads in the layouts of their writers draft through the engine what their equations say."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.algorithm import Algorithm, Batch, DraftTree
from algorithms.attention.paged_attention import PagedMixer
from algorithms.drafting.tree_drafter import RunLevel, TreeDrafter
from algorithms.eagle.drafting import Eagle, Eagle3, PEagle
from algorithms.eagle.loading import load_eagle
from tests.algorithms.drafters import DEEP_TARGET as TARGET
from tests.algorithms.eagle.published import (
    CHAINS,
    HEADS_BY_NAME,
    MASK,
    ONE_PASS,
    Head,
    OriginalHead,
    deepspec,
    specforge_peagle,
    speculators,
)
from tests.algorithms.recorded import Recorded, check_chains, check_distributions, check_kernels, check_trees, drafted
from tests.algorithms.tiny_folders import change_weights, edit_json, refusal
from tests.algorithms.toy import Setup, engine_of, requests, run

TEMPERATURE, STEPS = 0.7, 4
EAGER = Setup(max_batch=2, page_size=4)


def drafter(head: Head, folder: Path, **config: Any) -> Algorithm:
    if not head.in_one_pass:
        kind = Eagle if head.is_first else Eagle3
        return kind(kind.Config(steps=STEPS, **config), TARGET, str(folder))
    names_none = head.config["architectures"] == ["PEagleDraftModel"]
    token = MASK if names_none else None
    return PEagle(PEagle.Config(steps=STEPS, mask_token=token, **config), TARGET, str(folder))


@pytest.mark.parametrize("name", ["eagle", "deepspec", "specforge new true", "speculators default", "nvidia peagle"])
def test_greedy_chains(tmp_path: Path, name: str) -> None:
    """Of every way to draft; how each layout is read shows in what is sampled from it."""
    head, setup = HEADS_BY_NAME[name], Setup(max_batch=2, page_size=1, graph="step")
    original = OriginalHead(head, head.write(tmp_path))
    check_chains(drafted(drafter(head, tmp_path), TARGET, setup), original)


@pytest.mark.parametrize("name", HEADS_BY_NAME)
def test_the_distribution_of_a_sampled_chain(tmp_path: Path, name: str) -> None:
    head = HEADS_BY_NAME[name]
    original = OriginalHead(head, head.write(tmp_path))
    drafts = drafted(drafter(head, tmp_path, draft_sampling="sample"), TARGET, EAGER, TEMPERATURE)
    check_distributions(drafts, original, TEMPERATURE)


@pytest.mark.parametrize("name", ["deepspec", "speculators default", "speculators peagle", "aws peagle"])
def test_trees(tmp_path: Path, name: str) -> None:
    head = HEADS_BY_NAME[name]
    original = OriginalHead(head, head.write(tmp_path))
    check_trees(drafted(drafter(head, tmp_path, topk=3, num_nodes=10), TARGET, EAGER, every=4), original)


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


def test_tokens_of_wide_trees_see_their_paths_alone(tmp_path: Path) -> None:
    """The logits of every token of the last level, stored at slot 64 and above, are those of its path as a chain."""
    head = CHAINS["deepspec"]
    original = OriginalHead(head, head.write(tmp_path))
    algorithm = Eagle3(Eagle3.Config(steps=6, topk=16, num_nodes=40), TARGET, str(tmp_path))
    engine = engine_of(algorithm, Setup(max_batch=1, page_size=8, max_length=32), TARGET)
    spy = algorithm._tree = SpiedTree(algorithm._tree)  # type: ignore[assignment]
    engine.generate(requests(1, max_new_tokens=1))
    assert len(spy.levels) == 5
    tokens, _, logits = spy.levels[-1]
    for column in range(len(tokens)):
        path, at = [], column
        for level, above, _ in reversed(spy.levels):
            path, at = [level[at], *path], above[at]
        found = original.logits(spy.text, [*path, 0])[-1]
        torch.testing.assert_close(logits[column].double(), found, atol=1e-4, rtol=1e-4)


def test_path_probabilities_of_a_chain_in_one_pass(tmp_path: Path) -> None:
    head = ONE_PASS["speculators peagle"]
    original, algorithm = OriginalHead(head, head.write(tmp_path)), drafter(head, tmp_path)
    bind = algorithm.bind
    algorithm.bind = lambda resources: bind(replace(resources, needs_path_probs=True))  # type: ignore[method-assign]
    recorded = Recorded(algorithm)
    run(algorithm, requests(3, max_new_tokens=4), Setup(), TARGET)
    for text, tokens, _, _, probs in recorded.drafts:
        if len(text) > 1:
            assert probs is not None
            shares = original.logits(text, tokens[1:]).softmax(-1)[torch.arange(STEPS), tokens[1:]]
            torch.testing.assert_close(probs[1:].double(), shares.cumprod(0), atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize(("name", "fused"), [("speculators peagle normed", False), ("aws peagle", True)])
def test_the_kernels_draft_the_same(tmp_path: Path, name: str, fused: bool) -> None:
    ONE_PASS[name].write(tmp_path)
    check_kernels(lambda: drafter(ONE_PASS[name], tmp_path), TARGET, fused=fused)


def test_few_nodes_are_the_first_of_all(tmp_path: Path) -> None:
    """With `runtime.adaptive` a step may draft less; the output stays the target's."""
    for config in ({}, {"topk": 2, "num_nodes": 8}):
        head = ONE_PASS["specforge peagle"]
        head.write(tmp_path)
        algorithm = drafter(head, tmp_path, **config)
        propose_few = algorithm.propose_few
        algorithm.propose = lambda batch, few=propose_few: few(batch, 3)  # type: ignore[method-assign]
        algorithm.num_nodes, algorithm.max_depth = 3, 2
        drafted(algorithm, TARGET, Setup(page_size=4))


@pytest.mark.parametrize("own", [(), ("embed_tokens",), ("lm_head",), ("embed_tokens", "lm_head")])
def test_copies_of_the_targets_tensors_are_dropped(tmp_path: Path, own: tuple[str, ...]) -> None:
    loaded = load_eagle(deepspec(own=own).write(tmp_path), TARGET, "EAGLE-3")
    kept = [name for name in ("embed_tokens", "lm_head") if getattr(loaded, name) is not None]
    assert kept == list(own)


def test_an_absent_mask_is_zeros(tmp_path: Path) -> None:
    """As in vLLM; the mask token's key says what the folder is."""
    ONE_PASS["aws peagle"].write(tmp_path)
    change_weights(tmp_path, mask_hidden=None)
    loaded = load_eagle(tmp_path, TARGET, "P-EAGLE")
    assert loaded.mask_feature().abs().max() == 0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("head", "kind", "edits", "parts"),
    [
        (deepspec(), "EAGLE-3", {"target_layer_ids": [0, 1, 2, 1, 3]}, ("no last layer 3",)),
        (deepspec(), "EAGLE-3", {"num_target_layers": 6}, ("num_target_layers", "the target's 4", "got 6")),
        (deepspec(), "EAGLE-3", {"num_hidden_layers": 2}, ("num_hidden_layers", "expected the 1", "got 2")),
        (deepspec(), "P-EAGLE", {}, ("not a P-EAGLE head", "algo=eagle3")),
        (speculators(), "EAGLE-3", {"norm_before_residual": None}, ("'norm_before_residual' is missing",)),
        (speculators(), "EAGLE-3", {"fc_norm": True, "norm_before_fc": True}, ("one of them at most",)),
        (speculators(), "EAGLE-3", {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}, ("target layers", "[-1, 1, 4]")),
        (speculators(), "EAGLE-3", {"speculators_model_type": "dflash"}, ("not an EAGLE-3 head", "algo=dflash")),
        (speculators("peagle"), "EAGLE-3", {}, ("not an EAGLE-3 head", "algo=peagle")),
        (speculators("peagle"), "P-EAGLE", {"mask_token_id": 61}, ("mask_token_id", "0 to 60", "got 61")),
        (speculators("peagle"), "P-EAGLE", {"target_hidden_size": 16}, ("target_hidden_size", "32", "16")),
        (specforge_peagle(), "P-EAGLE", {}, ("mask token", "algo.mask_token")),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, head: Head, kind: str, edits: dict[str, Any], parts: tuple[str, ...]
) -> None:
    head.write(tmp_path)
    edit_json(tmp_path / "config.json", **edits)
    refusal(lambda: load_eagle(tmp_path, TARGET, kind), *parts)


def test_one_pass_feeds_nothing_back(tmp_path: Path) -> None:
    """So either meaning of `norm_output` is the same one."""
    ONE_PASS["aws peagle"].write(tmp_path)
    edit_json(tmp_path / "config.json", norm_output=True)
    loaded = load_eagle(tmp_path, TARGET, "P-EAGLE")
    assert loaded.config.logits == "normed"  # type: ignore[union-attr]


def test_a_trained_embedding_that_is_missing_is_refused(tmp_path: Path) -> None:
    speculators("peagle").write(tmp_path)
    change_weights(tmp_path, embed_tokens__weight=None)
    refusal(lambda: load_eagle(tmp_path, TARGET, "P-EAGLE"), "embed_tokens.weight", "own")
