"""Loss curve of a training log as a small SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot  # noqa: E402  the backend must be chosen first

SKIPPED = frozenset({"step", "tokens", "elapsed_s"})


def plot_curve(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Draw every loss-like column of `rows` against millions of tokens."""
    figure, axis = pyplot.subplots(figsize=(6.4, 3.6))
    columns = [key for key in {k: None for row in rows for k in row} if key not in SKIPPED]
    for column in columns:
        points = [(row["tokens"] / 1e6, row[column]) for row in rows if column in row]
        axis.plot(*zip(*points, strict=True), label=column, linewidth=1.0 if column == "loss" else 1.6)
    axis.set(xlabel="training tokens, millions", ylabel="cross entropy, nats per token", title=title)
    axis.set_yscale("log")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
