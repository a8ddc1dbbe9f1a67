"""From the arguments of a sweep to the overrides of its jobs: a pure function, so all machines find the same jobs.

An axis is a key with several values (`algo.topk=1,4,8`, `range(1,4)`, `choice(…)`, `glob(*)`). The jobs are the product
of the axes in the order in which they were typed; the last axis changes fastest.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from experiments.app.errors import UserError

OWN = ("sweep.", "hydra.", "hydra/")
"""Keys of the sweep itself, which are no part of a job."""


@dataclass(frozen=True)
class Grid:
    """`jobs`: the overrides of each job. `keys`: those with several values. `common`: overrides of keys with one
    value. `own`: those of the sweep and of Hydra."""

    jobs: tuple[tuple[str, ...], ...]
    keys: tuple[str, ...]
    common: tuple[str, ...]
    own: tuple[str, ...]


def parse(arguments: Sequence[str], params: Mapping[str, Any] | None = None) -> Grid:
    """The grid of `arguments`; `params` are the axes of a recipe, which arguments replace.

    Raises UserError for a key of the sweep itself with several values, and for a value that is no list of choices.
    """
    texts = [*(f"{key}={_as_choice(value)}" for key, value in (params or {}).items()), *arguments]
    loader = GlobalHydra.instance().config_loader() if GlobalHydra.instance().is_initialized() else None
    parsed = OverridesParser.create(config_loader=loader).parse_overrides(texts)
    values: dict[str, list[str]] = {}
    own: list[str] = []
    for override in parsed:
        key = override.get_key_element()
        if key.lstrip("+~").startswith(OWN):
            if override.is_sweep_override():
                raise UserError(f"{key} is a setting of the sweep: expected one value, got {override.input_line}")
            own.append(str(override.input_line))
            continue
        values[key] = _values(override)
    jobs = tuple(itertools.product(*values.values()))
    keys = tuple(key.lstrip("+~") for key, several in values.items() if len(several) > 1)
    return Grid(jobs, keys, tuple(several[0] for several in values.values() if len(several) == 1), tuple(own))


def _as_choice(value: Any) -> str:
    """An axis of a recipe as it is typed."""
    return ",".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)


def _values(override: Override) -> list[str]:
    key = override.get_key_element()
    if not override.is_sweep_override():
        return [str(override.input_line)]
    if not override.is_discrete_sweep():
        raise UserError(f"{override.input_line}: only hydra/sweeper=optuna searches an interval; give a list of values")
    return [f"{key}={value}" for value in override.sweep_string_iterator()]


def shard_of(jobs: Sequence[Any], shard: str | None) -> list[Any]:
    """Every n-th job from the i-th on, for `shard` = i/n."""
    if shard is None:
        return list(jobs)
    index, count = (int(part) for part in shard.split("/"))
    return list(jobs[index - 1 :: count])


def without_foreign_keys(
    jobs: Sequence[Sequence[str]], choices: Mapping[str, str], schemas: Mapping[str, Mapping[str, Any]], lenient: bool
) -> list[list[str]]:
    """The jobs, each without the keys that only options of other jobs have.

    `choices` is the option of each group that no job names, `schemas` the dataclass of each option of a group. A key
    that no job's option has is left in, so that composing names it. Raises UserError for a key to leave out unless
    `lenient`.
    """
    chosen = [_options(job, choices, schemas) for job in jobs]
    having: dict[str, set[str]] = {}
    for options in chosen:
        for group, option in options.items():
            for item in fields(schemas[group][option]) if option in schemas[group] else ():
                having.setdefault(f"{group}.{item.name}", set()).add(option)
    found = []
    for job, options in zip(jobs, chosen, strict=True):
        foreign = {text: key for text in job if _is_foreign(key := _two_parts(text), options, having)}
        if foreign and not lenient:
            key = next(iter(foreign.values()))
            group = key.partition(".")[0]
            raise UserError(
                f"{key} is a setting of {group}={', '.join(sorted(having[key]))} and not of {group}={options[group]}\n"
                "sweep.lenient=true applies such keys to the jobs that have them"
            )
        found.append([text for text in job if text not in foreign])
    return found


def _options(job: Sequence[str], choices: Mapping[str, str], schemas: Mapping[str, Any]) -> dict[str, str]:
    """Group to option of one job, for the groups in `schemas`."""
    typed = {key: value for key, _, value in (text.partition("=") for text in job)}
    return {group: typed.get(group, choices.get(group, "")) for group in schemas}


def _two_parts(text: str) -> str:
    """The first two parts of an override's key: group and setting."""
    return ".".join(text.partition("=")[0].lstrip("+~").split(".")[:2])


def _is_foreign(key: str, options: Mapping[str, str], having: Mapping[str, set[str]]) -> bool:
    return key in having and options[key.partition(".")[0]] not in having[key]
