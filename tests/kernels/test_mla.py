"""Latent attention beyond case-by-case parity: what it means, what must hold between calls, what bad input gets."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_kernels.attention import AttentionMetadata
from specdec_kernels.attention.cases_inputs import changed
from specdec_kernels.cases import Maker
from specdec_kernels.launch import CHIPS, Launch, record_launches
from specdec_kernels.mla import configs, kernel, mla_attention, mla_attention_with_lse
from specdec_kernels.mla.cases import mla_inputs
from specdec_kernels.mla.configs import blocks, mla_config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = dict(rtol=3e-6, atol=3e-6)


def inputs(mode: str, num_nodes: int, lengths: tuple[int, ...], seed: int = 0, **shape: Any) -> dict[str, Any]:
    return mla_inputs(Maker.seeded(DEVICE, seed=seed), mode, num_nodes, lengths, **shape)


def agree(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, **TOLERANCE)


def test_it_is_latent_attention_absorbed(impl: str) -> None:
    """The unabsorbed form, with keys and values of every head written out: q . (W_k c) = (W_k^T q) . c, and the values
    W_v c come from the result by W_v."""
    heads, latent, rope, nope, width = 3, 32, 16, 8, 11
    arguments = inputs("chain", 4, (9, 0), heads=heads, latent=latent, rope=rope, page_size=4)
    generator = torch.Generator().manual_seed(3)
    up_key, up_value = (
        torch.randn(heads, size, latent, generator=generator).to(DEVICE) / latent**0.5 for size in (nope, width)
    )
    plain = torch.randn(2, 4, heads, nope, generator=generator).to(DEVICE)
    arguments["q_latent"] = torch.einsum("bnhd,hdl->bnhl", plain, up_key).contiguous()
    scale = (nope + rope) ** -0.5
    arguments = changed(arguments, scale=scale)
    out = torch.einsum("bnhl,hvl->bnhv", mla_attention(**arguments, impl=impl), up_value)
    for request, length in enumerate((9, 0)):
        pages = arguments["metadata"].page_table[request].tolist()
        rows = torch.stack([arguments["cache"][pages[t // 4], t % 4] for t in range(length + 4)])
        keys = torch.einsum("tl,hdl->thd", rows[:, :latent], up_key)
        values = torch.einsum("tl,hvl->thv", rows[:, :latent], up_value)
        for node in range(4):
            seen = length + node + 1
            scores = torch.einsum("hd,thd->ht", plain[request, node], keys[:seen])
            scores += arguments["q_rope"][request, node] @ rows[:seen, latent:].T
            expected = torch.einsum("ht,thv->hv", (scores * scale).softmax(-1), values[:seen])
            agree(out[request, node], expected)


@settings(max_examples=10)
@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=3),
    num_nodes=st.integers(1, 5),
    split_tokens=st.one_of(st.none(), st.integers(1, 40)),
    page_size=st.sampled_from([1, 3, 16]),
    seed=st.integers(0, 99),
)
def test_splits_change_nothing(
    lengths: list[int], num_nodes: int, split_tokens: int | None, page_size: int, seed: int
) -> None:
    arguments = inputs("tree", num_nodes, tuple(lengths), seed, page_size=page_size)
    whole = mla_attention_with_lse(**arguments, impl="reference")
    agree(mla_attention_with_lse(**arguments, split_tokens=split_tokens, impl="triton"), whole)


@pytest.mark.parametrize("shift", [-400.0, 400.0])
def test_scores_of_any_size_are_merged(shift: float) -> None:
    """A number added to all scores of a row is added to its log-sum-exp, and changes nothing else; splits that no key
    of a row is in have no part in it."""
    plain = changed(inputs("chain", 3, (40, 5, 19)), scale=1.0)
    plain["q_latent"][..., 0], plain["cache"][..., 0] = 0.0, 1.0
    shifted = plain | {"q_latent": plain["q_latent"].clone()}
    shifted["q_latent"][..., 0] = shift
    out, lse = mla_attention_with_lse(**plain, split_tokens=16, impl="triton")
    moved, larger = mla_attention_with_lse(**shifted, split_tokens=16, impl="triton")
    torch.testing.assert_close(larger, lse + shift, rtol=1e-6, atol=1e-3)
    torch.testing.assert_close(moved, out, rtol=1e-2, atol=1e-3)


def test_the_batch_does_not_matter() -> None:
    """Row by row the same bits, alone, in another order, and beside a long request."""
    together = inputs("chain", 3, (40, 5, 19), split_tokens=16)
    out = mla_attention(**together, impl="triton")
    for order in ([2, 0, 1], [1], [0]):
        chosen = {name: together[name][order].contiguous() for name in ("q_latent", "q_rope")}
        chosen["metadata"] = together["metadata"].of_requests(order)
        assert torch.equal(mla_attention(**(together | chosen), impl="triton"), out[order])


def test_splits_at_the_bound_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a request would have more splits than the bound allows, they grow; its numbers still depend on it alone."""
    together = inputs("chain", 3, (70, 5, 33, 31), split_tokens=16)
    free = mla_attention(**together, impl="triton")
    monkeypatch.setattr(configs, "MAX_SPLITS", 2)
    bounded = mla_attention_with_lse(**together, impl="triton")
    agree(bounded, mla_attention_with_lse(**together, impl="reference"))
    assert torch.equal(bounded[0][1], free[1]), "a request under the bound keeps its bits"
    for request in range(4):
        alone = {name: together[name][[request]].contiguous() for name in ("q_latent", "q_rope")}
        alone["metadata"] = together["metadata"].of_requests([request])
        assert torch.equal(mla_attention(**(together | alone), impl="triton")[0], bounded[0][request])


@pytest.mark.parametrize("turns", [1, 2])
def test_requests_in_turns_have_the_same_bits(monkeypatch: pytest.MonkeyPatch, turns: int) -> None:
    """Where partial results of splits at fixed positions would take too much memory, `turns` requests run at a time."""
    together = inputs("chain", 3, (70, 5, 33), batch_invariant=True)
    whole = mla_attention_with_lse(**together, impl="triton")
    agree(whole, mla_attention_with_lse(**together, impl="reference"))
    monkeypatch.setattr(kernel, "requests_at_once", lambda *sizes: turns)
    for found, expected in zip(mla_attention_with_lse(**together, impl="triton"), whole, strict=True):
        assert torch.equal(found, expected)


def launches_of(num_nodes: int, length: int, heads: int = 128, batch: int = 2) -> list[Launch]:
    """Of 512 latent columns on sm90."""
    pages = -(-length // 64)
    make = dict(device="meta", dtype=torch.bfloat16)
    metadata = AttentionMetadata(
        torch.empty(batch, pages, dtype=torch.int32, device="meta"),
        torch.empty(batch, dtype=torch.int64, device="meta"), "chain", max_length=length, scale=0.1,
    )  # fmt: skip
    latent, rope = torch.empty(batch, num_nodes, heads, 512, **make), torch.empty(batch, num_nodes, heads, 64, **make)
    with record_launches("sm90") as launches:
        mla_attention(latent, rope, torch.empty(pages, 64, 576, **make), metadata)
    return launches


@pytest.mark.parametrize("num_nodes, length, batch", [(1, 4096, 1), (4, 1 << 17, 2), (8, 160_000, 2), (512, 9999, 2)])
def test_partial_results_are_bounded(num_nodes: int, length: int, batch: int) -> None:
    """32 MiB per request of 128 heads and 512 latent columns, however long it is; a prefill has none."""
    launches = launches_of(num_nodes, length, batch=batch)
    assert len(launches) == 1 + (num_nodes < 512)
    if num_nodes == 512:
        return
    partial, lse = launches[1].args[:2]
    splits = partial.shape[1]
    assert partial.shape == (batch, splits, num_nodes, 128, 512) and splits > 1
    assert partial.numel() * 2 + lse.numel() * 4 <= batch * configs.PARTIAL_BYTES


def test_every_chip_has_a_row_for_every_shape() -> None:
    for chip in (*CHIPS, "interpreter"):
        for latent in (32, 256, 384, 512):
            for rows in (1, 16, 17, 128, 4096):
                config = mla_config(chip, (latent, 64), rows, 8192)
                assert config.split_tokens % config.block_n == 0 and config.block_m >= 16
                assert config.warp_specialized == (chip == "sm90" and latent == 512)
                wide = mla_config(chip, (latent, 64), rows, 8192, itemsize=4)
                assert wide.block_m >= 16 and not wide.warp_specialized


@pytest.mark.parametrize("latent", [16, 48, 80, 256, 384, 448, 512, 576])
def test_blocks_cover_the_latent(latent: int) -> None:
    first, rest = blocks(latent)
    assert first + rest >= latent > first - 1 and all(size & (size - 1) == 0 for size in (first, rest))
    assert rest == 0 or rest >= 16
