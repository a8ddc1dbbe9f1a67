"""Arguments and results of the expert kernels. T rows, E experts, K chosen per row, H hidden and F expert width."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_kernels.projection.types import ScaledWeight

SCORINGS = ("softmax", "sigmoid", "softmax_of_chosen")
GROUP_SCORES = ("max", "two_best")


class Routing(NamedTuple):
    """How a row chooses its experts and weighs them.

    topk: experts of a row, K.
    scoring: `softmax` over all experts, `sigmoid` of each, or `softmax_of_chosen`, over the K chosen logits.
    renormalise: whether the K scores are divided by their sum plus 1e-20.
    scale: factor of the weights.
    groups, topk_groups: experts are chosen from the best `topk_groups` of `groups` groups of consecutive experts.
    group_score: the largest of a group (`max`), or the sum of its `two_best`, which goes with `sigmoid`.
    """

    topk: int
    scoring: str = "softmax"
    renormalise: bool = False
    scale: float = 1.0
    groups: int = 1
    topk_groups: int = 1
    group_score: str = "max"


class Routed(NamedTuple):
    """experts [T, K] int32 in falling order of choice, E where a row has none; weights [T, K] float32, 0 there."""

    experts: Tensor
    weights: Tensor


class ExpertSchedule(NamedTuple):
    """The rows of each expert, in tiles. An assignment is an entry of `Routed.experts`, numbered in row-major order.

    order: [T * K] int32, assignments sorted by expert, those of one expert in their order; those without expert last.
    starts: [E + 1] int32, the place in `order` of the first assignment of each expert, and of those without.
    items: [capacity, 3] int32, (expert, first place in `order`, place after the last) of each tile; (E, 0, 0) after
        the last item.
    num_items, num_touched: [1] int32, how many items there are, and how many experts have a row.
    row_tile: most rows of an item.
    """

    order: Tensor
    starts: Tensor
    items: Tensor
    num_items: Tensor
    num_touched: Tensor
    row_tile: int

    @property
    def num_experts(self) -> int:
        return self.starts.shape[0] - 1


class Mxfp4(NamedTuple):
    """Matrices [E, rows, C] in MXFP4 (OCP Microscaling Formats 1.0), C a multiple of 32.

    codes: [E, rows, C / 2] uint8, two E2M1 numbers a byte, that of the even column in the low half.
    scales: [E, rows, S] uint8: 32 columns are multiplied by 2^(scale - 127). S is C / 32 raised to a multiple of 16,
        the padding zeros, so that every row begins at a multiple of 16 bytes.
    """

    codes: Tensor
    scales: Tensor

    @classmethod
    def padded(cls, codes: Tensor, scales: Tensor) -> Mxfp4:
        """Of scales without padding, which is added."""
        return cls(codes, cls.padded_scales(scales))

    @staticmethod
    def padded_scales(scales: Tensor) -> Tensor:
        return F.pad(scales, (0, -scales.shape[-1] % 16))

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.codes.shape[:-1], 2 * self.codes.shape[-1]))


Matrices = Tensor | Mxfp4 | ScaledWeight
"""[E, rows, columns]. A `ScaledWeight` has codes [E, rows, columns], and the scales of each expert."""


class ExpertWeights(NamedTuple):
    """gate_up: [E, 2 F, H], the rows of gate, then those of up; down: [E, H, F]; biases [E, 2 F] and [E, H]."""

    gate_up: Matrices
    down: Matrices
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def of(self, expert: int) -> ExpertWeights:
        """The weights of one expert, without the first dimension."""
        gate_up_bias, down_bias = (None if bias is None else bias[expert] for bias in self[2:])
        return ExpertWeights(_of(self.gate_up, expert), _of(self.down, expert), gate_up_bias, down_bias)


def _of(weight: Matrices, expert: int) -> Matrices:
    if isinstance(weight, ScaledWeight):
        return weight._replace(codes=weight.codes[expert], scales=weight.scales[expert])
    return Mxfp4(*(part[expert] for part in weight)) if isinstance(weight, Mxfp4) else weight[expert]


class Activation(NamedTuple):
    """silu(gate) * up; or, with a limit, gpt-oss's g * sigmoid(alpha * g) * (u + 1), where g = min(gate, limit) and
    u = up between -limit and limit."""

    limit: float | None = None
    alpha: float = 1.0


class ExpertCall(NamedTuple):
    """The checked arguments of `expert_mlp`, which describes them."""

    x: Tensor
    routed: Routed
    schedule: ExpertSchedule
    weights: ExpertWeights
    activation: Activation
    shared: Tensor | None


def max_items(assignments: int, num_experts: int, row_tile: int) -> int:
    """Items of the worst distribution: one row for all experts but one, and the rest for that one."""
    if assignments <= num_experts:
        return assignments
    return num_experts - 1 + -(-(assignments - num_experts + 1) // row_tile)
