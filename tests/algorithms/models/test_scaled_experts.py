"""Experts and latent attention with float8 weights: a folder has the logits of its dequantised weights, and what is
quantised as it is loaded is what a folder would hold."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from algorithms.models.config import DecoderConfig
from algorithms.models.decoder import Decoder
from algorithms.models.dense_mixer import DenseMixer
from algorithms.models.experts.scaled import MATRICES, ScaledExpertTensors
from algorithms.models.loading import load_target
from algorithms.models.scaled_linear import ScaledLinear, quantised_blocks
from tests.algorithms.layer_kinds import EXPERTS, GROUPED, KINDS, LATENT, check_drafts
from tests.algorithms.scaled_folders import CONFIGS, by_rows, dequantised
from tests.algorithms.tiny_folders import change_weights, refusal, small_config, write_json, write_target, write_weights
from tests.algorithms.toy import Setup, requests

WIDE = replace(EXPERTS, width=160)
TARGETS: dict[str, dict[str, Any]] = {
    "experts": dict(num_layers=2, mlps=(None, EXPERTS), architecture="qwen3_moe"),
    "wide experts": dict(num_layers=2, mlps=(WIDE, WIDE), architecture="qwen3_moe"),
    "latent": dict(num_layers=2, mixings=(LATENT,) * 2, mlps=(None, GROUPED), architecture="deepseek_v3"),
}
"""The rows of up begin inside of a block of scales that gate and up would share."""


def config_of(kind: str) -> DecoderConfig:
    return small_config(**TARGETS[kind] | dict(qk_norm=kind != "latent", eos_token_ids=()))


def by_expert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A tensor of each projection of each expert, as published."""
    found = {}
    for name, tensor in tensors.items():
        place, _, matrix = name.rpartition(".")
        if matrix not in MATRICES:
            found[name] = tensor
            continue
        for index, one in enumerate(tensor):
            parts = zip(("gate_proj", "up_proj"), one.chunk(2), strict=True)
            for part, weight in parts if matrix == "gate_up_proj" else [("down_proj", one)]:
                found[f"{place}.{index}.{part}.weight"] = weight.contiguous()
    return found


def write_folders(folder: Path, kind: str, form: str) -> None:
    """`original`; `float8`, its projections quantised; and `plain`, with the numbers of `float8`."""
    for name in ("original", "float8", "plain"):
        write_target(folder / name, config_of(kind))
    stored, plain = {}, {}
    for name, tensor in by_expert(load_file(folder / "original" / "model.safetensors")).items():
        stored[name] = plain[name] = tensor
        if name.endswith(("_proj.weight", "_mqa.weight")):
            codes, scales = quantised_blocks(tensor) if form == "blocks" else by_rows(tensor)
            stored[name], stored[name + ("_scale_inv" if form == "blocks" else "_scale")] = codes, scales
            plain[name] = dequantised(codes, scales)
    write_weights(folder / "plain", plain)
    write_weights(folder / "float8", stored)
    raw = json.loads((folder / "float8" / "config.json").read_text())
    write_json(folder / "float8" / "config.json", {**raw, "quantization_config": CONFIGS[form]})


def logits_of(model: Decoder) -> Tensor:
    tokens = torch.randint(272, (1, 9), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        hidden, _ = model(tokens, DenseMixer(model.config, tokens.shape[1], "cpu"))
        return model.logits(hidden)


def scaled_experts(model: Decoder) -> dict[str, ScaledExpertTensors]:
    return {name: part for name, part in model.named_modules() if isinstance(part, ScaledExpertTensors)}


@pytest.mark.parametrize("form", list(CONFIGS))
@pytest.mark.parametrize("kind", list(TARGETS))
def test_a_folder_has_the_logits_of_its_dequantised_weights(tmp_path: Path, kind: str, form: str) -> None:
    write_folders(tmp_path, kind, form)
    expected = logits_of(load_target(tmp_path / "plain", "cpu", torch.float32).model)
    model = load_target(tmp_path / "float8", "cpu", torch.float32, "fp8_w8a16").model
    assert len(scaled_experts(model)) == sum(mlp is not None for mlp in config_of(kind).mlps)
    for impl in (None, "triton"):
        model.set_forward(impl)
        torch.testing.assert_close(logits_of(model), expected, atol=1e-4, rtol=1e-4)
    # The error of the codes themselves is far larger.
    assert (logits_of(load_target(tmp_path / "original", "cpu", torch.float32).model) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("kind", ["wide experts", "latent"])
def test_experts_round_their_inputs_as_projections_do(tmp_path: Path, kind: str) -> None:
    write_folders(tmp_path, kind, "blocks")
    model = load_target(tmp_path / "float8", "cpu", torch.float32).model
    for part in scaled_experts(model).values():
        assert all(weight.float8_x for weight in (part.weights.gate_up, part.weights.down))
    by_definition = logits_of(model)
    model.set_forward("triton")
    torch.testing.assert_close(logits_of(model), by_definition, atol=5e-2, rtol=0)  # a number may round otherwise
    plain = logits_of(load_target(tmp_path / "plain", "cpu", torch.float32).model)
    assert 1e-3 < (by_definition - plain).abs().max() < 1


@pytest.mark.parametrize("kind", list(TARGETS))
def test_what_is_quantised_as_it_is_loaded_is_what_a_folder_holds(tmp_path: Path, kind: str) -> None:
    """But for projections that have a use of their own: those stay as they are stored."""
    write_folders(tmp_path, kind, "blocks")
    stored, quantised = (
        load_target(tmp_path / name, "cpu", torch.float32, "fp8").model for name in ("float8", "original")
    )
    found, original = quantised.state_dict(), load_file(tmp_path / "original" / "model.safetensors")
    kept = {name for name in found if name.endswith(("kv_b_proj.weight", "shared_expert_gate.weight"))}
    for name, tensor in stored.state_dict().items():
        expected = original[name] if name in kept else tensor
        assert found[name].dtype == expected.dtype and torch.equal(found[name].float(), expected.float()), name
    assert any(isinstance(part, ScaledLinear) for part in quantised.modules()) and scaled_experts(quantised)


def test_the_gate_of_a_shared_expert_stays(tmp_path: Path) -> None:
    write_target(tmp_path, small_config(**KINDS["linear, attention and experts"], qk_norm=True))
    model = load_target(tmp_path, "cpu", torch.float32, "fp8").model
    gate = model.get_submodule("model.layers.0.mlp.shared_expert_gate")
    assert not isinstance(gate, ScaledLinear) and scaled_experts(model)


@pytest.mark.parametrize("kind", ["wide experts", "latent"])
def test_drafts_do_not_change_the_output(tmp_path: Path, kind: str) -> None:
    write_folders(tmp_path, kind, "blocks")
    target = load_target(tmp_path / "float8", "cpu", torch.float32)
    check_drafts(target, requests(3, max_new_tokens=8), Setup(page_size=4, max_batch=2), decoys=(True,))


def test_what_experts_lack_is_named(tmp_path: Path) -> None:
    write_folders(tmp_path, "experts", "blocks")
    name = "model.layers.1.mlp.experts.2.up_proj.weight_scale_inv"
    change_weights(tmp_path / "float8", **{name.replace(".", "__"): None})
    refusal(lambda: load_target(tmp_path / "float8", "cpu", torch.float32), "experts.gate_up_proj_scales")
