"""Turns a mistyped key or option into a message that names the nearest valid ones."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

MOST_SHOWN = 24
SAME_GROUP, OTHER_GROUP = 0.6, 0.8
"""Least likeness of the last parts of two keys, of one group and of two, for one to be a slip of the other."""
OTHER_WORDS = {
    "algorithm": "algo",
    "method": "algo",
    "attention": "backend",
    "dataset": "data",
    "prompts": "data",
    "tracking": "tracker",
    "batch_size": "runtime.max_batch",
    "max_tokens": "sampling.max_new_tokens",
    "num_prompts": "data.limit",
}
"""What other programs call a key."""


def nearest(name: str, valid: Sequence[str], count: int = 3) -> list[str]:
    """The entries of `valid` most like `name`, best first. Dotted keys are compared by their last parts."""
    group, _, leaf = name.rpartition(".")
    scored: list[tuple[float, str]] = []
    for key in valid:
        its_group, _, its_leaf = key.rpartition(".")
        like = difflib.SequenceMatcher(None, leaf, its_leaf).ratio()
        if key != name and like >= (SAME_GROUP if its_group == group else OTHER_GROUP):
            scored.append((like + (0.1 if its_group == group else 0.0), key))
    words = [OTHER_WORDS[word] for word in difflib.get_close_matches(leaf, OTHER_WORDS, n=1, cutoff=OTHER_GROUP)]
    found = [key for _, key in sorted(scored, key=lambda entry: -entry[0])]
    return list(dict.fromkeys([word for word in words if word in valid] + found))[:count]


def listing(names: Sequence[str]) -> str:
    """`names` in one line, cut where a screen would overflow."""
    shown = ", ".join(names[:MOST_SHOWN])
    return shown if len(names) <= MOST_SHOWN else f"{shown}, … ({len(names)} in all)"


def unknown_key_message(key: str, valid: Sequence[str], elsewhere: Mapping[str, str]) -> str:
    """Message for a key that does not exist.

    `valid` holds every dotted key that does; `elsewhere` maps keys of other options to that option.
    """
    lines = [f"unknown key '{key}'"]
    hints = [f"{key}=… (with {elsewhere[key]})"] if key in elsewhere else []
    hints += [f"{name}=…" for name in nearest(key, valid)]
    if not hints:
        hints = [f"{name}=… (with {elsewhere[name]})" for name in nearest(key, list(elsewhere))]
    if hints:
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
