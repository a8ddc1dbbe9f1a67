"""Settings whose annotations say what their values may be. No torch is imported here."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

from specdec_kernels.checks import expect_between, expect_choice

hints_of: Callable[..., dict[str, Any]] = lru_cache(get_type_hints)


@dataclass(frozen=True)
class Between:
    """`Annotated[int, Between(1, 64)]`: low <= value <= high, or low < value with `above`."""

    low: float
    high: float = inf
    above: bool = False


class Checked:
    """Base of a dataclass of settings. `Between` or a tuple of choices in the annotation of a field is what its value,
    or each value of a list, must be; None is allowed where the type has it."""

    GROUP: ClassVar[str] = ""
    """What stands before the name of a field on the command line."""

    def __post_init__(self) -> None:
        """Raises ValueError that names the key."""
        for name, hint in hints_of(type(self), include_extras=True).items():
            if get_origin(hint) is not Annotated:
                continue
            (kind, rule), value, key = get_args(hint), getattr(self, name), f"{self.GROUP}{name}"
            nullable = type(None) in get_args(kind)
            for each in value if isinstance(value, list) else [value]:
                if isinstance(rule, Between):
                    expect_between(key, each, rule.low, rule.high, rule.above, nullable)
                elif each is not None or not nullable:
                    expect_choice(key, each, rule)
