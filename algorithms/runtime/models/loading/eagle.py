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
    TargetFolder,
    check_fit,
    check_tokenizer,
    parse_config,
    read_config,
    refuse_extensions,
)
from algorithms.runtime.models.loading.weights import load_weights

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
TENSORS = {"EAGLE": "fc.weight and layers.*, no hidden_norm.weight", "EAGLE-3": "fc.weight and midlayer.*"}
"""The kinds of heads, and the tensors that tell them apart."""
# Keys that change the logits of either kind, and norms in other places.
UNSUPPORTED_EAGLE = ("final_logit_softcapping", "logit_scale")
UNSUPPORTED_EAGLE3 = (*UNSUPPORTED_EAGLE, "norm_before_residual", "norm_before_fc")


def load_eagle(
    path: str | Path, target: Target, device: torch.device | str, dtype: torch.dtype, kind: str | None = None
) -> EagleDrafter | Eagle3Drafter:
    """Load an EAGLE or EAGLE-3 head and bind it to `target`; safetensors or the published `pytorch_model.bin`.

    `kind`, "EAGLE" or "EAGLE-3", refuses the other kind. ModelError names what does not fit.
    """
    folder, config, stored = read_eagle(path, target, kind)
    drafter: EagleDrafter | Eagle3Drafter
    with torch.device("meta"):
        if isinstance(config, Eagle3Config):
            drafter = Eagle3Drafter(config, target.config.num_layers, EMBEDDING in stored, HEAD in stored)
            ignored = set() if config.reduced else {"d2t", "t2d"}
        else:
            drafter, ignored = EagleDrafter(config, EMBEDDING in stored), {HEAD}  # some heads repeat the target's
    load_weights(drafter, folder, device, dtype, ignored=ignored, optional_prefix="model.", pickles=True)
    if isinstance(drafter, Eagle3Drafter) and drafter.config.reduced:
        _check_vocabulary(folder, drafter)
    drafter.bind(target.model)
    return drafter


def read_eagle(
    path: str | Path, target: TargetFolder, kind: str | None = None
) -> tuple[Path, EagleConfig | Eagle3Config, dict[str, Stored]]:
    """Folder, config and tensor headers of a head that fits `target`, see `load_eagle`; no weights are read."""
    folder = resolve_folder(path, pickles=True)
    raw, stored = read_config(folder), stored_tensors(folder, "model.", pickles=True)
    config: EagleConfig | Eagle3Config
    if _kind_of(folder, raw, stored, kind) == "EAGLE-3":
        refuse_extensions(folder, "EAGLE-3", {**raw, **(raw.get("eagle_config") or {})}, UNSUPPORTED_EAGLE3)
        config = parse_config(folder, raw, Eagle3Config.from_hf)
        _check_eagle3_fit(folder, target, config, stored)
    else:
        refuse_extensions(folder, "EAGLE", raw, UNSUPPORTED_EAGLE)
        config = parse_config(folder, raw, EagleConfig.from_hf)
        check_fit(
            folder,
            target,
            hidden_size=(target.config.hidden_size, config.decoder.hidden_size),
            vocab_size=(target.config.vocab_size, config.decoder.vocab_size),
            draft_vocab_size=(target.config.vocab_size, int(raw.get("draft_vocab_size") or target.config.vocab_size)),
        )
    check_tokenizer(folder, target.path)
    return folder, config, stored


def _kind_of(folder: Path, raw: Mapping[str, Any], stored: Mapping[str, Stored], wanted: str | None) -> str:
    """The kind of head that the tensors are; ModelError where they are none, or not the `wanted` one."""
    starts = {name.split(".")[0] for name in stored}
    found = None
    if "fc.weight" in stored and "midlayer" in starts:
        found = "EAGLE-3"
    elif "fc.weight" in stored and "layers" in starts and "hidden_norm" not in starts:  # DFlash drafters have both
        found = "EAGLE"
    if found is not None and wanted in (None, found):
        return found
    wanted = wanted or "EAGLE"
    raise ModelError(
        f"this is not an {wanted} head",
        where=folder,
        expected=f"tensors {TENSORS[wanted]}",
        actual=f"architectures {raw.get('architectures')}, tensors {', '.join(sorted(stored)[:4])}, ...",
        fix="give the head's folder as model.draft_path; EAGLE-3 heads are for algo=eagle3, older ones for algo=eagle, "
        "DFlash drafters for algo=dflash",
    )


def _check_eagle3_fit(folder: Path, target: TargetFolder, config: Eagle3Config, stored: Mapping[str, Stored]) -> None:
    sizes = {
        "target_hidden_size": (target.config.hidden_size, config.target_hidden_size),
        "vocab_size": (target.config.vocab_size, config.decoder.vocab_size),
    }
    if EMBEDDING not in stored or HEAD not in stored:  # the target's serves, and must have the head's width
        sizes["hidden_size"] = (target.config.hidden_size, config.decoder.hidden_size)
    if HEAD not in stored:
        sizes["draft_vocab_size without an LM head of its own"] = (target.config.vocab_size, config.draft_vocab_size)
    check_fit(folder, target, **sizes)
    try:
        config.layer_ids(target.config.num_layers)
    except ValueError as error:
        raise ModelError(
            "drafter and target do not fit: captured layers",
            where=f"{folder / CONFIG_FILE}, against target {target.path}",
            actual=str(error),
            fix=OTHER_DRAFTER,
        ) from error


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
