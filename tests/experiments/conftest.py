"""Programs are called in this process here, and Hydra repeats nothing that one time is enough for."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hydra import version
from hydra._internal import config_repository, defaults_list
from hydra._internal.hydra import Hydra
from hydra.core import config_store
from hydra.core.default_element import InputDefault
from omegaconf import DictConfig, OmegaConf, _utils, base, omegaconf
from packaging.version import Version

from algorithms import registry
from experiments.data import arithmetic
from tests.algorithms.tiny_folders import small_config, small_dflash_config, write_dflash, write_target
from tests.algorithms.toy import time_once


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small random models: `target`, `dflash` and `draft`."""
    folder = tmp_path_factory.mktemp("models")
    target = write_target(folder / "target", small_config(num_layers=2))
    write_dflash(folder / "dflash", small_dflash_config(target.config, num_layers=1, target_layer_ids=(0, 1)))
    write_target(folder / "draft", small_config(num_layers=1), seed=2)
    return folder


@pytest.fixture(autouse=True, scope="session")
def steps_timed_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        time_once(patch)
        yield


@pytest.fixture(autouse=True, scope="session")
def composed_once() -> Iterator[None]:
    """Hydra composes every configuration twice, first to read `hydra.mode`, which no configuration here sets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Hydra, "get_mode", lambda self, config_name, overrides: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def schemas_read_once() -> Iterator[None]:
    """A program registers its dataclasses when it starts. The store gives copies of them, so one reading serves all."""
    kept: dict[Any, DictConfig] = {}

    def structured(node: Any) -> DictConfig:
        key = node if isinstance(node, type) else (type(node), repr(node))
        if key not in kept:
            kept[key] = OmegaConf.structured(node)
        return kept[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config_store, "OmegaConf", SimpleNamespace(structured=structured))
        yield


@pytest.fixture(autouse=True, scope="session")
def files_parsed_once() -> Iterator[None]:
    """A text has one meaning, and OmegaConf copies what it is given."""
    parsed = lru_cache(lambda text: yaml.load(text, Loader=_utils.get_yaml_loader()))

    def load(file: Any, Loader: Any) -> Any:
        return parsed(file if isinstance(file, str) else file.read())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(omegaconf, "yaml", SimpleNamespace(**vars(yaml) | {"load": load}))
        yield


@pytest.fixture(autouse=True, scope="session")
def problems_made_once() -> Iterator[None]:
    made = lru_cache(arithmetic.problems)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arithmetic, "problems", lambda *which: list(made(*which)))
        yield


@pytest.fixture(autouse=True, scope="session")
def plugins_sought_once() -> Iterator[None]:
    """What is installed stays. Plugins that a variable names are sought each time."""
    read = registry.algorithms_in
    shipped = lru_cache(read)

    def algorithms_in(package: str) -> dict[str, Any]:
        return dict(shipped(package)) if package == "algorithms" else read(package)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "entry_points", lru_cache(registry.entry_points))
        patch.setattr(registry, "algorithms_in", algorithms_in)
        yield


@pytest.fixture(autouse=True, scope="session")
def schemas_shared() -> Iterator[None]:
    """Hydra copies every registered schema for each composition, to keep one list of sources that it replaces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config_repository, "copy", SimpleNamespace(deepcopy=copy.copy))
        yield


@pytest.fixture(autouse=True, scope="session")
def compositions_shortened() -> Iterator[None]:
    """Trees of interpolations are only read, a map of choices is needed where there are interpolations, and versions
    stay."""
    choices, resolve = defaults_list._create_interpolation_map, InputDefault._resolve_interpolation_impl
    with pytest.MonkeyPatch.context() as patch:
        for module in (base, _utils):
            patch.setattr(module, "parse", lru_cache(base.parse))
        patch.setattr(defaults_list, "_create_interpolation_map", lambda *given: partial(choices, *given))
        patch.setattr(
            InputDefault, "_resolve_interpolation_impl", lambda self, known, value: resolve(self, known(), value)
        )
        newer = lru_cache(lambda least, base: base >= Version(least))
        patch.setattr(version, "base_at_least", lambda least: newer(least, version.getbase()))
        yield
