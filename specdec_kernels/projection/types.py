"""What both implementations of the products get."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Product(NamedTuple):
    """x [..., K] times a weight [N, K], checked."""

    x: Tensor
    weight: Tensor
    batch_invariant: bool = False

    @property
    def rows(self) -> int:
        return self.x.numel() // self.x.shape[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., N], of the result."""
        return (*self.x.shape[:-1], self.weight.shape[0])
