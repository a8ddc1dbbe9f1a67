"""Kernels with tiles smaller than their inputs.

The interpreter's tiles are so wide that they hold the inputs of most cases whole, so that nothing is carried from one
tile to the next. These tests make the tiles small.
"""

from dataclasses import replace

import pytest
import torch

import specdec_kernels.mla.configs as mla_configs
from specdec_kernels import paged_attention
from specdec_kernels.attention import kernel_merge
from specdec_kernels.attention.cases_inputs import attention_inputs, changed
from specdec_kernels.cases import Maker
from specdec_kernels.kv_index import kernel as kv_index
from specdec_kernels.kv_index.kernel import running_sums
from specdec_kernels.mla import mla_attention
from specdec_kernels.mla.cases import mla_inputs

if torch.cuda.is_available():
    pytest.skip("the tiles that are made small are the interpreter's", allow_module_level=True)


def test_running_sums_carry_over_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(kv_index.CONFIGS["interpreter"], scan_block=16)
    monkeypatch.setitem(kv_index.CONFIGS, "interpreter", small)
    counts = torch.arange(1, 71, dtype=torch.int32)
    assert running_sums(counts, torch.empty(71, dtype=torch.int64))[1:].tolist() == counts.cumsum(0).tolist()


def test_a_latent_in_two_blocks_over_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are rescaled between tiles."""
    inputs = changed(mla_inputs(Maker.seeded(), "chain", 3, (75, 40), latent=48, rope=16), scale=1.0)
    expected = mla_attention(**inputs, impl="reference")
    real = mla_configs.mla_config
    monkeypatch.setattr(mla_configs, "mla_config", lambda *args: replace(real(*args), block_n=16))
    torch.testing.assert_close(mla_attention(**inputs, impl="triton"), expected, rtol=1e-4, atol=1e-5)


def test_merge_rescales_between_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits are merged some at a time."""
    inputs = attention_inputs(Maker.seeded(), "chain", 3, (150, 40), split_tokens=16, scale=2.0)
    expected = paged_attention(**inputs, impl="reference")
    real = kernel_merge.merge_config
    monkeypatch.setattr(kernel_merge, "merge_config", lambda *args: replace(real(*args), unroll=2))
    torch.testing.assert_close(paged_attention(**inputs, impl="triton"), expected, rtol=1e-4, atol=1e-5)
