"""Targets with float8 weights: speculation writes what the same target writes alone, whatever drafts it verifies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from algorithms.algorithm import Algorithm
from algorithms.dflash.drafting import DFlash
from algorithms.engine.settings import RuntimeSettings
from algorithms.frontend import load_target as load_by_name
from algorithms.models.loading import Target, load_target
from algorithms.models.scaled_linear import ScaledLinear
from tests.algorithms.scaled_folders import CONFIGS, scaled_config, write_scaled_target
from tests.algorithms.test_layer_kinds import check_text
from tests.algorithms.tiny_folders import small_dflash_config, write_dflash, write_target
from tests.algorithms.toy import Scripted, Setup, answers, requests, run

CHAIN: dict[str, Any] = {}
TREE: dict[str, Any] = {"topk": 2, "num_nodes": 6}
SETUPS = {
    "torch": (Setup(page_size=4, max_batch=2), 3, 12),
    "captured": (Setup(graph="step", prefill_tile=4, max_batch=2), 3, 8),
    "deterministic": (Setup(impl="triton", deterministic=True, page_size=8, max_batch=2), 1, 3),
}
"""With the number of requests and of new tokens. The interpreter runs the kernels of the last."""
IN_FLOAT8 = "as it is loaded"
PAIRS = [("blocks", "torch"), ("blocks", "captured"), ("blocks", "deterministic"), ("rows", "torch"),
         ("rows", "deterministic"), (IN_FLOAT8, "torch")]  # fmt: skip
SMALL: dict[str, Any] = dict(num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=136, eos_token_ids=())


def write_both(folder: Path, kind: str) -> None:
    """A target, and a drafter that fits it."""
    config = scaled_config(**SMALL)
    if kind in CONFIGS:
        write_scaled_target(folder / "target", kind, config)
    else:
        write_target(folder / "target", config)
    drafter = small_dflash_config(config, num_layers=1, block_size=4, target_layer_ids=(0, 1))
    write_dflash(folder / "drafter", drafter)


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
    alone = answers(asked, setup, target)
    for request, written in zip(asked, alone, strict=True):
        check_text(target, request, written)
    scripts = [[*request.prompt_ids, *written] for request, written in zip(asked, alone, strict=True)]
    drafters: list[Algorithm] = [
        Scripted(scripts, 3, lambda at, depth: (at * 7 + depth * 3) % 4 != 0, decoys) for decoys in (False, True)
    ]
    drafters += [DFlash(DFlash.Config(**shape), target, tmp_path / "drafter") for shape in (TREE, CHAIN)]
    if name == "deterministic":  # of the interpreter's runs, one kind of weights has two and the other has the others
        drafters = drafters[::2] if kind == "blocks" else drafters[1::2]
    for drafter in drafters:
        drafted = run(drafter, asked, setup, target)
        assert [c.token_ids for c in drafted.completions] == alone, drafter.name
    # The kernels and torch compute one target.
    assert alone == answers(asked, SETUPS["torch"][0], target)


def test_the_output_is_that_of_the_quantised_weights(tmp_path: Path) -> None:
    """Quantised as it is loaded, a target is another one."""
    write_target(tmp_path, scaled_config(**SMALL))
    asked = requests(3, max_new_tokens=12)
    plain, scaled = (load_by_name(tmp_path, "cpu", weight_dtype=name) for name in ("auto", "fp8"))
    assert answers(asked, Setup(), plain) != answers(asked, Setup(), scaled)


def test_settings_that_do_not_fit_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"runtime.weight_dtype: expected one of auto, fp8, fp8_w8a16, got 'int4'"):
        RuntimeSettings(weight_dtype="int4")
    with pytest.raises(ValueError, match=r"runtime.weight_dtype=fp8.*expected runtime.tensor_parallel=1, got 2"):
        RuntimeSettings(weight_dtype="fp8", tensor_parallel=2)
    with pytest.raises(ValueError, match="weight_dtype: expected one of auto, fp8, fp8_w8a16, got 'fp4'"):
        load_by_name(tmp_path, "cpu", weight_dtype="fp4")
