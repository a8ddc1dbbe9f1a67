"""Targets and drafters from Hugging Face folders: config read and checked, weights loaded, the pair checked
for fit.

A drafter that does not fit its target would often run, and accept next to nothing: every dimension the two
share is therefore compared here, and the vocabularies by content, since equal sizes prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from algorithms.runtime.models.config import DecoderConfig, DFlashConfig
from algorithms.runtime.models.decoder import Decoder
from algorithms.runtime.models.dflash import DFlashDrafter
from algorithms.runtime.models.eagle_config import Eagle3Config, EagleConfig
from algorithms.runtime.models.folder import ModelError, read_json, resolve_folder
from algorithms.runtime.models.tokenizer import TOKENIZER_FILE, Tokenizer
from algorithms.runtime.models.weights import load_weights, stored_tensors

__all__ = [
    "ModelError",
    "Target",
    "TargetFolder",
    "TargetShape",
    "load_dflash",
    "load_draft",
    "load_target",
    "read_dflash",
    "read_draft",
    "read_target",
    "resolve_folder",
]

CONFIG_FILE = "config.json"
OTHER_DRAFTER = "use the drafter that was trained for this target, or the target it was trained for"
# Extensions of later DFlash families that change the computation; ignored, they would quietly spoil drafts.
UNSUPPORTED_DFLASH = (
    "attention_sink_bias",
    "attention_value_scale",
    "conv_kernel_size",
    "output_multiplier",
    "projector_type",
    "selector_rank",
)


Config = TypeVar("Config", DecoderConfig, DFlashConfig, EagleConfig, Eagle3Config)


class TargetShape(Protocol):
    """What a drafter must fit: a target whose weights need not be loaded."""

    @property
    def config(self) -> DecoderConfig: ...

    @property
    def path(self) -> Path: ...


@dataclass(frozen=True)
class TargetFolder:
    """A folder whose config and tensor names are those of a language model; no weights are read."""

    config: DecoderConfig
    path: Path


@dataclass(frozen=True)
class Target:
    """A loaded target model and the folder it came from."""

    model: Decoder
    config: DecoderConfig
    path: Path


def load_target(path: str | Path, device: torch.device | str, dtype: torch.dtype) -> Target:
    """Load a Qwen3 or Llama folder (or hub name) for inference on `device` in `dtype`; ModelError where it
    cannot be.
    """
    found = read_target(path)
    folder, config = found.path, found.config
    with torch.device("meta"):
        model = Decoder(config)

    def harmless(name: str) -> bool:
        return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")

    load_weights(model, folder, device, dtype, harmless=harmless)
    return Target(model, config, folder)


def read_target(path: str | Path) -> TargetFolder:
    """Find a language model and read its config and the names of its tensors; ModelError where it cannot serve."""
    folder = resolve_folder(path)
    raw = read_config(folder)
    config = parse_config(folder, raw, DecoderConfig.from_hf)
    _check_target_keys(folder, raw)
    _check_language_model(folder, raw)
    return TargetFolder(config, folder)


def _check_language_model(folder: Path, raw: Mapping[str, Any]) -> None:
    """Drafters carry configs of language models: the tensors tell."""
    names = sorted(stored_tensors(folder))
    fused = any(name.removeprefix("model.") == "fc.weight" for name in names)
    if fused or not any(name.startswith("model.layers.") for name in names):
        raise ModelError(
            "this is no language model",
            where=folder,
            expected="tensors model.embed_tokens.weight and model.layers.*",
            actual=f"architectures {raw.get('architectures')}, tensors {', '.join(names[:4])}, ...",
            fix="give the folder of a Qwen3 or Llama model; drafters of other kinds are for the algorithms they "
            "were trained for",
        )


def load_dflash(path: str | Path, target: Target, device: torch.device | str, dtype: torch.dtype) -> DFlashDrafter:
    """Load a DFlash drafter folder (or hub name) that fits `target`; ModelError names what does not fit."""
    folder, config = read_dflash(path, target)
    with torch.device("meta"):
        drafter = DFlashDrafter(config)
    load_weights(
        drafter,
        folder,
        device,
        dtype,
        harmless=lambda name: name.endswith("rotary_emb.inv_freq"),
        optional_prefix="model.",
    )
    return drafter


def read_dflash(path: str | Path, target: TargetShape) -> tuple[Path, DFlashConfig]:
    """Folder and config of a DFlash drafter that fits `target`; no weights are read."""
    folder = resolve_folder(path)
    raw = read_config(folder)
    _check_dflash_keys(folder, raw)
    config = parse_config(folder, raw, DFlashConfig.from_hf)
    check_fit(
        folder,
        target,
        hidden_size=(target.config.hidden_size, config.decoder.hidden_size),
        vocab_size=(target.config.vocab_size, config.decoder.vocab_size),
        num_target_layers=(target.config.num_layers, config.num_target_layers),
    )
    check_tokenizer(folder, target.path)
    return folder, config


def load_draft(path: str | Path, target: Target, device: torch.device | str, dtype: torch.dtype) -> Target:
    """Load a small language model that writes the same tokens as `target`; ModelError names what does not fit.

    Both folders must have a tokenizer: drafted ids mean nothing unless both vocabularies are the same.
    """
    return load_target(read_draft(path, target).path, device, dtype)


def read_draft(path: str | Path, target: TargetShape) -> TargetFolder:
    """The folder of a language model that writes the same tokens as `target`; no weights are read."""
    draft = read_target(path)
    check_fit(draft.path, target, vocab_size=(target.config.vocab_size, draft.config.vocab_size))
    for place in (draft.path, target.path):
        if not (place / TOKENIZER_FILE).is_file():
            raise ModelError(
                "the vocabularies of draft and target cannot be compared",
                where=place,
                expected=TOKENIZER_FILE,
                fix="save the tokenizer beside weights: AutoTokenizer.from_pretrained(name).save_pretrained(folder)",
            )
    check_tokenizer(draft.path, target.path)
    return draft


def refuse_extensions(folder: Path, kind: str, extensions: list[str]) -> None:
    if extensions:
        raise ModelError(
            f"the drafter uses extensions of {kind} that are not supported",
            where=folder / CONFIG_FILE,
            actual=", ".join(extensions),
            fix=f"use a drafter of the original {kind} architecture",
        )


def read_config(folder: Path) -> dict[str, Any]:
    return read_json(folder / CONFIG_FILE, fix="give a Hugging Face model folder: config.json beside the weights")


def parse_config(folder: Path, raw: Mapping[str, Any], from_hf: Callable[[Mapping[str, Any]], Config]) -> Config:
    try:
        return from_hf(raw)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ModelError(
            "the model config cannot be used",
            where=folder / CONFIG_FILE,
            actual=str(error),
            fix="use a supported model, or restore the published config.json",
        ) from error


def _check_target_keys(folder: Path, raw: Mapping[str, Any]) -> None:
    """Refuse what the config asks for and the decoder would leave out without any tensor to show for it."""
    sliding = bool(raw.get("use_sliding_window")) or "sliding_attention" in (raw.get("layer_types") or ())
    # transformers 5 writes it beside the other rope parameters.
    partial = {**raw, **(raw.get("rope_parameters") or {})}.get("partial_rotary_factor", 1.0)
    asked = {
        "sliding-window attention": sliding,
        f"partial_rotary_factor={partial}": partial != 1.0,
        "quantization_config": bool(raw.get("quantization_config")),
    }
    unsupported = [name for name, present in asked.items() if present]
    if unsupported:
        raise ModelError(
            "the target uses features that are not supported",
            where=folder / CONFIG_FILE,
            actual=", ".join(unsupported),
            fix="use an unquantised Qwen3 or Llama checkpoint with full attention",
        )


def _check_dflash_keys(folder: Path, raw: Mapping[str, Any]) -> None:
    nested = raw.get("dflash_config") or {}
    entries = {**raw, **nested}
    if entries.get("mask_token_id") is None or entries.get("num_target_layers") is None:
        raise ModelError(
            "this is no DFlash drafter",
            where=folder / CONFIG_FILE,
            expected="keys num_target_layers and dflash_config.mask_token_id",
            actual=f"architectures {raw.get('architectures')}",
            fix="give the drafter's folder as model.draft_path",
        )
    refuse_extensions(folder, "DFlash", [f"{key}={entries[key]}" for key in UNSUPPORTED_DFLASH if entries.get(key)])


def check_fit(folder: Path, target: TargetShape, **sizes: tuple[int, int]) -> None:
    """Compare `(target's, drafter's)` sizes."""
    for key, (expected, actual) in sizes.items():
        if expected != actual:
            raise ModelError(
                f"drafter and target do not fit: {key}",
                where=f"{folder / CONFIG_FILE}, against target {target.path}",
                expected=expected,
                actual=actual,
                fix=OTHER_DRAFTER,
            )


def check_tokenizer(folder: Path, target_folder: Path) -> None:
    if not all((place / TOKENIZER_FILE).is_file() for place in (folder, target_folder)):
        return
    expected, actual = Tokenizer.load(target_folder), Tokenizer.load(folder)
    if expected.fingerprint != actual.fingerprint:
        raise ModelError(
            "drafter and target do not fit: tokenizer",
            where=f"{folder / TOKENIZER_FILE}, against target {target_folder}",
            expected=f"the target's vocabulary: {expected.size} tokens, sha256 {expected.fingerprint[:16]}",
            actual=f"{actual.size} tokens, sha256 {actual.fingerprint[:16]}",
            fix=OTHER_DRAFTER,
        )
