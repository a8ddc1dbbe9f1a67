"""Settings of block drafters: their shapes, and the loss of a batch of blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from algorithms.dflash.config import (
    GRU,
    HIDDEN,
    HIDDEN_AND_TOKEN,
    NEXT,
    OWN,
    SELECTOR,
    SLOTS,
    VANILLA,
    ConvConfig,
    HeadConfig,
)
from specdec_kernels.checks import expect_at_least, expect_between, expect_choice

WEIGHTINGS = ("decay", "confidence")


@dataclass
class ShapeSettings:
    """Shape of the drafter; the rest is the target's.

    None takes what the published drafters have: five layers, or half as many as a target of fewer than ten; features
    of as many evenly spaced target layers; and the mask token that `mask_token` finds. `own_mask` trains an
    embedding for the mask instead. `slots` is own (z-lab) or next (DeepSpec), `causal` makes the rows of a block see
    those before them only (JetSpec).
    """

    num_layers: int | None = None
    block_size: int = 16
    target_layer_ids: list[int] | None = None
    mask_token_id: int | None = None
    own_mask: bool = False
    slots: str = OWN
    causal: bool = False

    def __post_init__(self) -> None:
        expect_at_least("drafter.num_layers", self.num_layers, 1, nullable=True)
        expect_at_least("drafter.block_size", self.block_size, 2)
        expect_choice("drafter.slots", self.slots, SLOTS)
        if self.own_mask and self.mask_token_id is not None:
            raise ValueError("drafter.own_mask trains a mask of its own: expected no drafter.mask_token_id")

    def parts(self) -> dict[str, Any]:
        """Fields of `DFlashConfig` that say which heads and convolutions there are."""
        return {}


@dataclass
class DFlashSettings(ShapeSettings):
    """`markov_rank` above 0 adds a Markov head of this rank, `confidence_head` a head that estimates acceptance."""

    markov_rank: int = 0
    confidence_head: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_at_least("drafter.markov_rank", self.markov_rank, 0)

    def parts(self) -> dict[str, Any]:
        reads = HIDDEN_AND_TOKEN if self.markov_rank else HIDDEN
        return {
            "head": HeadConfig(VANILLA, self.markov_rank) if self.markov_rank else None,
            "confidence": reads if self.confidence_head else None,
        }


@dataclass
class DSparkSettings(DFlashSettings):
    block_size: int = 7
    slots: str = NEXT
    markov_rank: int = 256
    confidence_head: bool = True


@dataclass
class DominoSettings(ShapeSettings):
    """`gru_size` is the width of the state, `rank` of the correction; the first `num_plain` drafts have none."""

    rank: int = 256
    gru_size: int = 1024
    num_plain: int = 1

    def parts(self) -> dict[str, Any]:
        return {"head": HeadConfig(GRU, self.rank, self.gru_size, self.num_plain)}


@dataclass
class DFlash2Settings(ShapeSettings):
    """A selector of this `rank` chooses among `num_candidates` tokens; `conv_group` channels share a coefficient of
    the convolutions over `conv_taps` rows."""

    rank: int = 256
    num_candidates: int = 16
    conv_taps: int = 2
    conv_group: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_at_least("drafter.conv_taps", self.conv_taps, 1)
        expect_at_least("drafter.conv_group", self.conv_group, 1)

    def parts(self) -> dict[str, Any]:
        head = HeadConfig(SELECTOR, self.rank, num_candidates=self.num_candidates)
        return {"head": head, "conv": ConvConfig(self.conv_taps, self.conv_group)}


@dataclass
class BlockSettings:
    """`anchors` is the number of blocks in a step, spread evenly over its rows. `weights` is confidence, with `alpha`,
    or decay, with `gamma`. `token_share` is s of the loss, `plain_until` and `selector_weight` say what the logits
    before a head's correction weigh. The LM head's logits are computed for `at_once` blocks at a time, to bound
    memory."""

    anchors: int = 320
    weights: str = "confidence"
    gamma: float = 7.0
    alpha: float = 0.5
    token_share: float = 1.0
    plain_until: float = 0.0
    selector_weight: float = 1.0
    at_once: int = 2048

    def __post_init__(self) -> None:
        expect_at_least("blocks.anchors", self.anchors, 1)
        expect_at_least("blocks.at_once", self.at_once, 1)
        expect_choice("blocks.weights", self.weights, WEIGHTINGS)
        expect_between("blocks.gamma", self.gamma, 0, math.inf, above=True)
        expect_at_least("blocks.selector_weight", self.selector_weight, 0)
        for key in ("alpha", "token_share", "plain_until"):
            expect_between(f"blocks.{key}", getattr(self, key), 0, 1)
