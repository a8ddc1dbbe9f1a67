"""MTP heads from a target's own folder, or from a folder that speculators wrote."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from algorithms.models.config import DecoderConfig
from algorithms.models.folder import ModelError, resolve_folder
from algorithms.models.layers import RMSNorm
from algorithms.models.loading import speculators
from algorithms.models.loading import target as loading
from algorithms.models.loading.stored import check_layers, stored_tensors
from algorithms.models.loading.weights import load_weights
from algorithms.mtp.config import MTPConfig
from algorithms.mtp.formats import BY_MODEL_TYPE, Family, family_of
from algorithms.mtp.model import MTPHead

LAYERS = "mtp_layers."
UNSUPPORTED = ("final_logit_softcapping", "draft_vocab_size")
COUNT_KEY = "num_nextn_predict_layers"


def load_mtp(
    path: str | Path | None,
    target: loading.Target,
    device: torch.device | str,
    dtype: torch.dtype,
    hidden_in: str | None = None,
    feedback: str | None = None,
) -> MTPHead:
    """Load the head in `path`, or in the target's folder if None, and bind it to `target`. `hidden_in` and `feedback`
    win over the family's. ModelError names what does not fit."""
    folder, config, family = read_mtp(path, target, hidden_in, feedback)
    with torch.device("meta"):
        head = MTPHead(config, target.config.num_layers)
    others = {name for name in stored_tensors(folder) if not name.startswith(family.prefix)}
    load_weights(
        head,
        folder,
        device,
        dtype,
        ignored=others,
        rename=lambda name: name.replace(family.prefix, LAYERS, 1),
        weight_format=loading.read_weight_format(folder, loading.read_config(folder)),
    )
    for module in head.modules():
        if isinstance(module, RMSNorm) and config.norm_offset:
            module.weight.add_(config.norm_offset)
    head.bind(target.model)
    return head


def read_mtp(
    path: str | Path | None,
    target: loading.TargetFolder,
    hidden_in: str | None = None,
    feedback: str | None = None,
) -> tuple[Path, MTPConfig, Family]:
    """Folder, config and family of a head that fits `target`, see `load_mtp`; no weights are read."""
    folder = target.path if path is None else resolve_folder(path)
    raw = loading.read_config(folder)
    flat = loading.parse_config(folder, raw, speculators.flatten)
    family, names = family_of(flat), sorted(stored_tensors(folder))
    if family is None or not any(name.startswith(family.prefix) for name in names):
        heads = ", ".join(f"tensors {each.prefix}* of model_type {key}" for key, each in BY_MODEL_TYPE.items())
        raise ModelError(
            "the target has no MTP head" if path is None else "this is not an MTP head",
            where=folder,
            expected=f"{heads}, or a folder of speculators with speculators_model_type mtp",
            actual=f"model_type {flat.get('model_type')}, {len(names)} tensors, none of an MTP head",
            fix="use a target with an MTP head, give one as model.draft_path, or take another algorithm",
        )
    count = len({name.removeprefix(family.prefix).split(".")[0] for name in names if name.startswith(family.prefix)})
    check_layers(folder, names, family.prefix, int(flat.get(COUNT_KEY) or count), COUNT_KEY)
    if "kind" in flat:
        loading.refuse_extensions(folder, "MTP", flat, UNSUPPORTED)
    decoder = loading.parse_config(folder, flat, DecoderConfig.from_hf)
    loading.check_fit(
        folder,
        target,
        hidden_size=(target.config.hidden_size, decoder.hidden_size),
        vocab_size=(target.config.vocab_size, decoder.vocab_size),
    )
    loading.check_tokenizer(folder, target.path)
    config = MTPConfig(
        decoder=replace(decoder, num_layers=count, sliding_windows=()),
        first=family.first,
        hidden_in=hidden_in or family.hidden_in,
        feedback=feedback or family.feedback,
        norm_offset=family.norm_offset,
    )
    return folder, config, family
