"""Bugs in conventions of published chain heads: files load, run, and draft wrong tokens."""

from __future__ import annotations

from tests.mutants.mutant import bugs_in

_PUBLISHED = "tests/algorithms/eagle/test_published.py::test_the_distribution_of_a_sampled_chain"
_MTP = "tests/algorithms/mtp/test_mtp.py::test_greedy_chains"
_formats = bugs_in("algorithms/eagle/loading.py")
_model = bugs_in("algorithms/eagle/model.py")
_drafting = bugs_in("algorithms/eagle/drafting.py")
_mtp = bugs_in("algorithms/mtp/model.py")

MUTANTS = (
    _formats(
        "layers_of_speculators_are_outputs",
        "merged[LAYER_IDS_KEY] = {{speculators.layer_outputs(layers_run, num_target_layers) -> tuple(layers_run)}}",
        (_PUBLISHED + "[speculators qwen3 of two layers]",),
        "historical: features one layer late (vLLM's issue 40727)",
    ),
    _formats("norm_output_of_speculators_is_specforges",
             '"feedback": {{NORMED if merged.pop("norm_output", False) else RAW -> RAW}}',
             (_PUBLISHED + "[speculators default]",), "the next level of a draft reads the raw stream"),
    _model("residual_is_always_raw",
           "{{normed[..., feature.shape[-1] :].contiguous() if self._normed_residual else feature -> feature}})",
           (_PUBLISHED + "[speculators default]",),
           "the residual stream starts from the feature, where the head was trained with its norm"),
    bugs_in("algorithms/drafting/feature_head.py")(
        "embedding_is_no_feature",
        "[{{self.target.embed(tokens) if index == EMBEDDING_LAYER else  -> }}next(given) for index in self.layer_ids]",
        (_PUBLISHED + "[deepspec]",),
        "a head that reads the embedding runs out of features",
    ),
    _model("mask_rows_of_zeros", "if self.mask_hidden is None else self.mask_hidden.flatten(){{ ->  * 0}}",
           (_PUBLISHED + "[aws peagle]",), "mask rows without the feature that they were trained with"),
    _drafting("mask_rows_at_one_position", "batch.lengths[:, None] + self._offsets[:count]{{ ->  * 0}}",
              (_PUBLISHED + "[aws peagle]",),
              "historical: rotary offsets of mask rows have no effect (NVIDIA Automodel's pull request 2377)"),
    bugs_in("algorithms/drafting/tree_drafter.py")(
        "drafts_of_one_pass_are_not_mapped",
        "tokens[:, 1:] = {{in_target(picked.tokens, self.vocabulary) -> picked.tokens}}",
        (_PUBLISHED + "[speculators peagle]",),
        "ids of a reduced vocabulary are taken for the target's",
    ),
    _mtp("halves_are_swapped", "halves[::-1] if {{ -> not }}hidden_first else halves", (_MTP + "[own_folder]",),
         "historical: the embedding enters in the place of the hidden state (slime's issue 691)"),
    _mtp("one_layer_drafts_all_levels", "streams[{{level % len(layers) -> 0}}], layers[{{level % len(layers) -> 0}}]",
         (_MTP + "[two_layers]",), "of several MTP layers the first drafts every step"),
    bugs_in("algorithms/drafting/level_drafter.py")("level_does_not_grow", "level += {{1 -> 0}}",
                                                    (_MTP + "[two_layers]",),
                                                    "every step runs the layer of the first one"),
)  # fmt: skip
