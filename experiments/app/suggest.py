"""Turns a mistyped key or option into a message that names the nearest valid ones."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

MOST_SHOWN = 24


def nearest(name: str, valid: Sequence[str], count: int = 3) -> list[str]:
    """The entries of `valid` most like `name`, best first; a key whose last part matches is near too."""
    leaf = name.rsplit(".", 1)[-1]
    same_leaf = [key for key in valid if key.rsplit(".", 1)[-1] == leaf and key != name]
    close = difflib.get_close_matches(name, valid, n=count, cutoff=0.6)
    leaves = {key.rsplit(".", 1)[-1]: key for key in valid}
    close_leaf = [leaves[key] for key in difflib.get_close_matches(leaf, list(leaves), n=count, cutoff=0.7)]
    return list(dict.fromkeys(same_leaf + close + close_leaf))[:count]


def listing(names: Sequence[str]) -> str:
    """`names` in one line, cut where a screen would overflow."""
    shown = ", ".join(names[:MOST_SHOWN])
    return shown if len(names) <= MOST_SHOWN else f"{shown}, … ({len(names)} in all)"


def unknown_key_message(key: str, valid: Sequence[str], elsewhere: Mapping[str, str]) -> str:
    """Message for a key that does not exist.

    `valid` holds every dotted key that does; `elsewhere` maps keys of other options to that option.
    """
    lines = [f"unknown key '{key}'"]
    if close := nearest(key, [*valid, *(name for name in elsewhere if name not in valid)]):
        hints = [f"{name}=…" + ("" if name in valid else f" (with {elsewhere[name]})") for name in close]
        lines.append("did you mean: " + ", ".join(hints))
    parent = key.rpartition(".")[0]
    siblings = [name for name in valid if name.rpartition(".")[0] == parent]
    if siblings:
        lines.append(f"keys of {parent or 'a run'}: {listing(siblings)}")
    return "\n".join(lines)


def unknown_option_message(group: str, option: str, valid: Sequence[str]) -> str:
    """Message for a config group that has no such option."""
    lines = [f"unknown {group} '{option}'"]
    if close := nearest(option, valid):
        lines.append("did you mean: " + ", ".join(f"{group}={name}" for name in close))
    lines.append(f"{group} can be: {listing(valid)}")
    return "\n".join(lines)
