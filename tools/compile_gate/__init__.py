"""Compile every kernel of every family for four chips on a machine without a GPU, and check the limits of the chips.

The cases marked `gate` are called inside `launch.record_launches(chip)`, and each distinct launch is compiled ahead of
time. The gate fails on a kernel that exceeds a limit, on a kernel that no gate case launches, and on a matrix product
that the compiler left to the scalar units.

    python -m tools.compile_gate [--family tree ...] [--chip sm90 ...] [--workers 2] [--sample]

The whole table takes minutes. `--sample` compiles up to two variants of every kernel and alternates between the
chips.
"""
