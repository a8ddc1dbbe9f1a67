"""Every entry of the registry: what its config keys mean, against transformers, and what is written back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from algorithms.dflash.model import DFlashDrafter
from algorithms.models.architectures import ARCHITECTURES
from algorithms.models.config import DecoderConfig
from algorithms.models.dense_mixer import DenseMixer
from algorithms.models.loading import load_target
from tests.algorithms import tiny_folders
from tests.algorithms.toy import Setup, autoregressive, requests, run

TOLERANCE = 1e-4
LENGTH = 21
SLIDING = {"use_sliding_window": True, "sliding_window": 5}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
GLM = {"pad_token_id": 0, "eos_token_id": [0, 1]}
LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 12, "qk_rope_head_dim": 16, "v_head_dim": 10,
    "head_dim": 16, "num_key_value_heads": 4, "first_k_dense_replace": 4, "rms_norm_eps": 1e-5, "attention_bias": True,
}  # fmt: skip
HYBRID = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4, "attention_bias": True, "partial_rotary_factor": 0.5,
}  # fmt: skip
QWEN_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
GPT_OSS = {
    "num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 44, "sliding_window": 5,
    "rms_norm_eps": 1e-5, "swiglu_limit": 1.5, "attention_bias": True,
}  # fmt: skip
GPT_OSS_YARN = {
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 150_000.0, "factor": 4.0, "original_max_position_embeddings": 16,
        "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    }
}  # fmt: skip
NEXT = {**LINEAR, **QWEN_EXPERTS, "linear_num_value_heads": 6, "shared_expert_intermediate_size": 28}
EXPERTS = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_shared_experts": 2, "n_group": 4,
    "topk_group": 2, "routed_scaling_factor": 1.7, "first_k_dense_replace": 2,
}  # fmt: skip
YARN = {
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16,
        "beta_fast": 8.0, "mscale": 0.7, "mscale_all_dim": 0.9,
    }
}  # fmt: skip
ROPE = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
OPTIONS = {"beta_fast": 4.0, "beta_slow": 0.5, "mscale": 0.8, "mscale_all_dim": 1.3, "truncate": False}
ROPES: dict[str, dict[str, Any]] = {
    "qwen3 yarn rope": ROPE,
    "llama yarn rope with options": ROPE | OPTIONS,
    "qwen3 yarn rope with an attention factor": ROPE | {"attention_factor": 1.7},
    "llama yarn rope whose ramp ends past the last pair": ROPE | {"rope_theta": 1.7},
    "llama rope of llama3": ROPE | LLAMA3,
    "llama linear rope": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.5},
    "llama dynamic rope": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
}
MODELS: dict[str, tuple[dict[str, Any], tuple[int | None, ...]]] = {
    **{name: ({"rope_parameters": rope, "num_key_value_heads": 1 + len(name) % 2}, ()) for name, rope in ROPES.items()},
    "llama": ({}, ()),
    "llama biases": ({"attention_bias": True, "mlp_bias": True}, ()),
    "mistral": ({"sliding_window": 6}, (6,) * 4),
    "mistral no window": ({"sliding_window": None}, ()),
    "qwen2": ({}, ()),
    "qwen2 window behind layer 2": ({**SLIDING, "max_window_layers": 2}, (None, None, 5, 5)),
    "qwen2 window behind the last layer": ({**SLIDING, "max_window_layers": 28}, ()),
    "qwen2 layer types": ({**SLIDING, "layer_types": ALTERNATING}, (5, None, 5, None)),
    "qwen3": ({"attention_bias": True}, ()),
    "qwen3 heads of its own": ({"num_key_value_heads": 4, "tie_word_embeddings": True}, ()),
    "glm4": (GLM, ()),
    "glm4 rotary": ({**GLM, "partial_rotary_factor": 0.25, "attention_bias": False}, ()),
    "qwen3_5_text": ({**LINEAR, "layer_types": HYBRID}, ()),
    "qwen3_next": ({**NEXT, "layer_types": HYBRID}, ()),
    "qwen3_next dense layers": ({**NEXT, "layer_types": HYBRID, "decoder_sparse_step": 2, "mlp_only_layers": [1]}, ()),
    "qwen3_moe": ({**QWEN_EXPERTS, "norm_topk_prob": True}, ()),
    "qwen3_moe dense layers": ({**QWEN_EXPERTS, "decoder_sparse_step": 2, "mlp_only_layers": [1]}, ()),
    "gpt_oss": ({**GPT_OSS, **GPT_OSS_YARN}, (5, None, 5, None)),
    "gpt_oss layer types": ({**GPT_OSS, "layer_types": ALTERNATING[1:] + ALTERNATING[:1]}, (None, 5, None, 5)),
    "glm4_moe": ({**EXPERTS, "use_qk_norm": True, "attention_bias": True, "norm_topk_prob": True}, ()),
    "deepseek_v2": ({**LATENT, **EXPERTS, "n_group": None, "topk_group": None, "first_k_dense_replace": 1}, ()),
    "deepseek_v2 groups": ({**LATENT, **EXPERTS, "topk_method": "group_limited_greedy"}, ()),
    "deepseek_v3": ({**LATENT, **EXPERTS, "norm_topk_prob": True}, ()),
    "deepseek_v3 dense": ({**LATENT, "q_lora_rank": None, "rope_interleave": False, **YARN}, ()),
    "glm4_moe_lite": ({**LATENT, **EXPERTS, "first_k_dense_replace": None}, ()),
    "qwen3 layer types": ({**SLIDING, "layer_types": ALTERNATING}, (5, None, 5, None)),
}

PAGE_SIZES = {name: (1, 4, 16)[number % 3] for number, name in enumerate(MODELS)}


def theirs(model_type: str, **keys: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
    }  # fmt: skip
    config = AutoConfig.for_model(model_type, **{**shape, **keys})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    tiny_folders.randomise(model, seed=2)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(3)) / 4)
    return model


@pytest.mark.parametrize("name", list(MODELS))
@torch.no_grad()
def test_architectures_agree_with_transformers(name: str, tmp_path: Path) -> None:
    """A saved folder: what its config means and is written as, the hidden states and logits of the model, and the
    output of the engine with its log-probabilities. Texts are several windows long, pages smaller."""
    keys, windows = MODELS[name]
    model = theirs(name.split()[0], **keys)
    config = DecoderConfig.from_hf(model.config.to_dict())
    assert config.sliding_windows == windows
    if "layer_types" not in keys:  # which transformers adds; older folders have none
        stored = {key: value for key, value in model.config.to_dict().items() if key != "layer_types"}
        assert DecoderConfig.from_hf(stored).sliding_windows == windows
    check_written(config)
    model.save_pretrained(tmp_path)
    target = load_target(tmp_path, "cpu", torch.float32)
    tokens, layers = torch.randint(0, 61, (2, LENGTH), generator=torch.Generator().manual_seed(4)), (2, 0)
    hidden, features = target.model(tokens, DenseMixer(config, LENGTH, "cpu"), layers)
    expected = model(tokens, output_hidden_states=True)
    assert expected.logits.std() > 0.5 and (target.model.logits(hidden) - expected.logits).abs().max() < TOLERANCE
    for layer, feature in zip(layers, features, strict=True):
        assert (feature - expected.hidden_states[layer + 1]).abs().max() < TOLERANCE, layer
    asked = [request for request in requests(4, max_new_tokens=12, logprobs=True) if len(request.prompt_ids) > 2]
    completions = run(autoregressive(target), asked, Setup(page_size=PAGE_SIZES[name]), target).completions
    for request, completion in zip(asked, completions, strict=True):
        text = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
        logits = model(text).logits[0, len(request.prompt_ids) - 1 : -1].log_softmax(-1)
        chosen = logits.gather(1, text[0, len(request.prompt_ids) :, None])[:, 0]
        # Of two tokens within rounding of each other either may be written.
        assert len(completion.token_ids) == 12 and (logits.max(1).values - chosen).max() < TOLERANCE
        assert completion.logprobs == pytest.approx(chosen.tolist(), abs=TOLERANCE)


def check_written(config: DecoderConfig) -> None:
    """Configs are written as transformers reads them."""
    from transformers import AutoConfig

    written = config.to_hf()
    read = AutoConfig.for_model(**written)
    assert DecoderConfig.from_hf(written) == config == DecoderConfig.from_hf(read.to_dict())
    assert read.architectures == [ARCHITECTURES[config.architecture].hf_class]


@torch.no_grad()
def test_dflash_reads_what_transformers_calls_hidden_states(tmp_path: Path) -> None:
    """z-lab's code takes `hidden_states[layer + 1]`, which for the last layer stands behind the final norm."""
    model, layers = theirs("qwen3"), (3, 1)
    model.save_pretrained(tmp_path)
    target = load_target(tmp_path, "cpu", torch.float32)
    drafter = DFlashDrafter(tiny_folders.small_dflash_config(target.config, target_layer_ids=layers)).requires_grad_(
        False
    )
    tiny_folders.randomise(drafter, seed=2)
    tokens = torch.arange(9)[None]
    hidden, features = target.model(tokens, DenseMixer(target.config, 9, "cpu"), layers)
    states = model(tokens, output_hidden_states=True).hidden_states
    wanted = drafter.hidden_norm(drafter.fc(torch.cat([states[layer + 1] for layer in layers], -1)))
    torch.testing.assert_close(drafter.context(features, hidden), wanted, atol=TOLERANCE, rtol=1e-4)
    assert (states[4] - features[0]).abs().max() > 0.1, "the norm makes no difference"


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@torch.no_grad()
def test_transformers_loads_what_the_toolkit_writes(tmp_path: Path, architecture: str) -> None:
    from transformers import AutoModelForCausalLM

    config = tiny_folders.small_config(architecture, tie_word_embeddings=True, rope_theta=1e6)
    ours = tiny_folders.write_target(tmp_path, config)
    tokens = torch.randint(0, config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(4))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    logits = ours.logits(ours(tokens, DenseMixer(config, 9, "cpu"))[0])
    assert (logits - model(tokens).logits).abs().max() < TOLERANCE


def test_every_option_has_a_key_in_the_architecture_of_this_toolkit(tmp_path: Path) -> None:
    config = tiny_folders.small_config(
        "specdec", sliding_windows=(None, 3, None, 3), soft_cap=20.0, scale=0.2, sinks=True, qk_norm=True,
        qkv_bias=True, mlp_bias=True,
    )  # fmt: skip
    written = tiny_folders.write_target(tmp_path, config)
    target = load_target(tmp_path, "cpu", torch.float32)
    assert target.config == config
    for name, tensor in written.state_dict().items():
        assert torch.equal(target.model.state_dict()[name], tensor), name
    assert "model.layers.3.self_attn.sinks" in target.model.state_dict()


@pytest.mark.parametrize(
    ("architecture", "change", "message"),
    [
        ("llama", {"qk_norm": True}, "LlamaForCausalLM cannot have qk_norm=True"),
        ("llama", {"qkv_bias": True}, "cannot have qkv_bias=True: expected False"),
        ("qwen2", {"qkv_bias": False}, "Qwen2ForCausalLM cannot have qkv_bias=False"),
        ("qwen3", {"sinks": True, "qk_norm": True}, "Qwen3ForCausalLM cannot have sinks=True"),
        ("mistral", {"soft_cap": 30.0}, "MistralForCausalLM cannot have soft_cap=30.0"),
        ("mistral", {"sliding_windows": (None, 4, 4, 4)}, "sliding_window|layer_types"),
        ("llama", {"sliding_windows": (4,) * 4}, "sliding-window attention is not supported"),
        ("qwen2", {"qkv_bias": True, "sliding_windows": (4, 4, 8, 8)}, r"cannot have sliding_windows=\(4, 4, 8, 8\)"),
    ],
)
def test_shapes_that_an_architecture_cannot_have_are_not_written(
    architecture: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_folders.small_config(architecture, **change).to_hf()


def test_unknown_architectures_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="model_type 'mamba' is not supported, expected one of .*'mistral', 'qwen2'"):
        tiny_folders.small_config("mamba")


@pytest.mark.parametrize(
    ("model_type", "keys", "said"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 7}, "expected 1 to 6 experts, got 7"),
        ("qwen3_moe", {"norm_topk_prob": None}, "norm_topk_prob"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported, expected 'sigmoid'"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
        ("deepseek_v3", {"n_group": 3}, "expected a divisor of 8 experts"),
        ("glm4_moe", {"mlp_layer_types": ["dense", "linear"]}, "mlp_layer_types: expected 4 of"),
        ("qwen3_next", {"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size"),
        ("deepseek_v3", {"kv_lora_rank": 40}, "expected multiples of 16"),
        ("qwen3_moe", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported, expected 'softmax'"),
        ("qwen3_next", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported, expected 'greedy'"),
        ("qwen3_moe", {"n_group": 2}, "n_group 2 is not supported, expected 1"),
        ("gpt_oss", {"routed_scaling_factor": 2.5}, "routed_scaling_factor 2.5 is not supported"),
        ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate False is not supported, expected True"),
        ("qwen3_next", {"output_gate_type": "sigmoid"}, "expected 'silu' or 'swish'"),
        ("qwen3_5_text", {"layer_types": "linear_attention"}, "layer_types: expected 4 of .* got 'linear_attention'"),
    ],
)
def test_what_is_not_supported_is_named(model_type: str, keys: dict[str, Any], said: str) -> None:
    """Before weights are read."""
    config = theirs(model_type, **MODELS[model_type][0]).config.to_dict() | keys
    with pytest.raises(ValueError, match=said):
        DecoderConfig.from_hf({key: value for key, value in config.items() if value is not None})


def test_grouped_projections_of_another_size_are_refused(tmp_path: Path) -> None:
    model = theirs("qwen3_next", **MODELS["qwen3_next"][0])
    model.save_pretrained(tmp_path)
    tiny_folders.change_weights(tmp_path, model__layers__0__linear_attn__in_proj_ba__weight=torch.zeros(11, 32))
    tiny_folders.refusal(lambda: load_target(tmp_path, "cpu", torch.float32), "in_proj_ba", "12 rows", "[11, 32]")


@torch.no_grad()
def test_a_language_model_inside_one_that_sees_images(tmp_path: Path) -> None:
    """Its keys are in `text_config`, its tensors have another prefix, and tensors of images and MTP are left out."""
    keys, _ = MODELS["qwen3_5_text"]
    model = theirs("qwen3_5_text", **keys)
    model.save_pretrained(tmp_path)
    plain = load_target(tmp_path, "cpu", torch.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    inside = {name.replace("model.", "model.language_model.", 1): value for name, value in tensors.items()}
    more = {name: torch.zeros(3) for name in ("model.visual.patch_embed.weight", "mtp.layers.0.mlp.up_proj.weight")}
    save_file(inside | more, tmp_path / "model.safetensors")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "qwen3_5", "text_config": json.loads(config.read_text())}))
    wrapped = load_target(tmp_path, "cpu", torch.float32)
    assert wrapped.config == plain.config
    for name, value in plain.model.state_dict().items():
        assert torch.equal(wrapped.model.state_dict()[name], value)
