"""The paged KV cache: one tensor per model.

A page holds `page_size` positions of one request; the pages of a request need not be adjacent. Target and drafter have
pools of their own shape but share page numbers, so one page table and one allocation serve both (see `scheduler`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from algorithms.algorithm import Resources
from algorithms.models.config import DecoderConfig
from algorithms.models.layers import rope_table


class KVScales(NamedTuple):
    """Factors of stored keys and values, each [layers, H_kv] float32: value = factor * stored."""

    k_scale: torch.Tensor
    v_scale: torch.Tensor

    def of_layer(self, layer: int) -> KVScales:
        """The factors of one layer, each [H_kv]."""
        return KVScales(self.k_scale[layer], self.v_scale[layer])


def load_kv_scales(path: str | Path, config: DecoderConfig) -> KVScales:
    """Factors for a model of this shape, from a safetensors file with `k_scale` and `v_scale`. Raises ValueError where
    the file is missing, lacks a tensor, or holds factors of another shape or not above zero."""
    if not Path(path).is_file():
        raise ValueError(f"runtime.kv_scales: expected a file, found none at {path}; task=kv_scales writes one")
    try:
        stored = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"runtime.kv_scales: expected a safetensors file, got {path}: {error}") from error
    expected = (config.num_layers, config.num_kv_heads)
    for name in KVScales._fields:
        if name not in stored:
            raise ValueError(f"runtime.kv_scales: expected {' and '.join(KVScales._fields)} in {path}, got no {name}")
        found = stored[name].float()
        if tuple(found.shape) != expected:
            raise ValueError(
                f"runtime.kv_scales: expected {name} of [layers, KV heads] {list(expected)}, "
                f"got {list(found.shape)} in {path}"
            )
        if not bool((found.isfinite() & (found > 0)).all()):
            raise ValueError(f"runtime.kv_scales: expected finite factors above zero, {name} of {path} has others")
    return KVScales(*(stored[name].float().contiguous() for name in KVScales._fields))


@dataclass(frozen=True)
class KVCache:
    """Keys and values of one model, and the constants that their storing needs."""

    kv: torch.Tensor  # [layers, 2, pages, page_size, H_kv, D]
    rope: torch.Tensor  # [context, R] float32 for the R elements of a head that rotate
    config: DecoderConfig
    """Constants of the model: the scale, soft cap and windows of its attention, the epsilon of its norms."""
    scales: KVScales | None = None  # the scales of a float8 pool; None: 1

    @classmethod
    def allocate(cls, config: DecoderConfig, resources: Resources, scales: KVScales | None = None) -> KVCache:
        """A pool for a model of this shape, on the run's pages and device, in its dtype of stored keys and values."""
        pages = (resources.num_pages, resources.page_size)
        # Zeros, not empty: a masked-out slot still enters a matmul with weight 0, and 0 * NaN is NaN.
        kv = torch.zeros(
            (config.num_layers, 2, *pages, config.num_kv_heads, config.head_dim),
            device=resources.device,
            dtype=resources.kv_dtype,
        )
        if scales is not None:
            scales = KVScales(*(scale.to(resources.device) for scale in scales))
        cache = cls(kv, rope_table(config, resources.context, resources.device), config, scales)
        resources.caches.append(cache)
        return cache

    def zero(self, pages: Sequence[int] | slice) -> None:
        # By bytes, which are 0 in the zero of every dtype: torch fills no selection of float8.
        self.kv.view(torch.uint8)[:, :, pages] = 0

    @property
    def page_size(self) -> int:
        return self.kv.shape[3]
