"""The architectures that can be loaded. No torch is imported here.

The common decoder normalises before attention and before its SwiGLU MLP (RMSNorm), rotates queries and keys (RoPE)
and shares key and value heads among query heads. An architecture that differs from it only in the fields of
`Architecture` needs one more entry in `ARCHITECTURES` and nothing else.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from algorithms.models.config_keys import check_layer_kinds, nested
from algorithms.models.experts.config import DeepSeekRule, GptOssRule, QwenRule
from algorithms.models.latent.config import LatentRule
from algorithms.models.linear.config import LinearRule

FULL, SLIDING = LAYER_TYPES = ("full_attention", "sliding_attention")
Windows = tuple[int | None, ...]
"""The sliding window of each layer, None for full attention; empty where no layer has one."""


WindowRule = Callable[[Mapping[str, Any], int], Windows]


def read_layer_types(layer_types: Sequence[str], window: int | None, num_layers: int) -> Windows:
    """Windows from the keys `layer_types` and `sliding_window`."""
    check_layer_kinds("layer_types", layer_types, LAYER_TYPES, num_layers)
    if SLIDING not in layer_types:
        return ()
    if not window:
        raise ValueError(f"{SLIDING} layers need a positive sliding_window, got {window}")
    return tuple(int(window) if kind == SLIDING else None for kind in layer_types)


def write_layer_types(windows: Windows, num_layers: int) -> dict[str, Any]:
    """The keys `layer_types` and `sliding_window`; inverse of `read_layer_types`."""
    return {
        "layer_types": [FULL if window is None else SLIDING for window in windows or (None,) * num_layers],
        "sliding_window": max((window for window in windows if window is not None), default=None),
    }


def no_windows(config: Mapping[str, Any], num_layers: int) -> Windows:
    """Full attention in all layers. `use_sliding_window` alone makes no layer slide."""
    layer_types, window = config.get("layer_types"), config.get("sliding_window")
    unclear = layer_types is None and bool(config.get("use_sliding_window")) and window is not None
    if unclear or SLIDING in (layer_types or ()):
        raise ValueError(f"sliding-window attention is not supported for model_type '{config.get('model_type')}'")
    return ()


def uniform_window(config: Mapping[str, Any], num_layers: int) -> Windows:
    if len(set(config.get("layer_types") or ())) > 1:
        raise ValueError("layer_types of several kinds are not supported for model_type 'mistral'")
    window = config.get("sliding_window", 4096)  # what transformers takes where the key is absent
    return () if window is None else (int(window),) * num_layers


def window_by_layer(config: Mapping[str, Any], num_layers: int) -> Windows:
    """`use_sliding_window`, `sliding_window`, and `layer_types` or `max_window_layers`."""
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    layer_types = config.get("layer_types")
    if layer_types is None:
        first = num_layers if window is None else int(config.get("max_window_layers", 28))
        layer_types = [SLIDING if layer >= first else FULL for layer in range(num_layers)]
    elif window is None and SLIDING in layer_types:
        raise ValueError(f"layer_types with {SLIDING} are not supported without use_sliding_window")
    return read_layer_types(layer_types, window, num_layers)


def window_by_turns(config: Mapping[str, Any], num_layers: int) -> Windows:
    """`layer_types`, by default every other layer with a window, the first one included, and `sliding_window`."""
    window = config.get("sliding_window")
    by_turns = [FULL if layer % 2 or window is None else SLIDING for layer in range(num_layers)]
    return read_layer_types(config.get("layer_types") or by_turns, window, num_layers)


NEXT_LAYER = "model.layers.{num_layers}."  # tensors of one MTP layer behind the last layer
_FLAGS = (
    "qk_norm", "qkv_bias", "o_bias", "mlp_bias", "sinks", "wide_norms", "interleaved_rope", "closing_norms",
    "gated_attention",
)  # fmt: skip
_NUMBERS = ("soft_cap", "scale")
_KINDS = ("mixings", "mlps")


class LayerRule(Protocol):
    """How `config.json` says which kind of mixing or of MLP the layers have."""

    def read(self, config: Mapping[str, Any], num_layers: int) -> tuple[Any, ...]:
        """Sizes of the kind of each layer, None for the common one. ValueError names what is not supported."""

    def write(self, layers: tuple[Any, ...]) -> dict[str, Any]:
        """The keys that `read` reads."""


@dataclass(frozen=True)
class Architecture:
    """Fields of `DecoderConfig` in this architecture: a fixed value, or the key of `config.json` that holds it."""

    hf_class: str
    qk_norm: bool | str = False
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    sinks: bool | str = False
    wide_norms: bool = False
    interleaved_rope: bool = False
    closing_norms: bool = False
    gated_attention: bool = False
    norm_offset: bool = False
    """Whether norms are stored less one; they are read as what multiplies, except that of linear attention."""
    rotary_share: float | None = None
    """Share of a head that rotates without `partial_rotary_factor`; None: all, and the key may say nothing else."""
    soft_cap: str | None = None
    scale: str | None = None
    windows: WindowRule = no_windows
    mixings: LayerRule | None = None  # None: all layers have attention
    mlps: LayerRule | None = None  # None: all layers have SwiGLU
    mtp_prefix: str | None = None
    """Prefix of the tensors of MTP layers, no part of the language model; `{num_layers}` stands for its layers."""

    def read(self, config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
        found: dict[str, Any] = {"sliding_windows": self.windows(config, num_layers)}
        for name in _KINDS:
            rule = getattr(self, name)
            found[name] = () if rule is None else rule.read(config, num_layers)
        for name in _FLAGS:
            rule = getattr(self, name)
            found[name] = bool(config.get(rule)) if isinstance(rule, str) else rule
        for name in _NUMBERS:
            value = config.get(getattr(self, name) or "")
            found[name] = None if value is None else float(value)
        rotary = {**config, **nested(config, "rope_parameters")}.get("partial_rotary_factor", self.rotary_share or 1.0)
        if self.rotary_share is None and rotary != 1.0:
            raise ValueError(f"partial_rotary_factor={rotary} is not supported for this model_type, expected 1")
        found["rotary_share"] = float(rotary)
        return found

    def write(self, fields: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
        """Keys of `config.json` for fields of `DecoderConfig`; ValueError for what the architecture cannot be."""
        windows = fields["sliding_windows"]
        written: dict[str, Any] = {"sliding_window": None}
        if windows:
            written = {"use_sliding_window": True, **write_layer_types(windows, num_layers)}
        if self.rotary_share is not None:
            written["partial_rotary_factor"] = fields["rotary_share"]
        keys = {name: key for name in (*_FLAGS, *_NUMBERS) if isinstance(key := getattr(self, name), str)}
        written |= {key: fields[name] for name, key in keys.items()}
        for name in _KINDS:
            if (rule := getattr(self, name)) is not None:
                written |= rule.write(fields[name])
        for name, held in self.read(written, num_layers).items():
            if held != fields[name]:
                raise ValueError(f"{self.hf_class} cannot have {name}={fields[name]}: expected {held}")
        return written


_BIASES: dict[str, Any] = dict(qkv_bias="attention_bias", o_bias="attention_bias")
_QWEN_HYBRID: dict[str, Any] = dict(
    qk_norm=True,
    **_BIASES,
    rotary_share=0.25,
    gated_attention=True,
    norm_offset=True,
    mixings=LinearRule(),
    mtp_prefix="mtp.",
)
_DEEPSEEK_V3: dict[str, Any] = dict(mixings=LatentRule(), mlps=DeepSeekRule("sigmoid"), mtp_prefix=NEXT_LAYER)
ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", **_BIASES, mlp_bias="mlp_bias"),
    "mistral": Architecture("MistralForCausalLM", windows=uniform_window),
    "qwen2": Architecture("Qwen2ForCausalLM", qkv_bias=True, windows=window_by_layer),
    "qwen3": Architecture("Qwen3ForCausalLM", qk_norm=True, **_BIASES, windows=window_by_layer),
    "glm4": Architecture(
        "Glm4ForCausalLM", qkv_bias="attention_bias", interleaved_rope=True, closing_norms=True, rotary_share=0.5
    ),
    "qwen3_5_text": Architecture("Qwen3_5ForCausalLM", **_QWEN_HYBRID),
    "qwen3_next": Architecture("Qwen3NextForCausalLM", mlps=QwenRule(gated_shared=True), **_QWEN_HYBRID),
    "qwen3_moe": Architecture("Qwen3MoeForCausalLM", qk_norm=True, **_BIASES, windows=window_by_layer, mlps=QwenRule()),
    "gpt_oss": Architecture(
        "GptOssForCausalLM", **_BIASES, sinks=True, wide_norms=True, windows=window_by_turns, mlps=GptOssRule()
    ),
    "glm4_moe": Architecture(
        "Glm4MoeForCausalLM",
        qk_norm="use_qk_norm",
        qkv_bias="attention_bias",
        rotary_share=0.5,
        mlps=DeepSeekRule("sigmoid"),
        mtp_prefix=NEXT_LAYER,
    ),
    "deepseek_v2": Architecture("DeepseekV2ForCausalLM", mixings=LatentRule(), mlps=DeepSeekRule("softmax")),
    "deepseek_v3": Architecture("DeepseekV3ForCausalLM", **_DEEPSEEK_V3),
    "glm4_moe_lite": Architecture("Glm4MoeLiteForCausalLM", **_DEEPSEEK_V3),
    # Not in transformers: Qwen2 with MTP layers (github.com/XiaomiMiMo/MiMo).
    "mimo": Architecture("MiMoForCausalLM", qkv_bias=True, windows=window_by_layer, mtp_prefix="model.mtp_layers."),
    # Not in transformers: for models trained here, every difference is a key of its own.
    "specdec": Architecture(
        "SpecdecForCausalLM",
        qk_norm="qk_norm",
        qkv_bias="qkv_bias",
        o_bias="o_bias",
        mlp_bias="mlp_bias",
        sinks="attention_sinks",
        soft_cap="attn_logit_softcapping",
        scale="attention_multiplier",
        windows=window_by_layer,
    ),
}


def find_architecture(model_type: str) -> Architecture:
    if model_type not in ARCHITECTURES:
        raise ValueError(f"model_type '{model_type}' is not supported, expected one of {sorted(ARCHITECTURES)}")
    return ARCHITECTURES[model_type]
