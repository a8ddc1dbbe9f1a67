"""Shape and conventions of MTP (multi-token prediction) heads. Configs do not say the conventions of the families:

family                  tensors                                   first half  reads of target    feeds back  norms
MiMo-7B                 model.mtp_layers.{i}.*                    hidden      after final norm   normed      w
Qwen3-Next, Qwen3.5     mtp.{fc, pre_fc_norm_*, layers.0, norm}   embedding   after final norm   normed      1 + w
DeepSeek-V3             model.layers.{L}.{enorm, hnorm, ...}      embedding   before final norm  raw         w
GLM-4.5, GLM-4.7-Flash  as DeepSeek-V3                            embedding   before final norm  normed      w
speculators             mtp_layers.{i}.*, in a folder of its own  embedding   before final norm  normed      w

Sources. MiMo: github.com/XiaomiMiMo/MiMo; `mimo_mtp.py` of vllm-project/vllm and of sgl-project/sglang. Qwen: vLLM's
`qwen3_next_mtp.py` and `qwen3_5_mtp.py`. What Qwen, DeepSeek and GLM read: ggml-org/llama.cpp, pull request 24025, with
acceptance measured for Qwen. What DeepSeek and GLM feed back: vLLM's `deepseek_mtp.py`, and its pull requests 46075 and
47448. speculators: vllm-project/speculators, `models/mtp`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from algorithms.checked import Checked
from algorithms.drafting.level_drafter import NORMED, RAW, STREAMS
from algorithms.models.architectures import find_architecture
from algorithms.models.config import DecoderConfig

EMBEDDING, HIDDEN = ORDERS = ("embedding", "hidden")


@dataclass(frozen=True)
class MTPConfig(Checked):
    """`decoder` describes the layers of the head: level i of a draft runs layer i mod their number."""

    decoder: DecoderConfig
    first: Annotated[str, ORDERS] = EMBEDDING
    """Which half of the projection's input comes first."""
    hidden_in: Annotated[str, STREAMS] = NORMED
    """Feature from the target: its last layer's output, or the final norm of it."""
    feedback: Annotated[str, STREAMS] = NORMED
    """Feature of the next level of a draft: the layer's output, or the head's final norm of it."""
    norm_offset: float = 0.0
    """Added to the weights of all norms: 1 where they are stored as differences from 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
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


LAYERS = "mtp_layers."  # prefix of the layers in `MTPHead`; a layer number follows


@dataclass(frozen=True)
class Family:
    """`prefix` of the stored tensors, `{num_layers}` for the target's layers, and fields of `MTPConfig`."""

    prefix: str
    first: str = EMBEDDING
    hidden_in: str = NORMED
    feedback: str = NORMED
    norm_offset: float = 0.0
    names: Mapping[str, str] | None = field(default=None, hash=False)
    """The head's name for the beginning of a stored one after the prefix, the first that fits; None: layer numbers
    follow the prefix, and then the head's own names. With names the head has one layer."""

    def renamed(self, name: str) -> str:
        """The head's name of a stored tensor; other names stay."""
        if not name.startswith(self.prefix):
            return name
        rest = name.removeprefix(self.prefix)
        if self.names is None:
            return LAYERS + rest
        return next((new + rest.removeprefix(old) for old, new in self.names.items() if rest.startswith(old)), name)


_LAYER = f"{LAYERS}0."
_QWEN = {
    "fc.": f"{_LAYER}input_proj.",
    "pre_fc_norm_embedding.": f"{_LAYER}token_layernorm.",
    "pre_fc_norm_hidden.": f"{_LAYER}hidden_layernorm.",
    "norm.": f"{_LAYER}final_layernorm.",
    "layers.0.": _LAYER,
}
_DEEPSEEK = {
    "eh_proj.": f"{_LAYER}input_proj.",
    "enorm.": f"{_LAYER}token_layernorm.",
    "hnorm.": f"{_LAYER}hidden_layernorm.",
    "shared_head.norm.": f"{_LAYER}final_layernorm.",
    "shared_head.head.": "lm_head.",
    "embed_tokens.": "embed_tokens.",
    "": _LAYER,
}


def _in_target(model_type: str, **conventions: Any) -> Family:
    return Family(find_architecture(model_type).mtp_prefix or "", **conventions)


SPECULATORS = Family("mtp_layers.", hidden_in=RAW)
"""Trained on the last layer's output. Served by vLLM with the final norm of it: `algo.hidden_in=normed`."""
BY_MODEL_TYPE = {
    "mimo": _in_target("mimo", first=HIDDEN),
    "qwen3_next": _in_target("qwen3_next", norm_offset=1.0, names=_QWEN),
    "qwen3_5_text": _in_target("qwen3_5_text", norm_offset=1.0, names=_QWEN),
    "deepseek_v3": _in_target("deepseek_v3", hidden_in=RAW, feedback=RAW, names=_DEEPSEEK),
    "glm4_moe": _in_target("glm4_moe", hidden_in=RAW, names=_DEEPSEEK),
    "glm4_moe_lite": _in_target("glm4_moe_lite", hidden_in=RAW, names=_DEEPSEEK),
}


def family_of(config: Mapping[str, Any]) -> Family | None:
    """The family of a flat config; None if it has no MTP head that is supported."""
    if "kind" in config:
        return SPECULATORS if config["kind"] == "mtp" else None
    return BY_MODEL_TYPE.get(str(config.get("model_type")))
