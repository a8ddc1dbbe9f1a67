"""Experts whose weights are float8 codes with scales, as `scaled_linear` has those of projections, and the replacement
of both by scaled ones."""

from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

import specdec_kernels as kernels
from algorithms.models.experts.module import MATRICES, ExpertTensors, joined_experts
from algorithms.models.fusion import Fusable
from algorithms.models.scaled_linear import BLOCK, ScaledLinear, WeightFormat, quantised_blocks


class ScaledExpertTensors(Fusable):
    """Codes and scales of `ExpertTensors`, in groups of rows so small that none has rows of gate and up."""

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
        return self.format.weight(getattr(self, name), getattr(self, f"{name}_scales"), self._group_rows(name))

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


def _scaled(plain: nn.Module, weight_format: WeightFormat, device: object) -> ScaledLinear | ScaledExpertTensors:
    """The scaled module in the place of `plain`, whose weights are still to be loaded."""
    with torch.device(str(device)):
        if isinstance(plain, ExpertTensors):
            return ScaledExpertTensors(plain, weight_format)
        assert isinstance(plain, nn.Linear)
        return ScaledLinear(plain.in_features, plain.out_features, plain.bias is not None, weight_format)


def make_scaled(model: nn.Module, weight_format: WeightFormat, names: set[str]) -> None:
    """Replace the linear layers and experts of these names by scaled ones, whose weights are still to be loaded."""
    for name in names:
        plain = model.get_submodule(name)
        model.set_submodule(name, _scaled(plain, weight_format, next(plain.parameters()).device))


@torch.no_grad()
def quantise(layers: nn.Module, weight_format: WeightFormat) -> None:
    """Replace the experts without biases in `layers`, and the linear layers of fusable modules, but for those that
    their module uses otherwise, by scaled ones in blocks, one at a time."""
    for parent in list(layers.modules()):
        for name, plain in list(parent.named_children()):
            is_linear = isinstance(parent, Fusable) and type(plain) is nn.Linear and name not in parent.unscaled
            if is_linear or (isinstance(plain, ExpertTensors) and not plain.biased):
                scaled: Any = _scaled(plain, weight_format, "meta")
                scaled.quantise(plain)
                setattr(parent, name, scaled.requires_grad_(False).train(plain.training))
