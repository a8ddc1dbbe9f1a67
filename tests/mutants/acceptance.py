"""Bugs in drawing and accepting tokens. Eleven of them shipped somewhere or stand for a class that did; most tests of
speculative sampling in use miss several, because their distributions do not depend on the context. They are put into
the definition or into the drafter, where parity of kernel and reference cannot help: only a test of the distribution
can tell.
"""

from __future__ import annotations

from functools import partial

from tests.mutants.mutant import Mutant, parity

_RULES = "specdec_kernels/verify/reference.py"
_TREES = "specdec_kernels/verify/reference_tree.py"
_KERNEL = "specdec_kernels/verify/kernel_rejection.py"
_OUTCOME = "specdec_kernels/verify/device.py"
_SELECT = "specdec_kernels/sampling/kernel.py"
_NUCLEUS = "specdec_kernels/sampling/kernel_nucleus.py"
_SETTLE = "specdec_kernels/sampling/kernel_settle.py"
_WALK = "specdec_kernels/verify/kernel.py"
_SAMPLING = "specdec_kernels/sampling/reference.py"
_DEVICE = "specdec_kernels/sampling/device.py"
_TYPES = "specdec_kernels/sampling/types.py"
_DRAFTER = "algorithms/runtime/drawn_tree.py"
_MISSES = ("tests/kernels/test_rejection_distribution.py::test_joint_distribution[rejection-opposed-plain]",)
_WHOLE = ("tests/kernels/test_rejection_distribution.py::test_joint_distribution[rejection-agreeing-plain]",)
_BLOCK = ("tests/kernels/test_rejection_distribution.py::test_joint_distribution[block-agreeing-plain]",)
_DRAWN = ("tests/algorithms/test_drafters.py::test_drawn_chains_follow_the_targets_distribution[rejection]",)
_EXACT = (
    "tests/kernels/test_rejection_distribution.py::test_exact_distribution_of_two_tokens[rejection-reference-plain]",
)
_FORBID = "specdec_kernels/sampling/kernel_forbid.py"
_MASK = "specdec_kernels/sampling/kernel_mask.py"
_case = partial(parity, "verify")
_pick = partial(parity, "sampling")

ELEVEN = (
    Mutant(
        "residual_is_the_target",
        _RULES,
        "subtracted = torch.where(whole[:, None], 0.0, draft[rows, tau])",
        "subtracted = torch.zeros_like(draft[rows, tau])",
        _MISSES,
        "historical: a rejected draft is replaced by a draw from the target itself",
    ),
    Mutant(
        "residual_without_the_rejected_token",
        _RULES,
        "residual = (scale[:, None] * target[rows, tau] - subtracted).clamp(min=0)",
        "rejected = tokens[rows, (tau + 1).clamp(max=num_nodes - 1)].clamp(0, vocab - 1)[:, None]\n"
        "    residual = target[rows, tau].scatter(1, rejected, 0.0)\n"
        "    residual = torch.where(whole[:, None], target[rows, tau], residual)",
        _MISSES,
        "historical: only the rejected token is taken off the target",
    ),
    Mutant(
        "draft_recorded_unfiltered",
        _DRAFTER,
        "found.append(self._in_target(probs))",
        "unfiltered = batch.sampling._replace(top_k=None, top_p=None, min_p=None).repeated(probs.shape[1])\n"
        "            found.append(self._in_target(filtered_probs(logits.flatten(0, 1), unfiltered).view_as(probs)))",
        _DRAWN,
        "historical: drafts are drawn under top-k, their distribution is recorded without (transformers #47932)",
    ),
    Mutant(
        "draft_and_recovery_share_noise",
        _TYPES,
        "RECOVER_STREAM = 3 ",
        "RECOVER_STREAM = 1 ",
        ("tests/kernels/test_sampling.py::test_streams_of_random_numbers_are_disjoint",),
        "historical: one stream for the draft and for the token in its place (vLLM #47386)",
    ),
    Mutant(
        "uniform_reused_for_recovery",
        _TYPES,
        "RECOVER_STREAM = 3 ",
        "RECOVER_STREAM = 2 ",
        _MISSES,
        "historical: the uniform that rejected a draft also picks its replacement",
    ),
    Mutant(
        "draft_in_bfloat16",
        _TREES,
        "draft = torch.nan_to_num(draft_probs.double()).clamp(min=0)",
        "draft = torch.nan_to_num(draft_probs.bfloat16().double()).clamp(min=0)",
        _EXACT,
        "historical: the draft's distribution is rounded to bfloat16, too little for any sampling test (DeepSpec #31)",
    ),
    Mutant(
        "greedy_at_a_temperature",
        _RULES,
        "tau = torch.where(drawn_rows, tau, _leading((drafted == greedy[:, :-1]) & in_reach))",
        "tau = _leading((drafted == greedy[:, :-1]) & in_reach)",
        _WHOLE,
        "historical: drafts are judged by the argmax although the request samples (SGLang #31214)",
    ),
    Mutant(
        "temperature_on_the_target_alone",
        _DRAFTER,
        "found.append(self._in_target(probs))",
        "at_one = batch.sampling._replace(temperature=(batch.sampling.temperature > 0).float())\n"
        "            at_one = at_one.repeated(probs.shape[1])\n"
        "            found.append(self._in_target(filtered_probs(logits.flatten(0, 1), at_one).view_as(probs)))",
        _DRAWN,
        "historical: the draft's distribution is recorded at temperature 1",
    ),
    Mutant(
        "bonus_of_the_row_before",
        _RULES,
        "residual = (scale[:, None] * target[rows, tau] - subtracted).clamp(min=0)",
        "stale = (tau - whole.long()).clamp(min=0)\n"
        "    residual = (scale[:, None] * target[rows, stale] - subtracted).clamp(min=0)",
        _WHOLE,
        "historical: the bonus is drawn from the row of the last draft's parent",
    ),
    Mutant(
        "residual_of_the_row_before",
        _RULES,
        "residual = (scale[:, None] * target[rows, tau] - subtracted).clamp(min=0)",
        "stale = (tau - (~whole).long()).clamp(min=0)\n"
        "    residual = (scale[:, None] * target[rows, stale] - subtracted).clamp(min=0)",
        _MISSES,
        "historical: the residual takes the target's distribution of the row before",
    ),
    Mutant(
        "impossible_token_now_and_then",
        _RULES,
        "bonus = torch.where(drawn_rows, drawn, greedy[rows, tau])",
        "drawn = torch.where(recover < 1e-3, vocab - 1, drawn)\n"
        "    bonus = torch.where(drawn_rows, drawn, greedy[rows, tau])",
        _MISSES,
        "historical: once in a thousand a token of probability zero (vLLM GHSA-8wr5-jm2h-8r4f)",
    ),
)
OTHERS = (
    Mutant(
        "uniform_may_equal",
        _KERNEL,
        "_leading(here & in_reach & (uniform * q < p), node, NODES)",
        "_leading(here & in_reach & (uniform * q <= p), node, NODES)",
        ("tests/kernels/test_verify.py::test_a_uniform_of_zero_accepts_nothing_impossible",),
        "a uniform of exactly zero accepts a draft that the target rules out",
    ),
    Mutant(
        "uniform_of_24_bits",
        _SAMPLING,
        "return ((words[0] << 21) | (words[1] >> 12 << 1) | 1).double() * 2.0**-53",
        "return ((words[0] >> 8) + 0.5).double() * 2.0**-24",
        ("tests/kernels/test_sampling.py::test_known_answer",),
        "a uniform of 24 bits is too coarse for the tokens of a large vocabulary",
    ),
    Mutant(
        "uniform_of_24_bits_in_the_kernel",
        _DEVICE,
        "odd = (word.to(tl.int64) << 21) | ((second >> 12).to(tl.int64) << 1) | 1",
        "odd = ((word >> 8).to(tl.int64) << 29) | (1 << 28)",
        ("tests/kernels/test_sampling.py::test_kernel_and_reference_share_one_random_stream",),
        "the kernel leaves the low bits of the uniform out",
    ),
    Mutant(
        "uniform_may_be_zero",
        _SAMPLING,
        "return ((words[0] << 21) | (words[1] >> 12 << 1) | 1).double() * 2.0**-53",
        "return ((words[0] << 21) | (words[1] >> 12 << 1)).double() * 2.0**-53",
        ("tests/kernels/test_sampling.py::test_uniforms_fill_the_unit_interval_and_streams_differ",),
        "historical: a uniform of 0 draws the first token with any weight and accepts any draft",
    ),
    Mutant(
        "goal_in_float32",
        _DEVICE,
        "goal = tl.minimum((uniform * whole.to(tl.float64)).to(tl.int64), whole - 1)",
        "goal = tl.minimum((uniform.to(tl.float32) * whole.to(tl.float32)).to(tl.int64), whole - 1)",
        ("tests/kernels/test_exact_distribution.py::test_every_uniform_over_a_small_vocabulary[triton-plain]",),
        "historical: the goal has 24 bits, so unlikely tokens behind likely ones cannot be drawn",
    ),
    Mutant(
        "rest_of_the_goal_in_float32",
        _DEVICE,
        "share = ((goal[:, None] - begin).to(tl.float64) + 0.5) / tl.maximum(units, 1).to(tl.float64)",
        "share = ((goal[:, None] - begin).to(tl.float32) / tl.maximum(units, 1).to(tl.float32)).to(tl.float64)",
        ("tests/kernels/test_exact_distribution.py::test_every_uniform_over_a_small_vocabulary[triton-plain]",),
        "historical: the rest of the goal inside a group is rounded to float32",
    ),
    Mutant(
        "residual_not_subtracted",
        _KERNEL,
        "residual = tl.sum(tl.maximum(kept[:, None] * p - q, 0.0), 1)",
        "residual = tl.sum(kept[:, None] * p, 1)",
        _case("rejection_tiles"),
        "groups of tokens are weighed by the target alone",
    ),
    Mutant(
        "block_ratio_not_capped",
        _RULES,
        "kept.append((kept[-1] * column).clamp(max=1))",
        "kept.append(kept[-1] * column)",
        _BLOCK,
        "a likely draft pays for an unlikely one behind it",
    ),
    Mutant(
        "bonus_shares_the_recovery_stream",
        _KERNEL,
        "uniform = tl.where(whole, d.philox_uniform(seed, root, _BONUS), recover)",
        "uniform = recover",
        _case("rejection_same", "block_same"),
        "the bonus is keyed like a replacement",
    ),
    Mutant(
        "last_of_equal_logits",
        _SELECT,
        "return start + tl.min(tl.where(value >= top[:, None], inside, STRIP), 1)",
        "return start + tl.max(tl.where(value >= top[:, None], inside, -1), 1)",
        _pick("pick_ties"),
        "the argmax takes the highest id among equal logits of a strip",
    ),
    Mutant(
        "last_of_equal_strips",
        _SELECT,
        "start = tl.min(tl.where(tops == top[:, None], lane, tops.shape[1]), 1) * STRIP",
        "start = tl.max(tl.where(tops == top[:, None], lane, -1), 1) * STRIP",
        _pick("pick_ties"),
        "the argmax is taken from the last strip that has the largest logit",
    ),
    Mutant(
        "chunk_of_another_row",
        _NUCLEUS,
        "return row, task % CHUNKS, there",
        "return row, task // CHUNKS % CHUNKS, there",
        _pick("pick_filtered_flat"),
        "a deferred row reads the chunk that its place in the queue names",
    ),
    Mutant(
        "min_p_below_its_class",
        _SETTLE,
        "rises = by_mass | (known & (value < lowest[:, None]))",
        "rises = by_mass",
        _pick("probs_two_limits"),
        "a row keeps the weight between the threshold of top-p and that of min-p, which cuts above it",
    ),
    Mutant(
        "top_p_of_the_unfiltered_row",
        _SETTLE,
        "goal = share * tl.where(by_count | WHOLE, in_reach, everything)",
        "goal = share * everything",
        _pick("pick_filtered_slots", "pick_filtered"),
        "top-p behind top-k takes its share of the whole row",
    ),
    Mutant(
        "ranks_of_another_class",
        _NUCLEUS,
        "rank = (tl.cumsum(one, 1) >> bits) & MOST",
        "rank = tl.cumsum(one, 1) & MOST",
        _pick("probs_spread"),
        "values of all classes are written down at places counted for the lowest one",
    ),
    Mutant(
        "stale_bonus_row",
        _WALK,
        "target = tl.where(hit, of_candidate, target)",
        "target = tl.where(hit & (link >> _LINK_BITS > 0), of_candidate, target)",
        _case("accept_saturated"),
        "the bonus behind the last accepted draft is the draft itself again",
    ),
    Mutant(
        "duplicate_sibling_taken_twice",
        _WALK,
        "onward = tl.where(hit, link >> _LINK_BITS & _LINK, link & _LINK) - 1",
        "onward = tl.where(hit, link >> _LINK_BITS & _LINK, 0) - 1",
        _case("accept_tree"),
        "the walk does not go on to the next sibling",
    ),
    Mutant(
        "length_without_the_bonus",
        _OUTCOME,
        "tl.store(out_lengths_ptr + request, length + count + 1, mask=in_batch)",
        "tl.store(out_lengths_ptr + request, length + count, mask=in_batch)",
        _case("accept_tree"),
        "the new length forgets the bonus",
    ),
    Mutant(
        "vocabulary_tail_wins",
        _DEVICE,
        'value = tl.load(values_ptr + offset, mask=live, other=float("-inf")).to(tl.float32)',
        "value = tl.load(values_ptr + offset, mask=live, other=0.0).to(tl.float32)",
        _pick("pick_vocab_100"),
        "historical: lanes past the vocabulary win against negative logits (vLLM GHSA-8wr5-jm2h-8r4f)",
    ),
    Mutant(
        "nan_is_a_logit",
        _DEVICE,
        'value = tl.where(value == value, value, float("-inf"))',
        "value = value + 0.0",
        _pick("pick_hostile"),
        "historical: NaN logits reach the comparison (FlashInfer #2402)",
    ),
    Mutant(
        "position_in_32_bits",
        _DEVICE,
        "high = (position >> 32).to(tl.uint32)",
        "high = (position >> 32).to(tl.uint32) * 0",
        _pick("pick_vocab_100"),
        "positions that differ by 2^32 share their random numbers",
    ),
    Mutant(
        "top_p_of_the_whole_distribution",
        _SAMPLING,
        "kept = torch.where(values >= floor[:, None], weights, 0.0)",
        "kept = weights",
        _pick("pick_filtered"),
        "top-p is measured before top-k instead of on what it left",
    ),
    Mutant(
        "top_k_drops_ties",
        _SAMPLING,
        "weights = torch.where(values >= floor[:, None], weights, 0.0)\n    return Row",
        "weights = torch.where(values > floor[:, None], weights, 0.0)\n    return Row",
        ("tests/kernels/test_sampling_filters.py::test_any_filter",),
        "the value at the threshold is not kept",
    ),
    Mutant(
        "stop_tokens_held_back_too_long",
        _FORBID,
        "(position[:, None] + 1 < until)",
        "(position[:, None] < until)",
        _pick("forbid_tokens"),
        "a stop token is forbidden one token past min_tokens",
    ),
    Mutant(
        "bad_words_miss_the_drafts",
        _FORBID,
        "return tl.where(place < length, before, drafted)",
        "return before",
        _pick("forbid_words"),
        "a bad word is written where its first tokens were drafted in the same block",
    ),
    Mutant(
        "mask_by_bytes",
        _MASK,
        "(column % WORD_BITS)) & 1",
        "(column % 8)) & 1",
        _pick("mask_odd"),
        "a token takes the bit of another one of its word",
    ),
    Mutant(
        "mask_of_everybody",
        _MASK,
        "live = asks[:, None] & (column < VOCAB)",
        "live = in_row[:, None] & (column < VOCAB)",
        _pick("mask_odd"),
        "a request without a grammar is masked because another one of its batch has one",
    ),
)
MUTANTS = (*ELEVEN, *OTHERS)
