"""The text of `python run.py --help`: groups with their options, and the keys of the chosen options.

The meanings are the docstrings after the fields of the configuration dataclasses.
"""

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from functools import lru_cache
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, ListConfig, OmegaConf

from experiments.app.compose import MAIN_CONFIG
from experiments.app.schema import CONFIG_FOLDER

HEAD = """\
Decode prompts speculatively, check the output, and show the time of each phase.

  python run.py algo=dflash backend=fa4 data.limit=16
  python run.py data=prompt 'data.text="How many eggs are in three boxes of 12?"'
  python run.py -m data=arithmetic,code sampling.temperature=0,0.7
  python run.py model=local model.path=FOLDER_OR_HUB_NAME model.draft_path=FOLDER_OR_HUB_NAME
  python run.py resume=FOLDER

-m runs once for each of several values; --cfg job shows the configuration; --help algo=eagle3 shows the keys of eagle3.

Groups, as group=option (* is chosen):
"""
WIDTH = 120


def manual(overrides: Sequence[str]) -> str:
    """The help text for the options that `overrides` choose. Raises Hydra's errors for one that does not exist."""
    with hydra.initialize_config_dir(config_dir=str(CONFIG_FOLDER), version_base="1.3"):
        cfg = hydra.compose(MAIN_CONFIG, list(overrides), return_hydra_config=True)
        loader = GlobalHydra.instance().config_loader()
        chosen, lines = cfg.hydra.runtime.choices, [HEAD]
        for group in sorted(name for name in chosen if not name.startswith("hydra")):
            options = (name for name in loader.get_group_options(group) if name != "schema")
            shown = ", ".join(f"*{name}" if name == chosen.get(group) else name for name in options)
            lines.append(textwrap.fill(shown, WIDTH, initial_indent=f"  {group:11}", subsequent_indent=" " * 13))
    lines.append("\nKeys, as key=value:\n")
    for key, value, meaning in _keys(cfg):
        text = f"  {key}={_typed(value)}"
        width = max(42, len(text) + 2)
        filled = textwrap.fill(meaning, WIDTH, initial_indent=" " * width, subsequent_indent=" " * 42)
        lines.append(f"{text:{width}}{filled.lstrip()}".rstrip())
    return "\n".join(lines)


def _keys(cfg: DictConfig, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """(dotted key, value, meaning) of every key of the program, keys of the root first."""
    schema = OmegaConf.get_type(cfg)
    meanings = field_docs(schema) if is_dataclass(schema) else {}
    groups = []
    for key in map(str, cfg):
        if key == "hydra":
            continue
        node = None if OmegaConf.is_missing(cfg, key) else cfg._get_node(key)
        if isinstance(node, DictConfig) and len(node) and not node._is_none() and is_dataclass(schema):
            groups.append((f"{prefix}{key}.", node))
        else:
            yield f"{prefix}{key}", "???" if node is None else cfg[key], meanings.get(key, "")
    for name, node in groups:
        yield from _keys(node, name)


def _typed(value: Any) -> str:
    """A value as it is typed on the command line."""
    if isinstance(value, (DictConfig, ListConfig)):
        text = json.dumps(OmegaConf.to_container(value, resolve=True), default=str)
        return text.replace('"', "").replace(", ", ",").replace(": ", ":")
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@lru_cache
def field_docs(schema: type) -> dict[str, str]:
    """Field of a dataclass to the docstring after it, in one line."""
    found: dict[str, str] = {}
    for kind in reversed(schema.__mro__):
        if kind.__module__ == "builtins":
            continue
        try:
            (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        except (OSError, TypeError, ValueError):
            continue
        statements = getattr(body, "body", [])
        for field, text in zip(statements, statements[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                found[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return found
