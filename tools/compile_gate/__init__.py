"""Compile every kernel of every family for four chips on a machine without a GPU, and check the limits of the chips.

The cases marked `gate` are called inside `launch.record_launches(chip)`: nothing runs, the launches are kept, and
each distinct one is compiled ahead of time. Registers and spills then come from the binary (`cuobjdump
--dump-resource-usage`, or the metadata in the AMD assembly), shared and tensor memory from the compiler,
tensor-core instructions from the assembly. The gate fails on a kernel that exceeds a limit, on a kernel that no gate
case launches, and on a matrix product that the compiler left to the scalar units.

    python -m tools.compile_gate [--family tree ...] [--chip sm90 ...] [--workers 2] [--sample]

The whole table takes minutes. `--sample` compiles up to two variants of every kernel and takes the chips in turn;
which kernels are launched is still checked in full.

`jobs` collects what is to be compiled, `usage` compiles and measures, `verdict` compares with the limits.
"""
