"""Targets with float8 weights: speculation writes what the same target writes alone, whatever drafts it verifies."""

from pathlib import Path
from typing import Any

import pytest
import torch

from algorithms.algorithm import Algorithm
from algorithms.dflash.drafting import DFlash
from algorithms.dflash.loading import load_dflash
from algorithms.eagle.config import Eagle3Config
from algorithms.eagle.drafting import Eagle3
from algorithms.eagle.loading import load_eagle
from algorithms.frontend import load_target as load_by_name
from algorithms.models.loading import Target, load_target
from algorithms.models.scaled_linear import ScaledLinear, quantised_blocks
from tests.algorithms.eagle.test_eagle import DRAFT_VOCAB, write_eagle3
from tests.algorithms.layer_kinds import check_drafts
from tests.algorithms.scaled_folders import CONFIGS, scaled_config, write_scaled_target
from tests.algorithms.tiny_folders import small_dflash_config, write_dflash, write_target
from tests.algorithms.toy import Setup, answers, requests

CHAIN: dict[str, Any] = {}
TREE: dict[str, Any] = {"topk": 2, "num_nodes": 6}
SETUPS = {
    "torch": (Setup(page_size=4, max_batch=2), 3, 8),
    "captured": (Setup(graph="step", prefill_tile=4, max_batch=2), 3, 6),
    "deterministic": (Setup(impl="triton", deterministic=True, page_size=8, max_batch=2), 1, 3),
}
"""With the number of requests and of new tokens. The interpreter runs the kernels of the last."""
IN_FLOAT8 = "as it is loaded"
PAIRS = [("blocks", "torch"), ("blocks", "captured"), ("blocks", "deterministic"), ("rows", "torch"),
         ("rows", "deterministic"), (IN_FLOAT8, "torch")]  # fmt: skip
SMALL: dict[str, Any] = dict(num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=136, eos_token_ids=())


def write_both(folder: Path, kind: str) -> dict[str, dict[str, torch.Tensor]]:
    """A target, and drafters that fit it; returns the drafters' tensors as written."""
    config = scaled_config(**SMALL)
    if kind in CONFIGS:
        write_scaled_target(folder / "target", kind, config)
    else:
        write_target(folder / "target", config)
    drafter = small_dflash_config(config, num_layers=1, block_size=4, target_layer_ids=(0, 1))
    head = Eagle3Config(scaled_config(**SMALL | dict(num_layers=1)), DRAFT_VOCAB, config.hidden_size, (0, 0, 1))
    return {
        "dflash": dict(write_dflash(folder / "dflash", drafter).state_dict()),
        "eagle3": write_eagle3(folder / "eagle3", head),
    }


def loaded(folder: Path) -> Target:
    target = load_target(folder / "target", "cpu", torch.float32, "fp8")
    assert any(isinstance(part, ScaledLinear) for part in target.model.modules())
    return target


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_drafts_do_not_change_the_output(tmp_path: Path, kind: str, name: str) -> None:
    """Drafts of a drafter, which are mostly rejected, and of a script, of which some are accepted."""
    write_both(tmp_path, kind)
    target = loaded(tmp_path)
    setup, count, tokens = SETUPS[name]
    asked = requests(count, max_new_tokens=tokens)
    if name == "deterministic":  # of the interpreter's runs, each kind of weights has one kind of draft
        drafters, decoys = ([], (True,)) if kind == "blocks" else ([dflash(tmp_path, target, CHAIN)], ())
    else:
        drafters, decoys = [dflash(tmp_path, target, TREE)], (False, True)
        drafters.append(Eagle3(Eagle3.Config(**TREE), target, tmp_path / "eagle3"))
    alone = check_drafts(target, asked, setup, drafters, decoys)
    # The kernels and torch compute one target.
    assert alone == answers(asked, SETUPS["torch"][0], target)


def dflash(folder: Path, target: Target, shape: dict[str, Any]) -> Algorithm:
    return DFlash(DFlash.Config(**shape), target, folder / "dflash")


@pytest.mark.parametrize("weight_dtype", ["auto", "fp8", "fp8_w8a16"])
def test_drafters_have_the_weights_that_were_asked_for(tmp_path: Path, weight_dtype: str) -> None:
    """Not those that the target has in its folder: a drafter may be published in another dtype."""
    written = write_both(tmp_path, "blocks")
    target = load_target(tmp_path / "target", "cpu", torch.float32, weight_dtype)
    drafters = {
        "dflash": load_dflash(tmp_path / "dflash", target),
        "eagle3": load_eagle(tmp_path / "eagle3", target, "EAGLE-3"),
    }
    for name, drafter in drafters.items():
        drafter.warmup(2)
        scaled = {f"{at}.weight": part for at, part in drafter.named_modules() if isinstance(part, ScaledLinear)}
        projections = {key for key in written[name] if key.endswith(("_proj.weight", "fc.weight", "lm_head.weight"))}
        assert set(scaled) == (set() if weight_dtype == "auto" else projections)
        for key, part in scaled.items():
            codes, scales = quantised_blocks(written[name][key])
            assert torch.equal(part.scaled_weight.codes, codes.view(torch.uint8)), key
            assert torch.equal(part.scaled_weight.scales, scales), key
            assert part.scaled_weight.float8_x == (weight_dtype == "fp8"), key


@pytest.mark.parametrize("impl", [None, "triton"])
def test_keys_and_values_of_all_draft_layers_are_those_of_each(tmp_path: Path, impl: str | None) -> None:
    """One product of float8 weights, whose rows of scales begin inside of blocks."""
    config = scaled_config(**SMALL)
    write_target(tmp_path / "target", config)
    write_dflash(tmp_path / "dflash", small_dflash_config(config, num_layers=2, target_layer_ids=(0, 1)))
    target = load_target(tmp_path / "target", "cpu", torch.float32, "fp8")
    drafter = load_dflash(tmp_path / "dflash", target)
    drafter.set_forward(impl)
    context = torch.randn(5, config.hidden_size, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        keys, values = drafter.context_kv(context, drafter.stack_kv())
        for index, layer in enumerate(drafter.layers):
            attention = layer.get_submodule("self_attn")
            for found, name in ((keys, "k_proj"), (values, "v_proj")):
                expected = attention.get_submodule(name)(context)
                torch.testing.assert_close(found[:, index].flatten(1), expected, atol=1e-5, rtol=1e-5)


def test_the_output_is_that_of_the_quantised_weights(tmp_path: Path) -> None:
    """Quantised as it is loaded, a target is another one."""
    write_target(tmp_path, scaled_config(**SMALL))
    asked = requests(3, max_new_tokens=12)
    plain, scaled = (load_by_name(tmp_path, "cpu", weight_dtype=name) for name in ("auto", "fp8"))
    assert answers(asked, Setup(), plain) != answers(asked, Setup(), scaled)
