"""Named inputs of paged attention and of its plan. Cases tagged `large` are for a GPU, those tagged `huge` for the
unit benchmark alone, which compares them with the reference on some of their requests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from specdec_kernels.attention.cases_inputs import attention_inputs, paths_inputs, plan_inputs
from specdec_kernels.cases import Case, Comparison, Maker, WorkModel, case_of

_PARITY_TOKENS = 1 << 19  # larger pools are for the benchmark alone, as the reference of all requests does not fit
_CHAINS = {1: "decode", 4: "chain4", 16: "chain16", 64: "chain64"}
# Equal on every chip for 64 packed rows, so that one tile schedule fits the call on each.
_PINNED = dict(block_m=64, split_tokens=512, first_splits=8, longest_split=4096)


def work(inputs: dict[str, Any]) -> tuple[int, int]:
    """(bytes moved, floating-point operations) that the call cannot avoid: each key and value that a row sees
    once, q and out once."""
    q, kv, metadata = inputs["q"], inputs["kv"], inputs["metadata"]
    batch, num_nodes, heads, head_dim = q.shape
    lengths, window = metadata.lengths, metadata.window
    prefix = int((lengths if window is None else lengths.clamp(max=window)).sum())
    slots = metadata.tree_width or num_nodes
    in_draft = num_nodes * (num_nodes + 1) // 2 if metadata.mode == "chain" else num_nodes * slots
    pairs = num_nodes * prefix + batch * in_draft
    kv_bytes = 2 * (prefix + batch * slots) * kv.shape[3] * head_dim * kv.element_size()
    return kv_bytes + 2 * q.numel() * q.element_size(), 4 * pairs * heads * head_dim


def _reference_bytes(inputs: dict[str, Any]) -> int:
    """Per request: scores twice in float32, gathered keys and values in their own type and in float32."""
    q, kv = inputs["q"], inputs["kv"]
    num_nodes, heads = q.shape[1:3]
    keys = int(inputs["metadata"].lengths.max()) + num_nodes if len(q) else 0
    return keys * (2 * 4 * num_nodes * heads + 2 * kv[0, 0, 0].numel() * (4 + kv.element_size()))


WORK: dict[str, WorkModel] = {"paged_attention": work, "paged_attention_with_lse": work}
COMPARISON = Comparison(
    float64=True,
    compiled_roundings=8,  # up to 256 products per score, and the keys of a split, are added one by one
    by_request=("q", "metadata"),
    reference_bytes=_reference_bytes,
)


def _gated(name: str, catches: str, mode: str, num_nodes: int, **shape: Any) -> Case:
    """A shipped shape: its table is wide enough for several splits, its requests are short."""
    shape = {"heads": (8, 2), "head_dim": 128, "capacity": 2048, **shape}
    return case_of("paged_attention", attention_inputs, name, catches, mode, num_nodes, (37,), gate=True, **shape)


def _timed(name: str, mode: str, num_nodes: int, batch: int, context: int, **shape: Any) -> Case:
    """Requests of about `context` tokens with the heads of an 8B model."""
    lengths = [context - 7 * row for row in range(batch)]
    shape = {"heads": (32, 8), "head_dim": 128, **shape}
    build = partial(attention_inputs, mode=mode, num_nodes=num_nodes, lengths=lengths, **shape)
    tags = ("large", "huge") if batch * context > _PARITY_TOKENS else ("large",)
    return Case(name, "paged_attention", build, "shapes that are timed", bench=True, tags=tags)


def _levels_inputs(
    make: Maker, num_nodes: int, lengths: Sequence[int], num_levels: int = 5, length_step: int = 0, width_step: int = 0,
    max_length: int = 300, **fields: Any,
) -> dict[str, Any]:  # fmt: skip
    steps = dict(num_levels=num_levels, length_step=length_step, width_step=width_step)
    return plan_inputs(make, num_nodes, lengths, max_length, **fields) | steps


_case = partial(case_of, "paged_attention_with_lse", attention_inputs)
_deep = partial(_case, tree_width=7, window=3, root_depth=2)
_wide = partial(_case, heads=(8, 2), head_dim=128)
_persistent = partial(_wide, planned=True, split_tokens=128, tuning=dict(resident_programs=5))
_fp8 = partial(_case, fp8=True)
_fp8_split = partial(_fp8, split_tokens=16)
_fp8_wide = partial(_wide, fp8=True)
_planned = partial(_case, planned=True)
_planned_split = partial(_planned, split_tokens=16)
_FIXED: dict[str, Any] = dict(batch_invariant=True, split_tokens=16, tuning=dict(first_splits=2))
_fixed = partial(_case, **_FIXED)
_gated_fixed = partial(_gated, batch_invariant=True)
_plan = partial(case_of, "plan_attention", plan_inputs)
_levels = partial(case_of, "plan_levels", _levels_inputs)
_tree_levels = partial(_levels, mode="tree")
_paths = partial(case_of, "mask_paths", paths_inputs)
_H64: dict[str, Any] = dict(heads=(8, 2), head_dim=64)
_SCALED: dict[str, Any] = dict(head_scales=True, sinks=True)
_ROUNDS: dict[str, Any] = dict(split_tokens=16, tuning=dict(first_splits=2, longest_split=64))
_PINNED_GROUPS = _PINNED | dict(block_m=128, max_splits=8)
_TILE_64 = dict(block_m=64, block_n=64, num_warps=8)
_LARGE = ("large",)
_BENCH: dict[str, Any] = dict(bench=True, tags=_LARGE)
_ROWS = dict(decode=("chain", 1), chain_8=("chain", 8), chain_16=("chain", 16), tree_64=("tree", 64))
CASES = (
    # Modes.
    _case("empty_batch", "launch on an empty grid", "chain", 3, ()),
    _case("decode_one_head", "tiles padded from one row", "chain", 1, (5,), heads=(1, 1)),
    _case("decode_first_token", "a request without a prefix", "chain", 1, (0,)),
    _case("chain_odd", "rows off the tile; lse per row", "chain", 5, (3, 18)),
    _case("block_odd", "the last row's view given to all", "block", 5, (3, 18)),
    _case("tree_odd", "bits read as nodes of another row", "tree", 5, (3, 18)),
    _case("draft_fills_page", "one page too many at an exact edge", "chain", 5, (27, 11)),
    _case("prefix_fills_page", "the draft begins on a fresh page", "block", 5, (32, 16)),
    _case("unequal_lengths", "one request's length used for another", "chain", 4, (70, 0, 3, 33)),
    _case("q_lens", "rows past q_lens not zeroed", "chain", 6, (20, 40, 9), q_lens=(2, 6, 0)),
    _case("q_lens_block", "a block row sees slots past q_lens", "block", 6, (20, 40), q_lens=(3, 1)),
    _case("prefill", "tiles above the diagonal", "chain", 90, (0, 0), q_lens=(90, 41)),
    _case("prefill_continued", "a chunk after a prefix", "chain", 33, (47, 16)),
    _case("long_table", "entries past the last page read", "chain", 3, (5,), capacity=1000, max_length=640),
    _case("cut", "keys past max_length", "tree", 4, (30, 12), max_length=20),
    _case("own_scale", "scale ignored", "chain", 3, (12,), scale=0.7),
    # Splits.
    _case("splits_chain", "splits past the end; merge weights", "chain", 6, (50, 3), split_tokens=16),
    _case("splits_tree", "a draft across two splits", "tree", 20, (55, 27), split_tokens=16),
    _case("splits_block", "split length off the tile", "block", 6, (61, 4), split_tokens=24),
    _case("splits_many_rows", "the causal end of a row tile inside a split", "chain", 70, (10,), split_tokens=32),
    _case("splits_grow", "more than its share", "chain", 3, (70, 200, 9), split_tokens=16, tuning=dict(max_splits=4)),
    _case("q_lens_split", "merge reads rows never written", "tree", 6, (60, 5, 0), q_lens=(4, 0, 6), split_tokens=16),
    # Shapes.
    _case("gqa_2", "row = node * G + g", "chain", 16, (40, 7), heads=(4, 2)),
    _case("gqa_3", "a group that does not divide the tile", "tree", 7, (40, 7), heads=(6, 2)),
    _case("tree_64", "the word's sign bit", "tree", 64, (21,), heads=(2, 1)),
    _case("tree_65", "first bit of the second word", "tree", 65, (21, 0), heads=(2, 1)),
    _case("page_1", "per-token pages", "tree", 6, (20, 3), page_size=1),
    _case("page_256", "page wider than a split", "tree", 6, (250, 300), page_size=256, split_tokens=96),
    _case("page_odd", "page size not a power of two", "chain", 6, (20, 31), page_size=6, split_tokens=16),
    _case("head_dim_96", "padding read from the next head", "tree", 9, (40, 3), head_dim=96),
    _case("head_dim_96_split", "padding written to the next row", "chain", 3, (40,), head_dim=96, split_tokens=16),
    # More than 64 rows, which sm90 computes in groups of 64 rows with specialised warps.
    _wide("groups_tree", "rows of the other group", "tree", 40, (200, 70, 0), q_lens=(40, 3, 0), sinks=True),
    _wide("groups_chain", "buffers of the item before", "chain", 33, (700, 0)),
    _wide("groups_block", "keys after the last", "block", 64, (63, 65)),
    _wide("groups_split", "a split that a request does not have", "chain", 70, (900, 30), split_tokens=128, sinks=True),
    _persistent("groups_planned", "phases of barriers", "tree", 20, (300, 5, 1200, 64), tree_width=90),
    _wide("groups_page_1", "places of per-token pages", "tree", 33, (130,), page_size=1),
    _wide("groups_page_48", "a page that ends inside a tile", "chain", 40, (200, 77), page_size=48, split_tokens=128),
    _wide("groups_64", "panels of another head", "tree", 33, (300, 70, 0), q_lens=(33, 3, 0), head_dim=64, sinks=True),
    _wide("groups_256", "keys past a short tile", "chain", 34, (300, 65), head_dim=256, split_tokens=128),
    _wide("groups_window", "a window from a page on", "chain", 70, (300, 9), window=60, q_lens=(70, 33), sinks=True),
    _wide("groups_window_block", "first keys of the last row", "block", 40, (300, 65), window=90, split_tokens=128),
    # Windows.
    _case("window_chain", "the window counts from the first row", "chain", 5, (40, 3), window=8),
    _case("window_one", "a row that sees itself alone", "chain", 4, (20,), window=1),
    _case("window_wide", "a window wider than the request", "chain", 4, (20, 0), window=100),
    _case("window_block", "keys ahead of a row are within any window", "block", 6, (30, 2), window=4),
    _case("window_off_tile", "loop starts a tile late", "chain", 9, (70, 33), window=21, tuning=dict(block_n=16)),
    _case("window_tree", "window by slot instead of depth", "tree", 12, (30, 2), window=9, tuning=dict(block_n=16)),
    _case("window_in_tree", "an ancestor beyond the window", "tree", 20, (30, 0), window=3, reach=2),
    _case("window_split", "splits from position zero", "chain", 6, (150, 61, 3), window=37, split_tokens=16),
    _case("window_split_tree", "the first split of a tree", "tree", 18, (90, 11), window=20, split_tokens=16),
    _case("window_prefill", "tiles below the window", "chain", 80, (9, 0), q_lens=(80, 33), window=11),
    _case("window_grow", "one more split", "tree", 5, (200, 77), window=70, split_tokens=16, tuning=dict(max_splits=2)),
    # Sinks, caps and scales.
    _case("sinks", "sink of another head", "chain", 5, (20, 3), sinks=True),
    _case(
        "sinks_split", "sink added once per split", "tree", 6, (60, 5, 0), q_lens=(4, 0, 6), sinks=True, split_tokens=16
    ),
    _case("sinks_blind", "a row that sees nothing but its sink", "tree", 7, (0, 0), sinks=True, blind=True),
    _case("blind", "a row that sees nothing", "tree", 7, (0, 20), blind=True, window=2),
    _case("soft_cap", "cap after the base change", "chain", 5, (20, 3), soft_cap=0.8),
    _case("soft_cap_split", "cap undone by the merge", "tree", 9, (60, 3), soft_cap=5.0, scale=0.9, split_tokens=16),
    _case("scales", "scales of pools that are not fp8", "chain", 3, (20,), k_scale=0.7, v_scale=3.0),
    # Float8 pools.
    _fp8("fp8", "codes of e4m3 decoded wrongly", "chain", 5, (33, 3)),
    _fp8("fp8_scales", "scale of another head", "tree", 5, (20,), heads=(8, 4), head_scales=True),
    _fp8_split("fp8_split", "scale applied twice", "chain", 5, (50, 3), **_SCALED),
    _fp8_wide("fp8_rows", "codes of the tile before", "chain", 16, (200, 3)),
    _fp8_wide("fp8_rows_window", "the first tile of a window", "chain", 40, (250, 31), window=100),
    _fp8(
        "fp8_rows_split", "another row", "tree", 20, (300, 70, 0), q_lens=(20, 3, 9), **_SCALED, split_tokens=64, **_H64
    ),
    _persistent("fp8_planned", "phases of barriers", "tree", 16, (300, 5, 700, 64), tree_width=70, fp8=True),
    _fp8_wide("fp8_rising", "weights beyond float16 with late maxima", "chain", 16, (700, 200), rising=True),
    _fp8_wide(
        "fp8_late", "rows without keys", "tree", 33, (3, 130), tree_width=200, blind=True, rising=True, split_tokens=64
    ),
    _fp8_split("fp8_padding", "the next head", "tree", 9, (61, 3), head_dim=96, page_size=6, soft_cap=5.0, window=30),
    _fp8("fp8_blind", "a row that sees nothing", "tree", 7, (0, 20), head_dim=32, blind=True, sinks=True),
    _fp8("fp8_soft_cap", "scale outside the cap", "chain", 3, (20,), k_scale=2.0, soft_cap=1.5, window=9),
    # Rows that are some nodes of a tree.
    _case("wide_tree", "rows taken for slots", "tree", 5, (20, 0), tree_width=30),
    _case("wide_tree_words", "words of N instead of M", "tree", 3, (40,), tree_width=130, heads=(2, 1)),
    _case("wide_tree_q_lens", "slots cut at q_lens", "tree", 5, (20, 9), tree_width=21, q_lens=(2, 0)),
    _case("wide_tree_split", "splits counted without the slots", "tree", 2, (9, 30), tree_width=40, split_tokens=16),
    _case("wide_tree_window", "depth of a slot for a row", "tree", 6, (30, 2), tree_width=25, window=5, reach=3),
    _deep("deep_tree_window", "the depth of slot 0", "tree", 6, (30, 2)),
    _deep("deep_tree_tiles", "slots before the window", "tree", 2, (30, 13, 45, 31, 14), tuning=dict(block_n=16)),
    _case("narrow_tree", "more rows than slots", "tree", 6, (11,), tree_width=3, q_lens=(3,)),
    # Tile schedules.
    _planned("planned", "work of another request", "chain", 5, (70, 0, 130), split_tokens=16),
    _planned_split("planned_gaps", "items without rows", "tree", 6, (60, 5, 0, 33), q_lens=(4, 0, 6, 0), sinks=True),
    _planned("planned_unsplit", "rows of unused tiles not zeroed", "chain", 9, (20, 3), q_lens=(3, 0)),
    _planned("planned_tiles", "tiles of one split", "chain", 40, (30, 3), tuning=dict(block_m=32)),
    _planned_split(
        "planned_window", "splits from position zero", "tree", 7, (150, 4), window=25, tuning=dict(resident_programs=3)
    ),
    _planned("planned_wide", "slots left out of the plan", "tree", 3, (28, 0), tree_width=30, split_tokens=16),
    _planned("planned_fp8", "list of the two-byte table", "chain", 3, (40, 9), split_tokens=16, fp8=True),
    # plan_attention and plan_levels.
    _plan("plan_none", "no request", 3, ()),
    _plan("plan_unequal", "start of the next request", 5, (299, 0, 17, 3), split_tokens=16),
    _plan("plan_q_lens", "tiles of unused rows", 40, (90, 30, 9), q_lens=(3, 0, 40), split_tokens=32),
    _plan("plan_unsplit", "one item a tile", 300, (3, 0), q_lens=(5, 0), tuning=dict(block_m=64)),
    _plan("plan_items", "items past the first block", 300, (290, 3), split_tokens=16, tuning=dict(block_m=16)),
    _plan("plan_window", "splits below the window", 4, (290, 9, 40), window=30, split_tokens=16),
    _plan("plan_window_edges", "a window from a border on", 4, range(30, 62), window=28, split_tokens=16),
    _plan("plan_wide", "slots beyond the rows", 4, (250, 9), mode="tree", tree_width=40, split_tokens=16),
    _plan("plan_grow", "share of partial results", 2, (290, 100), split_tokens=16, tuning=dict(max_splits=3)),
    _plan("plan_many", "lanes past the batch", 2, [13 * row % 257 for row in range(20)], split_tokens=32),
    _levels("levels_one", "no step", 3, (17, 40), num_levels=1, split_tokens=16),
    _levels("levels_chain", "lengths of the first level", 1, (60, 0, 15), length_step=1, split_tokens=16),
    _tree_levels(
        "levels_tree", "slots of level 0", 3, (62, 290), width_step=3, tree_width=4, q_lens=(3, 0), split_tokens=16
    ),
    _tree_levels(
        "levels_window", "some levels split", 2, (40, 9), width_step=8, tree_width=2, window=3, split_tokens=16
    ),
    _tree_levels(
        "levels_shipped", "resources", 10, [8000] * 8, gate=True, width_step=10, tree_width=10, max_length=8192
    ),
    _plan("plan_rounds", "a round more", 4, [256, 258, 383, 500, 640], max_length=700, **_ROUNDS),
    _plan("plan_shipped", "resources", 16, [8000] * 8, gate=True, max_length=8192),
    _plan(
        "plan_b64", "shapes that are timed", 16, [130000 // (row + 1) for row in range(64)], max_length=131072, **_BENCH
    ),
    # Splits of 16 keys up to 32, of 32 up to 128, of 64 from there on.
    _fixed("fixed_decode", "a border of splits", "chain", 1, (0, 15, 16, 31, 32, 129)),
    _fixed("fixed_chain", "splits that grow with the position", "chain", 6, (190, 3)),
    _fixed("fixed_block", "rows of one view", "block", 6, (61, 4), q_lens=(6, 3), sinks=True),
    _fixed("fixed_tree", "keys of another branch", "tree", 12, (55, 60, 32)),
    _fixed("fixed_forest", "the first slot of the pool, or of the draft", "tree", 5, (0,) * 6, roots=3),
    _fixed("fixed_tree_words", "slots of the second word", "tree", 70, (21,), heads=(2, 1)),
    _fixed("fixed_tree_q_lens", "turns of unused nodes", "tree", 6, (60, 5, 0), q_lens=(4, 0, 6)),
    _fixed("fixed_tree_blind", "rows that see no slot", "tree", 7, (0, 20), blind=True),
    _fixed("fixed_window", "the first split of a window", "chain", 7, (150, 4), window=25),
    _fixed("fixed_window_most", "a split at either end", "chain", 4, (45, 62), window=31, tuning=dict(first_splits=8)),
    _fixed("fixed_tree_window", "depth of a slot", "tree", 9, (140, 2), window=5, reach=3, sinks=True),
    _fixed("fixed_tree_splits", "the first split of a window", "tree", 5, (140, 61), window=60, reach=3),
    _fixed("fixed_walk_window", "the same, walked", "chain", 5, (140, 61), window=60, in_order=True),
    _fixed("fixed_soft_cap", "cap in every split", "tree", 9, (60, 3), soft_cap=5.0),
    _fixed("fixed_in_order", "sums of earlier splits", "chain", 40, (90, 3), q_lens=(40, 5), in_order=True),
    _fixed("fixed_in_order_fp8", "options of later splits", "block", 5, (90, 3), fp8=True, in_order=True),
    _fixed("fixed_many_rows", "rows that fill the chip", "chain", 140, (30,), v_scale=0.5, sinks=True),
    _fixed("fixed_splits_off", "keys past max_length", "tree", 4, (30, 12), max_length=20),
    _fixed("fixed_planned", "work of another cut", "tree", 5, (70, 0, 130), planned=True),
    _fixed("fixed_planned_order", "one item a tile", "chain", 40, (70, 3), planned=True, in_order=True),
    _fixed("fixed_fp8", "scales of a part", "tree", 5, (50, 3), fp8=True, head_scales=True),
    _plan("plan_fixed", "splits of the first request", 4, (250, 9, 0), **_FIXED),
    _plan("plan_fixed_q_lens", "splits of requests without rows", 4, (250, 9, 40), q_lens=(4, 0, 0), **_FIXED),
    _plan("plan_fixed_edges", "a border of splits", 4, range(9, 49), **_FIXED),
    _plan("plan_fixed_window_edges", "a window from a border on", 4, range(30, 62), window=31, **_FIXED),
    _plan("plan_fixed_window", "splits below the window", 4, (290, 9, 40), window=30, **_FIXED),
    # mask_paths.
    _paths("paths_none", "launch on an empty grid", 0, 3, 3),
    _paths("paths", "places of other bits", 3, 20, 20),
    _paths("paths_words", "bits of the second and third word", 2, 150, 40),
    _paths("paths_cut", "slots past the last place", 2, 20, 2),
    _paths("paths_deep", "places past the first block", 1, 80, 70, reach=1),
    _paths("paths_blind", "rows without a slot", 2, 9, 9, blind=True),
    _paths("paths_shipped", "resources", 8, 64, 9, gate=True),
    # Shipped shapes.
    _gated("shipped_decode", "registers of the 16-row tile", "chain", 1),
    _gated("shipped_chain_8", "registers of the 32-row tile", "chain", 8),
    _gated("shipped_chain_16", "registers of the 64-row tile", "chain", 16),
    _gated("shipped_block_16", "registers of the drafter's attention", "block", 16),
    _gated("shipped_tree_16", "registers of the bit mask", "tree", 16),
    _gated("shipped_tree_64", "registers of the 128-row tile with a mask", "tree", 64, capacity=4096),
    _gated("shipped_tree_100", "registers of several mask words", "tree", 100),
    _gated("shipped_prefill", "registers without splits", "chain", 160),
    _gated("shipped_planned", "registers of the persistent loop", "chain", 16, planned=True, tuning=_PINNED),
    _gated(
        "shipped_groups_planned", "registers of groups", "tree", 64, planned=True, sinks=True, tuning=_PINNED_GROUPS
    ),
    _gated("shipped_window", "registers of a window by depth", "tree", 16, window=64, sinks=True),
    _gated("shipped_window_decode", "registers of short tiles", "chain", 1, window=1 << 14, sinks=True),
    _gated("shipped_window_chain_8", "registers of short tiles", "chain", 8, window=64, sinks=True),
    _gated("shipped_window_wide", "registers of a window over many tiles", "chain", 16, window=1 << 20, sinks=True),
    _gated("shipped_soft_cap", "registers of the hyperbolic tangent", "chain", 16, soft_cap=30.0, window=512),
    _gated("shipped_wide_tree", "registers of an expansion step", "tree", 8, tree_width=64),
    _gated("shipped_page_1", "address registers of per-token pages", "chain", 16, page_size=1),
    _gated_fixed("shipped_fixed_decode", "registers of the fixed cut", "chain", 1),
    _gated_fixed("shipped_fixed_tree", "registers of turns by node", "tree", 16),
    _gated_fixed("shipped_fixed_prefill", "registers of two sums", "chain", 160),
    _gated_fixed("shipped_fixed_full", "the same in the tile of few rows", "chain", 16, in_order=True),
    _gated_fixed("shipped_fixed_64", "head dimension 64", "chain", 160, head_dim=64, tags=_LARGE),
    _gated_fixed("shipped_fixed_256", "head dimension 256", "chain", 160, head_dim=256, tags=_LARGE),
    _gated_fixed("shipped_fixed_fp8", "conversion of keys and values", "chain", 160, fp8=True, tags=_LARGE),
    _gated_fixed(
        "shipped_fixed_planned",
        "registers of the persistent loop",
        "chain",
        160,
        planned=True,
        tuning=_TILE_64,
        tags=_LARGE,
    ),
    *(
        _gated(f"shipped_{dim}_{name}", f"head dimension {dim}", *_ROWS[name], head_dim=dim)
        for dim in (64, 96, 256)
        for name in (("decode", "chain_16") if dim == 96 else _ROWS)
    ),
    *(
        _gated(f"shipped_fp8_{name}", "conversion of keys and values", *rows, fp8=True, head_scales=name == "decode")
        for name, rows in _ROWS.items()
    ),
    _gated("shipped_fp8_64_chain_16", "conversion, head dimension 64", "chain", 16, fp8=True, head_dim=64),
    _gated("shipped_fp8_256_chain_16", "conversion, head dimension 256", "chain", 16, fp8=True, head_dim=256),
    # Timed shapes.
    *(
        _timed(f"{_CHAINS[nodes]}_b{batch}_{context // 1024}k", "chain", nodes, batch, context)
        for batch in (1, 8, 64)
        for context in (1024, 8192, 32768, 131072)
        for nodes in _CHAINS
    ),
    *(_timed(f"tree{nodes}_b{batch}_8k", "tree", nodes, batch, 8192) for nodes in (32, 64) for batch in (1, 8)),
    _timed("block16_b8_8k", "block", 16, 8, 8192),
    _timed("chain16_b8_8k_page1", "chain", 16, 8, 8192, page_size=1),
    _timed("chain16_b8_8k_page64", "chain", 16, 8, 8192, page_size=64),
    *(
        _timed(f"{_CHAINS[nodes]}_b{batch}_{context // 1024}k_fp8", "chain", nodes, batch, context, fp8=True)
        for batch, context in ((8, 8192), (8, 32768), (64, 8192))
        for nodes in (1, 16)
    ),
    _timed("tree64_b8_8k_fp8", "tree", 64, 8, 8192, fp8=True),
    _timed("chain16_b8_32k_window", "chain", 16, 8, 32768, window=4096, sinks=True),
    _timed("chain16_b8_8k_window128", "chain", 16, 8, 8192, window=128, sinks=True),
    _timed("chain16_b64_8k_window128", "chain", 16, 64, 8192, window=128, sinks=True),
)
