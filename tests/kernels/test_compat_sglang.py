"""SGLang's functions against their formulas in plain Python, on worked examples and on random input.

The oracles below compute the documented result entry by entry; none of them shares code with the package. Outputs have
contents before the call, because SGLang writes into tensors of its own.
"""

import inspect
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec_kernels.cases import Maker
from specdec_kernels.compat import sglang
from specdec_kernels.compat.sglang import TreeMaskMode, cases

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAKE = Maker.seeded(DEVICE)
OLD = 77


def ints(values: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def old(size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.full((size,), OLD, dtype=dtype, device=DEVICE)


def starts_of(counts: list[int]) -> list[int]:
    return [sum(counts[:b]) for b in range(len(counts) + 1)]


def parents_of(selected: list[int], parent_list: list[int], topk: int) -> list[int | None]:
    """Parent node of each node, None for the root and for an orphan."""
    found: list[int | None] = [None]
    for candidate in selected:
        row = candidate // topk
        if row <= 0:
            found.append(0)
        elif row < len(parent_list) and parent_list[row] in selected:
            found.append(selected.index(parent_list[row]) + 1)
        else:
            found.append(None)
    return found


def tree_in_python(parents: list[int | None], length: int, depth: int) -> dict[str, list]:
    """Links, positions and visible nodes by the walk of SGLang's CPU builder; an orphan has no link to it."""
    nodes = range(len(parents))
    child, sibling = [-1] * len(parents), [-1] * len(parents)
    for node in reversed(nodes[1:]):
        if parents[node] is not None:
            sibling[node], child[parents[node]] = child[parents[node]], node
    seen, walked = [], []
    for node in nodes:
        path, current = [], node
        while current and len(path) < depth:
            path.append(current)
            current = parents[current] or 0
        seen.append({0, *path})
        walked.append(len(path))
    return dict(child=child, sibling=sibling, positions=[length + d for d in walked], seen=seen)


def run_build(
    parent_list: Any, selected: Any, lengths: Any, topk: int, depth: int, mode: TreeMaskMode, impl: str
) -> dict[str, Any]:
    batch, nodes = len(selected), len(selected[0]) + 1
    packed = mode is TreeMaskMode.QLEN_ONLY_BITPACKING
    mask = old(batch * nodes, torch.uint8) * 0 if packed else old(batch * nodes * nodes, torch.bool)
    outputs = cases.tree_outputs(MAKE, batch, nodes)
    sglang.build_tree_kernel_efficient(
        ints(parent_list), ints(selected), ints(lengths), mask, *outputs.values(), topk, depth, nodes, int(mode),
        impl=impl,
    )  # fmt: skip
    return dict(outputs, tree_mask=mask)


def test_worked_trees_of_four_branches(impl: str) -> None:
    parents = [[-1, 0, 1, 2, 3, 4, 8, 12, 16, 20, 24, 28, 32], [-1, 0, 1, 2, 3, 4, 5, 6, 7, 24, 28, 20, 21]]
    selected = [[0, 1, 4, 8, 20, 24, 36], [0, 4, 5, 6, 7, 24, 36]]
    found = run_build(parents, selected, [10, 20], 4, 4, TreeMaskMode.QLEN_ONLY_BITPACKING, impl)
    assert found["retrive_next_token"].tolist() == [[1, 3, 4, 5, 6, 7, -1, -1], [1, 2, -1, 6, -1, -1, 7, -1]]
    assert found["retrive_next_sibling"].tolist()[0][1] == 2
    assert found["retrive_next_sibling"].tolist()[1] == [-1, -1, 3, 4, 5, -1, -1, -1]
    assert [p - 10 for p in found["positions"].tolist()[:8]] == [0, 1, 1, 2, 2, 3, 3, 4]
    assert found["tree_mask"].tolist()[8:] == [1, 3, 7, 11, 19, 35, 75, 203]
    assert found["retrive_index"].tolist() == [list(range(8)), list(range(8, 16))]


@st.composite
def malformed(draw: st.DrawFn) -> dict[str, Any]:
    """Candidates in any order, repeated, negative, of rows that do not exist, or their own parents."""
    topk, depth, batch = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    drafts, rows = draw(st.integers(1, 9)), topk * (depth - 1) + 1
    ids = st.integers(-2, topk * rows + 2)
    many = lambda count: [draw(st.lists(ids, min_size=count, max_size=count)) for _ in range(batch)]  # noqa: E731
    return dict(selected=many(drafts), parent_list=many(rows), topk=topk, depth=depth)


@given(tree=malformed())
def test_malformed_trees_are_built_as_sglang_builds_them(impl: str, tree: dict[str, Any]) -> None:
    """A parent after its child or equal to it, a missing parent, and a path longer than `depth`."""
    batch, nodes, topk = len(tree["selected"]), len(tree["selected"][0]) + 1, tree["topk"]
    lengths = [5 * b for b in range(batch)]
    sizes = topk, tree["depth"], TreeMaskMode.QLEN_ONLY
    outputs = run_build(tree["parent_list"], tree["selected"], lengths, *sizes, impl)
    for b in range(batch):
        parents = parents_of(tree["selected"][b], tree["parent_list"][b], topk)
        expected = tree_in_python(parents, lengths[b], tree["depth"])
        assert outputs["retrive_next_token"][b].tolist() == expected["child"]
        assert outputs["retrive_next_sibling"][b].tolist() == expected["sibling"]
        assert outputs["positions"].view(batch, nodes)[b].tolist() == expected["positions"]
        cells = outputs["tree_mask"].view(batch, nodes, nodes)[b].tolist()
        assert [{j for j in range(nodes) if row[j]} for row in cells] == expected["seen"]


def test_longer_inputs_are_read_from_their_beginning(impl: str) -> None:
    """As the original does: rows follow each other by the sizes of the draft, whatever the shape of the tensor."""
    trees = []
    for spare in (0, 3):
        parents = torch.cat([ints([-1, 0, 1, -1, 1, 0]), ints([9] * 2 * spare)]).view(2, 3 + spare)
        selected = torch.cat([ints([0, 1, 2, 1, 0, 2]), ints([7] * 2 * spare)]).view(2, 3 + spare)
        outputs, mask = cases.tree_outputs(MAKE, 2, 4), torch.zeros(32, dtype=torch.bool, device=DEVICE)
        sglang.build_tree_kernel_efficient(
            parents, selected, ints([5, 8]), mask, *outputs.values(), 2, 2, 4, 1, impl=impl
        )
        trees.append([mask.tolist(), *(value.tolist() for value in outputs.values())])
    assert trees[0] == trees[1]


@pytest.mark.parametrize(
    "topk, depth, nodes, mode",
    [
        (*size, mode)
        for size in ((4, 4, 8), (2, 3, 6), (3, 1, 3), (2, 5, 1), (9, 2, 70))
        for mode in TreeMaskMode
        if size[2] <= 64 or mode is not TreeMaskMode.QLEN_ONLY_BITPACKING
    ],
)
def test_trees_of_random_choices(topk: int, depth: int, nodes: int, mode: TreeMaskMode, impl: str) -> None:
    """Random choices, with orphans and their children among them."""
    inputs = cases.build_inputs(
        Maker.seeded(DEVICE, seed=topk), batch=5, nodes=nodes, mode=mode, topk=topk, depth=depth
    )
    before = inputs["tree_mask"].tolist()
    lengths = inputs["verified_seq_len"].tolist()
    sglang.build_tree_kernel_efficient(**inputs, impl=impl)
    found = inputs["tree_mask"].tolist()
    expected = list(before)
    for b in range(5):
        parents = parents_of(inputs["selected_index"][b].tolist(), inputs["parent_list"][b].tolist(), topk)
        tree = tree_in_python(parents, lengths[b], depth)
        assert inputs["retrive_next_token"][b].tolist() == tree["child"]
        assert inputs["retrive_next_sibling"][b].tolist() == tree["sibling"]
        assert inputs["positions"].view(5, nodes)[b].tolist() == tree["positions"]
        first = nodes * sum(lengths[:b]) + b * nodes * nodes
        for i in range(nodes):
            if mode is TreeMaskMode.QLEN_ONLY_BITPACKING:
                expected[b * nodes + i] = sum(1 << j for j in tree["seen"][i])
                continue
            for j in range(nodes):
                full = first + i * (lengths[b] + nodes) + lengths[b] + j
                place = full if mode is TreeMaskMode.FULL_MASK else (b * nodes + i) * nodes + j
                expected[place] = j in tree["seen"][i]
    assert found == expected, "tree cells, or cells that are not the function's to write"


@given(data=st.data(), nodes=st.integers(1, 9))
def test_links_of_a_mask(impl: str, data: st.DataObject, nodes: int) -> None:
    parents = [None] + [data.draw(st.integers(0, i - 1)) for i in range(1, nodes)]
    tree = tree_in_python(parents, 30, nodes)
    mask = torch.tensor([[j in tree["seen"][i] for j in range(nodes)] for i in range(nodes)], device=DEVICE)
    outputs = cases.tree_outputs(MAKE, 1, nodes)
    sglang.reconstruct_indices_from_tree_mask(mask.flatten(), ints([30]), *outputs.values(), 1, nodes, impl=impl)
    assert outputs["retrive_next_token"].tolist() == [tree["child"]]
    assert outputs["retrive_next_sibling"].tolist() == [tree["sibling"]]
    assert outputs["positions"].tolist() == tree["positions"]


@given(segments=st.lists(st.lists(st.booleans(), max_size=20), max_size=5))
def test_flags_are_packed_little_endian(impl: str, segments: list[list[bool]]) -> None:
    packed = [
        sum(flag << bit for bit, flag in enumerate(segment[first : first + 8]))
        for segment in segments
        for first in range(0, len(segment), 8)
    ]
    flags = torch.tensor([flag for segment in segments for flag in segment], dtype=torch.bool, device=DEVICE)
    begin, out = starts_of([len(s) for s in segments]), starts_of([math.ceil(len(s) / 8) for s in segments])
    y = old(len(packed) + 2, torch.uint8)
    sglang.segment_packbits(flags, ints(begin, torch.int32), ints(out, torch.int32), y, len(segments), impl=impl)
    assert y.tolist() == [*packed, OLD, OLD]


def walk_greedy(inputs: dict[str, list], b: int, nodes: int, path: int) -> tuple[list[int], dict[int, int]]:
    """Accepted nodes (root first) and the token after each visited one."""
    current, accepted, predicts = 0, [0], {}
    target = inputs["target_predict"][b]
    while len(accepted) < path:
        child = inputs["retrive_next_token"][b][current]
        while child != -1 and inputs["candidates"][b][child] != target[current]:
            child = inputs["retrive_next_sibling"][b][child]
        if child == -1:
            break
        predicts[b * nodes + current] = target[current]
        accepted.append(child)
        current = child
    predicts[b * nodes + current] = target[current]
    return accepted, predicts


def expect_walk(inputs: dict[str, Any], walks: list[tuple[list[int], dict[int, int]]], nodes: int, path: int) -> None:
    """What the three outputs hold after the walks, places that no walk writes included."""
    tokens = [OLD] * (len(walks) * nodes)
    for b, (accepted, predicts) in enumerate(walks):
        for place, token in predicts.items():
            tokens[place] = token
        flat = [b * nodes + node for node in accepted]
        assert inputs["accept_index"][b].tolist() == flat + [-1] * (path - len(flat))
        assert inputs["accept_token_num"][b].item() == len(accepted) - 1
    assert inputs["predicts"].tolist() == tokens


def listed(inputs: dict[str, Any]) -> dict[str, list]:
    return {name: value.tolist() for name, value in inputs.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("nodes, path, vocab", [(1, 1, 3), (2, 2, 2), (9, 5, 3), (9, 2, 2), (17, 17, 2), (9, 1, 2)])
def test_greedy_walks(nodes: int, path: int, vocab: int, impl: str) -> None:
    inputs = cases.greedy_inputs(Maker.seeded(DEVICE, seed=nodes), 12, nodes, path, vocab)
    given_ = listed(inputs)
    sglang.verify_tree_greedy(**inputs, impl=impl)
    expect_walk(inputs, [walk_greedy(given_, b, nodes, path) for b in range(12)], nodes, path)


def walked(path: int, candidates: list, child: list, sibling: list) -> dict[str, Any]:
    """Outputs and trees of a verification."""
    tokens = ints(candidates)
    links = dict(retrive_next_token=ints(child), retrive_next_sibling=ints(sibling))
    index = torch.arange(tokens.numel(), device=DEVICE).view(tokens.shape)
    return cases.walk_outputs(MAKE, *tokens.shape, path) | dict(candidates=tokens, retrive_index=index, **links)


@pytest.mark.parametrize(
    "candidates, child, sibling, target, accepted, predicted",
    [
        # A node that is its own child or sibling: the walk ends after as many visits as there are nodes.
        ([[0, 1, 1], [0, 2, 2]], [[1, 1, -1], [1, -1, -1]], [[-1, -1, -1], [-1, 1, -1]], [[1, 1, 1], [9, 9, 9]],
         [2, 0], {}),
        # A child one past the last node, and a sibling far beyond it.
        ([[0, 5, 6], [0, 5, 6]], [[3, -1, -1], [1, 3, -1]], [[-1, -1, -1], [-1, 99, -1]], [[6, 7, 8], [5, 7, 8]],
         [0, 1], {0: 6, 3: 5, 4: 7}),
    ],
    ids=["cycle", "missing"],
)  # fmt: skip
def test_malformed_links_end_a_traversal(
    candidates: list, child: list, sibling: list, target: list, accepted: list[int], predicted: dict, impl: str
) -> None:
    inputs = walked(9, candidates, child, sibling)
    sglang.verify_tree_greedy(**inputs, target_predict=ints(target), impl=impl)
    assert inputs["accept_token_num"].tolist() == accepted
    assert predicted.items() <= dict(enumerate(inputs["predicts"].tolist())).items()


def sample_walk(inputs: dict[str, list], b: int, path: int, single: float, acc: float) -> tuple[list[int], dict]:
    """Sampled acceptance by its definition, in exact binary fractions; also the rejected mass by (node, token)."""
    nodes, vocab = len(inputs["candidates"][b]), len(inputs["target_probs"][b][0])
    node, accepted, predicts, rejected = 0, [0], {}, {}
    while len(accepted) < path:
        uniform, mass, probs = inputs["uniform_samples"][b][node], 0.0, inputs["target_probs"][b][node]
        child = inputs["retrive_next_token"][b][node]
        while child != -1:
            token = inputs["candidates"][b][child]
            known = 0 <= token < vocab
            share = probs[token] if known and (node, token) not in rejected else 0.0
            mass += share
            if known and (uniform < mass / max(acc, 1e-9) or share >= single):
                break
            if known and share > 0:
                rejected[node, token] = share
            child = inputs["retrive_next_sibling"][b][child]
        if child == -1:
            break
        predicts[b * nodes + node] = token
        accepted.append(child)
        node = child
    probs = inputs["target_probs"][b][node]
    full = len(accepted) == path
    rest = [0.0 if not full and (node, v) in rejected else probs[v] for v in range(vocab)]
    goal, running, drawn = inputs["uniform_samples_for_final_sampling"][b] * sum(rest), 0.0, None
    for v in range(vocab):
        running += rest[v]
        if rest[v] > 0 and running > goal:
            drawn = v
            break
    predicts[b * nodes + node] = probs.index(max(probs)) if drawn is None else drawn
    return accepted, dict(predicts=predicts, rejected=rejected)


@pytest.mark.parametrize("thresholds", [(1.0, 1.0), (0.25, 0.5), (0.0, 0.0)])
@pytest.mark.parametrize("nodes, path, vocab", [(1, 1, 5), (7, 4, 5), (7, 2, 3), (12, 12, 4)])
def test_sampled_walks(nodes: int, path: int, vocab: int, thresholds: tuple[float, float], impl: str) -> None:
    """Duplicate siblings and tokens outside the vocabulary among them; sums are exact, so results are too."""
    make = Maker.seeded(DEVICE, seed=nodes)
    inputs = cases.sampling_inputs(make, 12, nodes, path, vocab, *thresholds)
    inputs["candidates"] = make.integers(0, vocab + 1, 12, nodes)
    given_ = listed(inputs)
    sglang.tree_speculative_sampling_target_only(**inputs, deterministic=True, impl=impl)
    walks = [sample_walk(given_, b, path, *thresholds) for b in range(12)]
    expect_walk(inputs, [(accepted, more["predicts"]) for accepted, more in walks], nodes, path)
    rejected = torch.zeros(12, nodes, vocab)
    for b, (_, more) in enumerate(walks):
        for (node, token), share in more["rejected"].items():
            rejected[b, node, token] = share
    assert torch.equal(inputs["draft_probs"].cpu(), rejected)


def test_sampling_follows_the_target_exactly(impl: str) -> None:
    """Over all pairs of uniforms from grids that divide every sum, the first token has exactly the target's
    distribution, although two of the three children carry the same token and one carries a banned token."""
    probs = torch.tensor([2, 4, 4, 6, 0]) / 16
    uniforms, finals = 16, 4
    batch = uniforms * finals
    uniform = (torch.arange(batch) // finals + 0.5) / uniforms
    final = (torch.arange(batch) % finals + 0.5) / finals
    trees = walked(2, [[0, 1, 1, 2, 4]] * batch, [[1, -1, -1, -1, -1]] * batch, [[-1, 2, 3, 4, -1]] * batch)
    inputs = trees | dict(
        uniform_samples=uniform[:, None].repeat(1, 5).to(DEVICE),
        uniform_samples_for_final_sampling=final.to(DEVICE),
        target_probs=probs.repeat(batch, 5, 1).to(DEVICE),
        draft_probs=torch.zeros(batch, 5, 5, device=DEVICE),
    )
    sglang.tree_speculative_sampling_target_only(**inputs, impl=impl)
    first = inputs["predicts"].view(batch, 5)[:, 0]
    counts = first.long().bincount(minlength=5).tolist()
    assert counts == [int(share * batch) for share in probs.tolist()]


@pytest.mark.parametrize("path, final, token", [(2, 0.0, 0), (2, 0.75, 2), (3, 0.0, 2), (3, 0.75, 2)])
def test_a_full_path_ends_with_the_whole_target(path: int, final: float, token: int, impl: str) -> None:
    """Rejected mass at the last node counts only where its children could have been visited."""
    noted = torch.zeros(1, 2, 3, device=DEVICE)
    noted[0, 1, 0] = 1.0
    inputs = walked(path, [[0, 1]], [[1, -1]], [[-1, -1]]) | dict(
        uniform_samples=torch.zeros(1, 2, device=DEVICE),
        uniform_samples_for_final_sampling=torch.full((1,), final, device=DEVICE),
        target_probs=torch.tensor([[[0.0, 1.0, 0.0], [0.5, 0.0, 0.5]]], device=DEVICE),
        draft_probs=noted,
    )
    sglang.tree_speculative_sampling_target_only(**inputs, impl=impl)
    assert inputs["accept_token_num"].tolist() == [1] and inputs["predicts"].tolist() == [1, token]


@pytest.mark.parametrize("kind", [torch.uint8, torch.uint16, torch.uint32, torch.int32, torch.int64])
def test_packed_rows_of_every_type(kind: torch.dtype, impl: str) -> None:
    """A chain as long as the type has bits, so that its last row has all of them set."""
    nodes = min(torch.iinfo(kind).bits, 40)
    inputs = cases.build_inputs(MAKE, batch=2, nodes=nodes, mode=TreeMaskMode.QLEN_ONLY, topk=1, depth=nodes)
    inputs |= dict(tree_mask=torch.zeros(2 * nodes, dtype=kind, device=DEVICE), tree_mask_mode=2)
    inputs["selected_index"] = torch.arange(nodes - 1, device=DEVICE).repeat(2, 1)
    inputs["parent_list"] = torch.arange(-1, nodes - 1, device=DEVICE).repeat(2, 1)
    sglang.build_tree_kernel_efficient(**inputs, impl=impl)
    unsigned = 1 << torch.iinfo(kind).bits
    rows = [int(row) % unsigned for row in inputs["tree_mask"].tolist()]
    assert rows == [(1 << (i + 1)) - 1 for i in range(nodes)] * 2


SIGNATURES = {
    "build_tree_kernel_efficient": "parent_list selected_index verified_seq_len tree_mask positions retrive_index "
    "retrive_next_token retrive_next_sibling topk depth draft_token_num tree_mask_mode",
    "verify_tree_greedy": "predicts accept_index accept_token_num candidates retrive_index retrive_next_token "
    "retrive_next_sibling target_predict",
    "tree_speculative_sampling_target_only": "predicts accept_index accept_token_num candidates retrive_index "
    "retrive_next_token retrive_next_sibling uniform_samples uniform_samples_for_final_sampling target_probs "
    "draft_probs threshold_single threshold_acc deterministic",
    "reconstruct_indices_from_tree_mask": "tree_mask verified_seq_len positions retrive_index retrive_next_token "
    "retrive_next_sibling batch_size draft_token_num",
    "segment_packbits": "x input_indptr output_indptr y batch_size",
    "top_k_renorm_prob": "probs top_k",
    "top_p_renorm_prob": "probs top_p",
    "create_extend_after_decode_spec_info": "verified_id seq_lens accept_lens positions new_verified_id bs_upper",
    "assign_req_to_token_pool": "req_pool_indices req_to_token start_offset end_offset out_cache_loc pool_len bs_upper",
    "assign_draft_cache_locs": "req_pool_indices req_to_token seq_lens extend_lens num_new_pages_per_topk "
    "out_cache_loc source_cache_loc target_cache_loc last_page_lens_cumsum duplicate_cache_len pool_len topk "
    "speculative_num_steps page_size bs_upper iter_upper",
    "generate_draft_decode_kv_indices": "req_pool_indices req_to_token paged_kernel_lens kv_indices kv_indptr "
    "positions pool_len kv_indices_stride kv_indptr_stride bs_upper iter_upper num_tokens_upper page_size",
    "create_draft_kv_indices": "kv_indptr kv_indices req_pool_indices req_to_token seq_lens expand_factor row_stride "
    "num_tokens_upper",
    "align_evict_mask_to_page_size": "seq_lens evict_mask page_size num_draft_tokens BLOCK_SIZE",
    "get_target_cache_loc": "tgt_cache_loc to_free_slots accept_length to_free_num_slots out_cache_loc "
    "num_verify_tokens num_verify_tokens_upper bs_upper",
    "get_src_tgt_cache_loc": "seq_lens out_cache_loc accept_index accept_length draft_token_num page_size",
    "filter_finished_cache_loc_kernel": "out_cache_loc tgt_cache_loc accept_length accept_length_filter bs_upper "
    "num_verify_tokens_upper",
    "create_flashinfer_kv_indices_triton": "req_to_token_ptr req_pool_indices_ptr page_kernel_lens_ptr kv_indptr "
    "kv_start_idx kv_indices_ptr req_to_token_ptr_stride",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_have_sglangs_names_and_order(name: str) -> None:
    ours = list(inspect.signature(getattr(sglang, name)).parameters)
    theirs = SIGNATURES[name].split()
    assert ours[: len(theirs)] == theirs


def test_renormalised_distributions(impl: str) -> None:
    probs = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.4, 0.1, 0.1]], device=DEVICE)
    top_two = sglang.top_k_renorm_prob(probs, 2, impl=impl)
    torch.testing.assert_close(top_two.cpu(), torch.tensor([[0, 0, 3 / 7, 4 / 7], [0.5, 0.5, 0, 0]]))
    by_row = sglang.top_k_renorm_prob(probs, ints([1, 4], torch.int32), impl=impl)
    torch.testing.assert_close(by_row.cpu(), torch.tensor([[0, 0, 0, 1.0], [0.4, 0.4, 0.1, 0.1]]))
    nucleus = sglang.top_p_renorm_prob(probs, 0.65, impl=impl)
    torch.testing.assert_close(nucleus.cpu(), torch.tensor([[0, 0, 3 / 7, 4 / 7], [0.5, 0.5, 0, 0]]))


def pool(batch: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A table whose entry is 100 * row + column, and requests in rows from the last one down."""
    table = torch.arange(batch + 1)[:, None] * 100 + torch.arange(width)
    return table.int().to(DEVICE), torch.arange(batch, 0, -1, device=DEVICE)


def test_worked_slots_of_spans(impl: str) -> None:
    table, _ = pool(1, 20)
    out = old(7)
    sglang.assign_extend_cache_locs[(2,)](ints([1, 0]), table, ints([2, 5]), ints([4, 8]), out, 20, 2, impl=impl)
    assert out.tolist() == [102, 103, 5, 6, 7, OLD, OLD]
    sglang.assign_req_to_token_pool[(2,)](
        ints([1, 0]), table, ints([2, 5]), ints([4, 8]), ints([1, 2, 3, 4, 5]), 20, 2, impl=impl
    )
    assert table[1, 1:5].tolist() == [101, 1, 2, 104] and table[0, 4:9].tolist() == [4, 3, 4, 5, 8]


def draft_position(length: int, branch: int, step: int, topk: int, steps: int, page: int) -> int:
    tail = length % page
    if page == 1 or topk == 1:
        return length + branch * steps + step
    return length - tail + branch * math.ceil((tail + steps) / page) * page + tail + step


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    topk=st.integers(1, 3),
    steps=st.integers(1, 5),
    page=st.sampled_from([1, 2, 4]),
)
def test_draft_cache_locations(impl: str, lengths: list[int], topk: int, steps: int, page: int) -> None:
    """Allocated slots go to the table in order; the compacted ones are those of every branch's steps."""
    batch, paged = len(lengths), page > 1 and topk > 1
    tails = [length % page for length in lengths]
    pages = [math.ceil((tail + steps) / page) for tail in tails]
    extend = [p * page * topk - tail if paged else topk * steps for p, tail in zip(pages, tails, strict=True)]
    table, rows = pool(batch, 80)
    expected = table.tolist()
    allocated = [1000 + i for i in range(sum(extend))]
    first = starts_of(extend)
    for b, length in enumerate(lengths):
        expected[batch - b][length : length + extend[b]] = allocated[first[b] : first[b + 1]]
    place = [(b, t) for b in range(batch) for t in range(topk)]

    def drafted(b: int, t: int, step: int) -> int:
        """Slot of a branch's step; steps below 0 are the copied tail."""
        return expected[batch - b][draft_position(lengths[b], t, 0, topk, steps, page) + step]

    written = [drafted(b, t, step) for b, t in place for step in range(steps)]
    copies = [
        (drafted(b, 0, o - tails[b]), drafted(b, t, o - tails[b]))
        for b, t in place
        if paged and t > 0
        for o in range(tails[b])
    ]
    out, source, target = ints(allocated), old(len(copies)), old(len(copies))
    sglang.assign_draft_cache_locs[(batch,)](
        rows, table, ints(lengths), ints(extend), ints(pages), out, source, target, ints(tails).cumsum(0), len(copies),
        80, topk, steps, page, 4, 16, impl=impl,
    )  # fmt: skip
    assert table.tolist() == expected
    assert out.tolist()[: len(written)] == written
    assert list(zip(source.tolist(), target.tolist(), strict=True)) == copies


def test_unpaged_drafts_need_no_lengths_of_pages(impl: str) -> None:
    """SGLang passes placeholders without dimensions for what it does not use."""
    (table, rows), unused = pool(2, 20), ints(0)
    arguments = rows, table, ints([3, 0]), unused, unused, ints([1, 2, 3, 4]), None, None, unused, 0, 20, 2, 1, 1, 2, 2
    sglang.assign_draft_cache_locs[(2,)](*arguments, impl=impl)
    assert table[2, 2:6].tolist() == [202, 1, 2, 205] and table[1, :3].tolist() == [3, 4, 102]


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4), topk=st.integers(1, 3), steps=st.integers(1, 3),
    page=st.sampled_from([1, 2, 4]), window=st.sampled_from([0, 2, 5]),
)  # fmt: skip
def test_decode_indices(impl: str, lengths: list[int], topk: int, steps: int, page: int, window: int) -> None:
    table, rows = pool(len(lengths), 80)
    sink = 1 if window else 0
    width = sum(lengths) * topk + len(lengths) * topk * steps + 2
    indices, indptr = old(steps * width, torch.int32), old(steps * (len(lengths) * topk + 1), torch.int32)
    sglang.generate_draft_decode_kv_indices[(steps, len(lengths), topk)](
        rows, table, ints(lengths), indices, indptr, ints([0]), 80, width, indptr.shape[0] // steps,
        page_size=page, window_size=window, sink_size=sink, impl=impl,
    )  # fmt: skip
    indices, indptr = indices.view(steps, -1), indptr.view(steps, -1)
    for step in range(steps):
        flat, ends = [], [0]
        for b, length in enumerate(lengths):
            kept = list(range(length))
            if window and length > sink + window:
                kept = kept[:sink] + kept[-window:]
            for t in range(topk):
                drafts = [draft_position(length, t, s, topk, steps, page) for s in range(step + 1)]
                flat += [(len(lengths) - b) * 100 + position for position in kept + drafts]
                ends.append(len(flat))
        assert indices[step].tolist() == flat + [OLD] * (width - len(flat))
        assert indptr[step].tolist() == ends


def test_worked_pairs(impl: str) -> None:
    table, rows = pool(2, 20)
    indptr, indices = old(5, torch.int32), old(12, torch.int32)
    sglang.create_draft_kv_indices[(2,)](indptr, indices, rows, table, ints([3, 4]), 2, 20, 2, impl=impl)
    assert indptr.tolist() == [0, 2, 5, 8, 12]
    assert indices.tolist() == [200, 201, 200, 201, 202, 100, 101, 102, 100, 101, 102, 103]


@given(
    page=st.sampled_from([1, 3, 4, 16]),
    requests=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 6)), min_size=1, max_size=5),
)
def test_only_whole_pages_are_evicted(impl: str, page: int, requests: list[tuple[int, int]]) -> None:
    """A slot is kept iff it was accepted or lies on the page of the last kept token."""
    evict = torch.tensor([node >= accepted for _, accepted in requests for node in range(6)], device=DEVICE)
    sglang.align_evict_mask_to_page_size(ints([length for length, _ in requests]), evict, page, 6, impl=impl)
    assert evict.tolist() == [
        node >= accepted and (length + node) // page != (length + accepted - 1) // page
        for length, accepted in requests
        for node in range(6)
    ]


@given(
    page=st.sampled_from([1, 3, 4]),
    requests=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 4), st.booleans()), min_size=1, max_size=5),
)
def test_targets_of_accepted_paths(impl: str, page: int, requests: list[tuple[int, int, bool]]) -> None:
    nodes = 5
    slots = [10 * b + i for b in range(len(requests)) for i in range(nodes)]
    freed = [
        length + nodes - min(math.ceil((length + a + 1) / page) * page, length + nodes) for length, a, _ in requests
    ]
    accepted = ints([a for _, a, _ in requests], torch.int32)
    index = [b * nodes + i for b, (_, a, _) in enumerate(requests) for i in range(a + 1)]
    source, target, num_freed = sglang.get_src_tgt_cache_loc(
        ints([length for length, _, _ in requests]), ints(slots), ints(index), accepted, nodes, page, impl=impl
    )
    assert source.tolist() == [slots[i] for i in index] and num_freed.tolist() == freed
    to_free = old(sum(freed))
    sglang.get_target_cache_loc(target, to_free, accepted, num_freed, ints(slots), nodes, impl=impl)
    assert target.tolist() == [10 * b + i for b, (_, a, _) in enumerate(requests) for i in range(a + 1)]
    assert to_free.tolist() == [10 * b + nodes - f + i for b, f in enumerate(freed) for i in range(f)]
    kept = [0 if finished else a + 1 for _, a, finished in requests]
    going = old(sum(kept))
    sglang.filter_finished_cache_loc_kernel(going, target, accepted, ints(kept, torch.int32), impl=impl)
    assert going.tolist() == [10 * b + i for b, k in enumerate(kept) for i in range(k)]


@pytest.mark.parametrize("starts", [None, [3, 0, 7]])
def test_flashinfer_indices_of_token_tables(starts: list[int] | None, impl: str) -> None:
    table, rows = pool(3, 20)
    indices = old(9, torch.int32)
    sglang.create_flashinfer_kv_indices_triton[(3,)](
        table, rows, ints([2, 0, 4], torch.int32), ints([0, 2, 2, 6], torch.int32),
        None if starts is None else ints(starts, torch.int32), indices, 20, impl=impl,
    )  # fmt: skip
    first = starts or [0, 0, 0]
    expected = [300 + first[0] + j for j in range(2)] + [100 + first[2] + j for j in range(4)]
    assert indices.tolist() == [*expected, OLD, OLD, OLD]


def test_accepted_slots_are_compacted(impl: str) -> None:
    out = old(6)
    index = ints([2, -1, -1, 3, 5, -1], torch.int32)
    sglang.fill_accepted_out_cache_loc[(6,)](index, ints([9, 8, 7, 6, 5, 4]), out, 8, impl=impl)
    assert out.tolist() == [7, 6, 4, OLD, OLD, OLD]


def test_bonus_tokens(impl: str) -> None:
    """The last accepted token of each request, of which the third has none; a longer buffer keeps its end."""
    tokens, lens = ints([[5, 6, 7], [8, 9, 9], [1, 2, 3]]), ints([3, 1, 0], torch.int32)
    bonus = old(4, torch.int32)
    sglang.fill_bonus_tokens[(3,)](tokens, lens, bonus, 3, impl=impl)
    assert bonus.tolist() == [7, 8, OLD, OLD]
    index, predict = ints([[0, 2, 3], [4, -1, -1], [-1, -1, -1]], torch.int32), ints(range(50, 62), torch.int32)
    bonus = old(3)
    sglang.fill_bonus_tokens_from_predict(predict, index, lens, bonus, 3, impl=impl)
    assert bonus.tolist() == [53, 54, OLD]


def test_counts_that_are_too_large_read_nothing_after_the_tokens(impl: str) -> None:
    """The last token that is there is taken; entries that no request uses may be anything."""
    bonus = old(2, torch.int32)
    sglang.fill_bonus_tokens(ints([[5, 6], [8, 9]]), ints([3, 2]), bonus, 2, impl=impl)
    assert bonus.tolist() == [6, 9]
    predict, index = ints([50, 51, 52], torch.int32), ints([[1, 99], [2, 3]], torch.int32)
    sglang.fill_bonus_tokens_from_predict(predict, index, ints([1, 1]), bonus, 2, impl=impl)
    assert bonus.tolist() == [51, 52]
    positions, newest, verified = old(7), old(3, torch.int32), ints([31, 32, 33], torch.int32)
    lengths, accepted = ints([5, 6, 9]), ints([2, 0, 4], torch.int32)
    sglang.create_extend_after_decode_spec_info(verified, lengths, accepted, positions, newest, impl=impl)
    assert positions.tolist() == [3, 4, 5, 6, 7, 8, OLD] and newest.tolist() == [32, OLD, 33]


def test_pages_of_kept_slots_are_kept(impl: str) -> None:
    """Slots 9 and 4 are kept, and with them 8 and 6 of their pages, in whatever order they stand."""
    slots = ints([8, 20, 9, 4, 21, 6, 12, 13])
    evict = torch.tensor([True, True, False, False, True, True, True, True], device=DEVICE)
    sglang.align_evict_mask_to_page_size_simple_eagle[(1,)](slots, evict, 4, 8, 8, impl=impl)
    assert evict.tolist() == [False, True, False, False, True, False, True, True]
    both = torch.tensor([False, True, True, True], device=DEVICE)
    sglang.align_evict_mask_to_page_size_simple_eagle(ints([0, 1, 0, 1]), both, 2, 2, impl=impl)
    assert both.tolist() == [False, False, True, True], "requests are apart"


def test_wrong_input_is_refused() -> None:
    table, rows = pool(2, 20)
    with pytest.raises(ValueError, match=r"req_to_token: expected shape \[\*, 30\], got \[3, 20\]"):
        sglang.assign_extend_cache_locs(rows, table, rows, rows, old(3), 30)
    with pytest.raises(ValueError, match="expand_factor: expected at least 2, got 1"):
        sglang.create_draft_kv_indices(old(3), old(3), rows, table, rows, 1)
    with pytest.raises(ValueError, match="grid: expected a tuple of integers"):
        sglang.assign_extend_cache_locs[2]  # type: ignore[index]
    outputs = cases.tree_outputs(MAKE, 1, 4)
    mask = torch.zeros(16, dtype=torch.bool, device=DEVICE)
    with pytest.raises(ValueError, match="tree_mask: expected 9 bool cells, got 16"):
        sglang.reconstruct_indices_from_tree_mask(mask, ints([1]), *outputs.values(), 1, 3)
    with pytest.raises(ValueError, match="tree_mask: expected at least 16 entries, got 3"):
        sglang.build_tree_kernel_efficient(
            ints([[-1, 0, 1]]), ints([[0, 1, 2]]), ints([1]), mask[:3], *outputs.values(), 2, 2, 4, 1
        )
    walk = cases.walk_outputs(MAKE, 2, 3, 2)
    links = cases.random_links(MAKE, 2, 3)
    with pytest.raises(ValueError, match="predicts's entries: expected at least 6, got 5"):
        sglang.verify_tree_greedy(
            **(walk | dict(predicts=old(5, torch.int32))), candidates=old(6).view(2, 3), **links,
            target_predict=old(6).view(2, 3),
        )  # fmt: skip
