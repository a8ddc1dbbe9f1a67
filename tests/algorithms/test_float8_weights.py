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
from tests.algorithms.toy import Scripted, Setup, answers, autoregressive, requests, run

CHAIN: dict[str, Any] = {}
TREE: dict[str, Any] = {"topk": 2, "num_nodes": 6}
SETUPS = {
    "torch": (Setup(page_size=4, max_batch=2), 4, 16),
    "captured": (Setup(graph="step", prefill_tile=4, max_batch=2), 4, 16),
    "kernels": (Setup(impl="triton", fused=True, page_size=8, max_batch=2), 2, 3),
    "deterministic": (Setup(impl="triton", deterministic=True, page_size=8, max_batch=2), 2, 3),
}


@pytest.fixture(scope="module", params=[*CONFIGS, "as it is loaded"])
def folder(request: Any, tmp_path_factory: Any) -> Path:
    """A target, and a drafter that fits it."""
    folder: Path = tmp_path_factory.mktemp("float8")
    config = scaled_config(eos_token_ids=())
    if request.param in CONFIGS:
        write_scaled_target(folder / "target", request.param, config)
    else:
        write_target(folder / "target", config)
    write_dflash(folder / "drafter", small_dflash_config(config, num_layers=1, block_size=4))
    return folder


def loaded(folder: Path) -> Target:
    target = load_target(folder / "target", "cpu", torch.float32, "fp8")
    assert any(isinstance(part, ScaledLinear) for part in target.model.modules())
    return target


@pytest.mark.parametrize("name", list(SETUPS))
def test_drafts_do_not_change_the_output(folder: Path, name: str) -> None:
    """Drafts of a drafter, which are mostly rejected, and of a script, of which some are accepted."""
    target = loaded(folder)
    setup, count, tokens = SETUPS[name]
    asked = requests(count, max_new_tokens=tokens)
    alone = answers(asked, setup, target)
    for request, written in zip(asked, alone, strict=True):
        check_text(target, request, written)
    scripts = [[*request.prompt_ids, *written] for request, written in zip(asked, alone, strict=True)]
    drafters: list[Algorithm] = [
        Scripted(scripts, 3, lambda at, depth: (at * 7 + depth * 3) % 4 != 0, decoys) for decoys in (False, True)
    ]
    drafters += [DFlash(DFlash.Config(**shape), target, folder / "drafter") for shape in (CHAIN, TREE)]
    for drafter in drafters:
        drafted = run(drafter, asked, setup, target)
        assert [c.token_ids for c in drafted.completions] == alone, drafter.name
    # The kernels and torch compute one target.
    assert alone == answers(asked, SETUPS["torch"][0], target)


def test_the_output_is_that_of_the_quantised_weights(tmp_path: Path) -> None:
    """Quantised as it is loaded, a target is another one."""
    write_target(tmp_path, scaled_config(eos_token_ids=()))
    asked = requests(3, max_new_tokens=16)
    plain, scaled = (load_by_name(tmp_path, "cpu", weight_dtype=name) for name in ("auto", "fp8"))
    written = [
        [c.token_ids for c in run(autoregressive(each), asked, Setup(), each).completions] for each in (plain, scaled)
    ]
    assert written[0] != written[1]


def test_settings_that_do_not_fit_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"runtime.weight_dtype: expected one of auto, fp8, got 'int4'"):
        RuntimeSettings(weight_dtype="int4")
    with pytest.raises(ValueError, match=r"runtime.weight_dtype=fp8.*expected runtime.tensor_parallel=1, got 2"):
        RuntimeSettings(weight_dtype="fp8", tensor_parallel=2)
    with pytest.raises(ValueError, match="weight_dtype: expected one of auto, fp8, got 'fp4'"):
        load_by_name(tmp_path, "cpu", weight_dtype="fp4")
