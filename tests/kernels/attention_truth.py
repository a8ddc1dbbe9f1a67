"""Paged attention by its definition: a dense float64 softmax over explicitly listed keys, one row at a time,
without pages, splits, tiles or masks over tensors."""

import math
from typing import Any

import torch

from specdec_kernels.attention import AttentionMetadata
from specdec_kernels.attention.cases_inputs import attention_inputs
from specdec_kernels.cases import Maker

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = dict(rtol=2e-6, atol=2e-6)


def inputs(mode: str, num_nodes: int, lengths: tuple[int, ...], seed: int = 0, **shape: Any) -> dict[str, Any]:
    return attention_inputs(Maker.seeded(DEVICE, seed=seed), mode, num_nodes, lengths, **shape)


def agree(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double().cpu(), expected.double().cpu(), **TOLERANCE)


def _sees(metadata: AttentionMetadata, request: int, row: int, slot: int) -> bool:
    """Whether a row sees a draft slot by its mode, read off the definition one pair at a time."""
    if metadata.mode == "chain":
        return slot <= row
    if metadata.mode == "block":
        return True
    assert metadata.mask is not None
    word = int(metadata.mask[request, row, slot // 64]) % (1 << 64)
    return bool(word >> (slot % 64) & 1)


def _position(metadata: AttentionMetadata, request: int, index: int, depths: torch.Tensor | None) -> int:
    """Position of a draft slot or query row for the window, by its depth where there are depths."""
    return int(metadata.lengths[request]) + (index if depths is None else int(depths[request, index]))


def listed_keys(metadata: AttentionMetadata, num_nodes: int, request: int, row: int) -> list[int]:
    """Slots that a row sees, one by one."""
    length = int(metadata.lengths[request])
    used = num_nodes if metadata.q_lens is None else int(metadata.q_lens[request])
    slots = metadata.tree_width or used
    keys = [t for t in range(length + slots) if t < length or _sees(metadata, request, row, t - length)]
    if metadata.window is None:
        return keys
    own = metadata.depths if metadata.row_depths is None else metadata.row_depths
    stands = _position(metadata, request, row, own)
    where = [t if t < length else _position(metadata, request, t - length, metadata.depths) for t in keys]
    return [t for t, position in zip(keys, where, strict=True) if stands - position < metadata.window]


def _by_head(scale: Any, kv_heads: int) -> torch.Tensor:
    if isinstance(scale, torch.Tensor):
        return scale.double().cpu()
    return torch.full((kv_heads,), float(scale), dtype=torch.float64)


def dense(arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp in float64."""
    q, kv = arguments["q"].double().cpu(), arguments["kv"].double().cpu()
    batch, num_nodes, heads, head_dim = q.shape
    group, page_size = heads // kv.shape[3], kv.shape[2]
    k_scale, v_scale = (_by_head(arguments.get(name, 1.0), kv.shape[3]) for name in ("k_scale", "v_scale"))
    metadata: AttentionMetadata = arguments["metadata"]
    scale = head_dim**-0.5 if metadata.scale is None else metadata.scale
    soft_cap, sinks = metadata.soft_cap, arguments.get("sinks")
    out = torch.zeros_like(q)
    lse = torch.full((batch, num_nodes, heads), -math.inf, dtype=torch.float64)
    for request in range(batch):
        used = num_nodes if metadata.q_lens is None else int(metadata.q_lens[request])
        pages = metadata.page_table[request].tolist()
        for row in range(used):
            keys = listed_keys(metadata, num_nodes, request, row)
            chosen = torch.zeros(2, 0, kv.shape[3], head_dim, dtype=torch.float64)
            if keys:
                chosen = torch.stack([kv[:, pages[t // page_size], t % page_size] for t in keys], dim=1)
            k = (chosen[0] * k_scale[:, None]).repeat_interleave(group, dim=1)
            v = (chosen[1] * v_scale[:, None]).repeat_interleave(group, dim=1)
            scores = torch.einsum("hd,thd->ht", q[request, row], k) * scale
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            if sinks is not None:
                scores = torch.cat([scores, sinks.double().cpu()[:, None]], dim=1)
                v = torch.cat([v, torch.zeros(1, heads, head_dim, dtype=torch.float64)])
            if scores.shape[1]:
                lse[request, row] = scores.logsumexp(-1)
                out[request, row] = torch.einsum("ht,thd->hd", scores.softmax(-1), v)
    return out, lse
