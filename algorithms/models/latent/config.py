"""Sizes of latent attention, and the keys of `config.json` that hold them. No torch is imported here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from algorithms.models.config_keys import one_kind, read_size, read_sizes, write_fields

_SIZES = {"latent": "kv_lora_rank", "nope": "qk_nope_head_dim", "rope": "qk_rope_head_dim", "value": "v_head_dim"}


@dataclass(frozen=True)
class LatentConfig:
    """Sizes of a layer's latent attention; the fields carry the meaning of their Hugging Face namesakes."""

    latent: int
    """Elements of the stored latent, from which the keys and values of all heads follow."""
    nope: int
    """Elements of a head's query and key that do not rotate."""
    rope: int
    """Elements that rotate; all heads share this part of the key."""
    value: int
    """Elements of a head's value."""
    query_rank: int | None
    """Width of the queries' own latent; None: they are projected at once."""
    interleaved: bool
    """Whether neighbours rotate as pairs; else the halves."""
    bias: bool = False

    def __post_init__(self) -> None:
        if self.rope % 16 or self.latent % 16:
            raise ValueError(
                "kv_lora_rank and qk_rope_head_dim: expected multiples of 16, which the attention kernel takes, "
                f"got {self.latent} and {self.rope}"
            )


@dataclass(frozen=True)
class LatentRule:
    """All layers have latent attention."""

    def read(self, config: Mapping[str, Any], num_layers: int) -> tuple[LatentConfig, ...]:
        rank = config.get("q_lora_rank")
        layer = LatentConfig(
            **read_sizes(config, _SIZES),
            query_rank=None if rank is None else read_size("q_lora_rank", rank),
            interleaved=bool(config.get("rope_interleave", True)),
            bias=bool(config.get("attention_bias")),
        )
        return (layer,) * num_layers

    def write(self, layers: tuple[LatentConfig, ...]) -> dict[str, Any]:
        layer = one_kind("latent attention", layers)
        return {
            **write_fields(layer, _SIZES),
            "q_lora_rank": layer.query_rank,
            "rope_interleave": layer.interleaved,
            "attention_bias": layer.bias,
        }
