"""Bugs in the functions of SGLang's signatures."""

from __future__ import annotations

from functools import partial

from tests.mutants.mutant import Mutant, parity

_KERNEL = "specdec_kernels/compat/sglang/kernel.py"
_BUILD = "specdec_kernels/compat/sglang/kernel_build.py"
_DRAFTS = "specdec_kernels/compat/sglang/index/kernel_drafts.py"
_TREES = "specdec_kernels/compat/sglang/index/kernel_trees.py"
_case = partial(parity, "compat.sglang")
_index_case = partial(parity, "compat.sglang.index")

MUTANTS = (
    Mutant(
        "sgl_prefix_of_the_row_before",
        _BUILD,
        "start += before * NODES + (node + 1) * tl.maximum(length, 0)",
        "start += before * NODES + node * tl.maximum(length, 0)",
        _case("sgl_build_full"),
        "cells of the full mask are written over the prefix of their row",
    ),
    Mutant(
        "sgl_rejected_mass_forgotten",
        _KERNEL,
        "uniform = tl.where(hit, tl.load(uniforms_ptr + request * NODES + child, mask=hit, other=1.0), uniform)",
        "uniform = tl.load(\n"
        "            uniforms_ptr + request * NODES + child, mask=live & (child >= 0) & (child < NODES), other=1.0\n"
        "        )",
        _case("sgl_sampling_small"),
        "each sibling gets a uniform number of its own",
    ),
    Mutant(
        "export_without_the_prefix",
        _TREES,
        "start = request_start + row % NODES * (length + NODES)",
        "start = request_start + row % NODES * NODES",
        _index_case("full_odd"),
        "rows of the full mask are laid out without their prefix columns",
    ),
    Mutant(
        "branch_shares_a_page",
        _DRAFTS,
        "pages = (length % PAGE_SIZE + STEPS + PAGE_SIZE - 1) // PAGE_SIZE",
        "pages = (STEPS + PAGE_SIZE - 1) // PAGE_SIZE + length * 0",
        _index_case("draft_b64"),
        "historical: branches of a drafter overlap where the prefix ends inside a page (SGLang #15360)",
    ),
    Mutant(
        "window_without_the_sink",
        _DRAFTS,
        "early = tl.where(column < sink, column, column + length - prefix)",
        "early = column + length - prefix",
        _index_case("indices_window"),
        "a window drops the first tokens that a sink must keep",
    ),
    Mutant(
        "parents_stand_before_their_children",
        _BUILD,
        "parent = tl.where(found < NODES, found, -1)",
        "parent = tl.where(found < node, found, -1)",
        ("tests/kernels/test_compat_sglang.py::test_a_parent_behind_its_child[triton]",),
        "historical: an entry whose parent stands behind it loses its links and its depth",
    ),
    Mutant(
        "walks_pass_their_end",
        "specdec_kernels/tree/kernel.py",
        "return (ancestor > 0) & (depth < longest_walk)",
        "return (ancestor > 0) & (depth <= longest_walk)",
        parity("tree", "tree_anywhere"),
        "a walk in circles is one node longer than the draft has steps",
    ),
)
