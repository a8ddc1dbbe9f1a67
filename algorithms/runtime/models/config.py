"""Shapes of the target and of the DFlash drafter, read from and written to Hugging Face `config.json`.

Two generations of files are in circulation: transformers 4 writes `rope_theta` and `rope_scaling` at the top level,
transformers 5 writes one `rope_parameters` mapping. Both are read; both are written, so that either version loads the
exported folder. The DFlash keys follow the published z-lab checkpoints (arXiv 2602.06036). Importing this imports
no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec_kernels import LinearScaling, Llama3Scaling, YarnScaling

    RopeScaling = LinearScaling | Llama3Scaling | YarnScaling

ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
LAYER_TYPES = ("full_attention", "sliding_attention")
DEFAULT_BLOCK_SIZE = 16
DEFAULT_ROPE_THETA = 10_000.0
"""What transformers takes where a config has none, as those of Llama 2 and its drafters do."""


ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_YARN_OPTIONS = {"beta_fast": float, "beta_slow": float, "attention_factor": float, "mscale": float,
                 "mscale_all_dim": float, "truncate": bool}  # fmt: skip


def _required(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise ValueError(f"model config: key '{key}' is missing")
    return config[key]


def _read_rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    merged: dict[str, Any] = {"rope_theta": config.get("rope_theta")}
    for source in (config.get("rope_scaling"), config.get("rope_parameters")):
        merged.update({key: value for key, value in (source or {}).items() if value is not None})
    theta = float(merged["rope_theta"] or DEFAULT_ROPE_THETA)
    kind = merged.get("rope_type", merged.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ValueError(f"model config: rope type '{kind}' is not supported, expected one of {', '.join(ROPE_TYPES)}")
    if kind == "default":
        return theta, None
    # As transformers does where the length before stretching is not given.
    original = config.get("original_max_position_embeddings") or config.get("max_position_embeddings")
    merged.setdefault("original_max_position_embeddings", original)
    return theta, _read_scaling(kind, merged)


def _read_scaling(kind: str, merged: Mapping[str, Any]) -> RopeScaling:
    from specdec_kernels import LinearScaling, Llama3Scaling, YarnScaling

    factor = float(_required(merged, "factor"))
    if kind == "linear":
        return LinearScaling(factor)
    original = int(_required(merged, "original_max_position_embeddings"))
    if kind == "llama3":
        low, high = (float(_required(merged, f"{end}_freq_factor")) for end in ("low", "high"))
        return Llama3Scaling(factor, original, low, high)
    given: dict[str, Any] = {
        key: kind_of(merged[key]) for key, kind_of in _YARN_OPTIONS.items() if merged.get(key) is not None
    }
    return YarnScaling(factor, original, **given)


def _write_rope(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if scaling is not None:
        written = {key: value for key, value in vars(scaling).items() if value is not None}
        if "original_length" in written:
            written["original_max_position_embeddings"] = written.pop("original_length")
        parameters |= {"rope_type": type(scaling).__name__.removesuffix("Scaling").lower(), **written}
    return {"rope_theta": theta, "rope_parameters": parameters}


def _read_eos(config: Mapping[str, Any]) -> tuple[int, ...]:
    eos = config.get("eos_token_id")
    if eos is None:
        return ()
    return (int(eos),) if isinstance(eos, int) else tuple(int(token) for token in eos)


@dataclass(frozen=True)
class DecoderConfig:
    """Shape of a Qwen3 or Llama decoder; the fields carry the meaning of their Hugging Face namesakes."""

    architecture: str
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
    sliding_windows: tuple[int | None, ...] = ()
    """Positions that each layer's attention reaches back over, its own included; None is all of them.

    Empty where no layer has a window."""
    soft_cap: float | None = None
    """Attention scores s become soft_cap * tanh(s / soft_cap)."""
    scale: float | None = None
    """What attention scores are multiplied by; None is head_dim ** -0.5."""
    sinks: bool = False
    """Whether every query head has a learned sink."""

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ValueError(
                f"model_type '{self.architecture}' is not supported, expected one of {list(ARCHITECTURES)}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads={self.num_kv_heads}, "
                f"got {self.num_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")
        if self.sliding_windows and len(self.sliding_windows) != self.num_layers:
            raise ValueError(f"sliding_windows must have {self.num_layers} entries, got {len(self.sliding_windows)}")
        sizes = {f"sliding_windows[{layer}]": window for layer, window in enumerate(self.sliding_windows)}
        for name, value in {**sizes, "soft_cap": self.soft_cap, "scale": self.scale}.items():
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")

    def window(self, layer: int) -> int | None:
        """The sliding window of `layer`, or None."""
        return self.sliding_windows[layer] if self.sliding_windows else None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Read a `config.json` mapping; ValueError names a missing key, an unsupported model or rope type."""
        architecture = _required(config, "model_type")
        if architecture not in ARCHITECTURES:
            raise ValueError(f"model_type '{architecture}' is not supported, expected one of {list(ARCHITECTURES)}")
        if config.get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act '{config['hidden_act']}' is not supported, expected 'silu'")
        hidden, heads = int(_required(config, "hidden_size")), int(_required(config, "num_attention_heads"))
        theta, scaling = _read_rope(config)
        return cls(
            architecture=architecture,
            vocab_size=int(_required(config, "vocab_size")),
            hidden_size=hidden,
            intermediate_size=int(_required(config, "intermediate_size")),
            num_layers=int(_required(config, "num_hidden_layers")),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            rms_norm_eps=float(_required(config, "rms_norm_eps")),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=int(_required(config, "max_position_embeddings")),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bool(config.get("attention_bias", False)),
            o_bias=bool(config.get("attention_bias", False)),
            qk_norm=architecture == "qwen3",
            mlp_bias=bool(config.get("mlp_bias", False)),
            eos_token_ids=_read_eos(config),
        )

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` mapping that transformers loads as Qwen3ForCausalLM or LlamaForCausalLM."""
        eos: int | list[int] | None = list(self.eos_token_ids) or None
        if len(self.eos_token_ids) == 1:
            eos = self.eos_token_ids[0]
        return {
            "architectures": [ARCHITECTURES[self.architecture]],
            "model_type": self.architecture,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_bias": self.qkv_bias,
            "mlp_bias": self.mlp_bias,
            "eos_token_id": eos,
            "dtype": "bfloat16",
            **_write_rope(self.rope_theta, self.rope_scaling),
        }


def default_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """The published rule: one draft layer reads the middle, several read evenly spaced layers 1 … N-3."""
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    if num_target_layers < 4:
        raise ValueError(f"default target_layer_ids need num_target_layers >= 4, got {num_target_layers}")
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_draft_layers - 1)) for i in range(num_draft_layers))


@dataclass(frozen=True)
class DFlashConfig:
    """Shape of a DFlash drafter: `decoder` describes its layers (`num_layers` of them).

    `target_layer_ids` name target layers whose output (the residual stream after that layer) is read;
    `causal_layers[i]` says whether layer i is causal inside the block (the published default for sliding layers).
    """

    decoder: DecoderConfig
    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    num_target_layers: int
    layer_types: tuple[str, ...]
    sliding_window: int | None
    causal_layers: tuple[bool, ...]

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size must be >= 1, got {self.block_size}")
        outside = [i for i in self.target_layer_ids if not 0 <= i < self.num_target_layers]
        if outside or not self.target_layer_ids:
            raise ValueError(
                f"target_layer_ids must lie in 0..{self.num_target_layers - 1}, got {list(self.target_layer_ids)}"
            )
        if not 0 <= self.mask_token_id < self.decoder.vocab_size:
            raise ValueError(
                f"mask_token_id must be below vocab_size={self.decoder.vocab_size}, got {self.mask_token_id}"
            )
        if len(self.layer_types) != self.decoder.num_layers:
            raise ValueError(f"layer_types must have {self.decoder.num_layers} entries, got {len(self.layer_types)}")
        unknown = sorted(set(self.layer_types) - set(LAYER_TYPES))
        if unknown:
            raise ValueError(f"layer_types must be among {list(LAYER_TYPES)}, got {unknown}")
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            raise ValueError("sliding_attention layers need a positive sliding_window")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DFlashConfig:
        """Read a published drafter `config.json`; an entry of `dflash_config` wins over the same top-level key."""
        nested = config.get("dflash_config") or {}

        def entry(key: str, default: Any = None) -> Any:
            return nested.get(key, config.get(key, default))

        decoder = DecoderConfig.from_hf(config)
        num_target_layers = int(_required({"num_target_layers": entry("num_target_layers")}, "num_target_layers"))
        ids = entry("target_layer_ids")
        if ids is None:
            ids = default_target_layer_ids(num_target_layers, decoder.num_layers)
        layer_types = tuple(config.get("layer_types") or ["full_attention"] * decoder.num_layers)
        causal = entry("is_causal")
        return cls(
            decoder=decoder,
            block_size=int(entry("block_size", DEFAULT_BLOCK_SIZE)),
            target_layer_ids=tuple(int(i) for i in ids),
            mask_token_id=int(_required({"mask_token_id": entry("mask_token_id")}, "mask_token_id")),
            num_target_layers=num_target_layers,
            layer_types=layer_types,
            sliding_window=config.get("sliding_window"),
            causal_layers=tuple(
                kind == "sliding_attention" if causal is None else bool(causal) for kind in layer_types
            ),
        )

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` mapping with the keys of the published checkpoints."""
        return {
            **self.decoder.to_hf(),
            "architectures": ["DFlashDraftModel"],
            "block_size": self.block_size,
            "num_target_layers": self.num_target_layers,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
            },
            "layer_types": list(self.layer_types),
            "sliding_window": self.sliding_window,
        }
