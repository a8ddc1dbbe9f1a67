"""Bugs in routing, tile schedule and products of experts."""

from __future__ import annotations

from tests.mutants.mutant import bugs_in, parity

_route = bugs_in("specdec_kernels/experts/kernel_route.py")
_schedule = bugs_in("specdec_kernels/experts/kernel_schedule.py")
_product = bugs_in("specdec_kernels/experts/kernel.py")
_mxfp4 = bugs_in("specdec_kernels/experts/kernel_mxfp4.py")

MUTANTS = (
    _route("experts_weigh_with_the_bias", "logit if OF_CHOSEN else {{score -> choice}}",
           parity("experts", "route_sigmoid"), "the correction bias enters the weights"),
    _route("experts_group_by_its_largest",
           'score += {{tl.max(tl.where(expert[None, :] == first[:, None], float("-inf"), member), 1) -> 0.0}}',
           parity("experts", "route_v3"), "a group counts by its best expert where its two best count"),
    _route("experts_of_padding_rows", "tl.where({{real -> there}}[:, None], expert[None, :], EXPERTS)",
           parity("experts", "route_masked"), "rows that are not real read the weights of experts"),
    _route("experts_rows_before_in_one_place", "start[None, :] + {{before -> 0 * took}}, assignment",
           parity("experts", "both_ties"), "rows of one expert are written to one place of the schedule"),
    _route("experts_idle_rows_in_one_place",
           "last = total + {{idle_before[:, None] * TOPK + -> 0 * row[:, None] +}} rank",
           parity("experts", "both_masked"), "assignments without expert are written to one place of the schedule"),
    _schedule("experts_order_restarts", "start += {{tl.sum(mine.to(tl.int32), 0) -> 0}}",
              ("tests/kernels/test_parity.py::test_small_tiles_have_the_same_results[experts-schedule_random-small]",),
              "rows of a later block overwrite those of the first"),
    _product("experts_sum_of_unwritten_parts", "tl.where({{there -> inside}}, parts[slot], 0.0)",
             parity("experts", "mlp_some"), "the part of a slot without expert is added, which nobody wrote"),
    _product("experts_norm_without_residual",
             "out = (out.to(tl.float32){{ + residual.to(tl.float32) -> }}).to(out.dtype)",
             parity("experts", "normed_odd"), "the norm of the experts' output alone"),
    _product("experts_up_without_one", "* (up{{ + 1.0 -> }})", parity("experts", "mlp_gpt_oss"),
             "the clamped activation without the one that gpt-oss adds to up"),
    _mxfp4("experts_mxfp4_halves_swapped", "tl.join({{low, high -> high, low}})", parity("experts", "mlp_mxfp4"),
           "the high half of a byte is read as the even element"),
    _mxfp4("experts_mxfp4_one_scale", "scales_at += {{TILE.BLOCK_K // 32 -> 0}}",
           parity("experts", "mlp_mxfp4_gpt_oss"), "later steps are scaled by the groups of the first"),
)  # fmt: skip
