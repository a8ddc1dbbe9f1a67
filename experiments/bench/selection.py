"""Which cases are timed, and the inputs they are timed on."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import import_module

import torch

from specdec_kernels.cases import Case, Maker

SETS = ("quick", "full")
_QUICK_PER_FUNCTION = 4


@dataclass(frozen=True)
class DeviceMaker(Maker):
    """Draws floats on the device, because a CPU takes minutes for a large key-value pool."""

    device_generator: torch.Generator

    def normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(*shape, generator=self.device_generator, device=self.device, dtype=self.dtype)
        return values.mul_(scale)


def maker(device: torch.device, dtype: torch.dtype, seed: int) -> Maker:
    """Seeded source of a case's tensors on `device`."""
    if device.type != "cuda":
        return Maker.seeded(device, dtype, seed)
    on_device = torch.Generator(device).manual_seed(seed)
    return DeviceMaker(device, dtype, torch.Generator().manual_seed(seed), on_device)


def named(what: str, value: str, known: Sequence[str]) -> tuple[str, ...]:
    """`all`, `none`, or some of `known` joined by `+`. Raises ValueError naming what is not known."""
    if value in ("all", "none"):
        return tuple(known) if value == "all" else ()
    chosen = value.split("+")
    if wrong := [name for name in chosen if name not in known]:
        options = ", ".join(("all", "none", *known))
        raise ValueError(f"{what}: expected one of {options}, or several joined by +, got {wrong[0]!r}")
    return tuple(dict.fromkeys(chosen))


def chosen_cases(families: Sequence[str], shapes: str, on_gpu: bool) -> list[tuple[str, Case]]:
    """(family, case) in table order.

    `full` is every case marked `bench`, `quick` up to four of each function spread over them, anything else a
    pattern of case names (`*` and `?`). Without a GPU both sets shrink to one small case per family.

    Raises:
        ValueError: no family, or a pattern that no case of `families` matches.
    """
    if not families:
        raise ValueError("family=none leaves nothing to measure: expected all, or families joined by +")
    tables = {family: import_module(f"specdec_kernels.{family}.cases").CASES for family in families}
    if shapes not in SETS:
        return _matching(tables, shapes, on_gpu)
    if on_gpu:
        timed = {family: [case for case in cases if case.bench] for family, cases in tables.items()}
        chosen = {family: _spread(cases) for family, cases in timed.items()} if shapes == "quick" else timed
    else:  # one case that the interpreter finishes in seconds; one that is timed, where there is such a case
        small = {
            family: [case for case in cases if "large" not in case.tags and (case.bench or case.gate)]
            for family, cases in tables.items()
        }
        chosen = {family: sorted(cases, key=lambda case: not case.bench)[:1] for family, cases in small.items()}
    return [(family, case) for family, cases in chosen.items() for case in cases]


def _matching(tables: dict[str, tuple[Case, ...]], pattern: str, on_gpu: bool) -> list[tuple[str, Case]]:
    found = [(family, case) for family, cases in tables.items() for case in cases if fnmatchcase(case.name, pattern)]
    if not found:
        expected = f"{' or '.join(SETS)} or a pattern of case names"
        raise ValueError(f"shapes: expected {expected}: no case of {', '.join(tables)} is called {pattern!r}")
    fitting = [(family, case) for family, case in found if on_gpu or "large" not in case.tags]
    if not fitting:
        raise ValueError(f"shapes={pattern}: its {len(found)} cases are too large for the interpreter; use a GPU")
    return fitting


def _spread(cases: Sequence[Case]) -> list[Case]:
    """At most `_QUICK_PER_FUNCTION` cases of each function, first and last among them."""
    by_function: dict[str, list[Case]] = {}
    for case in cases:
        by_function.setdefault(case.function, []).append(case)
    kept = []
    for mine in by_function.values():
        last = min(_QUICK_PER_FUNCTION, len(mine)) - 1
        kept += [mine[round(index * (len(mine) - 1) / max(last, 1))] for index in range(last + 1)]
    return [case for case in cases if case in kept]
