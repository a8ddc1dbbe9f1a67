"""Stand-ins for FlashInfer and FlashAttention-4 that check how they are called and compute what they promise.

Each has the parameter names of the real function, recorded with the version they were read from, refuses arguments of
another name, dtype, shape or device, and does dense attention in float64 from nothing but those arguments. So a backend
that passes wrong indices, lengths, masks or alignments gives wrong results here as it would on a GPU.
"""

from __future__ import annotations

import math
from functools import partial
from importlib.machinery import ModuleSpec
from inspect import Parameter, Signature
from types import ModuleType
from typing import Any

import torch

from algorithms.attention.backends import packages
from tests.algorithms import tape


def _names(text: str) -> list[str]:
    return text.split()


FLASHINFER_VERSION = "0.7.2.post1"
FLASHINFER_INIT = _names(
    "float_workspace_buffer kv_layout use_cuda_graph qo_indptr_buf paged_kv_indptr_buf paged_kv_indices_buf "
    "paged_kv_last_page_len_buf custom_mask_buf mask_indptr_buf backend jit_args jit_kwargs variant_owns_mask"
)
FLASHINFER_PLAN = _names(
    "qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads num_kv_heads head_dim_qk page_size "
    "head_dim_vo custom_mask packed_custom_mask causal pos_encoding_mode use_fp16_qk_reduction sm_scale window_left "
    "logits_soft_cap rope_scale rope_theta q_data_type kv_data_type o_data_type non_blocking prefix_len_ptr "
    "token_pos_in_items_ptr token_pos_in_items_len max_item_len_ptr seq_lens seq_lens_q block_tables "
    "max_token_per_sequence max_sequence_kv fixed_split_size disable_split_kv uniform_q_len"
)
FLASHINFER_RUN = _names(
    "q paged_kv_cache q_scale k_scale v_scale out lse return_lse lse_base lse_layout enable_pdl window_left sinks "
    "kv_cache_sf skip_softmax_threshold_scale_factor use_fp16_softmax uses_spcompress"
)
FLASH_ATTENTION_VERSION = "4.0.0b36"
FLASH_ATTENTION_VARLEN = _names(
    "q k v qv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k min_seqlen_k seqused_q seqused_k gather_kv_indices "
    "page_table softmax_scale causal window_size learnable_sink softcap num_splits pack_gqa deterministic score_mod "
    "score_mod_bwd mask_mod block_sparse_tensors aux_tensors aux_scalars return_lse scheduler_metadata "
    "seqlen_k_per_split disable_scheduler_metadata gather_bwd_recompute_p gather_bwd_token_chunk"
)


DTYPES = (torch.float16, torch.bfloat16)


def bind(names: list[str], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Arguments by name; TypeError for a name that the real function does not have."""
    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=None) for name in names]
    return dict(Signature(parameters).bind(*args, **kwargs).arguments)


def int32(name: str, tensor: torch.Tensor, *shape: int) -> None:
    assert tensor.dtype == torch.int32 and tuple(tensor.shape) == shape, f"{name}: {tensor.dtype} {tensor.shape}"
    assert tensor.is_contiguous(), name


def attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, scale: float, cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [R, H, D] over keys [S, H_kv, D] in float64: out [R, H, D], natural lse [R, H]; blind rows are 0 and -inf."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (half.double().repeat_interleave(group, 1) for half in (keys, values))
    scores = torch.einsum("rhd,shd->rhs", q.double(), keys) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - torch.where(lse.isinf(), 0.0, lse)[..., None])
    return torch.einsum("rhs,shd->rhd", weights, values), lse


def windowed(rows: int, keys: int, causal: bool, left: int | None, right: int | None) -> torch.Tensor:
    """[rows, keys] visibility of rows aligned at the last key."""
    distance = torch.arange(rows)[:, None] + (keys - rows) - torch.arange(keys)
    seen = distance >= 0 if causal else torch.ones(rows, keys, dtype=torch.bool)
    if left is not None and left >= 0:
        seen = seen & (distance <= left)
    if right is not None and right >= 0:
        seen = seen & (distance >= -right)
    return seen


class FakePrefillWrapper:
    """`flashinfer.BatchPrefillWithPagedKVCacheWrapper`. Like the real one it keeps only the last plan, and the kernel
    that the first plan chose."""

    made: list[FakePrefillWrapper] = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = bind(FLASHINFER_INIT, *args, **kwargs)
        assert given["float_workspace_buffer"].dtype == torch.uint8 and given["kv_layout"] == "NHD"
        assert given["backend"] in ("auto", "fa2", "fa3")
        self.backend, self.plans = given["backend"], 0
        self.made.append(self)

    def plan(self, *args: Any, **kwargs: Any) -> None:
        p = bind(FLASHINFER_PLAN, *args, **kwargs)
        batch = len(p["qo_indptr"]) - 1
        int32("qo_indptr", p["qo_indptr"], batch + 1)
        int32("paged_kv_indptr", p["paged_kv_indptr"], batch + 1)
        int32("paged_kv_last_page_len", p["paged_kv_last_page_len"], batch)
        int32("paged_kv_indices", p["paged_kv_indices"], len(p["paged_kv_indices"]))
        assert p["paged_kv_indptr"][-1] <= len(p["paged_kv_indices"])
        pages = p["paged_kv_indptr"].diff()
        last = p["paged_kv_last_page_len"]
        assert bool((pages >= 1).all()) and bool(((last >= 1) & (last <= p["page_size"])).all())
        if self.backend == "auto":
            self.backend = "fa2" if p.get("custom_mask") is not None else "fa3"
        keys, rows = (pages - 1) * p["page_size"] + last, p["qo_indptr"].diff()
        if p.get("custom_mask") is not None:
            assert self.backend == "fa2", "fa3 takes no mask"
            assert p["custom_mask"].dtype == torch.bool and p["custom_mask"].shape == (int((rows * keys).sum()),)
        self.planned, self.keys, self.rows = p, keys.tolist(), rows.tolist()
        self.plans += 1

    def run(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        given, p = bind(FLASHINFER_RUN, *args, **kwargs), self.planned
        q, (keys, values) = given["q"], given["paged_kv_cache"]
        assert q.dtype == p["q_data_type"] and keys.dtype == p["kv_data_type"] and keys.stride() == values.stride()
        assert q.shape == (sum(self.rows), p["num_qo_heads"], p["head_dim_qk"])
        assert keys.shape[1:] == (p["page_size"], p["num_kv_heads"], p["head_dim_qk"]) and given["return_lse"]
        out, lse, row, bit = [], [], 0, 0
        for request, (rows, count) in enumerate(zip(self.rows, self.keys, strict=True)):
            start, end = p["paged_kv_indptr"][request : request + 2].tolist()
            pages = p["paged_kv_indices"][start:end].long()
            stored = [half[pages].flatten(0, 1)[:count] for half in (keys, values)]
            if p.get("custom_mask") is not None:
                seen = p["custom_mask"][bit : bit + rows * count].view(rows, count)
                assert p["window_left"] < 0
            else:
                seen = windowed(rows, count, p["causal"], p["window_left"], None)
            one = attend(q[row : row + rows], *stored, seen, p["sm_scale"], p["logits_soft_cap"] or 0.0)
            out.append(one[0])
            lse.append(one[1])
            row, bit = row + rows, bit + rows * count
        return torch.cat(out).to(q.dtype), torch.cat(lse).float() / math.log(2.0)


def fake_flash_attn_varlen_func(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`flash_attn.cute.flash_attn_varlen_func` over a page table, as compute capability 9.0 has it. Rows past
    `seqused_q` are left as garbage."""
    p = bind(FLASH_ATTENTION_VARLEN, *args, **kwargs)
    q, k, v = p["q"], p["k"], p["v"]
    batch, rows, heads, head_dim = q.shape
    assert q.dtype in DTYPES and k.dtype == v.dtype == q.dtype
    assert p["num_splits"] == 1, "no split keys on compute capability 9"
    assert p.get("cu_seqlens_q") is None and p.get("cu_seqlens_k") is None
    int32("page_table", p["page_table"], batch, p["page_table"].shape[1])
    int32("seqused_k", p["seqused_k"], batch)
    assert p["max_seqlen_q"] == rows and head_dim == k.shape[3]
    out, lse = torch.empty_like(q), q.new_empty((batch, heads, rows), dtype=torch.float32)
    tape.device_work(partial(_flash_attention_kernel, p, out, lse))
    return out, lse if p["return_lse"] else None


def _flash_attention_kernel(p: dict[str, Any], out: torch.Tensor, lse: torch.Tensor) -> None:
    q, k, v = p["q"], p["k"], p["v"]
    assert bool(((p["page_table"] >= 0) & (p["page_table"] < len(k))).all()), "every entry is loaded"
    assert bool((p["seqused_k"] <= p["max_seqlen_k"]).all())
    rows = q.shape[1]
    out.fill_(math.nan)
    lse.fill_(math.nan)
    for request, count in enumerate(p["seqused_k"].tolist()):
        used = rows if p.get("seqused_q") is None else int(p["seqused_q"][request])
        stored = [half[p["page_table"][request].long()].flatten(0, 1)[:count] for half in (k, v)]
        seen = windowed(used, count, p["causal"], *p["window_size"])
        one = attend(q[request, :used], *stored, seen, p["softmax_scale"], p["softcap"])
        out[request, :used], lse[request, :, :used] = one[0].to(q.dtype), one[1].T.float()


def module(name: str, **contents: Any) -> ModuleType:
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None, is_package=True)
    made.__path__ = []
    vars(made).update(contents)
    return made


def take_float32(monkeypatch: Any) -> None:
    """Let the stand-ins serve models in float32, of which every token can be compared, with heads of 16."""
    monkeypatch.setattr("tests.algorithms.fake_packages.DTYPES", (torch.float32,))
    monkeypatch.setattr(packages, "half_precision_only", lambda shape: None)


def install(monkeypatch: Any) -> None:
    """Put both stand-ins where the backends import the packages, on a CPU that passes for a Hopper GPU."""
    FakePrefillWrapper.made = []
    flashinfer = module("flashinfer", BatchPrefillWithPagedKVCacheWrapper=FakePrefillWrapper)
    cute = module("flash_attn.cute", flash_attn_varlen_func=fake_flash_attn_varlen_func)
    modules = {"flashinfer": flashinfer, "flash_attn": module("flash_attn", cute=cute), "flash_attn.cute": cute}
    for name, made in modules.items():
        monkeypatch.setitem(__import__("sys").modules, name, made)
    monkeypatch.setattr(packages, "no_device", lambda: None)
    monkeypatch.setattr(packages, "capability", lambda device: (9, 0))
