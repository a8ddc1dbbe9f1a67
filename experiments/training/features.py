"""Channels of captured features brought to the same size while a drafter trains.

The residual stream of a deep layer is tens of times larger than what a fresh layer adds to it, and some of its channels
are hundreds of times larger than others. Training divides each channel by its root mean square over text; the exported
weights that read the features are divided instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SMALLEST_SHARE = 0.1
"""No channel counts as smaller than this share of its layer's median: what hardly varies must not be blown up."""


class FeatureScales:
    """One positive number for each channel of each captured layer, `[width]` float32 tensors."""

    def __init__(self, scales: Sequence[Tensor]) -> None:
        self.scales = list(scales)

    @classmethod
    def measured(cls, features: Sequence[Tensor], counted: Tensor) -> FeatureScales:
        """Root mean squares of `features`, each [B, T, width], over the positions that `counted [B, T]` marks.

        First positions are left out: decoders keep a huge state there that stands for nothing.
        """
        counted = counted.clone()
        counted[:, 0] = False
        means = [feature.float()[counted].square().mean(0).sqrt() for feature in features]
        return cls([mean.clamp(min=SMALLEST_SHARE * float(mean.median()) + 1e-6) for mean in means])

    def __call__(self, features: Sequence[Tensor]) -> list[Tensor]:
        """The features `[..., width]`, divided."""
        pairs = zip(features, self.scales, strict=True)
        return [feature / scale.to(feature.dtype) for feature, scale in pairs]

    def folded(self, weight: Tensor) -> Tensor:
        """`weight [out, layers * width]`, which reads divided features, for features as they are."""
        return weight / torch.cat(self.scales) if self.scales else weight

    def unfolded(self, weight: Tensor) -> Tensor:
        """The inverse of `folded`, in float32 on the device of the scales."""
        return weight.to(self.scales[0]) * torch.cat(self.scales) if self.scales else weight
