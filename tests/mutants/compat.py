"""Bugs in the functions of SGLang's signatures."""

from __future__ import annotations

from functools import partial

from tests.mutants.mutant import Mutant, parity

_KERNEL = "specdec_kernels/compat/sglang/kernel.py"
_TREES = "specdec_kernels/compat/sglang/index/kernel_trees.py"
_case = partial(parity, "compat.sglang")
_index_case = partial(parity, "compat.sglang.index")

MUTANTS = (
    Mutant(
        "sgl_prefix_of_the_row_before",
        _KERNEL,
        "target = place + before * NODES + (node % NODES + 1) * length",
        "target = place + before * NODES + node % NODES * length",
        _case("sgl_build_full"),
        "cells of the full mask are written over the prefix of their row",
    ),
    Mutant(
        "sgl_rejected_mass_forgotten",
        _KERNEL,
        "coin = tl.where(hit, tl.load(coins_ptr + request * NODES + child, mask=hit, other=1.0), coin)",
        "coin = tl.load(coins_ptr + request * NODES + child, mask=live & (child >= 0) & (child < NODES), other=1.0)",
        _case("sgl_sampling_small"),
        "each sibling gets a coin of its own",
    ),
    Mutant(
        "export_without_the_prefix",
        _TREES,
        "start = request_start + row % NODES * (length + NODES)",
        "start = request_start + row % NODES * NODES",
        _index_case("full_odd"),
        "rows of the full mask are laid out without their prefix columns",
    ),
)
