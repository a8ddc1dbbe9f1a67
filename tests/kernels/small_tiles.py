"""Tiles of the interpreter that are smaller than most inputs, as the tiles of a GPU are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specdec_kernels.activation import configs as activation
from specdec_kernels.commit import configs as commit
from specdec_kernels.compat.sglang import configs as sglang
from specdec_kernels.compat.sglang.index import configs as index
from specdec_kernels.compat.sglang.index import kernel_slots, kernel_trees
from specdec_kernels.kv_index import configs as kv_index
from specdec_kernels.kv_write import configs as kv_write
from specdec_kernels.tree import configs as tree

FAMILIES = ("activation", "commit", "compat.sglang", "compat.sglang.index", "kv_index", "kv_write", "tree")


def make_tiles_small(patch: pytest.MonkeyPatch) -> None:
    """Several programs, and several turns of their loops, for an input of a few dozen entries."""
    patch.setattr(activation, "_INTERPRETER_BLOCK", 16)
    patch.setitem(commit.BLOCK_ROWS, "interpreter", 2)
    patch.setitem(commit.BLOCK_WIDTH, "interpreter", 4)
    walks = dict(walk_requests=2, tree_requests=2, greedy_requests=2, max_tile=64)
    patch.setattr(sglang, "_INTERPRETER", replace(sglang._INTERPRETER, flat_block=16, **walks))
    tables = dict(flat_block=16, max_programs=3, compact_block=64, evict_block=16, move_direct=4, move_budget=32)
    trees = dict(pair_nodes=8, pair_requests=2, mask_rows=16, mask_splits=2, tail_programs=2)
    patch.setattr(index, "_INTERPRETER", replace(index._INTERPRETER, **tables, **trees))
    patch.setattr(kernel_slots, "_STAGING_BYTES", 1)
    patch.setattr(kernel_trees, "_MASK_CELLS", 32)
    lists = replace(kv_index._CONFIGS["interpreter"], flat_block=16, scan_block=4, move_requests=1, move_budget=32)
    patch.setitem(kv_index._CONFIGS, "interpreter", lists)
    patch.setattr(kv_write, "_INTERPRETER_ROWS", 32)
    links = dict(max_nodes=8, max_requests=16, pair_budget=16 * 8 * 8)
    groups = dict(topk_tile=32, topk_tiles=4, draw_strip=2)
    patch.setitem(tree.CONFIGS, "interpreter", replace(tree.CONFIGS["interpreter"], **links, **groups))
