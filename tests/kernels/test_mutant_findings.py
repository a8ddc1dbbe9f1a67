"""Regimes that no other test had until a bug put in by hand (`tests.mutants`) went unseen.

Offsets beyond 2^31 need a pool that large: it is a sparse file, of which only the touched pages exist.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import specdec_kernels.mla.kernel as mla_kernel
from specdec_kernels import accept, build_chain, move_accepted, paged_attention, row_offsets, token_slots
from specdec_kernels.attention import merge
from specdec_kernels.attention.inputs import attention_inputs
from specdec_kernels.cases import Maker
from specdec_kernels.kv_index import configs
from specdec_kernels.mla import mla_attention
from specdec_kernels.mla.cases import mla_inputs
from specdec_kernels.sampling import types
from tests.kernels.guard import guarded

if torch.cuda.is_available():
    pytest.skip("sparse pools are mapped files, on a CPU", allow_module_level=True)

BEYOND = 1 << 31


def sparse(path: Path, *shape: int) -> torch.Tensor:
    """A float16 tensor of zeros that takes no memory until it is written."""
    elements = torch.Size(shape).numel()
    with path.open("wb") as file:
        file.truncate(2 * elements)
    return torch.from_file(str(path), shared=True, size=elements, dtype=torch.float16).view(shape)


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_slots_beyond_32_bits(impl: str) -> None:
    table = torch.tensor([[3, 1 << 28]], dtype=torch.int32)
    start, counts = torch.tensor([15]), torch.tensor([3], dtype=torch.int32)
    slots = token_slots(table, start, counts, 3, 16, impl=impl)
    assert slots.tolist() == [[63, 1 << 32, (1 << 32) + 1]]


def test_streams_of_random_numbers_are_disjoint() -> None:
    """No law can tell while the keys of two uses happen not to meet; a shared number is a coupling in waiting."""
    streams = [types.TARGET_STREAM, types.DRAFT_STREAM, types.ACCEPT_STREAM, types.RECOVER_STREAM, types.BONUS_STREAM]
    assert len(set(streams)) == len(streams)


def test_a_path_moves_beyond_32_bit_offsets(tmp_path: Path) -> None:
    page_size, heads, head_dim = 16, 4, 64
    pages = BEYOND // (page_size * heads * head_dim) + 2
    kv = sparse(tmp_path / "pool", 1, 2, pages, page_size, heads, head_dim)
    table = torch.tensor([[pages - 1]], dtype=torch.int32)
    kv[0, :, -1, :6] = torch.arange(6.0)[:, None, None]
    with guarded():
        move_accepted(kv, table, torch.tensor([1]), torch.tensor([[0, 3, -1]], dtype=torch.int32), impl="triton")
    assert kv[0, :, -1, :6, 0, 0].tolist() == [[0, 1, 4, 3, 4, 5]] * 2


def test_attention_reads_beyond_32_bit_offsets(tmp_path: Path) -> None:
    page_size, heads, head_dim = 16, 4, 64
    pages = BEYOND // (page_size * heads * head_dim) + 2
    kv = sparse(tmp_path / "pool", 2, pages, page_size, heads, head_dim)
    generator = torch.Generator().manual_seed(1)
    kv[:, -1] = torch.randn(2, page_size, heads, head_dim, generator=generator).half()
    q = torch.randn(1, 2, heads, head_dim, generator=generator).half()
    length = torch.tensor([9])
    near = paged_attention(q, kv[:, -1:].clone(), torch.tensor([[0]], dtype=torch.int32), length, mode="chain")
    with guarded():
        far = paged_attention(q, kv, torch.tensor([[pages - 1]], dtype=torch.int32), length, mode="chain")
    assert torch.equal(far, near)


def test_running_sums_carry_over_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's blocks are so wide that the case tables have two at most."""
    narrow = replace(configs._CONFIGS["interpreter"], scan_block=16)
    monkeypatch.setitem(configs._CONFIGS, "interpreter", narrow)
    counts = torch.arange(1, 71, dtype=torch.int32)
    assert torch.equal(row_offsets(counts, impl="triton"), row_offsets(counts, impl="reference"))


def test_a_latent_in_two_blocks_over_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's tile takes all keys at once, so no sum is ever rescaled unless the tile is made small."""
    inputs = mla_inputs(Maker.seeded(), "chain", 3, (75, 40), latent=48, rope=16) | dict(scale=1.0)
    expected = mla_attention(**inputs, impl="reference")
    real = mla_kernel.mla_config
    monkeypatch.setattr(mla_kernel, "mla_config", lambda *args: replace(real(*args), block_n=16))
    torch.testing.assert_close(mla_attention(**inputs, impl="triton"), expected, rtol=1e-4, atol=1e-5)


def test_merge_rescales_between_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits are merged some at a time; the interpreter takes all of them at once unless told otherwise."""
    inputs = attention_inputs(Maker.seeded(), "chain", 3, (150, 40), split_tokens=16, scale=2.0)
    expected = paged_attention(**inputs, impl="reference")
    real = merge.merge_config
    monkeypatch.setattr(merge, "merge_config", lambda *args: replace(real(*args), unroll=2))
    torch.testing.assert_close(paged_attention(**inputs, impl="triton"), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_coin_of_zero_accepts_nothing_impossible(rule: str, impl: str) -> None:
    """u = 0 happens once in 2^24 draws; a draft that the target rules out must still be rejected."""
    logits = torch.zeros(1, 2, 4)
    logits[0, 0, 2] = float("-inf")
    lengths = torch.tensor([5])
    tokens = torch.tensor([[0, 2]])
    accepted = accept(
        rule,
        tokens,
        build_chain(lengths, 2, impl="reference"),
        logits,
        lengths,
        1,
        temperature=torch.ones(1),
        uniforms=torch.zeros(1, 3),
        draft_probs=torch.full((1, 1, 4), 0.25),
        impl=impl,
    )
    assert accepted.num_accepted.tolist() == [0] and accepted.bonus.item() != 2
