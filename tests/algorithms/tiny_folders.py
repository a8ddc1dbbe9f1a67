"""Writes small random models as Hugging Face folders: a Qwen3 or Llama target, a DFlash drafter, a byte
tokenizer.

Weights are drawn wide enough that logits differ by units and no two tokens tie; norm weights and biases are
not at their neutral values, so a forgotten one shows.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn

from algorithms.dflash.config import DFlashConfig
from algorithms.dflash.model import DFlashDrafter
from algorithms.models.config import DecoderConfig
from algorithms.models.decoder import Decoder
from algorithms.models.folder import ModelError

SPECIAL_TOKENS = ("<|end|>", "<|user|>", "<|assistant|>", "<|mask|>")
END_ID, MASK_ID = 0, 3
VOCAB_SIZE = 272
"""Special tokens and the 256 bytes, and a few ids that no token has, as in padded checkpoints."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def small_config(architecture: str = "qwen3", **changes: Any) -> DecoderConfig:
    """A decoder of four narrow layers; `changes` replace fields."""
    config = DecoderConfig(
        architecture=architecture, vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, num_layers=4,
        num_heads=4, num_kv_heads=2, head_dim=16, rms_norm_eps=1e-6, rope_theta=10_000.0, rope_scaling=None,
        max_position_embeddings=512, tie_word_embeddings=False, qk_norm=architecture == "qwen3", mlp_bias=False,
        eos_token_ids=(END_ID,),
    )  # fmt: skip
    return replace(config, **changes)


def small_dflash_config(target: DecoderConfig, num_layers: int = 2, **changes: Any) -> DFlashConfig:
    """A DFlash drafter that fits `target` and reads its layers 1 and 2; `changes` replace fields."""
    fields: dict[str, Any] = dict(
        decoder=replace(target, architecture="qwen3", num_layers=num_layers, qk_norm=True, rope_scaling=None),
        block_size=8,
        target_layer_ids=(1, 2),
        mask_token_id=MASK_ID,
        num_target_layers=target.num_layers,
        causal_layers=(False,) * num_layers,
    )
    return DFlashConfig(**{**fields, **changes})


@torch.no_grad()
def randomise(module: nn.Module, seed: int) -> None:
    """Draw every parameter: matrices of unit gain, embeddings of unit size, norm weights around one."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight"):
            values = 1 + 0.2 * values
        elif name.endswith("bias"):
            values = 0.5 * values
        elif "embed" not in name:
            values = values * parameter.shape[-1] ** -0.5
        parameter.copy_(values)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2))


def edit_json(path: Path, **changes: Any) -> None:
    """Replace keys of a JSON file; a value of None stays as null."""
    write_json(path, {**json.loads(path.read_text()), **changes})


def write_weights(folder: Path, tensors: Mapping[str, Tensor], shards: int = 1) -> None:
    """`model.safetensors`, or that many numbered shards with their index."""
    if shards == 1:
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
        return
    names = sorted(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        members = names[shard::shards]
        save_file({name: tensors[name].contiguous() for name in members}, folder / file)
        weight_map.update(dict.fromkeys(members, file))
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def write_tokenizer(folder: Path, special_tokens: tuple[str, ...] = SPECIAL_TOKENS, template: bool = True) -> None:
    """A tokenizer of single bytes after the special tokens: nothing to train, any text can be written."""
    symbols = [*special_tokens, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": special_tokens[END_ID]}
    write_json(folder / "tokenizer_config.json", config)
    if template:
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def write_target(
    folder: Path,
    config: DecoderConfig | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
) -> Decoder:
    """Write a target folder with tokenizer; returns the model as written."""
    folder.mkdir(parents=True, exist_ok=True)
    model = Decoder(config or small_config()).requires_grad_(False)
    randomise(model, seed)
    model.to(dtype)
    write_json(folder / "config.json", model.config.to_hf())
    write_weights(folder, model.state_dict(), shards)
    write_tokenizer(folder)
    return model


def write_dflash(
    folder: Path, config: DFlashConfig, seed: int = 1, dtype: torch.dtype = torch.float32, prefix: str = ""
) -> DFlashDrafter:
    """Write a drafter folder, tensor names under `prefix`; returns the drafter as written."""
    folder.mkdir(parents=True, exist_ok=True)
    drafter = DFlashDrafter(config).requires_grad_(False)
    randomise(drafter, seed)
    drafter.to(dtype)
    write_json(folder / "config.json", config.to_hf())
    write_weights(folder, {prefix + name: tensor for name, tensor in drafter.state_dict().items()})
    return drafter


def change_weights(folder: Path, **changes: Tensor | None) -> None:
    """Replace or (None) remove tensors of a single-file checkpoint; `__` in a keyword stands for a dot."""
    tensors = load_file(folder / "model.safetensors")
    for key, value in changes.items():
        tensors.pop(key.replace("__", "."), None)
        if value is not None:
            tensors[key.replace("__", ".")] = value
    save_file(tensors, folder / "model.safetensors")


def refusal(call: Callable[[], Any], *parts: str) -> str:
    """The message of the ModelError that `call` raises: it holds all `parts` and fits on a screen."""
    with pytest.raises(ModelError) as caught:
        call()
    message = str(caught.value)
    for part in (*parts, "fix:"):
        assert part in message
    assert len(message.splitlines()) <= 6
    return message
