"""Sizes of a mixture of experts, and the keys of `config.json` that hold them. No torch is imported here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from algorithms.models import config_keys
from algorithms.models.config_keys import expect_only, nested, one_kind, read_size, read_sizes, required, write_fields

DENSE, SPARSE = MLP_TYPES = ("dense", "sparse")
SHARED_KEY = "shared_expert_intermediate_size"
_QWEN = {"num_experts": "num_experts", "topk": "num_experts_per_tok", "width": "moe_intermediate_size"}
_DEEPSEEK = _QWEN | {"num_experts": "n_routed_experts"}
_GPT_OSS = {"num_experts": "num_local_experts", "topk": "num_experts_per_tok", "width": "intermediate_size"}
"""Sizes of each family: field, key of `config.json`."""


@dataclass(frozen=True)
class ExpertsConfig:
    """Sizes and routing of a layer; `specdec_kernels.Routing` says what the routing fields mean."""

    num_experts: int
    topk: int
    width: int
    """Columns of an expert's gate, and of its up projection."""
    scoring: str = "softmax"
    renormalise: bool = False
    scale: float = 1.0
    groups: int = 1
    topk_groups: int = 1
    group_score: str = "max"
    corrected: bool = False
    """Whether a bias is added to the scores for the choice (`e_score_correction_bias`)."""
    wide_router: bool = False
    """Whether logits are products in float32; else they have the dtype of the model."""
    shared: int = 0
    """Experts that every token runs through, as one MLP."""
    biased: bool = False
    """Whether router and experts have biases."""
    limit: float | None = None
    alpha: float = 1.0
    """Of the activation, see `specdec_kernels.Activation`."""
    mxfp4: bool = False
    """Whether the matrices of the experts are stored, and stay, in MXFP4."""
    gated_shared: int = 0
    """Columns of an MLP that every token runs through, and whose output a gate multiplies; 0: there is none."""
    same: bool = False
    """Whether checkpoints hold the first expert alone, for all: see `experiments.studies.shape_scaled`."""

    def __post_init__(self) -> None:
        if not 1 <= self.topk <= self.num_experts:
            raise ValueError(f"num_experts_per_tok: expected 1 to {self.num_experts} experts, got {self.topk}")
        if self.num_experts % self.groups or not 1 <= self.topk_groups <= self.groups:
            raise ValueError(
                f"n_group, topk_group: expected a divisor of {self.num_experts} experts and 1 to that many groups, got "
                f"{self.groups} and {self.topk_groups}"
            )


def _plain_softmax(config: Mapping[str, Any]) -> None:
    """ValueError for keys of other families that would route otherwise."""
    expect_only(config, scoring_func=("softmax",), topk_method=("greedy",), n_group=(1,), routed_scaling_factor=(1,))


@dataclass(frozen=True)
class QwenRule:
    """Qwen3-MoE, Qwen3-Next (`gated_shared`): every `decoder_sparse_step`-th layer, but for `mlp_only_layers`."""

    gated_shared: bool = False

    def read(self, config: Mapping[str, Any], num_layers: int) -> tuple[ExpertsConfig | None, ...]:
        _plain_softmax(config)
        # transformers 5 writes num_local_experts, the published folders have num_experts.
        key = "num_local_experts" if "num_local_experts" in config else "num_experts"
        experts = ExpertsConfig(
            **read_sizes(config, _QWEN | {"num_experts": key}),
            renormalise=bool(required(config, "norm_topk_prob")),
            gated_shared=read_size(SHARED_KEY, required(config, SHARED_KEY)) if self.gated_shared else 0,
            same=bool(config.get("same_experts")),
        )
        step, dense = int(config.get("decoder_sparse_step", 1)), set(config.get("mlp_only_layers") or ())
        sparse = [layer not in dense and step > 0 and (layer + 1) % step == 0 for layer in range(num_layers)]
        return tuple(experts if has else None for has in sparse)

    def write(self, layers: tuple[ExpertsConfig | None, ...]) -> dict[str, Any]:
        experts = one_kind("mixture of experts", layers)
        return {
            **write_fields(experts, _QWEN),
            "norm_topk_prob": experts.renormalise,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [index for index, layer in enumerate(layers) if layer is None],
            **({SHARED_KEY: experts.gated_shared} if self.gated_shared else {}),
            **({"same_experts": True} if experts.same else {}),
        }


@dataclass(frozen=True)
class DeepSeekRule:
    """DeepSeek-V2 (softmax), V3, GLM-4.5 (sigmoid): experts by `mlp_layer_types` or `first_k_dense_replace`."""

    scoring: str

    def read(self, config: Mapping[str, Any], num_layers: int) -> tuple[ExpertsConfig | None, ...]:
        types = config.get("mlp_layer_types")
        if types is None:
            dense = int(config.get("first_k_dense_replace") or 0)
            types = [DENSE] * min(dense, num_layers) + [SPARSE] * max(0, num_layers - dense)
        config_keys.check_layer_kinds("mlp_layer_types", types, MLP_TYPES, num_layers)
        if SPARSE not in types:
            return ()
        expect_only(config, moe_layer_freq=(1,), scoring_func=(self.scoring,))
        experts = self._read_experts(config)
        return tuple(experts if kind == SPARSE else None for kind in types)

    def _read_experts(self, config: Mapping[str, Any]) -> ExpertsConfig:
        sigmoid = self.scoring == "sigmoid"
        methods = ("noaux_tc",) if sigmoid else ("greedy", "group_limited_greedy")
        expect_only(config, topk_method=methods)
        grouped = (config.get("topk_method") or methods[0]) != "greedy"
        groups, topk_groups = (int(config.get(key) or 1) if grouped else 1 for key in ("n_group", "topk_group"))
        return ExpertsConfig(
            **read_sizes(config, _DEEPSEEK),
            scoring=self.scoring,
            # transformers and DeepSeek's own code for V2 do not divide by the sum.
            renormalise=sigmoid and bool(required(config, "norm_topk_prob")),
            scale=float(config.get("routed_scaling_factor") or 1.0),
            groups=groups,
            topk_groups=topk_groups,
            group_score="two_best" if sigmoid else "max",
            corrected=sigmoid,
            wide_router=True,
            shared=int(config.get("n_shared_experts") or 0),
        )

    def write(self, layers: tuple[ExpertsConfig | None, ...]) -> dict[str, Any]:
        if not layers:
            return {"mlp_layer_types": None, "first_k_dense_replace": 1 << 20}
        experts = one_kind("mixture of experts", layers)
        dense = [layer is None for layer in layers].index(False)
        if None in layers[dense:]:
            raise ValueError("mlps: expected dense layers only before those with experts")
        method = "noaux_tc" if experts.corrected else "greedy" if experts.groups == 1 else "group_limited_greedy"
        return {
            "first_k_dense_replace": dense,
            "mlp_layer_types": [DENSE if layer is None else SPARSE for layer in layers],
            **write_fields(experts, _DEEPSEEK),
            "scoring_func": experts.scoring,
            "topk_method": method,
            "norm_topk_prob": experts.renormalise,
            "routed_scaling_factor": experts.scale,
            "n_group": experts.groups,
            "topk_group": experts.topk_groups,
            "n_shared_experts": experts.shared,
        }


MXFP4 = "mxfp4"
MXFP4_GROUP = 32  # columns with one scale


@dataclass(frozen=True)
class GptOssRule:
    """gpt-oss: experts with biases in all layers, in bfloat16 or MXFP4, chosen by logit."""

    def read(self, config: Mapping[str, Any], num_layers: int) -> tuple[ExpertsConfig | None, ...]:
        _plain_softmax(config)
        experts = ExpertsConfig(
            **read_sizes(config, _GPT_OSS),
            scoring="softmax_of_chosen",
            biased=True,
            # Published folders have no swiglu_alpha.
            limit=float(config.get("swiglu_limit", 7.0)),
            alpha=float(config.get("swiglu_alpha", 1.702)),
            mxfp4=self._is_mxfp4(config),
        )
        return (experts,) * num_layers

    def _is_mxfp4(self, config: Mapping[str, Any]) -> bool:
        quantization = nested(config, "quantization_config")
        if quantization.get("quant_method") != MXFP4:
            return False
        if kept := [name for name in quantization.get("modules_to_not_convert") or () if "experts" in name]:
            raise ValueError(f"modules_to_not_convert: expected all experts in {MXFP4}, got {kept} without")
        sizes = {key: config.get(key, 0) for key in ("hidden_size", "intermediate_size")}
        if any(size % MXFP4_GROUP for size in sizes.values()):
            raise ValueError(f"hidden_size, intermediate_size: expected multiples of {MXFP4_GROUP}, got {sizes}")
        return True

    def write(self, layers: tuple[ExpertsConfig | None, ...]) -> dict[str, Any]:
        experts = one_kind("mixture of experts", layers)
        kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        quantization = {"quant_method": MXFP4, "modules_to_not_convert": kept}
        return {
            **write_fields(experts, _GPT_OSS),
            "swiglu_limit": experts.limit,
            "swiglu_alpha": experts.alpha,
            **({"quantization_config": quantization} if experts.mxfp4 else {}),
        }
