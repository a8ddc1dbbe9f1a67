"""What went wrong while a configuration was composed, and the nearest setting that would have worked."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Transformer
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.app.compose import dotted_keys, option_keys
from experiments.app.errors import UserError, disk_is_full
from experiments.app.schema import CONFIG_FOLDER
from experiments.app.suggest import listing, unknown_key_message, unknown_option_message

MAIN_CONFIG = "config"
_OF_ANOTHER_TYPE = {
    r"Value (?P<got>'.*') of type '\w+' could not be converted to Integer": "a whole number",
    r"Value (?P<got>'.*') of type '\w+' could not be converted to Float": "a number",
    r"Value (?P<got>'.*') is not a valid bool": "true or false",
    r"Invalid value assigned: \w+ is not a ListConfig, list or tuple": "a list, such as [a,b]",
    r"Cannot assign \w+ to Dict": "a mapping, such as {a:1}",
}
"""What OmegaConf says of a value, to what was expected in its place."""


def explain(error: Exception, config_name: str) -> str:
    """`error` in a few lines, with what to type instead."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and not isinstance(error, HydraException):
        where = "paths.outputs" if config_name == MAIN_CONFIG else "out_dir or hydra.run.dir"
        if disk_is_full(error):
            return f"the disk is full: {error}\nmake room, or give another folder as {where}"
        return f"the run folder cannot be created: {error}\ngive a folder that can be written as {where}"
    if (group := _foreign_group(str(error), config_name)) is not None:
        return _unknown_key(group, str(error), config_name)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options is not None:
        group, _, option = error.missing_cfg_file.rpartition("/")
        return unknown_option_message(group, option, [o for o in error.options if o != "schema"])
    text = str(error)
    if unknown := re.search(r"Could not override '([^']*)'|You must specify '([^']+)'", text):
        return _refused_override(unknown.group(1) or unknown.group(2) or "", error, config_name)
    if missing := re.search(r"Could not find '?([\w/.-]+)'?|Could not delete\D*'([^']+)'", text):
        return _unknown_key(missing.group(1) or missing.group(2), text, config_name)
    if missing := re.search(r"Missing mandatory value: (\S+)", text):
        return f"{missing.group(1)} has no value: give it as {missing.group(1)}=…"
    return _composition_error(text, error.__cause__)


def _foreign_group(text: str, config_name: str) -> str | None:
    """The group of another program that was added with a `+`; None where that is not the error."""
    found = re.search(r"Could not find '(\w+)/|^In '(\w+)/[^']*': ConfigKeyError", text)
    group = (found.group(1) or found.group(2)) if found else None
    foreign = config_name == MAIN_CONFIG and group not in ("hydra", *groups_of(config_name))
    return group if foreign and (CONFIG_FOLDER / str(group)).is_dir() else None


def _of_another_type(text: str, cause: str) -> str | None:
    """The message for a value that its key cannot have; None where that is not the error."""
    typed = re.search(r"merging override \+*([\w.@/]+)=(.*)", text)
    for said, expected in _OF_ANOTHER_TYPE.items():
        if typed and (found := re.search(said, f"{text}\n{cause}")):
            inner = re.search(r"full_key: (\S+)", cause)
            got = found.groupdict().get("got", repr(typed[2]))
            return f"{inner[1] if inner else typed[1]}: expected {expected}, got {got}"
    return None


def _composition_error(text: str, cause: BaseException | None) -> str:
    if (message := _of_another_type(text, str(cause))) is not None:
        return message
    lines = text.splitlines() + (str(cause).splitlines()[:1] if cause else [])
    if "Ambiguous value" in text:
        name = re.search(r"argument '([^'=]+)=", text)
        key = name.group(1) if name else "key"
        return (
            f"{lines[0]}\nto run once for each value, add -m\n"
            f"to give text with a comma, quote it twice: '{key}=\"a, b\"'\nto give a list, write '{key}=[a,b]'"
        )
    numbered = re.search(r"merging override (\+*)([\w.]+)\.(\d+)=(.*)", lines[0])
    if numbered and "(str) is incompatible with (int)" in "".join(lines):
        plus, key, number, value = numbered.groups()
        return f"{lines[0]}\na key that is a number goes into braces: '{plus}{key}={{{number}:{value}}}'"
    entry = re.search(r"merging override \+{1,2}([\w.]+)=(.*)", lines[0])
    if entry and "is not a subclass of" in "".join(lines):
        return f"{lines[0]}\na new entry is added to the mapping that holds it: {_new_entry(entry[1], entry[2])}"
    if re.search("LexerNoViableAlt|no viable alternative|mismatched input|token recognition|extraneous input", text):
        lines.append("quote text with spaces, commas or brackets twice: 'data.text=\"one, two (three)\"'")
    return "\n".join(line for line in dict.fromkeys(lines) if line.strip())


def _new_entry(key: str, value: str) -> str:
    """The setting that adds to a mapping what `+key=value` was meant to add: an entry, or one field of a new one."""
    above, _, last = key.rpartition(".")
    if value.startswith("{"):
        return f"'+{above}={{{last}:{value}}}'"
    mapping, _, entry = above.rpartition(".")
    return f"'+{mapping}={{{entry}:{{{last}:{value}}}}}'"


def _refused_override(key: str, error: Exception, config_name: str) -> str:
    """The message for a key that does not exist; a key of a mapping can be added."""
    text, cause = str(error), str(error.__cause__)
    if not key:
        return "a setting without a key: expected key=value, such as algo=dflash"
    inner = re.search(r"full_key: (\S+)", cause)
    addition = re.search(r"use (\+\S.*)", text)
    message = _unknown_key(inner.group(1) if inner else key, text, config_name)
    if "object_type=dict" in cause and addition and not key.startswith("model.drafts."):
        message += f"\nto add it to what is there: '{addition.group(1)}'"
    return message


def _unknown_key(key: str, text: str, config_name: str) -> str:
    """The message for a key that is not among those of the chosen options, which are composed to learn them.

    In a sweep over options of its group, the key may be one that only some of them have.
    """
    groups = groups_of(config_name)
    chosen, key = chosen_options(sys.argv[1:], groups), key.split("@")[0].lstrip("+~")
    group = key.split(".")[0]
    base = tuple(f"{name}={values[0]}" for name, values in chosen.items() if name != group)
    keys: dict[str, list[str]] = {}
    for option in chosen.get(group, [""]):
        cfg = _composed(config_name, (*base, *([f"{group}={option}"] if option else [])))
        if cfg is None:
            return text
        keys[option] = [*dotted_keys(cfg), *groups]
    having = [option for option in keys if key in keys[option]]
    if 0 < len(having) < len(keys):
        return _partly_known(key, group, {o: names for o, names in keys.items() if o not in having}, having)
    elsewhere = option_keys() if config_name == MAIN_CONFIG else {}
    every = dict.fromkeys(name for names in keys.values() for name in names if name != key)
    return unknown_key_message(key, list(every), elsewhere)


def _partly_known(key: str, group: str, lacking: dict[str, list[str]], having: Sequence[str]) -> str:
    """The message for a key that the options `having` of a sweep have and the others lack."""
    owners = ", ".join(f"{group}={option}" for option in having)
    lines = [f"{group}={option} has no key '{key}'" for option in lacking]
    lines.append(f"{owners} {'has' if len(having) == 1 else 'have'} it: sweep it with {owners} alone")
    for option, names in lacking.items():
        lines.append(f"keys of {group}={option}: {listing([n for n in names if n.startswith(f'{group}.')])}")
    return "\n".join(lines)


@lru_cache
def groups_of(config_name: str) -> list[str]:
    """The groups that a program's configuration has an option of, in alphabetical order."""
    path = CONFIG_FOLDER / f"{config_name}.yaml"
    config: Any = OmegaConf.load(path) if path.is_file() else {}
    entries = config.get("defaults", [])
    keys = [str(key) for entry in entries if isinstance(entry, DictConfig) for key in entry]
    return sorted(key for key in keys if key.isidentifier())


def chosen_options(arguments: Sequence[str], groups: Sequence[str]) -> dict[str, list[str]]:
    """Group to the options that the settings among `arguments` choose; several in a sweep."""
    found: dict[str, list[str]] = {}
    for argument in arguments:
        override = _parsed(argument)
        if override is None or override.is_delete() or override.key_or_group not in groups:
            continue
        if override.is_sweep_override():
            found[override.key_or_group] = [str(value) for value in override.sweep_iterator(Transformer.str)]
        elif isinstance(override.value(), (str, int)):
            found[override.key_or_group] = [str(override.value())]
    return found


def _parsed(argument: str) -> Override | None:
    """`argument` as Hydra reads it; None where it is no setting."""
    if argument.startswith("-") or "=" not in argument:
        return None
    try:
        return OverridesParser.create().parse_override(argument)
    except HydraException:
        return None


@lru_cache(maxsize=32)
def _composed(config_name: str, overrides: tuple[str, ...]) -> DictConfig | None:
    """The configuration with `overrides`; without them where they do not compose; None where neither composes."""
    for tried in [overrides, ()] if overrides else [()]:
        GlobalHydra.instance().clear()
        try:
            with hydra.initialize_config_dir(config_dir=str(CONFIG_FOLDER), version_base="1.3"):
                return hydra.compose(config_name, list(tried))
        except (HydraException, OmegaConfBaseException):
            continue
    return None
