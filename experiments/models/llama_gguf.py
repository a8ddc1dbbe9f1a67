"""Writes a Llama model that is stored as GGUF as a folder in the Hugging Face layout.

Weights become float32: that is what the file says, and what a reader of the GGUF file computes with. bfloat16 has 8
significant bits, fewer than the products of a float16 scale and a 4-bit number, so it would round every weight once
more. A run in bfloat16 rounds while loading, as for every checkpoint.

llama.cpp stores the rows of the query and key projections in another order: row 2 i + j of a head is row i + j D / 2 of
the Hugging Face layout, since it rotates neighbours where transformers rotates halves (Source: github.com/ggml-org/
llama.cpp, convert_hf_to_gguf.py, LlamaModel.permute). This order is taken back here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.models.gguf import Array, Gguf, GgufError, GgufTensor

CONTROL, USER_DEFINED = 3, 4
"""Token types of ggml: control tokens are special, user-defined ones are matched before the text is split."""

DIGITS_THEN_BYTES: list[dict[str, Any]] = [
    {"type": "Digits", "individual_digits": True},
    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
]
PRE_TOKENIZERS = {"smollm": DIGITS_THEN_BYTES}
"""How text is split before merges, by ggml's name of the rule."""

WHOLE_MODEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
CONFIG_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "rope.dimension_count",
    "max_position_embeddings": "context_length",
}
HEAD_COUNTS = {"q_proj": "head_count", "k_proj": "head_count_kv"}
"""Projections whose rows are reordered."""
SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}


def unpermuted(weight: Array, heads: int) -> Array:
    """[heads * D, in] rows in llama.cpp's order to those of the Hugging Face layout."""
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def tensors(gguf: Gguf) -> Iterator[tuple[str, Array]]:
    """Hugging Face name and float32 weights of every tensor. Raises GgufError for one that no Llama has."""
    heads = {name: int(gguf.get(f"llama.attention.{key}")) for name, key in HEAD_COUNTS.items()}
    for stored in gguf.tensors.values():
        name = _name(stored)
        weight = stored.read()
        projection = name.split(".")[-2]
        yield name, unpermuted(weight, heads[projection]) if projection in heads else weight


def _name(stored: GgufTensor) -> str:
    if stored.name in WHOLE_MODEL:
        return WHOLE_MODEL[stored.name]
    found = LAYER_TENSOR.fullmatch(stored.name)
    if found is None or found[2] not in IN_LAYER:
        raise GgufError(f"expected tensors of a Llama model, got {stored.name!r}")
    return f"model.layers.{found[1]}.{IN_LAYER[found[2]]}.weight"


def config(gguf: Gguf) -> dict[str, Any]:
    """`config.json`. Raises GgufError for another architecture, and for settings that Llama does not have."""
    architecture = gguf.get("general.architecture")
    if architecture != "llama":
        raise GgufError(f"general.architecture: expected 'llama', got {architecture!r}")
    if scaling := [key for key in gguf.metadata if key.startswith("llama.rope.scaling")] + [
        name for name in gguf.tensors if name.startswith("rope_")
    ]:
        raise GgufError(f"scaled rotary embeddings are not supported: expected none, got {', '.join(scaling)}")
    theta = float(gguf.get("llama.rope.freq_base"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(gguf.get("tokenizer.ggml.tokens")),
        **{key: int(gguf.get(f"llama.{name}")) for key, name in CONFIG_KEYS.items()},
        "hidden_act": "silu",
        "rms_norm_eps": float(f"{gguf.get('llama.attention.layer_norm_rms_epsilon'):.6g}"),  # stored as float32
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        **_token_ids(gguf),
        "dtype": "float32",
    }


def tokenizer(gguf: Gguf) -> dict[str, Any]:
    """`tokenizer.json` of a byte-level BPE vocabulary. Raises GgufError for another kind."""
    model, rule = gguf.get("tokenizer.ggml.model"), gguf.get("tokenizer.ggml.pre")
    if model != "gpt2" or rule not in PRE_TOKENIZERS:
        expected = f"'gpt2' with one of {', '.join(PRE_TOKENIZERS)}"
        raise GgufError(f"tokenizer.ggml.model and .pre: expected {expected}, got {model!r} with {rule!r}")
    tokens: list[str] = gguf.get("tokenizer.ggml.tokens")
    kinds: list[int] = gguf.get("tokenizer.ggml.token_type")
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == CONTROL,
        }
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[rule]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in gguf.get("tokenizer.ggml.merges")],
        },
    }


def tokenizer_config(gguf: Gguf) -> dict[str, Any]:
    """`tokenizer_config.json`."""
    tokens = gguf.get("tokenizer.ggml.tokens")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": int(gguf.get("llama.context_length")),
        **{key.removesuffix("_id"): tokens[index] for key, index in _token_ids(gguf).items()},
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
    }


def _token_ids(gguf: Gguf) -> dict[str, int]:
    """Ids of the special tokens that the file names, such as `eos_token_id`, which ends an answer."""
    found = {name: gguf.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in SPECIAL_TOKENS.items()}
    return {f"{name}_token_id": int(index) for name, index in found.items() if index is not None}


def write_folder(gguf: Gguf, folder: Path, origin: str) -> None:
    """Write config, tokenizer, chat template and float32 weights into `folder`, which exists.

    `origin` is kept in `config.json` as `weights_origin`. Raises GgufError for a file that is no Llama model.
    """
    from safetensors.numpy import save_file

    contents = {
        "config.json": {**config(gguf), "weights_origin": origin},
        "tokenizer.json": tokenizer(gguf),
        "tokenizer_config.json": tokenizer_config(gguf),
        "generation_config.json": _token_ids(gguf),
    }
    for name, content in contents.items():
        text = json.dumps(content, indent=None if name == "tokenizer.json" else 2, ensure_ascii=False)
        (folder / name).write_text(text + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(gguf.get("tokenizer.chat_template"), encoding="utf-8")
    weights = folder / "model.safetensors"
    save_file(dict(tensors(gguf)), weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors creates files that only the owner may read
