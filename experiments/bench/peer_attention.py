"""Other implementations of paged attention.

torch's own attention reads no pages: it receives keys and values that were gathered beforehand, outside of its time,
which favours it. FlashInfer and FlashAttention-4 are called through the runtime's backends and planned beforehand; what
the backends add around the kernel of the package is part of the time. FlashAttention-3 is the library inside vLLM's
wheel (`vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so`, called as of vLLM 0.24); its scheduler runs beforehand too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch

from algorithms.runtime.backends.flash_attention_4 import FlashAttention4
from algorithms.runtime.backends.flashinfer import FlashInferBackend
from algorithms.runtime.backends.protocol import Backend, BackendError
from experiments.bench.libraries import Unavailable, load_library
from specdec_kernels.attention import AttentionMetadata, AttentionShape
from specdec_kernels.attention.reference import visible_keys

Call = Callable[[], torch.Tensor]


def _dense(inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [B, H_kv, S, D] by position, zero where nothing is stored."""
    kv, metadata, num_nodes = inputs["kv"], inputs["metadata"], inputs["q"].shape[1]
    lengths = metadata.lengths
    longest = int(lengths.max()) + num_nodes
    needed = 2 * len(lengths) * longest * kv.shape[3] * kv.shape[4] * kv.element_size()
    if kv.is_cuda and 2.5 * needed > torch.cuda.mem_get_info(kv.device)[0]:
        raise Unavailable(f"gathered keys and values of {needed / 2**30:.0f} GiB do not fit")
    columns = -(-longest // kv.shape[2])
    table = metadata.page_table[:, :columns].long().clamp(0, kv.shape[1] - 1)
    stored = torch.arange(longest, device=kv.device) < (lengths + num_nodes)[:, None]
    sides = []
    for plane in kv:
        side = plane[table].flatten(1, 2)[:, :longest]
        sides.append(side.masked_fill_(~stored[:, :, None, None], 0.0).transpose(1, 2).contiguous())
    return sides[0], sides[1]


def _expect_plain(inputs: dict[str, Any]) -> None:
    """Refuse what only a paged kernel of this project takes."""
    told = inputs["metadata"]._asdict() | inputs
    for name in ("window", "sinks", "soft_cap", "k_scale", "v_scale", "q_lens", "tree_width", "work_list"):
        if told.get(name) is not None:
            raise Unavailable(f"not compared with {name}")
    if inputs["kv"].dtype != inputs["q"].dtype:
        raise Unavailable(f"not compared with keys of {inputs['kv'].dtype}")


def _scale(inputs: dict[str, Any]) -> float:
    given = inputs["metadata"].scale
    return inputs["q"].shape[-1] ** -0.5 if given is None else float(given)


def _sdpa(inputs: dict[str, Any]) -> Call:
    """torch's scaled_dot_product_attention, without a mask where the case needs none."""
    from torch.nn.attention.bias import causal_lower_right

    _expect_plain(inputs)
    keys, values = _dense(inputs)
    query = inputs["q"].transpose(1, 2).contiguous()
    num_nodes, longest = query.shape[2], keys.shape[2]
    metadata: AttentionMetadata = inputs["metadata"]
    alike = bool((metadata.lengths == metadata.lengths[0]).all())
    mask: Any
    if alike and (num_nodes == 1 or metadata.mode == "block"):
        mask = None
    elif alike and metadata.mode == "chain":
        mask = causal_lower_right(num_nodes, longest)
    else:
        mask = visible_keys(metadata, num_nodes, longest)[:, None]
    options = dict(attn_mask=mask, scale=_scale(inputs), enable_gqa=query.shape[1] != keys.shape[1])
    return lambda: torch.nn.functional.scaled_dot_product_attention(query, keys, values, **options).transpose(1, 2)


def _varlen(inputs: dict[str, Any]) -> Call:
    """torch's flash attention over requests of different lengths, packed one behind the other."""
    if find_spec("torch.nn.attention.varlen") is None:
        raise Unavailable("not in this torch")
    from torch.nn.attention.varlen import varlen_attn

    _expect_plain(inputs)
    q, metadata = inputs["q"], inputs["metadata"]
    lengths = metadata.lengths
    batch, num_nodes, heads, head_dim = q.shape
    if metadata.mode == "tree":
        raise Unavailable("takes no tree mask")
    if not q.is_cuda:
        raise Unavailable("runs on a GPU only")
    keys, values = _dense(inputs)
    used = lengths + num_nodes
    longest = int(used.max())
    stored = torch.arange(longest, device=q.device) < used[:, None]
    packed = [side.transpose(1, 2)[stored].contiguous() for side in (keys, values)]
    del keys, values
    q_ends = torch.arange(batch + 1, device=q.device, dtype=torch.int32) * num_nodes
    k_ends = torch.nn.functional.pad(used.cumsum(0), (1, 0)).to(torch.int32)
    flat = q.reshape(batch * num_nodes, heads, head_dim)
    # Options came one by one: torch 2.10 had `is_causal` alone.
    known = signature(varlen_attn).parameters
    causal = metadata.mode == "chain"
    given = dict(scale=_scale(inputs), enable_gqa=True, window_size=(-1, 0 if causal else -1), is_causal=causal)
    options: dict[str, Any] = {name: value for name, value in given.items() if name in known}
    attend: Any = varlen_attn
    return lambda: attend(flat, *packed, q_ends, k_ends, num_nodes, longest, **options).view(q.shape)


def _through(backend: Callable[[], Backend], inputs: dict[str, Any]) -> Call:
    """A package through a backend of its own, planned once: plans share what lies inside a backend."""
    if inputs.get("k_scale") is not None or inputs.get("v_scale") is not None:
        raise Unavailable("not compared with scales of keys and values")
    q, kv = inputs["q"], inputs["kv"]
    try:
        built = backend()
        planned = built.plan(inputs["metadata"], AttentionShape.of(q, kv), "verify")
    except BackendError as reason:
        raise Unavailable(str(reason)) from reason
    return lambda: built.run(planned, q, kv, inputs.get("sinks"))


def _flashinfer() -> FlashInferBackend:
    return FlashInferBackend(FlashInferBackend.Config(), "auto")


def _flash_attention_3(inputs: dict[str, Any]) -> Call:
    """FlashAttention-3 over the same pages; it takes no mask."""
    _expect_plain(inputs)
    q, kv = inputs["q"], inputs["kv"]
    metadata: AttentionMetadata = inputs["metadata"]
    batch, num_nodes, heads, head_dim = q.shape
    if metadata.mode == "tree":
        raise Unavailable("takes no tree mask")
    load_library("vllm", "_vllm_fa3_C*.so")
    package, device, causal = torch.ops._vllm_fa3_C, q.device, metadata.mode == "chain"
    ends = torch.arange(batch + 1, device=device, dtype=torch.int32) * num_nodes
    used = (metadata.lengths + num_nodes).to(torch.int32)
    page_size, longest = kv.shape[2], metadata.page_table.shape[1] * kv.shape[2]
    none: tuple[None, ...] = (None,)
    scheduled = package.get_scheduler_metadata(
        batch, num_nodes, longest, heads, kv.shape[3], head_dim, head_dim, q.dtype, used, ends, *none * 4, page_size, 0,
        causal, -1, -1, False, 0, None, 0,
    )  # fmt: skip
    flat, table, scale = q.reshape(-1, heads, head_dim), metadata.page_table, _scale(inputs)

    def attend() -> torch.Tensor:
        out, *_ = package.fwd(
            flat, *kv, *none * 4, ends, *none * 3, used, num_nodes, longest, table, *none * 8, scale, causal, -1, -1,
            0.0, True, scheduled, 0, None, 0, None, 1, 0, None,
        )  # fmt: skip
        return out.view(q.shape)

    return attend


PAGED_ATTENTION: dict[str, Callable[[dict[str, Any]], Call]] = {
    "sdpa": _sdpa,
    "varlen": _varlen,
    "flashinfer": partial(_through, _flashinfer),
    "flash_attention_3": _flash_attention_3,
    "flash_attention_4": partial(_through, FlashAttention4),
}
