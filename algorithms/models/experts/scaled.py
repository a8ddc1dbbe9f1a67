"""Experts whose weights are float8 codes with scales, as `scaled_linear` has those of projections."""

from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

import specdec_kernels as kernels
from algorithms.models.experts.module import BiasedExpertTensors, ExpertTensors, joined_experts
from algorithms.models.fusion import Fusable
from algorithms.models.scaled_linear import BLOCK, WeightFormat, quantised_blocks

MATRICES = ("gate_up_proj", "down_proj")


class ScaledExpertTensors(Fusable):
    """Codes gate_up_proj [E, 2 F, hidden] and down_proj [E, hidden, F], and their scales. Groups of rows become smaller
    where the first row of up would be inside of one."""

    float32 = tuple(f"{name}_scales" for name in MATRICES)

    def __init__(self, plain: ExpertTensors, weight_format: WeightFormat) -> None:
        super().__init__()
        self.num_experts, self.same, self.format = plain.num_experts, plain.same, weight_format
        self.width = plain.down_proj.shape[2]
        for name in MATRICES:
            experts, rows, columns = shape = getattr(plain, name).shape
            groups = (experts, -(-rows // self._group_rows(name)), weight_format.scale_shape(rows, columns)[1])
            codes = torch.zeros(shape, dtype=torch.float8_e4m3fn)
            self.register_parameter(name, nn.Parameter(codes, requires_grad=False))
            self.register_parameter(f"{name}_scales", nn.Parameter(torch.ones(groups), requires_grad=False))

    @property
    def weights(self) -> kernels.ExpertWeights:
        return kernels.ExpertWeights(self._matrices("gate_up_proj"), self._matrices("down_proj"))

    def _matrices(self, name: str) -> kernels.ScaledWeight:
        codes, scales = getattr(self, name).view(torch.uint8), getattr(self, f"{name}_scales")
        columns = codes.shape[2] if self.format.by_row else BLOCK
        return kernels.ScaledWeight(codes, scales, self._group_rows(name), columns, self.format.float8_x)

    def _group_rows(self, name: str) -> int:
        if self.format.by_row:
            return 1
        return BLOCK if name == "down_proj" else gcd(BLOCK, self.width)

    def adopt(self, prefix: str, stored: dict[str, Any]) -> None:
        """Codes are joined as bytes: torch does not join float8 numbers on every device."""

        def as_bytes(name: str, codes: Any) -> Any:
            return codes.changed(codes.shape, lambda x: x.view(torch.uint8))

        def of_groups(name: str, scales: Any) -> Any:
            rows = scales.shape[0] if name == "down_proj" else -(-self.width // self._group_rows("gate_up_proj"))
            return scales.changed((rows, *scales.shape[1:]), lambda x: self._of_groups(name, x))

        every = (self.num_experts, self.same)
        for name, codes in joined_experts(prefix, stored, "weight", *every, as_bytes).items():
            stored[prefix + name] = codes.changed(codes.shape, lambda x: x.view(torch.float8_e4m3fn))
        for name, scales in joined_experts(prefix, stored, self.format.scale_name, *every, of_groups).items():
            stored[f"{prefix}{name}_scales"] = scales

    def _of_groups(self, name: str, scales: Tensor) -> Tensor:
        """Scales of blocks of a projection as those of the groups here."""
        if name == "down_proj" or self.format.by_row:
            return scales
        group = self._group_rows("gate_up_proj")
        return scales.repeat_interleave(BLOCK // group, 0)[: self.width // group]

    @torch.no_grad()
    def quantise(self, plain: ExpertTensors) -> None:
        """Take the weights of `plain` in blocks, each projection of an expert on its own, as checkpoints have them."""
        found = {}
        for name in MATRICES:
            projections = 1 if name == "down_proj" else 2
            parts = [quantised_blocks(part) for one in getattr(plain, name) for part in one.chunk(projections)]
            codes = torch.stack([codes.view(torch.uint8) for codes, _ in parts])
            scales = torch.stack([self._of_groups(name, scales) for _, scales in parts])
            found[name] = codes.view(getattr(self, name).shape).view(torch.float8_e4m3fn)
            found[f"{name}_scales"] = scales.view(getattr(self, f"{name}_scales").shape)
        self.load_state_dict(found, assign=True)
        self.requires_grad_(False)


def make_experts_scaled(model: nn.Module, weight_format: WeightFormat, names: set[str]) -> None:
    """Replace the experts of these names by scaled ones, whose weights are still to be loaded."""
    for name in names:
        plain = model.get_submodule(name)
        assert isinstance(plain, ExpertTensors)
        with torch.device(plain.down_proj.device):
            scaled = ScaledExpertTensors(plain, weight_format)
        model.set_submodule(name, scaled)


def quantise_experts(layers: nn.Module, weight_format: WeightFormat) -> None:
    """Replace the experts in `layers` by scaled ones in blocks, one layer at a time."""
    for parent in list(layers.modules()):
        for name, plain in list(parent.named_children()):
            if isinstance(plain, ExpertTensors) and not isinstance(plain, BiasedExpertTensors):
                with torch.device("meta"):
                    scaled = ScaledExpertTensors(plain, weight_format)
                scaled.quantise(plain)
                setattr(parent, name, scaled.train(plain.training))
