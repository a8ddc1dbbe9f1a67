"""Bugs in drawing and accepting tokens. Eleven of them shipped somewhere or stand for a class that did; most tests of
speculative sampling in use miss several, because their distributions do not depend on the context. They are put into
the definition or into the drafter, where parity of kernel and reference cannot help: only a test of the distribution
can tell.
"""

from __future__ import annotations

from functools import partial

from tests.mutants.mutant import bugs_in, parity

_rules = bugs_in("specdec_kernels/verify/reference.py")
_trees = bugs_in("specdec_kernels/verify/reference_tree.py")
_kernel = bugs_in("specdec_kernels/verify/kernel_rejection.py")
_select = bugs_in("specdec_kernels/sampling/kernel.py")
_settle = bugs_in("specdec_kernels/sampling/kernel_settle.py")
_walk = bugs_in("specdec_kernels/verify/kernel.py")
_sampling = bugs_in("specdec_kernels/sampling/reference.py")
_device = bugs_in("specdec_kernels/sampling/device.py")
_types = bugs_in("specdec_kernels/sampling/types.py")
_drafter = bugs_in("algorithms/drafting/sampled_tree.py")
_MISSES = ("tests/kernels/test_joint_distribution.py::test_joint_distribution[rejection-chain-opposed-plain]",)
_WHOLE = ("tests/kernels/test_joint_distribution.py::test_joint_distribution[rejection-chain-agreeing-plain]",)
_BLOCK = ("tests/kernels/test_joint_distribution.py::test_joint_distribution[block-chain-agreeing-plain]",)
_SAMPLED = (
    "tests/algorithms/test_sampled_trees.py::test_three_tokens_follow_the_targets_distribution[standalone_rejection]",
)
_EXACT = (
    "tests/kernels/test_rule_distribution.py::test_exact_distribution_of_three_tokens[rejection-reference-spread]",
)
_logits = bugs_in("specdec_kernels/sampling/kernel_logits.py")
_case = partial(parity, "verify")
_pick = partial(parity, "sampling")

ELEVEN = (
    _rules("residual_is_the_target",
           "subtracted = torch.{{where(whole[:, None], 0.0, draft[rows, tau]) -> zeros_like(draft[rows, tau])}}",
           _MISSES, "historical: a rejected draft is replaced by a draw from the target itself"),
    _rules("residual_without_the_rejected_token",
           "{{residual = (scale[:, None] * target[rows, tau] - subtracted).clamp(min=0) -> "
           "rejected = tokens[rows, (tau + 1).clamp(max=num_nodes - 1)].clamp(0, vocab - 1)[:, None]\n"
           "    residual = target[rows, tau].scatter(1, rejected, 0.0)\n"
           "    residual = torch.where(whole[:, None], target[rows, tau], residual)}}", _MISSES,
           "historical: only the rejected token is taken off the target"),
    _drafter(
        "draft_recorded_unfiltered",
        "{{found.append(self._in_target(probs)) -> "
        "unfiltered = batch.sampling._replace(top_k=None, top_p=None, min_p=None).repeated(probs.shape[1])\n"
        "            found.append(self._in_target(filtered_probs(logits.flatten(0, 1), unfiltered).view_as(probs)))}}",
        _SAMPLED,
        "historical: drafts are drawn under top-k, their distribution is recorded without (transformers #47932)",
    ),
    _types("draft_and_recovery_share_noise", "RECOVER_STREAM = {{3 -> 1}} ",
           ("tests/kernels/test_sampling.py::test_streams_of_random_numbers_are_disjoint",),
           "historical: one stream for the draft and for the token in its place (vLLM #47386)"),
    _types("uniform_reused_for_recovery", "RECOVER_STREAM = {{3 -> 2}} ", _MISSES,
           "historical: the uniform that rejected a draft also picks its replacement"),
    _trees(
        "draft_in_bfloat16",
        "draft = torch.nan_to_num(draft_probs.{{ -> bfloat16().}}double()).clamp(min=0)",
        _EXACT,
        "historical: the draft's distribution is rounded to bfloat16, too little for any sampling test (DeepSpec #31)",
    ),
    _rules("greedy_at_a_temperature",
           "tau ={{ torch.where(sampled_rows, tau, -> }} _leading((drafted == greedy[:, :-1]) & in_reach){{) -> }}",
           _WHOLE, "historical: drafts are judged by the argmax although the request samples (SGLang #31214)"),
    _drafter("temperature_on_the_target_alone",
             "{{found.append(self._in_target(probs)) -> "
             "at_one = batch.sampling._replace(temperature=(batch.sampling.temperature > 0).float())\n"
             "            at_one = at_one.repeated(probs.shape[1])\n"
             "            found.append(self._in_target(filtered_probs(logits.flatten(0, 1), at_one).view_as(probs)))}}",
             _SAMPLED, "historical: the draft's distribution is recorded at temperature 1"),
    _rules("bonus_of_the_row_before",
           "{{ -> stale = (tau - whole.long()).clamp(min=0)\n"
           "    }}residual = (scale[:, None] * target[rows, {{tau -> stale}}] - subtracted).clamp(min=0)", _WHOLE,
           "historical: the bonus is drawn from the row of the last draft's parent"),
    _rules("residual_of_the_row_before",
           "{{residual = (scale[:, None] * target[rows, tau] - subtracted) -> "
           "stale = (tau - (~whole).long()).clamp(min=0)\n"
           "    residual = (scale[:, None] * target[rows, stale] - subtracted)}}.clamp(min=0)", _MISSES,
           "historical: the residual takes the target's distribution of the row before"),
    _rules("impossible_token_now_and_then",
           "{{ -> sampled = torch.where(recover < 1e-3, vocab - 1, sampled)\n"
           "    }}bonus = torch.where(sampled_rows, sampled, greedy[rows, tau])", _MISSES,
           "historical: once in a thousand a token of probability zero (vLLM GHSA-8wr5-jm2h-8r4f)"),
)  # fmt: skip
OTHERS = (
    _kernel("uniform_may_equal", "_leading(here & in_reach & (uniform * q {{< -> <=}} p), node, NODES)",
            ("tests/kernels/test_verify.py::test_one_draft_by_hand",),
            "a uniform of exactly zero accepts a draft that the target rules out"),
    _sampling("uniform_of_24_bits",
              "return ((multiplied[0] {{<< 21) | (others[0] >> 12 << 1) | 1 -> >> 8) + 0.5}}).double() * "
              "2.0**-{{53 -> 24}}",
              ("tests/kernels/test_sampling.py::test_known_answer",),
              "a uniform of 24 bits is too coarse for the tokens of a large vocabulary"),
    _device("uniform_of_24_bits_in_the_kernel",
            "odd = {{(word.to(tl.int64) << 21) | ((second >> 12).to(tl.int64) << 1) | 1 -> "
            "((word >> 8).to(tl.int64) << 29) | (1 << 28)}}",
            ("tests/kernels/test_sampling.py::test_kernel_and_reference_share_one_random_stream",),
            "the kernel leaves the low bits of the uniform out"),
    _sampling("uniform_may_be_zero",
              "return ((multiplied[0] << 21) | (others[0] >> 12 << 1){{ | 1 -> }}).double() * 2.0**-53",
              ("tests/kernels/test_sampling.py::test_uniforms_fill_the_unit_interval_and_streams_differ",),
              "historical: a uniform of 0 draws the first token with any weight and accepts any draft"),
    _device("goal_in_float32",
            "goal = tl.minimum((uniform{{ -> .to(tl.float32)}} * whole.to(tl.{{float64 -> "
            "float32}})).to(tl.int64), whole - 1)",
            ("tests/kernels/test_exact_distribution.py::test_every_uniform_over_a_small_vocabulary[triton-plain]",),
            "historical: the goal has 24 bits, so unlikely tokens behind likely ones cannot be drawn"),
    _device("rest_of_the_goal_in_float32",
            "share = ((goal[:, None] - begin).to(tl.{{float64) + 0.5 -> "
            "float32}}) / tl.maximum(units, 1).to(tl.{{ -> float32)).to(tl.}}float64)",
            ("tests/kernels/test_exact_distribution.py::test_every_uniform_over_a_small_vocabulary[triton-plain]",),
            "historical: the rest of the goal inside a group is rounded to float32"),
    _rules("block_ratio_not_capped", "kept.append({{(kept[-1] * column).clamp(max=1) -> kept[-1] * column}})", _BLOCK,
           "a likely draft pays for an unlikely one behind it"),
    _kernel("bonus_shares_the_recovery_stream", "stream = {{tl.where(whole, _BONUS, _RECOVER) -> _RECOVER}}",
            _case("rejection_same", "block_same"), "the bonus is keyed like a replacement"),
    _select("last_of_equal_logits",
            "return start + tl.{{min -> max}}(tl.where(value >= top[:, None], inside, {{STRIP -> -1}}), 1)",
            _pick("pick_ties"), "the argmax takes the highest id among equal logits of a strip"),
    _settle("min_p_below_its_class", "rises = by_mass{{ | (known & (edges < limits.lowest[:, None])) -> }}",
            _pick("probs_two_limits"),
            "a row keeps the weight between the threshold of top-p and that of min-p, which cuts above it"),
    _settle("top_p_of_the_unfiltered_row",
            "goal = limits.share * {{tl.where(by_count | WHOLE, in_reach, limits.everything) -> limits.everything}}",
            _pick("pick_filtered_slots", "pick_filtered"), "top-p behind top-k takes its share of the whole row"),
    _walk("stale_bonus_row", "target = tl.where(hit{{ ->  & (link >> _LINK_BITS > 0)}}, of_candidate, target)",
          _case("accept_saturated"), "the bonus behind the last accepted draft is the draft itself again"),
    _walk("duplicate_sibling_taken_twice",
          "onward = tl.where(hit, link >> _LINK_BITS & _LINK, {{link & _LINK -> 0}}) - 1", _case("accept_tree"),
          "the walk does not go on to the next sibling"),
    _device("vocabulary_tail_wins",
            'value = tl.load(values_ptr + offset, mask=live, other={{float("-inf") -> 0.0}}).to(tl.float32)',
            _pick("pick_vocab_100"),
            "historical: lanes past the vocabulary win against negative logits (vLLM GHSA-8wr5-jm2h-8r4f)"),
    _device("nan_is_a_logit", 'value = {{tl.where(value == value, value, float("-inf")) -> value + 0.0}}',
            _pick("pick_hostile"), "historical: NaN logits reach the comparison (FlashInfer #2402)"),
    _device("position_in_32_bits", "high = (position >> 32).to(tl.uint32){{ ->  * 0}}", _pick("pick_vocab_100"),
            "positions that differ by 2^32 share their random numbers"),
    _sampling("top_p_of_the_whole_distribution",
              "kept = {{torch.where(values >= floor[:, None], weights, 0.0) -> weights}}", _pick("pick_filtered"),
              "top-p is measured before top-k instead of on what it left"),
    _sampling("top_k_drops_ties",
              "weights = torch.where(values {{>= -> >}} floor[:, None], weights, 0.0)\n    return Row",
              ("tests/kernels/test_sampling_filters.py::test_any_filter",), "the value at the threshold is not kept"),
    _logits("stop_tokens_held_back_too_long", "(position[:, None] {{+ 1  -> }}< until)", _pick("forbid_tokens"),
            "a stop token is forbidden one token past min_tokens"),
    _logits("bad_words_miss_the_drafts", "token = {{tl.where(place < length, token, drafted) -> token}}",
            _pick("forbid_words"), "a bad word is written where its first tokens were drafted in the same block"),
    _logits("mask_of_everybody",
            "live = {{asks -> in_row}}[:, None] & (column < VOCAB)\n        word = tl.load(bits_ptr", _pick("mask_odd"),
            "a request without a grammar is masked because another one of its batch has one"),
)  # fmt: skip
MUTANTS = (*ELEVEN, *OTHERS)
