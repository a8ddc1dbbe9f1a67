"""DFlash drafters from published folders."""

from __future__ import annotations

from pathlib import Path

import torch

from algorithms.runtime.models.config.dflash import DFlashConfig
from algorithms.runtime.models.drafters.dflash import DFlashDrafter
from algorithms.runtime.models.folder import ModelError, resolve_folder
from algorithms.runtime.models.loading.target import (
    CONFIG_FILE,
    Target,
    TargetFolder,
    check_fit,
    check_tokenizer,
    parse_config,
    read_config,
    refuse_extensions,
)
from algorithms.runtime.models.loading.weights import load_weights

# Extensions of later DFlash families that change the computation.
UNSUPPORTED = (
    "add_swa_attention_sink_bias",
    "attention_sink_bias",
    "attention_value_scale",
    "conv_kernel_size",
    "logit_scale",
    "output_multiplier",
    "projector_type",
    "selector_rank",
    "shift_label",
    "use_confidence_head",
)


def load_dflash(path: str | Path, target: Target, device: torch.device | str, dtype: torch.dtype) -> DFlashDrafter:
    """Load a DFlash drafter's folder or hub name that fits `target`; ModelError names what does not fit."""
    folder, config = read_dflash(path, target)
    with torch.device("meta"):
        drafter = DFlashDrafter(config)
    load_weights(drafter, folder, device, dtype, optional_prefix="model.")
    return drafter


def read_dflash(path: str | Path, target: TargetFolder) -> tuple[Path, DFlashConfig]:
    """Folder and config of a DFlash drafter that fits `target`; no weights are read."""
    folder = resolve_folder(path)
    raw = read_config(folder)
    entries = {**raw, **(raw.get("dflash_config") or {})}
    if entries.get("mask_token_id") is None or entries.get("num_target_layers") is None:
        raise ModelError(
            "this is not a DFlash drafter",
            where=folder / CONFIG_FILE,
            expected="keys num_target_layers and dflash_config.mask_token_id",
            actual=f"architectures {raw.get('architectures')}",
            fix="give the drafter's folder as model.draft_path",
        )
    refuse_extensions(folder, "DFlash", entries, UNSUPPORTED)
    config = parse_config(folder, raw, DFlashConfig.from_hf)
    check_fit(
        folder,
        target,
        hidden_size=(target.config.hidden_size, config.decoder.hidden_size),
        vocab_size=(target.config.vocab_size, config.decoder.vocab_size),
        num_target_layers=(target.config.num_layers, config.num_target_layers),
        draft_vocab_size=(target.config.vocab_size, int(entries.get("draft_vocab_size") or target.config.vocab_size)),
    )
    check_tokenizer(folder, target.path)
    return folder, config
