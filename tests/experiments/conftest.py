"""Programs are called in this process here, and Hydra repeats nothing that one time is enough for."""

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
def patch_of_the_session() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        time_once(patch)
        for repeat_nothing in (compose_once, read_schemas_once, read_files_once, shorten_compositions, look_once):
            repeat_nothing(patch)
        yield


def compose_once(patch: pytest.MonkeyPatch) -> None:
    """Hydra composes every configuration twice, first to read `hydra.mode`, which no configuration here sets."""
    patch.setattr(Hydra, "get_mode", lambda self, config_name, overrides: None)


def read_schemas_once(patch: pytest.MonkeyPatch) -> None:
    """A program registers its dataclasses when it starts. The store gives copies of them, so one reading serves all,
    and Hydra need not copy every schema for each composition, to keep one list of sources that it replaces."""
    kept: dict[Any, DictConfig] = {}

    def structured(node: Any) -> DictConfig:
        key = node if isinstance(node, type) else (type(node), repr(node))
        if key not in kept:
            kept[key] = OmegaConf.structured(node)
        return kept[key]

    patch.setattr(config_store, "OmegaConf", SimpleNamespace(structured=structured))
    patch.setattr(config_repository, "copy", SimpleNamespace(deepcopy=copy.copy))


def read_files_once(patch: pytest.MonkeyPatch) -> None:
    """A text has one meaning, and OmegaConf copies what it is given."""
    parsed = lru_cache(lambda text: yaml.load(text, Loader=_utils.get_yaml_loader()))

    def load(file: Any, Loader: Any) -> Any:
        return parsed(file if isinstance(file, str) else file.read())

    patch.setattr(omegaconf, "yaml", SimpleNamespace(**vars(yaml) | {"load": load}))


def shorten_compositions(patch: pytest.MonkeyPatch) -> None:
    """Trees of interpolations are only read, a map of choices is needed where there are interpolations, and versions
    stay."""
    choices, resolve = defaults_list._create_interpolation_map, InputDefault._resolve_interpolation_impl
    parsed = lru_cache(base.parse)
    for module in (base, _utils):
        patch.setattr(module, "parse", parsed)
    patch.setattr(defaults_list, "_create_interpolation_map", lambda *given: partial(choices, *given))
    patch.setattr(InputDefault, "_resolve_interpolation_impl", lambda self, known, value: resolve(self, known(), value))
    newer = lru_cache(lambda least, base: base >= Version(least))
    patch.setattr(version, "base_at_least", lambda least: newer(least, version.getbase()))


def look_once(patch: pytest.MonkeyPatch) -> None:
    """What is installed stays, and so do the problems. Plugins that a variable names are sought each time."""
    read, made = registry.algorithms_in, lru_cache(arithmetic.problems)
    shipped = lru_cache(read)

    def algorithms_in(package: str) -> dict[str, Any]:
        return dict(shipped(package)) if package == "algorithms" else read(package)

    patch.setattr(registry, "entry_points", lru_cache(registry.entry_points))
    patch.setattr(registry, "algorithms_in", algorithms_in)
    patch.setattr(arithmetic, "problems", lambda *which: list(made(*which)))
