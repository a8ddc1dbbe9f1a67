"""Sizes of linear attention, and the keys of `config.json` that hold them. No torch is imported here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from algorithms.models.config_keys import check_layer_kinds, expect_only, one_kind, read_sizes, write_fields

FULL, LINEAR = LAYER_TYPES = ("full_attention", "linear_attention")
_SIZES = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "taps": "linear_conv_kernel_dim",
}


@dataclass(frozen=True)
class LinearConfig:
    """Heads of keys (and queries) and of values, elements of each, and taps of the convolution."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"linear_num_value_heads: expected a multiple of {self.key_heads} key heads, got {self.value_heads}"
            )

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class LinearRule:
    """Layers by `layer_types`; where that is absent, every `full_attention_interval`-th has attention."""

    def read(self, config: Mapping[str, Any], num_layers: int) -> tuple[LinearConfig | None, ...]:
        expect_only(config, attn_output_gate=(True,), output_gate_type=("silu", "swish"))
        types = config.get("layer_types")
        if types is None:
            step = int(config.get("full_attention_interval") or 4)
            types = [FULL if (layer + 1) % step == 0 else LINEAR for layer in range(num_layers)]
        check_layer_kinds("layer_types", types, LAYER_TYPES, num_layers)
        sizes = LinearConfig(**read_sizes(config, _SIZES))
        return tuple(sizes if kind == LINEAR else None for kind in types)

    def write(self, layers: tuple[LinearConfig | None, ...]) -> dict[str, Any]:
        types = [FULL if layer is None else LINEAR for layer in layers]
        return {"layer_types": types, **write_fields(one_kind("linear attention", layers), _SIZES)}
