"""Progress of a long piece of work: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

PLAIN_INTERVAL_S = 15.0
Show = Callable[[float, str], None]


@contextmanager
def progress(title: str, quiet: bool = False) -> Iterator[Show]:
    """A function that shows (share done in 0..1, what to say about it); `quiet` shows nothing."""
    console = Console(soft_wrap=True, quiet=quiet)
    if not console.is_terminal:
        yield _lines(console, title)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bars:
        task = bars.add_task(title, total=1.0)
        yield lambda share, text: bars.update(task, completed=share, description=f"{title}  {text}")


def _lines(console: Console, title: str) -> Show:
    last = -PLAIN_INTERVAL_S

    def show(share: float, text: str) -> None:
        nonlocal last
        now = time.monotonic()
        if share >= 1.0 or now - last >= PLAIN_INTERVAL_S:
            last = now
            console.print(f"{title}  {share:.0%}  {text}", markup=False, highlight=False)

    return show
