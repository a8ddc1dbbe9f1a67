"""Block drafters in the layouts of their writers draft through the engine what their equations say."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from algorithms.dflash.drafting import DFlash
from algorithms.dflash.loading import load_dflash
from algorithms.dflash.model import DFlashDrafter
from algorithms.models.fusion import queries_only
from tests.algorithms.dflash.published import (
    FAMILIES,
    Original,
    Published,
    deepspec,
    dflash_2,
    domino,
    speculators,
    speculators_dflash_2,
    zlab,
)
from tests.algorithms.drafters import DEEP_TARGET as TARGET
from tests.algorithms.recorded import Recorded, check_chains, check_distributions, check_kernels, check_trees, drafted
from tests.algorithms.tiny_folders import edit_json, refusal
from tests.algorithms.toy import Setup, answers, changed, requests, run

TEMPERATURE = 0.7
EAGER = Setup(max_batch=2, page_size=4)
OF_EACH_HEAD = (
    "speculators dflash", "deepspec vanilla", "deepspec gated", "speculators dspark rnn", "dspark confidence", "domino",
    "dflash 2", "speculators dspark vanilla",
)  # fmt: skip
"""One family for each way to come from hidden states to a draft, with the target's vocabulary and with one of its own.
How layouts are read shows in greedy chains."""


def algorithm(folder: Path, **config: Any) -> DFlash:
    return DFlash(DFlash.Config(**config), TARGET, str(folder))


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_chains(tmp_path: Path, name: str) -> None:
    """Captured for each head."""
    family, setup = FAMILIES[name], Setup(max_batch=2, page_size=1, graph="step" if name in OF_EACH_HEAD else "none")
    original = Original(family, family.write(tmp_path))
    check_chains(drafted(algorithm(tmp_path), TARGET, setup), original)


@pytest.mark.parametrize(("window", "windows"), [(5, (5, 5)), (9, (6, 9))], ids=["narrower", "wider"])
def test_a_window_of_the_run(tmp_path: Path, window: int, windows: tuple[int, ...]) -> None:
    """The narrower one of it and of the layer's own."""
    family = FAMILIES["zlab window"]
    original = Original(replace(family, windows=windows), family.write(tmp_path))
    check_chains(drafted(algorithm(tmp_path, window=window), TARGET, EAGER), original)


@pytest.mark.parametrize("name", OF_EACH_HEAD)
def test_the_distribution_of_a_sampled_chain(tmp_path: Path, name: str) -> None:
    original = Original(FAMILIES[name], FAMILIES[name].write(tmp_path))
    drafts = drafted(algorithm(tmp_path, draft_sampling="sample"), TARGET, EAGER, TEMPERATURE)
    check_distributions(drafts, original, TEMPERATURE)


@pytest.mark.parametrize("name", OF_EACH_HEAD)
def test_trees(tmp_path: Path, name: str) -> None:
    original = Original(FAMILIES[name], FAMILIES[name].write(tmp_path))
    drafts = drafted(algorithm(tmp_path, topk=3, num_nodes=24), TARGET, EAGER, every=5)
    check_trees(drafts, original, original.confidence if FAMILIES[name].confidence is not None else None)


@pytest.mark.parametrize("name", ["dspark confidence", "deepspec confidence", "specforge dspark"])
def test_confidence_is_the_path_probability_of_a_chain(tmp_path: Path, name: str) -> None:
    """Where a chain is asked for path probabilities, as `mixed` does, a confidence head gives them."""
    family = FAMILIES[name]
    original, chain = Original(family, family.write(tmp_path)), algorithm(tmp_path)
    bind = chain.bind
    chain.bind = lambda resources: bind(replace(resources, needs_path_probs=True))  # type: ignore[method-assign]
    recorded = Recorded(chain)
    run(chain, requests(3, max_new_tokens=4), Setup(), TARGET)
    for text, tokens, _, _, probs in recorded.drafts:
        assert probs is not None
        expected = original.confidence(text, tokens[1:]).cumprod(0)
        torch.testing.assert_close(probs[1:].double(), expected, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("name", ["deepspec gated", "domino", "dflash 2", "speculators dspark rnn"])
def test_the_kernels_draft_the_same(tmp_path: Path, name: str) -> None:
    FAMILIES[name].write(tmp_path)
    check_kernels(lambda: algorithm(tmp_path), TARGET)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("zlab", dict(block_size=1)),
        ("deepspec rnn", dict(block_size=1)),
        ("domino shifted", dict(block_size=2)),
        ("dflash 2", dict(block_size=2)),
        ("dflash 2", dict(topk=4, num_nodes=9)),
        ("speculators dspark rnn", dict(topk=3, num_nodes=9)),
    ],
)
def test_borders(tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    """Blocks of one and two tokens, trees, a prompt of one token, more requests than slots, steps of any size: outputs
    are the target's own, also where it samples."""
    drafter = algorithm(FAMILIES[name].write(tmp_path), **settings)
    asked = [changed(request, temperature=(0.0, 0.9)[request.id % 2]) for request in requests(7, max_new_tokens=4)]
    expected = answers(asked, Setup(backend="torch", max_batch=1), TARGET)
    setup = Setup(max_batch=3, page_size=4, graph="step", adaptive=settings.get("topk") == 4)
    got = run(drafter, asked, setup, TARGET)
    assert [c.token_ids for c in got.completions] == expected


@pytest.mark.parametrize("own", [(), ("embed_tokens",), ("lm_head",), ("embed_tokens", "lm_head")])
def test_copies_of_the_targets_tensors_are_dropped(tmp_path: Path, own: tuple[str, ...]) -> None:
    drafter = load_dflash(deepspec(own=own).write(tmp_path), TARGET)
    kept = [name for name in ("embed_tokens", "lm_head") if getattr(drafter, name) is not None]
    assert kept == list(own)


@pytest.mark.parametrize(
    ("published", "keys", "parts"),
    [
        (zlab(), {"speculators_model_type": "eagle3"}, ("transformer_layer_config: expected the decoder's keys",)),
        (
            speculators(),
            {"speculators_model_type": "peagle"},
            ("expected one of dflash, dspark, dflash2 for algo=dflash",),
        ),
        (speculators(), {"sample_from_anchor": True}, ("next by sample_from_anchor, own by speculative_tokens",)),
        (speculators(from_anchor=True), {"sample_from_anchor": None}, ("own by speculators without", "next by spec")),
        (
            dflash_2(),
            {"architectures": ["DFlashDraftModel"], "dflash_config": {"mask_token_id": 60}},
            ("no selector_rank",),
        ),
        (speculators_dflash_2(), {"sample_from_anchor": True}, ("expected false for dflash2",)),
        (deepspec(), {"slots": "own", "sample_from_anchor": True}, ("own by slots, next by sample_from_anchor",)),
        (deepspec(), {"architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text"}, ("gemma4_text",)),
        (zlab(own={"projector_type": "other"}), {}, ("projector_type 'other' is not supported",)),
        (domino(True, 1), {"sample_from_anchor": False}, ("own by sample_from_anchor, next by shift_label",)),
        (speculators(), {"draft_vocab_size": 38}, ("'d2t' has the wrong shape", "[38]", "[37]")),
        (deepspec(), {"draft_vocab_size": 40}, ("lack tensors", "d2t, t2d")),
        (zlab(), {"draft_vocab_size": 40}, ("draft_vocab_size without an LM head",)),
    ],
)
def test_contradictions_are_refused(
    tmp_path: Path, published: Published, keys: dict[str, Any], parts: tuple[str, ...]
) -> None:
    edit_json(published.write(tmp_path) / "config.json", **keys)
    refusal(lambda: load_dflash(tmp_path, TARGET), *parts)


def test_a_selector_samples_no_trees(tmp_path: Path) -> None:
    config = DFlash.Config(topk=2, num_nodes=6, draft_sampling="sample")
    with pytest.raises(ValueError, match="a drafter with a candidate selector samples chains only"):
        DFlash.check(config, TARGET, str(dflash_2().write(tmp_path)))


@torch.no_grad()
def test_convolutions_of_identities_leave_dflash(tmp_path: Path) -> None:
    """Kernels of 1 at a row itself, and 0 elsewhere; before that, in the fused forward too."""
    drafter = load_dflash(dflash_2().write(tmp_path), TARGET)
    weights = drafter.state_dict()
    block = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
    convolved = drafter(block, queries_only)
    drafter.set_forward("reference")
    torch.testing.assert_close(drafter(block, queries_only), convolved, atol=1e-4, rtol=1e-4)
    drafter.set_forward(None)
    for name, weight in weights.items():
        if name.endswith("kernel_projection.weight"):
            weight.zero_()
        elif name.endswith("base_kernel"):
            weight[:] = torch.tensor([1.0, 0.0])[:, None]
    plain = DFlashDrafter(replace(drafter.config, conv=None, head=None))
    plain.load_state_dict({name: weights[name] for name in plain.state_dict()})
    torch.testing.assert_close(drafter(block, queries_only), plain(block, queries_only))
    assert not torch.allclose(convolved, plain(block, queries_only), atol=0.1)


def test_a_vocabulary_of_ids_is_refused(tmp_path: Path) -> None:
    published = speculators()
    assert published.known is not None
    ids = replace(published, known=None, added={"d2t": published.known, "t2d": torch.zeros(61, dtype=torch.bool)})
    refusal(lambda: load_dflash(ids.write(tmp_path), TARGET), "vocabulary contradicts itself")
