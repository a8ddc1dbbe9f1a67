"""Targets and draft models from Hugging Face folders."""

from algorithms.models.folder import ModelError, resolve_folder
from algorithms.models.loading.target import Target, TargetFolder, load_draft, load_target, read_draft, read_target

__all__ = [
    "ModelError", "Target", "TargetFolder", "load_draft", "load_target", "read_draft", "read_target", "resolve_folder",
]  # fmt: skip
