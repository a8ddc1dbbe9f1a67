"""Block drafters from published folders."""

from dataclasses import replace
from pathlib import Path

import torch

from algorithms.dflash.config import DFlashConfig
from algorithms.dflash.formats import normalise, tensor_name
from algorithms.dflash.model import DFlashDrafter
from algorithms.models.folder import ModelError, resolve_folder
from algorithms.models.loading import target as loading
from algorithms.models.loading.stored import check_layers, stored_tensors
from algorithms.models.loading.weights import load_weights
from algorithms.parallel.sharding import shard_drafter

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
VOCABULARY = ("d2t", "t2d")
UNSUPPORTED = (
    "add_swa_attention_sink_bias", "attention_sink_bias", "attention_value_scale", "shift_label",
)  # fmt: skip
"""Keys of families whose computation differs."""


def load_dflash(path: str | Path, target: loading.Target) -> DFlashDrafter:
    """Load a block drafter's folder or hub name that fits `target`; ModelError names what does not fit."""
    folder, config = read_dflash(path, target)
    with torch.device("meta"):
        drafter = DFlashDrafter(config)
    ignored = {*(() if config.reduced else VOCABULARY), "verifier_lm_head.weight", "verifier_norm.weight"}
    load_weights(drafter, folder, target.device, target.dtype, ignored=ignored, rename=tensor_name)
    loading.fit_drafter(folder, drafter, target)
    shard_drafter(drafter)
    return drafter


def read_dflash(path: str | Path, target: loading.TargetFolder) -> tuple[Path, DFlashConfig]:
    """Folder and config of a block drafter that fits `target`; no weights are read."""
    folder = resolve_folder(path)
    raw, stored = loading.read_config(folder), stored_tensors(folder, tensor_name)
    entries = loading.parse_config(folder, raw, lambda config: normalise(config, stored, target.config.num_layers))
    if entries.get("mask_token_id") is None:
        raise ModelError(
            "this is not a DFlash drafter",
            where=folder / loading.CONFIG_FILE,
            expected="the key mask_token_id, in dflash_config or beside it",
            actual=f"architectures {raw.get('architectures')}",
            fix="give the drafter's folder as model.draft_path",
        )
    loading.refuse_extensions(folder, "DFlash", entries, UNSUPPORTED)
    config = loading.parse_config(folder, entries, DFlashConfig.from_hf)
    config = replace(config, owns_embedding=EMBEDDING in stored, owns_head=HEAD in stored)
    check_layers(folder, stored, "layers.", config.decoder.num_layers)
    sizes = {
        "hidden_size": (target.config.hidden_size, config.decoder.hidden_size),
        "vocab_size": (target.config.vocab_size, config.decoder.vocab_size),
        "num_target_layers": (target.config.num_layers, config.num_target_layers),
        "target_hidden_size": (target.config.hidden_size, entries.get("target_hidden_size", target.config.hidden_size)),
    }
    if not config.owns_head:
        sizes["draft_vocab_size without an LM head of its own"] = (target.config.vocab_size, config.num_known)
    loading.check_fit(folder, target, **sizes)
    loading.check_tokenizer(folder, target.path)
    return folder, config
