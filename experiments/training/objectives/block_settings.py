"""Settings of block drafters: their shapes, and the loss of a batch of blocks."""

from dataclasses import dataclass
from typing import Annotated, Any

from algorithms.checked import Between, Checked
from algorithms.dflash import config as shapes


@dataclass
class ShapeSettings(Checked):
    """Shape of the drafter; the rest is the target's.

    None takes what the published drafters have: five layers, or half as many as a target of fewer than ten; features
    of as many evenly spaced target layers; and the mask token that `mask_token` finds. `own_mask` trains an
    embedding for the mask instead. `slots` is own (z-lab) or next (DeepSpec), `causal` makes the rows of a block see
    those before them only (JetSpec).
    """

    GROUP = "drafter."
    num_layers: Annotated[int | None, Between(1)] = None
    block_size: Annotated[int, Between(2)] = 16
    target_layer_ids: list[int] | None = None
    mask_token_id: int | None = None
    own_mask: bool = False
    slots: Annotated[str, shapes.SLOTS] = shapes.OWN
    causal: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.own_mask and self.mask_token_id is not None:
            raise ValueError("drafter.own_mask trains a mask of its own: expected no drafter.mask_token_id")

    def parts(self) -> dict[str, Any]:
        """Fields of `DFlashConfig` that say which heads and convolutions there are."""
        return {}


@dataclass
class DFlashSettings(ShapeSettings):
    """`markov_rank` above 0 adds a Markov head of this rank, `confidence_head` a head that estimates acceptance."""

    markov_rank: Annotated[int, Between(0)] = 0
    confidence_head: bool = False

    def parts(self) -> dict[str, Any]:
        reads = shapes.HIDDEN_AND_TOKEN if self.markov_rank else shapes.HIDDEN
        return {
            "head": shapes.HeadConfig(shapes.VANILLA, self.markov_rank) if self.markov_rank else None,
            "confidence": reads if self.confidence_head else None,
        }


@dataclass
class DSparkSettings(DFlashSettings):
    block_size: Annotated[int, Between(2)] = 7
    slots: Annotated[str, shapes.SLOTS] = shapes.NEXT
    markov_rank: Annotated[int, Between(0)] = 256
    confidence_head: bool = True


@dataclass
class DominoSettings(ShapeSettings):
    """`gru_size` is the width of the state, `rank` of the correction; the first `num_plain` drafts have none."""

    rank: int = 256
    gru_size: int = 1024
    num_plain: int = 1

    def parts(self) -> dict[str, Any]:
        return {"head": shapes.HeadConfig(shapes.GRU, self.rank, self.gru_size, self.num_plain)}


@dataclass
class DFlash2Settings(ShapeSettings):
    """A selector of this `rank` chooses among `num_candidates` tokens; `conv_group` channels share a coefficient of
    the convolutions over `conv_taps` rows."""

    rank: int = 256
    num_candidates: int = 16
    conv_taps: Annotated[int, Between(1)] = 2
    conv_group: Annotated[int, Between(1)] = 16

    def parts(self) -> dict[str, Any]:
        head = shapes.HeadConfig(shapes.SELECTOR, self.rank, num_candidates=self.num_candidates)
        return {"head": head, "conv": shapes.ConvConfig(self.conv_taps, self.conv_group)}


@dataclass
class BlockSettings(Checked):
    """`anchors` is the number of blocks in a step, spread evenly over its rows. `weights` is confidence, with `alpha`,
    or decay, with `gamma`. `token_share` is s of the loss, `plain_until` and `selector_weight` say what the logits
    before a head's correction weigh. The LM head's logits are computed for `at_once` blocks at a time, to bound
    memory."""

    GROUP = "blocks."
    anchors: Annotated[int, Between(1)] = 320
    weights: Annotated[str, ("decay", "confidence")] = "confidence"
    gamma: Annotated[float, Between(0, above=True)] = 7.0
    alpha: Annotated[float, Between(0, 1)] = 0.5
    token_share: Annotated[float, Between(0, 1)] = 1.0
    plain_until: Annotated[float, Between(0, 1)] = 0.0
    selector_weight: Annotated[float, Between(0)] = 1.0
    at_once: Annotated[int, Between(1)] = 2048
