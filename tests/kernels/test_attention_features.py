"""Windows, sinks, caps, fp8 pools and wide trees of paged attention, and how they relate."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_kernels.attention import device, paged_attention, paged_attention_with_lse
from specdec_kernels.attention.cases_inputs import attention_inputs, changed
from specdec_kernels.cases import Maker
from specdec_kernels.launch import launch, record_launches
from specdec_kernels.tree import build_chain
from tests.kernels.attention_truth import DEVICE, agree, dense, inputs

COMPILED = DEVICE != "cpu"


def run(arguments: dict[str, Any], **options: Any) -> torch.Tensor:
    return paged_attention(**changed(arguments, **options), impl="triton")


def run_with_lse(arguments: dict[str, Any], **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return paged_attention_with_lse(**changed(arguments, **options), impl="triton")


SHAPES = st.fixed_dictionaries(
    dict(
        num_nodes=st.integers(1, 9), lengths=st.lists(st.integers(0, 90), min_size=1, max_size=2),
        seed=st.integers(0, 1000), window=st.sampled_from([None, 1, 3, 17, 64]),
        page_size=st.sampled_from([1, 5, 16, 256]), soft_cap=st.sampled_from([None, 2.0]), sinks=st.booleans(),
    )
)  # fmt: skip


@settings(max_examples=14)
@given(
    shape=SHAPES, mode=st.sampled_from(["chain", "block", "tree"]), extra_slots=st.sampled_from([None, 0, 5, 70]),
    blind=st.booleans(), split_tokens=st.sampled_from([None, 16]), block_n=st.sampled_from([16, 32]),
)  # fmt: skip
def test_any_combination(
    shape: dict[str, Any], mode: str, extra_slots: int | None, blind: bool, split_tokens: int | None, block_n: int
) -> None:
    tree: dict[str, Any] = {}
    if mode == "tree":
        tree = dict(tree_width=None if extra_slots is None else shape["num_nodes"] + extra_slots, blind=blind)
    arguments = inputs(mode, **shape, **tree, heads=(2, 1), reach=2)
    tuning = None if split_tokens else dict(block_n=block_n)
    out, lse = run_with_lse(arguments, split_tokens=split_tokens, tuning=tuning)
    expected_out, expected_lse = dense(arguments)
    agree(out, expected_out)
    agree(lse, expected_lse)


@pytest.mark.parametrize("num_nodes, window", [(5, None), (70, None), (9, 7)])
def test_a_chain_is_a_tree_of_width_one(num_nodes: int, window: int | None) -> None:
    arguments = inputs("chain", num_nodes, (40, 2), heads=(2, 1), window=window)
    links = build_chain(arguments["metadata"].lengths, num_nodes)
    tree = dict(mode="tree", mask=links.mask, depths=None if window is None else links.depth)
    tuning = dict(block_n=16)
    assert torch.equal(run(arguments, tuning=tuning), run(arguments, **tree, tuning=tuning))


@pytest.mark.parametrize("sinks", [False, True])
def test_one_split_is_written_as_the_merge_would(sinks: bool) -> None:
    """A larger host bound sends a short request through the merge, which must not show."""
    arguments = inputs("chain", 4, (11,), heads=(4, 2), capacity=200, sinks=sinks)
    for shape in (dict(), dict(window=5)):
        short = run_with_lse(arguments, split_tokens=16, max_length=16, **shape)
        long = run_with_lse(arguments, split_tokens=16, max_length=200, **shape)
        for left, right in zip(short, long, strict=True):
            # A sink joins the sum in another place, and a compiler may fuse that sum differently.
            error = 1e-6 if sinks and COMPILED else 0.0
            torch.testing.assert_close(left, right, rtol=error, atol=error)


@pytest.mark.parametrize("split_tokens", [None, 16])
def test_a_result_may_have_a_place(impl: str, split_tokens: int | None) -> None:
    """Written there, rows past `q_lens` too, and nowhere else: to the place of some rows of a larger tensor."""
    arguments = inputs("chain", 4, (20, 0), q_lens=(4, 0), split_tokens=split_tokens)
    expected = paged_attention(**arguments, impl=impl)
    whole = torch.full((5, *expected.shape[1:]), float("nan"), dtype=expected.dtype, device=expected.device)
    out = paged_attention(**arguments, out=whole[1:3], impl=impl)
    assert out.data_ptr() == whole[1:3].data_ptr() and torch.equal(out, expected)
    assert whole[[0, 3, 4]].isnan().all()
    with pytest.raises(ValueError, match="out: expected shape"):
        paged_attention(**arguments, out=whole, impl=impl)


def test_every_code_of_fp8_is_read_exactly() -> None:
    """256 rows see one key of dimension 256: the output is the value, the score of row i is entry i of the key."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes[codes.view(torch.float8_e4m3fn).isnan()] = 0
    arguments = inputs("tree", 256, (1,), heads=(1, 1), head_dim=256, page_size=1, tree_width=1)
    arguments = changed(
        arguments,
        q=torch.eye(256, device=DEVICE)[None, :, None],
        kv=codes.view(torch.float8_e4m3fn).expand(2, 2, 1, 1, 256).contiguous().to(DEVICE),
        page_table=torch.zeros(1, 2, dtype=torch.int32, device=DEVICE),
        mask=torch.zeros(1, 256, 1, dtype=torch.int64, device=DEVICE),
    )
    out, lse = run_with_lse(arguments, scale=1.0)
    values = codes.view(torch.float8_e4m3fn).float().to(DEVICE)
    # A compiled division by a sum of one may round once.
    error = 2e-7 if COMPILED else 0.0
    torch.testing.assert_close(out[0, :, 0], values.expand(256, -1), rtol=error, atol=0)
    agree(lse[0, :, 0], values)


_half_factors = device._half_factors


@triton.jit
def _half_factors_kernel(largest_ptr, shrink_ptr, grow_ptr, SIZE: tl.constexpr):
    row = tl.arange(0, SIZE)
    shrink, grow = _half_factors(tl.load(largest_ptr + row))
    tl.store(shrink_ptr + row, shrink)
    tl.store(grow_ptr + row, grow)


def test_queries_are_brought_into_the_range_of_float16() -> None:
    """Normal powers of two that undo each other; only rows near the smallest normal number end below 2^7."""
    largest = torch.tensor([1.0, 1.5, 2.0**-119, 2.0**-120, 3e-39, 0.0, 2.0**100, 3.4e38], device=DEVICE)
    shrink, grow = torch.empty_like(largest), torch.empty_like(largest)
    launch(_half_factors_kernel, (1,), largest, shrink, grow, num_warps=1, SIZE=8)
    assert torch.equal(shrink * grow, torch.ones_like(largest))
    assert (torch.stack([shrink, grow]) >= 2.0**-126).all() and torch.stack([shrink, grow]).isfinite().all()
    scaled = (largest * shrink).tolist()
    assert all(2.0**7 <= each < 2.0**8 for each in [*scaled[:2], scaled[2], *scaled[6:]]), scaled
    assert scaled[3] == 2.0**6 and scaled[4] < 2.0**6 and scaled[5] == 0.0


def is_specialised(arguments: dict[str, Any]) -> bool:
    """Whether `kernel_hopper` computes the call on sm90."""
    with record_launches("sm90") as launches:
        paged_attention(**arguments, impl="triton")
    return "NUM_BUFFERS" in launches[0].constexprs


@pytest.mark.parametrize(
    "specialised, mode, options",
    [
        (True, "chain", {}),
        (True, "chain", dict(page_size=48, window=100, sinks=True)),
        (True, "tree", dict(split_tokens=256)),
        (True, "tree", dict(page_size=8, fp8=True)),
        (False, "chain", dict(page_size=8)),
        (False, "chain", dict(page_size=24)),
        (False, "chain", dict(split_tokens=192)),
        (False, "tree", dict(window=100)),
        (False, "block", dict(soft_cap=30.0)),
        (False, "block", dict(head_dim=96)),
    ],
)
def test_specialised_warps_take_calls_whose_copies_are_whole(
    specialised: bool, mode: str, options: dict[str, Any]
) -> None:
    """16 keys of one page: a page, and the first key of a split, is a multiple of 16."""
    options = dict(heads=(8, 2), head_dim=128) | options
    arguments = attention_inputs(Maker.seeded("cpu", torch.bfloat16), mode, 32, (1000,), **options)
    assert is_specialised(arguments) == specialised


def test_specialised_warps_take_no_pool_that_is_not_aligned() -> None:
    arguments = attention_inputs(Maker.seeded("cpu", torch.bfloat16), "chain", 32, (9,), heads=(8, 2), head_dim=128)
    kv = arguments["kv"]
    arguments["kv"] = torch.cat([kv.new_zeros(1), kv.flatten()])[1:].view(kv.shape)
    assert not is_specialised(arguments)
