"""SGLang's speculative-decoding functions over the kernels of this package.

Names, argument order, shapes, dtypes and outputs written in place follow sgl-kernel 0.3.21 and the Triton kernels
of SGLang's speculative workers, on CUDA tensors or on CPU tensors. Kernels that SGLang launches as `name[grid](...)`
are functions here, with or without the grid. Sizes that SGLang passes for its compiler are ignored.

Results equal SGLang's wherever those are defined. They differ, on purpose, in these places:

* A uniform number of exactly 0 accepts nothing: the test is u < mass, not <=, so that a token of probability 0 is never
  emitted.
* A sibling with the token of a rejected sibling has no mass left, so padding and duplicates are never sampled.
* A residual without mass falls back to the target's largest token, not to the last id of the vocabulary.
* `build_tree_kernel_efficient` follows SGLang's CPU and Triton builders on malformed trees: its CUDA builder reads past
  the tensors there, or does not end. A negative candidate is a child of the root, and one of a row that the parent list
  does not have is an orphan. All links are written, so that the caller need not fill them with -1 first.
* A request that has accepted nothing keeps its bonus token; the original reads before its row.
* Nothing is read or written outside the tensors, for any links, ids and lengths. A traversal of links that form a cycle
  ends after N visits.
* Entry 0 of `kv_indptr` is written. No request's draft slots overwrite what another request still has to read.
"""

from specdec_kernels.compat.sglang.api import (
    build_tree_kernel_efficient,
    reconstruct_indices_from_tree_mask,
    segment_packbits,
    top_k_renorm_prob,
    top_p_renorm_prob,
    tree_speculative_sampling_target_only,
    verify_tree_greedy,
)
from specdec_kernels.compat.sglang.cache_locations import (
    align_evict_mask_to_page_size,
    align_evict_mask_to_page_size_simple_eagle,
    assign_draft_cache_locs,
    assign_extend_cache_locs,
    assign_req_to_token_pool,
    create_draft_kv_indices,
    create_extend_after_decode_spec_info,
    create_flashinfer_kv_indices_triton,
    fill_accepted_out_cache_loc,
    fill_bonus_tokens,
    fill_bonus_tokens_from_predict,
    filter_finished_cache_loc_kernel,
    generate_draft_decode_kv_indices,
    get_src_tgt_cache_loc,
    get_target_cache_loc,
)
from specdec_kernels.compat.sglang.types import TreeMaskMode

__all__ = [
    "TreeMaskMode", "align_evict_mask_to_page_size", "align_evict_mask_to_page_size_simple_eagle",
    "assign_draft_cache_locs", "assign_extend_cache_locs", "assign_req_to_token_pool", "build_tree_kernel_efficient",
    "create_draft_kv_indices", "create_extend_after_decode_spec_info", "create_flashinfer_kv_indices_triton",
    "fill_accepted_out_cache_loc", "fill_bonus_tokens", "fill_bonus_tokens_from_predict",
    "filter_finished_cache_loc_kernel", "generate_draft_decode_kv_indices", "get_src_tgt_cache_loc",
    "get_target_cache_loc", "reconstruct_indices_from_tree_mask", "segment_packbits", "top_k_renorm_prob",
    "top_p_renorm_prob", "tree_speculative_sampling_target_only", "verify_tree_greedy",
]  # fmt: skip
