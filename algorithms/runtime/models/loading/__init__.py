"""Targets and drafters from Hugging Face folders."""

from algorithms.runtime.models.folder import ModelError, resolve_folder
from algorithms.runtime.models.loading.dflash import load_dflash, read_dflash
from algorithms.runtime.models.loading.eagle import load_eagle, read_eagle
from algorithms.runtime.models.loading.target import (
    Target,
    TargetFolder,
    load_draft,
    load_target,
    read_draft,
    read_target,
)

__all__ = [
    "ModelError",
    "Target",
    "TargetFolder",
    "load_dflash",
    "load_draft",
    "load_eagle",
    "load_target",
    "read_dflash",
    "read_draft",
    "read_eagle",
    "read_target",
    "resolve_folder",
]
