"""Loss curve of a training log as a small SVG.

matplotlib comes with the `dev` extra only. A run of an hour must not end in an import error, so without it the picture
is left out and the log stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

NOT_A_LOSS = frozenset({"step", "tokens", "elapsed_s"})


def plot_curve(rows: Sequence[dict[str, Any]], path: Path, title: str) -> bool:
    """Draw every loss column of `rows` against millions of tokens; returns whether a picture was written."""
    if find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6))
    axis = figure.subplots()
    columns = dict.fromkeys(key for row in rows for key in row)
    for column in (key for key in columns if key not in NOT_A_LOSS and not key.startswith("tokens_per_step")):
        drawn = [row for row in rows if column in row]
        millions = [row["tokens"] / 1e6 for row in drawn]
        width = 1.0 if column == "loss" else 1.8
        axis.plot(millions, [row[column] for row in drawn], label=column, linewidth=width)
    axis.set(xlabel="training tokens, millions", ylabel="cross entropy, nats per token", title=title)
    axis.set_yscale("log")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    return True
