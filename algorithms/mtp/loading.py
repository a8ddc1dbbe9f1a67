"""MTP heads from a target's own folder, or from a folder that speculators wrote."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from algorithms.models.architectures import find_architecture
from algorithms.models.config import DecoderConfig
from algorithms.models.config_keys import nested
from algorithms.models.folder import ModelError, resolve_folder
from algorithms.models.layers import RMSNorm
from algorithms.models.loading import speculators
from algorithms.models.loading import target as loading
from algorithms.models.loading.stored import check_layers, stored_tensors
from algorithms.models.loading.weights import load_weights
from algorithms.mtp.config import BY_MODEL_TYPE, LAYERS, Family, MTPConfig, family_of
from algorithms.mtp.model import MTPHead
from algorithms.parallel.sharding import shard_drafter

UNSUPPORTED = ("final_logit_softcapping", "draft_vocab_size", "mtp_use_dedicated_embeddings")
COUNT_KEYS = COUNT_KEY, *_ = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
TARGETS_PREFIX = "target."  # what is put before the names of tensors that are not the head's: both may have an LM head


class MTPFolder(NamedTuple):
    """A head that fits its target, before its weights are read."""

    path: Path
    config: MTPConfig
    family: Family
    names: frozenset[str]  # of its tensors, as in `MTPHead`


def load_mtp(
    path: str | Path | None, target: loading.Target, hidden_in: str | None = None, feedback: str | None = None
) -> MTPHead:
    """Load the head in `path`, or in the target's folder if None, and bind it to `target`. `hidden_in` and `feedback`
    win over the family's. ModelError names what does not fit."""
    folder, config, family, names = read_mtp(path, target, hidden_in, feedback)
    with torch.device("meta"):
        own = "embed_tokens.weight" in names, "lm_head.weight" in names
        head = MTPHead(config, target.config.num_layers, *own)

    def rename(name: str) -> str:
        return family.renamed(name) if name.startswith(family.prefix) else TARGETS_PREFIX + name

    others = {name for name in stored_tensors(folder, rename) if name.startswith(TARGETS_PREFIX)}
    weight_format = loading.read_weight_format(folder, loading.read_config(folder))
    given: Any = dict(ignored=others, rename=rename, weight_format=weight_format)
    load_weights(head, folder, target.device, target.dtype, **given)
    for module in head.modules():
        if isinstance(module, RMSNorm) and config.norm_offset:
            module.weight.add_(config.norm_offset)
    head.bind(target.model)
    loading.fit_drafter(folder, head, target)
    shard_drafter(head)
    return head


def read_mtp(
    path: str | Path | None, target: loading.TargetFolder, hidden_in: str | None = None, feedback: str | None = None
) -> MTPFolder:
    """A head that fits `target`, see `load_mtp`; no weights are read."""
    folder = target.path if path is None else resolve_folder(path)
    raw = loading.read_config(folder)
    flat = loading.parse_config(folder, raw, speculators.flatten)
    flat |= loading.parse_config(folder, flat, lambda keys: nested(keys, "text_config"))
    stored = sorted(stored_tensors(folder))
    family = family_of(flat)
    if family is not None:
        family = replace(family, prefix=family.prefix.format(num_layers=target.config.num_layers))
    if family is None or not any(name.startswith(family.prefix) for name in stored):
        heads = ", ".join(f"{each.prefix}* of {key}" for key, each in BY_MODEL_TYPE.items())
        raise ModelError(
            "the target has no MTP head" if path is None else "this is not an MTP head",
            where=folder,
            expected=f"tensors {heads}, or a folder of speculators with speculators_model_type mtp",
            actual=f"model_type {flat.get('model_type')}, {len(stored)} tensors, none of an MTP head",
            fix="use a target with an MTP head, give one as model.draft_path, or take another algorithm",
        )
    names = frozenset(family.renamed(name) for name in stored if name.startswith(family.prefix))
    count = _count_layers(folder, flat, stored, family)
    if "kind" in flat or flat.get(UNSUPPORTED[-1]):
        loading.refuse_extensions(folder, "MTP", flat, UNSUPPORTED)
    decoder = loading.parse_config(folder, flat, DecoderConfig.from_hf)
    loading.check_fit(
        folder,
        target,
        hidden_size=(target.config.hidden_size, decoder.hidden_size),
        vocab_size=(target.config.vocab_size, decoder.vocab_size),
    )
    loading.check_tokenizer(folder, target.path)
    if "kind" in flat and find_architecture(decoder.architecture).norm_offset:
        raise _unsupported(folder, "a layer whose norms are stored as weights", f"model_type {decoder.architecture}")
    config = MTPConfig(
        decoder=_of_head(folder, decoder, names, count),
        first=family.first,
        hidden_in=hidden_in or family.hidden_in,
        feedback=feedback or family.feedback,
        norm_offset=family.norm_offset,
    )
    return MTPFolder(folder, config, family, names)


def _count_layers(folder: Path, flat: dict[str, Any], stored: list[str], family: Family) -> int:
    said = next((int(flat[key]) for key in COUNT_KEYS if flat.get(key)), None)
    if family.names is not None:
        if said is not None and said != 1:
            raise _unsupported(folder, f"one MTP layer with model_type {flat['model_type']}", f"{said} MTP layers")
        return 1
    count = len({name.removeprefix(family.prefix).split(".")[0] for name in stored if name.startswith(family.prefix)})
    check_layers(folder, stored, family.prefix, said or count, COUNT_KEY)
    return count


def _of_head(folder: Path, decoder: DecoderConfig, names: frozenset[str], count: int) -> DecoderConfig:
    """The shape of the head's layers: of the target's kinds, as the tensors say which. Configs do not."""
    first = f"{LAYERS}0."
    if any(name.startswith(f"{first}linear_attn.") for name in names):
        raise _unsupported(folder, "attention or latent attention in the MTP layer", "linear attention")

    def of_head(kinds: tuple[Any, ...], mark: str) -> tuple[Any, ...]:
        kind = next((kind for kind in kinds if kind is not None), None)
        return (kind,) * count if kind is not None and f"{first}{mark}" in names else ()

    return replace(
        decoder,
        num_layers=count,
        sliding_windows=(),
        mixings=of_head(decoder.mixings, "self_attn.kv_a_proj_with_mqa.weight"),
        mlps=of_head(decoder.mlps, "mlp.gate.weight"),
    )


def _unsupported(folder: Path, expected: str, actual: str) -> ModelError:
    return ModelError(
        "this MTP head is not supported",
        where=folder,
        expected=expected,
        actual=actual,
        fix="give another head as model.draft_path, or take another algorithm",
    )
