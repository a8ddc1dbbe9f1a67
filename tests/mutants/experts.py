"""Bugs in routing, tile schedule and products of experts."""

from __future__ import annotations

from tests.mutants.mutant import bugs_in, parity

_route = bugs_in("specdec_kernels/experts/kernel_route.py")
_schedule = bugs_in("specdec_kernels/experts/kernel_schedule.py")
_product = bugs_in("specdec_kernels/experts/kernel.py")
_mxfp4 = bugs_in("specdec_kernels/experts/kernel_mxfp4.py")

MUTANTS = (
    _route(
        "experts_weigh_with_the_bias",
        "logit if OF_CHOSEN else {{score -> choice}}",
        parity("experts", "route_sigmoid"),
        "the correction bias enters the weights",
    ),
    _route(
        "experts_group_by_its_largest",
        'score += {{tl.max(tl.where(expert[None, :] == first[:, None], float("-inf"), member), 1) -> 0.0}}',
        parity("experts", "route_v3"),
        "a group counts by its best expert where its two best count",
    ),
    _route(
        "experts_of_padding_rows",
        "chosen = tl.where({{real -> there}}[:, None], chosen, EXPERTS)",
        parity("experts", "route_masked"),
        "rows that are not real read the weights of experts",
    ),
    _schedule(
        "experts_order_restarts",
        "start += {{tl.sum(mine.to(tl.int32), 0) -> 0}}",
        ("tests/kernels/test_parity.py::test_small_tiles_have_the_same_results[experts-schedule_random-small]",),
        "rows of a later block overwrite those of the first",
    ),
    _product(
        "experts_sum_of_unwritten_parts",
        "there = (column < H){{ & (expert >= 0) & (expert < EXPERTS) -> }}",
        parity("experts", "mlp_some"),
        "the part of a slot without expert is added, which nobody wrote",
    ),
    _product(
        "experts_up_without_one",
        "* (up{{ + 1.0 -> }})",
        parity("experts", "mlp_gpt_oss"),
        "the clamped activation without the one that gpt-oss adds to up",
    ),
    _mxfp4(
        "experts_mxfp4_halves_swapped",
        "tl.join({{low, high -> high, low}})",
        parity("experts", "mlp_mxfp4"),
        "the high half of a byte is read as the even element",
    ),
    _mxfp4(
        "experts_mxfp4_one_scale",
        "scales_at += {{TILE.BLOCK_K // 32 -> 0}}",
        parity("experts", "mlp_mxfp4_gpt_oss"),
        "later steps are scaled by the groups of the first",
    ),
)
