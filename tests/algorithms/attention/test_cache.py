"""Pools of keys and values: what they are made of, and how pages become zeros."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from algorithms.attention.cache import KVCache, KVScales, load_kv_scales
from tests.algorithms.attention.test_paged_attention import resources_of
from tests.algorithms.toy import CONFIG, random_target

SHAPE = (CONFIG.num_layers, CONFIG.num_kv_heads)


def scales() -> KVScales:
    factors = torch.arange(1.0, 1 + SHAPE[0] * SHAPE[1]).view(SHAPE)
    return KVScales(factors, 100 * factors)


@pytest.mark.parametrize("pages", [[3, 0], slice(2, 5), slice(None)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_pages_become_zeros_in_every_layer(dtype: torch.dtype, pages: list[int] | slice) -> None:
    resources = replace(resources_of(random_target()), kv_dtype=dtype, num_pages=6)
    cache = KVCache.allocate(CONFIG, resources)
    assert cache.kv.dtype == dtype and cache.kv.shape == (SHAPE[0], 2, 6, 4, CONFIG.num_kv_heads, CONFIG.head_dim)
    assert resources.caches == [cache] and cache.page_size == 4 and cache.rope.shape == (40, CONFIG.head_dim)
    cache.kv.copy_(torch.ones(cache.kv.shape))
    cache.zero(pages)
    left = torch.ones(6)
    left[pages] = 0
    assert torch.equal(cache.kv.float(), left[:, None, None, None].expand(cache.kv.shape))


def test_factors_are_those_of_their_layer(tmp_path: Path) -> None:
    save_file(scales()._asdict(), tmp_path / "scales.safetensors")
    loaded = load_kv_scales(tmp_path / "scales.safetensors", CONFIG)
    assert torch.equal(loaded.k_scale, scales().k_scale) and torch.equal(loaded.v_scale, scales().v_scale)
    second = loaded.of_layer(1)
    assert (second.k_scale.tolist(), second.v_scale.tolist()) == ([3, 4], [300, 400])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(v_scale=None), "got no v_scale"),
        (dict(k_scale=torch.ones(2, 1)), r"expected k_scale of \[layers, KV heads\] \[2, 2\], got \[2, 1\]"),
        *(
            (dict(v_scale=torch.full(SHAPE, wrong)), "expected finite factors above zero, v_scale of .* has others")
            for wrong in (0.0, -1.0, float("inf"), float("nan"))
        ),
    ],
)
def test_factors_that_do_not_fit_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    held = {name: tensor for name, tensor in (scales()._asdict() | change).items() if tensor is not None}
    save_file(held, tmp_path / "scales.safetensors")
    with pytest.raises(ValueError, match=message):
        load_kv_scales(tmp_path / "scales.safetensors", CONFIG)


def test_files_that_are_no_factors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="found none at"):
        load_kv_scales(tmp_path / "none.safetensors", CONFIG)
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(ValueError, match="expected a safetensors file"):
        load_kv_scales(tmp_path / "text", CONFIG)
