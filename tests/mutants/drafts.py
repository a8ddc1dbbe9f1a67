"""Bugs in synthetic drafts, in drafters with another vocabulary, in reported drafts, and in GLM-4's layers."""

from __future__ import annotations

from tests.mutants.mutant import bugs_in

_RATES = "tests/algorithms/test_synthetic.py::test_drafts_are_accepted_at_the_given_rates"
_SHARED = "tests/algorithms/models/test_shared_vocabulary.py::"
_DRAFTS = "tests/algorithms/test_drafts.py::"
_GLM = ("tests/algorithms/models/test_architectures.py::test_architectures_agree_with_transformers[glm4]",)
_synthetic = bugs_in("algorithms/synthetic.py")
_vocabulary = bugs_in("algorithms/models/shared_vocabulary.py")
_step = bugs_in("algorithms/step/step.py")
_readback = bugs_in("algorithms/engine/transfers.py")
_rotary = bugs_in("algorithms/models/layers.py")
_decoder = bugs_in("algorithms/models/decoder.py")

MUTANTS = (
    _synthetic("rates_from_the_last_depth_on",
               "reached = torch.nn.functional.pad(drawn.long(){{ -> .flip(1)}}.cumprod(1)", (_RATES + "[chain]",),
               "the first draft is accepted at the rate of the last one"),
    _synthetic("every_depth_draws_the_same_number", "lengths[:, None] * 1_000_003 + {{places -> places * 0}}",
               (_RATES + "[chain]",), "drafts of one step are right or wrong together"),
    _synthetic("drafts_beside_the_path_are_right", "keep = reached.gather(1, depth){{ & on_path -> }}",
               ("tests/algorithms/test_synthetic.py::test_one_draft_of_a_depth_is_right",),
               "a tree accepts siblings of drafts that were meant to be wrong"),
    _vocabulary("head_in_the_order_of_the_draft_model",
                "exact[index] for index in {{shared -> sorted(shared, key=exact.__getitem__)}}",
                (_SHARED + "test_drafts_are_the_most_likely_tokens_in_common",),
                "logits belong to other tokens than their rows say"),
    _vocabulary(
        "context_in_the_targets_ids",
        "from_pretrained(table[{{self.substitutes -> torch.arange(len(self.substitutes)).clamp(max=len(table) - 1)}}",
        (_SHARED + "test_drafts_are_the_most_likely_tokens_in_common",),
        "the draft model reads the target's ids as its own",
    ),
    _vocabulary("space_of_sentencepiece_is_a_character", 'token{{.replace("▁", " ") -> }}.encode()',
                (_SHARED + "test_tokens_are_the_same_by_their_bytes",), "no word that follows a space is shared"),
    _step("target_probability_at_the_node_itself",
          "values = self.logits{{.gather(1, above[:, :, None].expand_as(self.logits)) -> }}",
          (_DRAFTS + "test_drafts_of_every_step[standalone_chain-setup0]",),
          "a draft is reported with the probability after it, not before it"),
    _step("draft_probability_of_row_zero", "rows = {{above -> above * 0}} if tree.draft_rows is None",
          (_DRAFTS + "test_sampled_drafts_have_the_probability_that_they_were_drawn_with[settings0]",),
          "all drafts of a chain are reported with the first distribution"),
    _readback("acceptance_by_token_alone", "if {{parents[node] == path and  -> }}tokens[node] == token",
              ("tests/algorithms/engine/test_readback.py::test_drafts_come_with_their_place_in_the_tree",),
              "a rejected node with the token of an accepted one is reported as accepted"),
    _rotary("halves_rotate_instead_of_neighbours",
            "turning.unflatten(-1, (-1, 2)).unbind(-1) if {{interleaved -> False}} else", _GLM,
            "other pairs rotate than the model was trained with"),
    _rotary("all_of_a_head_rotates", "kernels.rope_table(config.{{rotary_dim -> head_dim}}, ", _GLM,
            "elements turn that the model was trained to leave alone"),
    _decoder("closing_norm_of_the_mlp_is_skipped",
             "return stream + _closed({{self.post_mlp_layernorm -> None}}, self.mlp(norm(stream), real))", _GLM,
             "the MLP's output enters the residual stream without its norm"),
)  # fmt: skip
