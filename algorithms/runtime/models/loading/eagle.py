"""EAGLE and EAGLE-3 heads from published folders.

Most heads are published without an embedding and many without safetensors. Their configs look like those of language
models, so the tensors decide which kind of head a folder holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from algorithms.runtime.models.config.eagle import Eagle3Config, EagleConfig
from algorithms.runtime.models.drafters.eagle import Eagle3Drafter, EagleDrafter
from algorithms.runtime.models.folder import ModelError, resolve_folder
from algorithms.runtime.models.loading.stored import Stored, stored_tensors
from algorithms.runtime.models.loading.target import (
    CONFIG_FILE,
    OTHER_DRAFTER,
    Target,
    TargetShape,
    check_fit,
    check_tokenizer,
    parse_config,
    read_config,
    refuse_extensions,
)
from algorithms.runtime.models.loading.weights import load_weights

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
# Norms in other places, which have no tensors of their own.
UNSUPPORTED_EAGLE3 = ("norm_before_residual", "norm_before_fc", "fc_norm")


def load_eagle(path: str | Path, target: Target, device: torch.device | str, dtype: torch.dtype) -> EagleDrafter:
    """Load an EAGLE head, safetensors or the published `pytorch_model.bin`, and bind it to `target`.

    ModelError names what does not fit.
    """
    folder, config, stored = read_eagle(path, target)
    with torch.device("meta"):
        drafter = EagleDrafter(config, own_embedding=EMBEDDING in stored)
    # Some published heads repeat the target's LM head.
    load_weights(drafter, folder, device, dtype, ignored={HEAD}, optional_prefix="model.", pickles=True)
    drafter.bind(target.model)
    return drafter


def read_eagle(path: str | Path, target: TargetShape) -> tuple[Path, EagleConfig, dict[str, Stored]]:
    """Folder, config and tensor headers of an EAGLE head that fits `target`; no weights are read."""
    folder, raw, stored = _open_head(path)
    # A DFlash drafter has fc and layers too, and normalises what fc returns.
    fits = _has(stored, "layers.") and "hidden_norm.weight" not in stored
    _check_kind(folder, raw, stored, fits, "EAGLE", "fc.weight and layers.*, no hidden_norm.weight")
    config = parse_config(folder, raw, EagleConfig.from_hf)
    check_fit(
        folder,
        target,
        hidden_size=(target.config.hidden_size, config.decoder.hidden_size),
        vocab_size=(target.config.vocab_size, config.decoder.vocab_size),
    )
    check_tokenizer(folder, target.path)
    return folder, config, stored


def load_eagle3(path: str | Path, target: Target, device: torch.device | str, dtype: torch.dtype) -> Eagle3Drafter:
    """Load an EAGLE-3 head as SafeAILab or SpecForge write it, and bind it to `target`.

    ModelError names what does not fit.
    """
    folder, config, stored = read_eagle3(path, target)
    with torch.device("meta"):
        drafter = Eagle3Drafter(config, target.config.num_layers, EMBEDDING in stored, HEAD in stored)
    ignored = set() if config.reduced else {"d2t", "t2d"}
    load_weights(drafter, folder, device, dtype, ignored=ignored, optional_prefix="model.", pickles=True)
    if config.reduced:
        _check_vocabulary(folder, drafter)
    drafter.bind(target.model)
    return drafter


def read_eagle3(path: str | Path, target: TargetShape) -> tuple[Path, Eagle3Config, dict[str, Stored]]:
    """Folder, config and tensor headers of an EAGLE-3 head that fits `target`; no weights are read."""
    folder, raw, stored = _open_head(path)
    _check_kind(folder, raw, stored, _has(stored, "midlayer."), "EAGLE-3", "fc.weight and midlayer.*")
    refuse_extensions(folder, "EAGLE-3", {**raw, **(raw.get("eagle_config") or {})}, UNSUPPORTED_EAGLE3)
    config = parse_config(folder, raw, Eagle3Config.from_hf)
    sizes = {
        "target_hidden_size": (target.config.hidden_size, config.target_hidden_size),
        "vocab_size": (target.config.vocab_size, config.decoder.vocab_size),
    }
    if EMBEDDING not in stored or HEAD not in stored:  # the target's serves, and must have the head's width
        sizes["hidden_size"] = (target.config.hidden_size, config.decoder.hidden_size)
    if HEAD not in stored:
        sizes["draft_vocab_size without an LM head of its own"] = (target.config.vocab_size, config.draft_vocab_size)
    check_fit(folder, target, **sizes)
    check_tokenizer(folder, target.path)
    try:
        config.layer_ids(target.config.num_layers)
    except ValueError as error:
        raise ModelError(
            "drafter and target do not fit: captured layers",
            where=f"{folder / CONFIG_FILE}, against target {target.path}",
            actual=str(error),
            fix=OTHER_DRAFTER,
        ) from error
    return folder, config, stored


def load_eagle_head(
    path: str | Path, target: Target, device: torch.device | str, dtype: torch.dtype
) -> EagleDrafter | Eagle3Drafter:
    """Load an EAGLE or EAGLE-3 head, whichever the folder holds; ModelError names what does not fit."""
    folder, _, stored = _open_head(path)
    load = load_eagle3 if _has(stored, "midlayer.") else load_eagle
    return load(folder, target, device, dtype)


def read_eagle_head(
    path: str | Path, target: TargetShape
) -> tuple[Path, EagleConfig | Eagle3Config, dict[str, Stored]]:
    """Folder, config and tensor headers of an EAGLE or EAGLE-3 head; no weights are read."""
    folder, _, stored = _open_head(path)
    return read_eagle3(folder, target) if _has(stored, "midlayer.") else read_eagle(folder, target)


def _has(stored: Mapping[str, Stored], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in stored)


def _open_head(path: str | Path) -> tuple[Path, dict[str, Any], dict[str, Stored]]:
    folder = resolve_folder(path, pickles=True)
    return folder, read_config(folder), stored_tensors(folder, "model.", pickles=True)


def _check_kind(
    folder: Path, raw: Mapping[str, Any], stored: Mapping[str, Stored], fits: bool, kind: str, tensors: str
) -> None:
    if fits and "fc.weight" in stored:
        return
    raise ModelError(
        f"this is not an {kind} head",
        where=folder,
        expected=f"tensors {tensors}",
        actual=f"architectures {raw.get('architectures')}, tensors {', '.join(sorted(stored)[:4])}, ...",
        fix="give the head's folder as model.draft_path; EAGLE-3 heads are for algo=eagle3, older ones for algo=eagle, "
        "DFlash drafters for algo=dflash",
    )


def _check_vocabulary(folder: Path, drafter: Eagle3Drafter) -> None:
    """`d2t` must hold offsets. If it held ids instead, the drafts would be valid tokens and wrong ones."""
    ids = drafter.to_target(torch.arange(drafter.draft_vocab_size, device=drafter.d2t.device)).cpu()
    marked = drafter.t2d.cpu().nonzero().squeeze(-1)
    if not torch.equal(ids, marked):
        raise ModelError(
            "the draft vocabulary contradicts itself",
            where=folder,
            expected=f"d2t[i] + i to be the {len(ids)} ids that t2d marks, in rising order",
            actual=f"t2d marks {len(marked)} ids, d2t leads to {ids[:4].tolist()}, ...",
            fix="restore d2t and t2d as the head was trained with",
        )
