"""Paged attention beyond case-by-case parity: what must hold between calls, and what bad input gets.

The truth is `attention_truth.dense`.
"""

import pytest
import torch

from specdec_kernels.attention import paged_attention, paged_attention_with_lse
from specdec_kernels.attention.configs import UNSPLIT, attention_config
from specdec_kernels.launch import CHIPS
from tests.kernels.attention_truth import agree, dense, inputs


@pytest.mark.parametrize("mode", ["chain", "block", "tree"])
def test_dense_truth(mode: str, impl: str) -> None:
    arguments = inputs(mode, 9, (0, 37), q_lens=(9, 6), page_size=4, split_tokens=16)
    out, lse = paged_attention_with_lse(**arguments, impl=impl)
    expected_out, expected_lse = dense(arguments)
    agree(out, expected_out)
    agree(lse, expected_lse)


@pytest.mark.parametrize("mode", ["chain", "block", "tree"])
def test_garbage_that_no_row_may_see_does_not_leak(mode: str, impl: str) -> None:
    """Unused slots and foreign pages are NaN in these inputs; another garbage must give the same bits."""
    arguments = inputs(mode, 6, (21, 40, 0), heads=(2, 1), q_lens=(4, 6, 0), split_tokens=16)
    assert arguments["kv"].isnan().any()
    out, lse = paged_attention_with_lse(**arguments, impl=impl)
    assert not out.isnan().any() and not lse.isnan().any()
    other = paged_attention(**(arguments | dict(kv=arguments["kv"].nan_to_num(1e30))), impl=impl)
    assert torch.equal(out, other)
    assert (out[2] == 0).all() and (lse[2] == float("-inf")).all() and (out[0, 4:] == 0).all()


def test_scores_far_apart_stay_finite(impl: str) -> None:
    """A running maximum that is not carried, or a first tile that is all masked, overflows here."""
    arguments = inputs("chain", 3, (60,), heads=(2, 1), split_tokens=16, scale=400.0)
    out = paged_attention(**arguments, impl=impl)
    truth = paged_attention(
        **(arguments | dict(q=arguments["q"].double(), kv=arguments["kv"].double())), impl="reference"
    )
    torch.testing.assert_close(out.double(), truth, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("length, split_tokens", [(70, 32), (300, 16)])
def test_half_precision_is_as_good_as_eager(length: int, split_tokens: int) -> None:
    """Partial results are rounded too, each as the result is, and there may be as many as splits."""
    tuning = dict(block_n=16, first_splits=32)
    arguments = inputs("chain", 8, (length,), heads=(4, 2), split_tokens=split_tokens, tuning=tuning)
    half = arguments | dict(q=arguments["q"].half(), kv=arguments["kv"].half())
    truth = half | dict(q=half["q"].double(), kv=half["kv"].double())
    expected = paged_attention(**truth, impl="reference")
    kernel = (paged_attention(**half, impl="triton").double() - expected).abs().max()
    eager = (paged_attention(**half, impl="reference").double() - expected).abs().max()
    assert kernel <= 2 * eager


@pytest.mark.parametrize("kv_bytes", [1, 2, 4])
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 256])
def test_every_shape_has_a_launch_configuration(chip: str, head_dim: int, kv_bytes: int) -> None:
    for rows in (1, 16, 17, 64, 65, 128, 129, 512, 513, 10000):
        config = attention_config(chip, head_dim, rows, 4096, kv_bytes=kv_bytes)
        assert config.block_m >= min(rows, 64) and config.split_tokens % config.block_n == 0
        assert (config.split_tokens == UNSPLIT) == (rows > 4 * config.block_m)
