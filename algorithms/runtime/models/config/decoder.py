"""Shape of a decoder-only language model; the registry says how each architecture spells it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from algorithms.runtime.models.config.keys import read_eos, required, write_eos
from algorithms.runtime.models.config.rope import read_rope, write_rope
from algorithms.runtime.models.registry import Windows, find_architecture
from specdec_kernels.checks import expect_between

if TYPE_CHECKING:
    from algorithms.runtime.models.config.rope import RopeScaling

_SIZES = {
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "max_position_embeddings": "max_position_embeddings",
}
"""Required integers: field, key of `config.json`."""


@dataclass(frozen=True)
class DecoderConfig:
    """Shape of a decoder; the fields carry the meaning of their Hugging Face namesakes."""

    architecture: str
    """A key of `registry.ARCHITECTURES`: how the shape is written to `config.json`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    qk_norm: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    sliding_windows: Windows = ()
    """Positions that each layer's attention reaches back over, its own included; None is all of them.

    Empty where no layer has a window."""
    soft_cap: float | None = None
    """Attention scores s become soft_cap * tanh(s / soft_cap)."""
    scale: float | None = None
    """What attention scores are multiplied by; None is head_dim ** -0.5."""
    sinks: bool = False
    """Whether every query head has a learned sink."""

    def __post_init__(self) -> None:
        find_architecture(self.architecture)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads: expected a multiple of num_key_value_heads={self.num_kv_heads}, "
                f"got {self.num_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim: expected an even number for rotary embeddings, got {self.head_dim}")
        if self.sliding_windows and len(self.sliding_windows) != self.num_layers:
            raise ValueError(f"sliding_windows: expected {self.num_layers} entries, got {len(self.sliding_windows)}")
        sizes = {f"sliding_windows[{layer}]": window for layer, window in enumerate(self.sliding_windows)}
        for name, value in {**sizes, "soft_cap": self.soft_cap, "scale": self.scale}.items():
            expect_between(name, value, 0, inf, above=True, nullable=True)

    def window(self, layer: int) -> int | None:
        """The sliding window of `layer`, or None."""
        return self.sliding_windows[layer] if self.sliding_windows else None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Read a `config.json` mapping; ValueError names a missing key, or a value that is not supported."""
        architecture = required(config, "model_type")
        entry = find_architecture(architecture)
        if config.get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act '{config['hidden_act']}' is not supported, expected 'silu'")
        sizes: dict[str, Any] = {field: int(required(config, key)) for field, key in _SIZES.items()}
        theta, scaling = read_rope(config)
        return cls(
            architecture=architecture,
            **sizes,
            num_kv_heads=int(config.get("num_key_value_heads") or sizes["num_heads"]),
            head_dim=int(config.get("head_dim") or sizes["hidden_size"] // sizes["num_heads"]),
            rms_norm_eps=float(required(config, "rms_norm_eps")),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            eos_token_ids=read_eos(config),
            **entry.read(config, sizes["num_layers"]),
        )

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` mapping; ValueError where `architecture` cannot have this shape."""
        entry = find_architecture(self.architecture)
        return {
            "architectures": [entry.hf_class],
            "model_type": self.architecture,
            **{key: getattr(self, field) for field, key in _SIZES.items()},
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_word_embeddings,
            "eos_token_id": write_eos(self.eos_token_ids),
            "dtype": "bfloat16",
            **entry.write(vars(self), self.num_layers),
            **write_rope(self.rope_theta, self.rope_scaling),
        }
