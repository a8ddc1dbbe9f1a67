"""Writes small random targets whose layers have float8 weights, as they are published."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from algorithms.models.config import DecoderConfig
from algorithms.models.scaled_linear import quantised_blocks
from tests.algorithms.tiny_folders import small_config, write_json, write_target, write_weights

BLOCKS: dict[str, Any] = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.layers.1.mlp.down_proj"],
}  # fmt: skip
ROWS: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head", "model.layers.1.mlp.down_proj"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
            "output_activations": None,
        }
    },
    "kv_cache_scheme": None,
}
CONFIGS = {"blocks": BLOCKS, "rows": ROWS}
PLAIN = "model.layers.1.mlp.down_proj.weight"
"""A projection that the configs leave as it is."""


def scaled_config(**changes: Any) -> DecoderConfig:
    """Weights of several blocks, not all of them whole: gate and up have 192 rows, keys begin at row 192, values at
    row 288, and 160 inner elements are a block and a quarter."""
    sizes = dict(hidden_size=160, intermediate_size=192, num_heads=12, num_kv_heads=6, num_layers=3)
    return small_config(**{**sizes, **changes})


def by_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes [N, K], and bfloat16 scales [N, 1] as llm-compressor writes them."""
    scales = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    return (weight / scales.float()).clamp(-448, 448).to(torch.float8_e4m3fn), scales


def dequantised(codes: Tensor, scales: Tensor) -> Tensor:
    """[N, K] float32, one row and column at a time."""
    rows = torch.arange(codes.shape[0]) // (1 if scales.shape[0] == codes.shape[0] else 128)
    columns = torch.arange(codes.shape[1]) // (codes.shape[1] if scales.shape[1] == 1 else 128)
    return codes.float() * scales.float()[rows][:, columns]


def write_scaled_target(
    folder: Path, kind: str, config: DecoderConfig | None = None, seed: int = 0
) -> dict[str, Tensor]:
    """Write a target of `CONFIGS[kind]`; returns the tensors of the same model in float32, dequantised."""
    write_target(folder, config or scaled_config(), seed)
    stored, plain = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stored[name] = plain[name] = tensor
        if name.endswith("_proj.weight") and name != PLAIN:
            codes, scales = quantised_blocks(tensor) if kind == "blocks" else by_rows(tensor)
            stored[name] = codes
            stored[name + ("_scale_inv" if kind == "blocks" else "_scale")] = scales
            plain[name] = dequantised(codes, scales)
    write_weights(folder, stored)
    raw = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {**raw, "quantization_config": CONFIGS[kind]})
    return plain
