"""What both implementations of the products get."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

GROUP = 128  # rows and inner elements of the blocks that have one scale in published checkpoints
LARGEST_CODE = 448.0
LEAST_MAGNITUDE = 1e-10  # what the largest magnitude of a group of x counts as at least, so that zeros have a scale


class ScaledWeight(NamedTuple):
    """A weight [N, K] of float8 e4m3 codes, each of which is multiplied by the scale of its group. codes [N, K] uint8,
    the bytes of `torch.float8_e4m3fn`, all finite. scales [ceil(N / group_rows), ceil(K / group_inner)] float32.
    group_rows: a power of two up to 128. group_inner: 128, or K for one scale per row. float8_x: x is rounded to codes
    too (W8A8): each group of 128 numbers of a row is divided by its largest magnitude / 448, and rounded to the nearest
    code; otherwise x stays as it is (W8A16)."""

    codes: Tensor
    scales: Tensor
    group_rows: int
    group_inner: int
    float8_x: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)


class Product(NamedTuple):
    """x [..., K] times a weight [N, K], checked."""

    x: Tensor
    weight: Tensor | ScaledWeight
    batch_invariant: bool = False

    @property
    def rows(self) -> int:
        return self.x.numel() // self.x.shape[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., N], of the result."""
        return (*self.x.shape[:-1], self.weight.shape[0])

    @property
    def plain(self) -> Tensor:
        """The weight of a product that is not of a `ScaledWeight`."""
        assert isinstance(self.weight, Tensor)
        return self.weight
