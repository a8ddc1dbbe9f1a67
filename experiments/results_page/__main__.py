"""Writes docs/results.md and its pictures from measured rows.

    python -m experiments.results_page
    python -m experiments.results_page --check     # writes nothing; exit code 1 where a file is not what rows say

A table of one's own is a file of rows in experiments/results, and a block in a file of
experiments/results_page/sections; `experiments/results_page/blocks.py` lists what a block may say.
"""

from __future__ import annotations

import argparse
import sys

from experiments.results_page.page import files


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(
        "python -m experiments.results_page", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    arguments = parser.parse_args()
    stale = []
    try:
        found = files()
    except ValueError as error:
        sys.exit(f"error: {error}")
    for path, content in found.items():
        if arguments.check:
            stale += [path] if not path.is_file() or path.read_text(encoding="utf-8") != content else []
        else:
            path.write_text(content, encoding="utf-8")
            print(path)
    if stale:
        sys.exit(f"not what the rows say: {', '.join(map(str, stale))}; run python -m experiments.results_page")


if __name__ == "__main__":
    main()
