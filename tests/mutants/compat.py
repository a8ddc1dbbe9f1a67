"""Bugs in the functions of SGLang's signatures."""

from __future__ import annotations

from functools import partial

from tests.mutants.mutant import bugs_in, parity

_kernel = bugs_in("specdec_kernels/compat/sglang/kernel.py")
_build = bugs_in("specdec_kernels/compat/sglang/kernel_build.py")
_index = bugs_in("specdec_kernels/compat/sglang/kernel_index.py")
_case = partial(parity, "compat.sglang")

MUTANTS = (
    _build("sgl_prefix_of_the_row_before", "start += before * NODES + {{(node + 1) -> node}} * tl.maximum(length, 0)",
           _case("sgl_build_full"), "cells of the full mask are written over the prefix of their row"),
    _kernel("sgl_rejected_mass_forgotten",
            "uniform = tl.{{where(hit, tl.load(given.uniforms + visited, mask=hit, other=1.0), uniform) -> "
            "load(given.uniforms + visited, mask=live & (child >= 0) & (child < NODES), other=1.0)}}",
            _case("sgl_sampling_odd"), "each sibling gets a uniform number of its own"),
    _index("branch_shares_a_page",
           "pages = ({{length % PAGE_SIZE +  -> }}STEPS + PAGE_SIZE - 1) // PAGE_SIZE{{ ->  + length * 0}}",
           _case("sgl_decode_paged"),
           "historical: branches of a drafter overlap where the prefix ends inside a page (SGLang #15360)"),
    _index("window_without_the_sink",
           "early = {{tl.where(column < sink, column, column + length - prefix) -> column + length - prefix}}",
           _case("sgl_decode_window"), "a window drops the first tokens that a sink must keep"),
    _build("parents_only_before_their_children", "parent = tl.where(found < {{NODES -> node}}, found, -1)",
           ("tests/kernels/test_compat_sglang.py::test_malformed_trees_are_built_as_sglang_builds_them[triton]",),
           "historical: an entry whose parent follows it loses its links and its depth"),
    _build("paths_pass_their_end", "        climbing = (ancestor > 0) & (steps {{< -> <=}} depth)",
           ("tests/kernels/test_compat_sglang.py::test_malformed_trees_are_built_as_sglang_builds_them",),
           "a path in a cycle is one node longer than the draft has steps"),
)  # fmt: skip
