"""Tools of the developers of this repository: run from its root with `python -m tools.<name>`, not in the wheel."""
