"""EAGLE, EAGLE-3 and P-EAGLE heads from published folders, many without an embedding or safetensors. Their configs look
like configs of language models, so the tensors decide which kind of head a folder holds."""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from algorithms.eagle.config import Eagle3Config, EagleConfig
from algorithms.eagle.formats import EAGLE, EAGLE3, MASK_HIDDEN, P_EAGLE, eagle3_name, kind_of, normalise
from algorithms.eagle.model import Eagle3Drafter, EagleDrafter
from algorithms.models.folder import ModelError, resolve_folder
from algorithms.models.loading import speculators
from algorithms.models.loading import target as loading
from algorithms.models.loading.stored import Stored, check_layers, stored_tensors, without_model
from algorithms.models.loading.weights import load_weights
from algorithms.parallel.sharding import shard_drafter

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
VERIFIER = {"verifier_lm_head.weight", "verifier_norm.weight"}
TENSORS = {
    EAGLE: "fc.weight and layers.*, no hidden_norm.weight",
    EAGLE3: "fc.weight, and midlayer.* or layers.0.hidden_norm.weight",
    P_EAGLE: "those of EAGLE-3 and mask_hidden, or a key that names a mask token",
}
UNSUPPORTED = (
    "input_embedding_scale", "causal_head", "enable_confidence_head", "final_logit_softcapping", "num_anchors",
    "projector_type", "sample_from_anchor",
)  # fmt: skip
"""Keys that change the logits, or say that the file is a block drafter's."""
UNSUPPORTED_EAGLE = (*UNSUPPORTED, "fc_norm", "norm_before_fc", "norm_before_residual")


def load_eagle(
    path: str | Path, target: loading.Target, kind: str | None = None, mask_token: int | None = None
) -> EagleDrafter | Eagle3Drafter:
    """Load a head and bind it to `target`. `kind`, one of `formats.KINDS`, refuses the others; None takes EAGLE and
    EAGLE-3. `mask_token` is P-EAGLE's, where the folder names none. ModelError names what does not fit."""
    folder, config, stored = read_eagle(path, target, kind, mask_token)
    head: EagleDrafter | Eagle3Drafter
    ignored, rename = {HEAD}, without_model
    own_embedding, own_head = EMBEDDING in stored, HEAD in stored
    if isinstance(config, EagleConfig):
        with torch.device("meta"):
            head = EagleDrafter(config, own_embedding)
    else:
        mask_shape = stored[MASK_HIDDEN].shape if MASK_HIDDEN in stored else None
        with torch.device("meta"):
            head = Eagle3Drafter(config, target.config.num_layers, own_embedding, own_head, mask_shape)
        ignored, rename = VERIFIER if config.reduced else {*VERIFIER, "d2t", "t2d"}, eagle3_name
    load_weights(head, folder, target.device, target.dtype, ignored=ignored, rename=rename, pickles=True)
    head.bind(target.model)
    loading.fit_drafter(folder, head, target)
    shard_drafter(head)
    return head


def read_eagle(
    path: str | Path, target: loading.TargetFolder, kind: str | None = None, mask_token: int | None = None
) -> tuple[Path, EagleConfig | Eagle3Config, dict[str, Stored]]:
    """Folder, config and tensor headers of a head that fits, see `load_eagle`; of weights one norm is read at most."""
    folder = resolve_folder(path, pickles=True)
    raw = loading.read_config(folder)
    stored = stored_tensors(folder, without_model, pickles=True)
    flat = loading.parse_config(folder, raw, speculators.flatten)
    found = _checked_kind(folder, flat, stored, kind)
    if found == EAGLE:
        config: EagleConfig | Eagle3Config = _read_eagle1(folder, target, raw, stored)
    else:
        stored = {eagle3_name(name): tensor for name, tensor in stored.items()}
        config = _read_eagle3(folder, target, flat, stored, found, mask_token)
    loading.check_tokenizer(folder, target.path)
    return folder, config, stored


def _checked_kind(folder: Path, flat: Mapping[str, Any], stored: Mapping[str, Stored], wanted: str | None) -> str:
    found = kind_of(flat, stored)
    if found is not None and (found == wanted or (wanted is None and found != P_EAGLE)):
        return found
    wanted = wanted or EAGLE
    said = {"architectures": flat.get("architectures"), "speculators_model_type": flat.get("kind")}
    shown = ", ".join(f"{key} {value}" for key, value in said.items() if value is not None or key == "architectures")
    raise ModelError(
        f"this is not an {wanted} head" if wanted != P_EAGLE else "this is not a P-EAGLE head",
        where=folder,
        expected=f"tensors {TENSORS[wanted]}",
        actual=f"{shown}, tensors {', '.join(sorted(stored)[:4])}, ...",
        fix="give the head's folder as model.draft_path; EAGLE-3 heads are for algo=eagle3, P-EAGLE heads for "
        "algo=peagle, older ones for algo=eagle, DFlash drafters for algo=dflash",
    )


def _read_eagle1(
    folder: Path, target: loading.TargetFolder, raw: Mapping[str, Any], stored: Mapping[str, Stored]
) -> EagleConfig:
    loading.refuse_extensions(folder, EAGLE, raw, UNSUPPORTED_EAGLE)
    config = loading.parse_config(folder, raw, EagleConfig.from_hf)
    check_layers(folder, stored, "layers.", config.decoder.num_layers)
    vocab_size = target.config.vocab_size
    loading.check_fit(
        folder,
        target,
        hidden_size=(target.config.hidden_size, config.decoder.hidden_size),
        vocab_size=(vocab_size, config.decoder.vocab_size),
        draft_vocab_size=(vocab_size, int(raw.get("draft_vocab_size") or vocab_size)),
    )
    return config


def _read_eagle3(
    folder: Path,
    target: loading.TargetFolder,
    flat: Mapping[str, Any],
    stored: Mapping[str, Stored],
    kind: str,
    mask_token: int | None,
) -> Eagle3Config:
    num_layers = target.config.num_layers
    entries = loading.parse_config(folder, flat, lambda keys: normalise(keys, stored, kind, num_layers, mask_token))
    loading.refuse_extensions(folder, kind, entries, UNSUPPORTED)
    if (kind == P_EAGLE or entries.get("embed_requires_grad")) and EMBEDDING not in stored:
        raise ModelError(
            "the head was trained with an embedding of its own, and the weights have none",
            where=folder,
            expected=f"tensor {EMBEDDING}",
            fix="restore the tensor: the target's embedding would give other drafts",
        )
    config = loading.parse_config(folder, entries, Eagle3Config.from_hf)
    sizes = {
        "target_hidden_size": (target.config.hidden_size, config.target_hidden_size),
        "vocab_size": (target.config.vocab_size, config.decoder.vocab_size),
    }
    if EMBEDDING not in stored or HEAD not in stored:  # the target's serves, and must have the head's width
        sizes["hidden_size"] = (target.config.hidden_size, config.decoder.hidden_size)
    if HEAD not in stored:
        sizes["draft_vocab_size without an LM head of its own"] = (target.config.vocab_size, config.draft_vocab_size)
    if MASK_HIDDEN in stored:
        features = config.num_features * config.target_hidden_size
        sizes[f"values of {MASK_HIDDEN}"] = (features, prod(stored[MASK_HIDDEN].shape))
    loading.check_fit(folder, target, **sizes)
    try:
        config.layer_ids(num_layers)
    except ValueError as error:
        raise ModelError(
            "drafter and target do not fit: target layers",
            where=f"{folder / loading.CONFIG_FILE}, against target {target.path}",
            actual=str(error),
            fix=loading.OTHER_DRAFTER,
        ) from error
    return config
