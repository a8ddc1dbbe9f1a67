"""Slots and pools beyond 2^31 elements: no offset may be computed in 32 bits.

A pool of that size is a sparse file, of which only the touched pages exist.
"""

from pathlib import Path

import pytest
import torch

from specdec_kernels import AttentionMetadata, move_accepted, paged_attention, token_slots
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


def test_slots_beyond_32_bits(impl: str) -> None:
    table = torch.tensor([[3, 1 << 28]], dtype=torch.int32)
    start, counts = torch.tensor([15]), torch.tensor([3], dtype=torch.int32)
    slots = token_slots(table, start, counts, 3, 16, impl=impl)
    assert slots.tolist() == [[63, 1 << 32, (1 << 32) + 1]]


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
    metadata = AttentionMetadata(torch.tensor([[0]], dtype=torch.int32), length, "chain")
    near = paged_attention(q, kv[:, -1:].clone(), metadata)
    with guarded():
        far = paged_attention(q, kv, metadata._replace(page_table=torch.tensor([[pages - 1]], dtype=torch.int32)))
    assert torch.equal(far, near)
