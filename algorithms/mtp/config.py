"""Shape and conventions of MTP (multi-token prediction) heads."""

from dataclasses import dataclass
from typing import Any

from algorithms.drafting.feature_drafter import NORMED, RAW, STREAMS
from algorithms.models.config import DecoderConfig

EMBEDDING, HIDDEN = ORDERS = ("embedding", "hidden")


@dataclass(frozen=True)
class MTPConfig:
    """`decoder` describes the layers of the head: level i of a draft runs layer i mod their number."""

    decoder: DecoderConfig
    first: str = EMBEDDING
    """Which half of the projection's input comes first."""
    hidden_in: str = NORMED
    """Feature from the target: its last layer's output, or the final norm of it."""
    feedback: str = NORMED
    """Feature of the next level of a draft: the layer's output, or the head's final norm of it."""
    norm_offset: float = 0.0
    """Added to the weights of all norms: 1 where they are stored as differences from 1."""

    def __post_init__(self) -> None:
        choices = {"first": ORDERS, "hidden_in": STREAMS, "feedback": STREAMS}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}: expected {' or '.join(allowed)}, got {getattr(self, name)!r}")
        if self.feedback == RAW and self.decoder.num_layers > 1:
            raise ValueError("feedback=raw: expected one MTP layer, because each has a final norm of its own")

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` of speculators; ValueError for conventions that are not those of its files."""
        if self != MTPConfig(self.decoder, hidden_in=RAW):
            raise ValueError(f"MTP head: expected the conventions of speculators, got {self}")
        return {
            "architectures": ["MTPDraftModel"],
            "speculators_model_type": "mtp",
            "num_nextn_predict_layers": self.decoder.num_layers,
            "transformer_layer_config": self.decoder.to_hf(),
        }
