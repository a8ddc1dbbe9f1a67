"""Shape of a decoder-only language model; the registry says how each architecture spells it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

from algorithms.models.architectures import Windows, find_architecture
from algorithms.models.config_keys import nested, read_eos, read_size, read_sizes, required, write_eos, write_fields
from specdec_kernels.checks import expect_between

if TYPE_CHECKING:
    from specdec_kernels import LinearScaling, Llama3Scaling, YarnScaling

    RopeScaling = LinearScaling | Llama3Scaling | YarnScaling

_SIZES = {
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "max_position_embeddings": "max_position_embeddings",
}
"""Required integers: field, key of `config.json`."""
MOST_LAYERS = 10_000
EMBEDDING_LAYER = -1  # the id of the embedding among the layers whose output a drafter reads
DEFAULT_THETA = 10_000.0
ROPE_TYPES = ("default", "dynamic", "linear", "llama3", "yarn")
_YARN_NUMBERS = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")


@dataclass(frozen=True)
class DecoderConfig:
    """Shape of a decoder; the fields carry the meaning of their Hugging Face namesakes."""

    architecture: str
    """A key of `architectures.ARCHITECTURES`: how the shape is written to `config.json`."""
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
    """Positions that each layer reaches back, its own included; None is all. Empty where no layer has a window."""
    soft_cap: float | None = None
    """Attention scores s become soft_cap * tanh(s / soft_cap)."""
    scale: float | None = None
    """Factor of attention scores; None is head_dim ** -0.5."""
    rotary_share: float = 1.0
    """Share of each head that rotates, from its first element on."""
    interleaved_rope: bool = False
    """Whether neighbours rotate as pairs; else the halves of what rotates."""
    closing_norms: bool = False
    """Whether attention and MLP each end in a norm of their own, before the residual addition."""
    gated_attention: bool = False
    """Whether the output of each head is multiplied by the sigmoid of a gate, which `q_proj` gives behind the query."""
    sinks: bool = False
    """Whether every query head has a learned sink."""
    wide_norms: bool = False
    """Whether norms round after they multiply by their weight, which is then float32; else before."""
    mixings: tuple[Any, ...] = ()
    """Sizes of what stands for attention in each layer, see `kinds`; None is attention. Empty: all have that."""
    mlps: tuple[Any, ...] = ()
    """Sizes of the MLP of each layer, see `kinds`; None is SwiGLU of `intermediate_size`. Empty: all have that."""

    def __post_init__(self) -> None:
        find_architecture(self.architecture)
        expect_between("rms_norm_eps", self.rms_norm_eps, 0, 1)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads: expected a multiple of num_key_value_heads={self.num_kv_heads}, "
                f"got {self.num_heads}"
            )
        expect_between("partial_rotary_factor", self.rotary_share, 0, 1)
        if self.rotary_dim % 2 or not self.rotary_dim:
            raise ValueError(
                f"head_dim: expected an even number of elements that rotate, got {self.rotary_dim} of {self.head_dim}"
            )
        for name in ("sliding_windows", "mixings", "mlps"):
            if (by_layer := getattr(self, name)) and len(by_layer) != self.num_layers:
                raise ValueError(f"{name}: expected {self.num_layers} entries, got {len(by_layer)}")
        sizes = {f"sliding_windows[{layer}]": window for layer, window in enumerate(self.sliding_windows)}
        for name, value in {**sizes, "soft_cap": self.soft_cap, "scale": self.scale}.items():
            expect_between(name, value, 0, inf, above=True, nullable=True)

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.rotary_share)

    def window(self, layer: int) -> int | None:
        return self.sliding_windows[layer] if self.sliding_windows else None

    def mixing(self, layer: int) -> Any:
        return self.mixings[layer] if self.mixings else None

    def mlp(self, layer: int) -> Any:
        return self.mlps[layer] if self.mlps else None

    def of_layers(self, layers: Sequence[int]) -> DecoderConfig:
        names = ("sliding_windows", "mixings", "mlps")
        given = {name: getattr(self, name) for name in names if getattr(self, name)}
        chosen: dict[str, Any] = {name: tuple(held[layer] for layer in layers) for name, held in given.items()}
        return replace(self, num_layers=len(layers), **chosen)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Read a `config.json` mapping; ValueError names a missing key, or a value that is not supported."""
        # Models that also see images hold the keys of their language model in a mapping of their own.
        config = {**config, **nested(config, "text_config")}
        architecture = required(config, "model_type")
        entry = find_architecture(architecture)
        if config.get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act '{config['hidden_act']}' is not supported, expected 'silu'")
        sizes = read_sizes(config, _SIZES)
        read_size("num_hidden_layers", sizes["num_layers"], MOST_LAYERS)
        # Latent attention has no head dimension of its own; transformers gives the name to the part that rotates.
        head_dim = config.get("qk_rope_head_dim") or sizes["hidden_size"] // sizes["num_heads"]
        by_default = {"num_key_value_heads": sizes["num_heads"], "head_dim": head_dim}
        heads, head_dim = (read_size(key, config.get(key) or value) for key, value in by_default.items())
        theta, scaling = read_rope(config)
        return cls(
            architecture=architecture,
            **sizes,
            num_kv_heads=heads,
            head_dim=head_dim,
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
            **write_fields(self, _SIZES),
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


def read_rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling, as transformers 4 (`rope_scaling`) or 5 (`rope_parameters`) writes them. Raises ValueError."""
    merged: dict[str, Any] = {"rope_theta": config.get("rope_theta")}
    for source in ("rope_scaling", "rope_parameters"):
        merged.update({key: value for key, value in nested(config, source).items() if value is not None})
    by_layer = [key for key, value in merged.items() if isinstance(value, Mapping)]
    if by_layer:
        raise ValueError(f"model config: rope parameters of their own for {', '.join(by_layer)} are not supported")
    theta = DEFAULT_THETA if merged["rope_theta"] is None else _positive("rope_theta", merged["rope_theta"])
    kind = merged.get("rope_type", merged.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ValueError(f"model config: rope type '{kind}' is not supported, expected one of {', '.join(ROPE_TYPES)}")
    if kind in ("default", "dynamic"):
        # Dynamic NTK scaling begins after `max_position_embeddings`, where the engine's longest requests end.
        return theta, None
    # As transformers does where the length before stretching is not given.
    original = config.get("original_max_position_embeddings") or config.get("max_position_embeddings")
    merged.setdefault("original_max_position_embeddings", original)
    return theta, _read_scaling(kind, merged)


def _positive(key: str, value: Any) -> float:
    expect_between(f"model config: {key}", value if isfinite(number := float(value)) else None, 0, inf, above=True)
    return number


def _read_scaling(kind: str, merged: Mapping[str, Any]) -> RopeScaling:
    from specdec_kernels import LinearScaling, Llama3Scaling, YarnScaling

    factor = _positive("factor", required(merged, "factor"))
    if kind == "linear":
        return LinearScaling(factor)
    key = "original_max_position_embeddings"
    original = read_size(key, required(merged, key))
    if kind == "llama3":
        low, high = (_positive(key, required(merged, key)) for key in ("low_freq_factor", "high_freq_factor"))
        return Llama3Scaling(factor, original, low, high)
    options = {key: merged[key] for key in _YARN_NUMBERS if merged.get(key) is not None}
    truncate = bool(merged.get("truncate", True))
    return YarnScaling(factor, original, **{key: float(options[key]) for key in options}, truncate=truncate)


def write_rope(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """The keys that `read_rope` reads, for either version of transformers."""
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if scaling is not None:
        written = {key: value for key, value in vars(scaling).items() if value is not None}
        if "original_length" in written:
            written["original_max_position_embeddings"] = written.pop("original_length")
        parameters |= {"rope_type": type(scaling).__name__.removesuffix("Scaling").lower(), **written}
    return {"rope_theta": theta, "rope_parameters": parameters}
