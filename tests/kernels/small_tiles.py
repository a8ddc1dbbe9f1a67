"""Tiles of the interpreter that are smaller than most inputs, as the tiles of a GPU are."""

from dataclasses import replace

import pytest

from specdec_kernels.activation import kernel as activation
from specdec_kernels.commit import kernel as commit
from specdec_kernels.compat.sglang import configs as sglang
from specdec_kernels.experts import configs as experts
from specdec_kernels.kv_index import kernel as kv_index
from specdec_kernels.kv_write import kernel as kv_write
from specdec_kernels.lattice import configs as lattice
from specdec_kernels.tree import configs as tree

FAMILIES = ("activation", "commit", "compat.sglang", "experts", "kv_index", "kv_write", "lattice", "tree")


def make_tiles_small(patch: pytest.MonkeyPatch) -> None:
    """Several programs, and several turns of their loops, for an input of a few dozen entries."""
    patch.setitem(activation.BLOCK, "interpreter", 16)
    patch.setitem(commit.BLOCK_ROWS, "interpreter", 2)
    patch.setitem(commit.BLOCK_WIDTH, "interpreter", 4)
    walks = dict(walk_requests=2, tree_requests=2, greedy_requests=2, max_tile=64)
    spans = dict(flat_block=16, max_programs=3)
    patch.setitem(sglang.CONFIGS, "interpreter", replace(sglang.CONFIGS["interpreter"], **spans, **walks))
    patch.setattr(experts, "INTERPRETER_PRODUCT", experts.ProductConfig(32, 16, 32, 1, 1))
    patch.setitem(experts.ROUTE, "interpreter", experts.RouteConfig(4, 4, 16, 2, 16))
    lists = dict(flat_block=16, scan_block=4, move_requests=1, move_budget=32)
    patch.setitem(kv_index.CONFIGS, "interpreter", replace(kv_index.CONFIGS["interpreter"], **lists))
    patch.setattr(kv_write, "_INTERPRETER_ROWS", 32)
    links = dict(max_nodes=8, max_requests=16, pair_budget=16 * 8 * 8)
    groups = dict(topk_tile=32, topk_tiles=4, sample_groups=2)
    patch.setitem(tree.CONFIGS, "interpreter", replace(tree.CONFIGS["interpreter"], **links, **groups))
    blocks = replace(
        lattice.CONFIGS["interpreter"], rank_block=16, max_requests=2, state_rows=16, state_units=16, state_block=16
    )
    patch.setitem(lattice.CONFIGS, "interpreter", blocks)
