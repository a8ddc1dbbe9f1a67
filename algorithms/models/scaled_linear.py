"""Linear layers whose weights are float8 codes with scales. Activations are rounded to float8 too, as checkpoints ask
for (W8A8), in groups of 128 of a row; or they keep their dtype (W8A16).

Two formats are published: blocks of 128 x 128, with the scales of DeepSeek-V3 (`X.weight_scale_inv`, which multiplies,
despite its name) or of compressed-tensors (`X.weight_scale`), and one scale per row, of compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import specdec_kernels as kernels
from algorithms.models.config_keys import nested
from algorithms.models.fusion import Fusable

BLOCK = 128
SCALE_NAMES = ("weight_scale_inv", "weight_scale")
LARGEST = torch.finfo(torch.float8_e4m3fn).max
SUPPORTED = (
    f"quant_method fp8 with weight_block_size [{BLOCK}, {BLOCK}] and activation_scheme dynamic, or compressed-tensors "
    "of format float-quantized with dynamic activations and weights of strategy channel or block"
)


@dataclass(frozen=True)
class WeightFormat:
    """by_row: a scale for each row, not block. scale_name: of its tensor. float8_x: activations are rounded too."""

    by_row: bool = False
    scale_name: str = "weight_scale_inv"
    float8_x: bool = True

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> WeightFormat | None:
        """The format that a `config.json` names; None without quantisation. ValueError: it is not supported."""
        entries = nested(config, "quantization_config") or nested(config, "compression_config")
        if not entries:
            return None
        method = entries.get("quant_method")
        if method == "fp8":
            _expect(entries, weight_block_size=[BLOCK, BLOCK])
            _expect({"activation_scheme": "dynamic", "fmt": "e4m3", **entries}, activation_scheme="dynamic", fmt="e4m3")
            return cls()
        if method != "compressed-tensors":
            raise ValueError(f"quant_method {method!r}")
        return cls(by_row=_is_by_row(entries), scale_name="weight_scale")

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        return (rows, 1) if self.by_row else (-(-rows // BLOCK), -(-columns // BLOCK))

    def weight(self, codes: Tensor, scales: Tensor, group_rows: int = BLOCK) -> kernels.ScaledWeight:
        """`codes [..., N, K]` with their scales, each of `group_rows` rows in blocks."""
        groups = (1, codes.shape[-1]) if self.by_row else (group_rows, BLOCK)
        return kernels.ScaledWeight(codes.view(torch.uint8), scales, *groups, self.float8_x)


def _expect(entries: Mapping[str, Any], place: str = "", **wanted: Any) -> None:
    """Raise ValueError naming the first entry that is not the one wanted."""
    for key, value in wanted.items():
        if entries.get(key) != value:
            raise ValueError(f"{place}{key} {entries.get(key)!r}")


def _is_by_row(entries: Mapping[str, Any]) -> bool:
    """Whether compressed-tensors stores a scale per row; ValueError for a scheme that is not supported."""
    _expect(entries, format="float-quantized")
    for key in ("kv_cache_scheme", "transform_config"):
        if entries.get(key):
            raise ValueError(f"{key} {entries[key]!r}")
    _expect({"format": "dense", **nested(entries, "sparsity_config")}, "sparsity_config.", format="dense")
    strategies = set()
    for group in nested(entries, "config_groups").values():
        weights = {"symmetric": True, "dynamic": False, **nested(group, "weights")}
        _expect(weights, "weights.", num_bits=8, type="float", symmetric=True, dynamic=False)
        if weights.get("strategy") == "block":
            _expect(weights, "weights.", block_structure=[BLOCK, BLOCK])
        elif weights.get("strategy") != "channel":
            raise ValueError(f"weights.strategy {weights.get('strategy')!r}")
        inputs = {"dynamic": True, **nested(group, "input_activations")}
        _expect(inputs, "input_activations.", dynamic=True)
        _expect(group, output_activations=None)
        strategies.add(weights["strategy"])
    if len(strategies) != 1:
        raise ValueError(f"config_groups with weights of strategies {sorted(strategies)}")
    return strategies == {"channel"}


def dequantised(codes: Tensor, scales: Tensor, weight_format: WeightFormat) -> Tensor:
    """The numbers [N, K] of e4m3 codes, in float32. NaN where a code is none."""
    rows, columns = codes.shape
    if weight_format.by_row:
        return codes.float() * scales.float()
    each = scales.float().repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return codes.float() * each


class ScaledLinear(Fusable):
    """x W^T + bias for a weight of e4m3 codes. Parameters are named as in checkpoints."""

    def __init__(self, in_features: int, out_features: int, bias: bool, weight_format: WeightFormat) -> None:
        super().__init__()
        self.format = weight_format
        codes = torch.zeros(out_features, in_features, dtype=torch.float8_e4m3fn)
        self.weight = nn.Parameter(codes, requires_grad=False)
        scales = torch.ones(weight_format.scale_shape(out_features, in_features))
        self.register_parameter(weight_format.scale_name, nn.Parameter(scales, requires_grad=False))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        self.float32 = (weight_format.scale_name,)

    @property
    def scaled_weight(self) -> kernels.ScaledWeight:
        return self.format.weight(self.weight, getattr(self, self.format.scale_name))

    def quantise(self, plain: nn.Linear) -> None:
        """Take the weights of `plain` in blocks, and its bias."""
        codes, scales = quantised_blocks(plain.weight)
        bias = {} if plain.bias is None else {"bias": plain.bias}
        self.load_state_dict({"weight": codes, "weight_scale_inv": scales, **bias}, assign=True)

    def forward(self, x: Tensor) -> Tensor:
        same, impl = self.batch_invariant, self.impl or "reference"
        return kernels.linear(x.contiguous(), self.scaled_weight, self.bias, batch_invariant=same, impl=impl)


def quantised_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes [N, K] and float32 scales [ceil(N / 128), ceil(K / 128)] of a weight: the scale of a block is its
    largest magnitude / 448, or 1 for zeros; a code is the nearest one, ties to even."""
    rows, columns = weight.shape
    padded = F.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    largest = blocks.abs().amax((1, 3))
    scales = torch.where(largest > 0, largest / LARGEST, 1.0)
    codes = (blocks / scales[:, None, :, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return codes.reshape(padded.shape)[:rows, :columns].contiguous(), scales


class Packed(NamedTuple):
    """Weights [rows of all, in] of several projections, and their biases."""

    weight: Tensor | kernels.ScaledWeight
    bias: Tensor | None


@torch.no_grad()
def packed(projections: Sequence[nn.Linear | ScaledLinear]) -> Packed:
    """`joined`; the weights and biases of the projections become views of it."""
    found = joined(projections)
    weight, bias = found
    codes = weight.codes if isinstance(weight, kernels.ScaledWeight) else weight
    sizes = [projection.weight.shape[0] for projection in projections]
    for projection, part in zip(projections, codes.split(sizes), strict=True):
        projection.weight = nn.Parameter(part.view(projection.weight.dtype), requires_grad=False)
    for projection, part in zip(projections, () if bias is None else bias.split(sizes), strict=bias is not None):
        projection.bias = nn.Parameter(part, requires_grad=False)
    return found


def joined(projections: Sequence[nn.Linear | ScaledLinear]) -> Packed:
    """One matrix of all `projections`. Raises ValueError where some are scaled and others are not."""
    scaled = [projection for projection in projections if isinstance(projection, ScaledLinear)]
    if scaled and len({getattr(projection, "format", None) for projection in projections}) > 1:
        raise ValueError("expected projections that read the same input to have weights of one format, got several")
    # torch does not join float8 numbers on every device.
    weights: list[Tensor] = [each.weight.view(torch.uint8) if scaled else each.weight for each in projections]
    weight = torch.cat(weights)
    biases: list[Tensor] = [projection.bias for projection in projections if projection.bias is not None]
    return Packed(
        _scaled(weight, [projection.scaled_weight for projection in scaled]) if scaled else weight,
        torch.cat(biases) if biases else None,
    )


def _scaled(codes: Tensor, members: Sequence[kernels.ScaledWeight]) -> kernels.ScaledWeight:
    """`codes` with the scales of their members, in groups of rows so small that each member begins with one."""
    group, row, scales = members[0].group_rows, 0, []
    for member in members:
        group = gcd(group, row)
        row += member.shape[0]
    for member in members:
        repeated = member.scales.repeat_interleave(member.group_rows // group, 0)
        scales.append(repeated[: -(-member.shape[0] // group)])
    return members[0]._replace(codes=codes, scales=torch.cat(scales), group_rows=group)
