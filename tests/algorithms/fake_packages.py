"""Stand-ins for FlashInfer and FlashAttention-4 that check how they are called and compute what they promise.

Each has the parameter names of the real function, recorded with the version they were read from, refuses arguments of
another name, dtype, shape or device, and does dense attention in float64 from nothing but those arguments. So a backend
that passes wrong indices, lengths, masks or alignments gives wrong results here as it would on a GPU.
"""

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
    that the first plan chose. With `use_cuda_graph` its launches read lengths, pages and masks in the buffers that it
    was given, and how keys are split in the memory of its plan, as they are when a launch runs."""

    made: "list[FakePrefillWrapper]" = []
    BUFFERS = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = bind(FLASHINFER_INIT, *args, **kwargs)
        assert given["float_workspace_buffer"].dtype == torch.uint8 and given["kv_layout"] == "NHD"
        assert given["backend"] in ("auto", "fa2", "fa3")
        self.backend, self.plans, self.in_graphs = given["backend"], 0, bool(given.get("use_cuda_graph"))
        self.buffers: list[torch.Tensor] = []
        self.packed, self.starts = given.get("custom_mask_buf"), given.get("mask_indptr_buf")
        if self.in_graphs:
            assert self.backend == "fa2", "fa3 plans the lengths of requests"
            self.buffers = [given[name] for name in self.BUFFERS]
            self.fixed_batch = len(self.buffers[0]) - 1
        if self.packed is not None:
            assert self.packed.dtype == torch.uint8
            int32("mask_indptr_buf", self.starts, self.fixed_batch + 1)
        self.made.append(self)

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        assert float_workspace_buffer.dtype == int_workspace_buffer.dtype == torch.uint8
        self.memory = int_workspace_buffer

    def plan(self, *args: Any, **kwargs: Any) -> None:
        p = bind(FLASHINFER_PLAN, *args, **kwargs)
        assert not tape.recording(), "plan works on the host"
        given = [p[name.removesuffix("_buf")] for name in self.BUFFERS]
        batch = len(given[0]) - 1
        for name, values, size in zip(self.BUFFERS, given, (batch + 1, batch + 1, len(given[2]), batch), strict=True):
            int32(name, values, size)
        if self.backend == "auto":
            self.backend = "fa3"
        assert p.get("custom_mask") is None and p.get("packed_custom_mask") is None
        self.planned, self.rows = p, given[0].diff().tolist()
        self.planned_keys = self._keys(given)
        if self.in_graphs:
            assert batch == self.fixed_batch and len(given[2]) <= len(self.buffers[2])
            assert set(self.rows) == {p["uniform_q_len"]}
            for buffer, values in zip(self.buffers, given, strict=True):
                buffer[: len(values)].copy_(values)
            self._split(given[1].diff().tolist())
        else:
            assert given[1][-1] <= len(given[2])
            self.buffers = given
        self.plans += 1

    def run(self, *args: Any, **kwargs: Any) -> Any:
        given, p = bind(FLASHINFER_RUN, *args, **kwargs), self.planned
        q, (keys, values) = given["q"], given["paged_kv_cache"]
        assert q.dtype == p["q_data_type"] and keys.dtype == p["kv_data_type"] and keys.stride() == values.stride()
        assert q.shape == (sum(self.rows), p["num_qo_heads"], p["head_dim_qk"])
        assert keys.shape[1:] == (p["page_size"], p["num_kv_heads"], p["head_dim_qk"])
        assert not self.in_graphs or given["enable_pdl"] is False, "lengths are read before the kernel waits"
        out, lse = given.get("out"), q.new_empty(q.shape[:2], dtype=torch.float32)
        out = torch.empty_like(q) if out is None else out
        assert out.shape == q.shape and out.is_contiguous()
        tape.device_work(partial(self._kernel, q, keys, values, out, lse))
        return (out, lse) if given["return_lse"] else out

    def _keys(self, arrays: list[torch.Tensor]) -> list[int]:
        """Keys of each request."""
        pages, last, page_size = arrays[1].diff(), arrays[3], self.planned["page_size"]
        assert bool((pages >= 1).all()) and bool(((last >= 1) & (last <= page_size)).all())
        return ((pages - 1) * page_size + last).tolist()

    def _split(self, pages: list[int]) -> None:
        """Divide keys of the planned `pages` for a chip of 132 multiprocessors, and write that into the plan's memory,
        as `PrefillPlan` in `scheduler.cuh` does."""
        p, batch = self.planned, len(self.rows)
        packed = self.rows[0] * (p["num_qo_heads"] // p["num_kv_heads"])
        self.row_tile, room = 128 if packed > 64 else 64 if packed > 16 else 16, 264 // p["num_kv_heads"]
        row_tiles, chunk = -(-packed // self.row_tile), max(128 // p["page_size"], 1)
        if p["window_left"] >= 0:
            pages = [min(count, -(-(p["window_left"] + self.row_tile) // p["page_size"])) for count in pages]
        while batch * row_tiles * -(-max(pages) // chunk) > room and chunk < max(pages):
            chunk += 1
        most = 1 if p["disable_split_kv"] else -(-max(pages) // chunk)
        tiles = [(r, t, c) for r in range(batch) for t in range(row_tiles) for c in range(most)]
        size = max(room, len(tiles))
        padding = (size - len(tiles)) * [(-77, -77, -77)]
        columns = list(zip(*(tiles + padding), strict=True))
        arrays = dict(request=columns[0], row_tile=columns[1], chunk=columns[2])
        arrays |= dict(
            begins=[r * self.rows[0] * most for r in range(batch + 1)], size=[chunk * p["page_size"]],
            ends=[row * most for row in range(sum(self.rows) + 1)],
        )  # fmt: skip
        at, self.plan_arrays, places = 0, {}, {}
        for name, values in arrays.items():
            places[name], view = at, self.memory[at : at + 4 * len(values)].view(torch.int32)
            view.copy_(torch.tensor(values))
            self.plan_arrays[name], at = view, at + -(-len(values) // 4) * 16
        self.plan_arrays["runs"] = self.memory[at : at + size]
        self.plan_arrays["runs"].copy_(torch.arange(size) < len(tiles))
        offsets = [places[name] for name in ("request", "row_tile", "chunk", "ends", "begins", "size")]
        self._plan_info = [
            size, sum(self.rows), 0, self.row_tile, *offsets, 0, 0, at, 1, int(not p["disable_split_kv"]),
        ]  # fmt: skip

    def _stored(self, request: int, count: int, pools: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
        starts = self.buffers[1].tolist()
        pages = self.buffers[2][starts[request] : starts[request + 1]].long()
        assert bool(((pages >= 0) & (pages < len(pools[0]))).all()), "a page that does not exist"
        return [half[pages].flatten(0, 1)[:count] for half in pools]

    def _seen(self, request: int, count: int) -> torch.Tensor:
        rows, p = self.rows[request], self.planned
        if self.packed is None:
            return windowed(rows, count, p["causal"], p["window_left"], None)
        assert p["window_left"] < 0
        bits = self.packed[self.starts[request] :][: -(-rows * count // 8)]
        return (bits[:, None] >> torch.arange(8) & 1).flatten()[: rows * count].view(rows, count).bool()

    def _kernel(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *results: torch.Tensor) -> None:
        """What a launch computes, from the plan and the buffers as they are when it runs."""
        p, counts, row = self.planned, self._keys(self.buffers), 0
        if self.in_graphs and not p["disable_split_kv"]:
            return self._chunked_kernel(q, (keys, values), counts, *results)
        for request, (rows, count) in enumerate(zip(self.rows, counts, strict=True)):
            seen, stored = self._seen(request, count), self._stored(request, count, (keys, values))
            one = attend(q[row : row + rows], *stored, seen, p["sm_scale"], p["logits_soft_cap"] or 0.0)
            results[0][row : row + rows] = one[0].to(q.dtype)
            results[1][row : row + rows] = one[1].float() / math.log(2.0)
            row += rows

    def _chunked_kernel(self, q: torch.Tensor, pools: Any, counts: list[int], *results: torch.Tensor) -> None:
        """Partial results are laid out by the number of chunks of the actual keys, and merged as planned."""
        p, plan, rows = self.planned, {k: v.tolist() for k, v in self.plan_arrays.items()}, self.rows[0]
        group, (size,) = p["num_qo_heads"] // p["num_kv_heads"], plan["size"]
        partial_rows = 2 * len(plan["runs"]) * self.row_tile
        out = q.new_full((partial_rows, *q.shape[1:]), math.nan, dtype=torch.float64)
        lse = out.new_full(out.shape[:2], math.nan)
        for runs, request, row_tile, chunk in zip(
            plan["runs"], plan["request"], plan["row_tile"], plan["chunk"], strict=True
        ):
            if not runs:
                continue
            count, window = counts[request], p["window_left"] if p["window_left"] >= 0 else counts[request]
            chunks = -(-min(max(count, 1), window + self.row_tile) // size)
            first = max(count + row_tile * self.row_tile // group - rows - window, 0)
            begin, end = (min(first + number * size, count) for number in (chunk, chunk + 1))
            part, stored = q[request * rows : (request + 1) * rows], self._stored(request, count, pools)
            seen = self._seen(request, count)[:, begin:end]
            found = attend(
                part, *(half[begin:end] for half in stored), seen, p["sm_scale"], p["logits_soft_cap"] or 0.0
            )
            for packed in range(row_tile * self.row_tile, min((row_tile + 1) * self.row_tile, rows * group)):
                row, heads = packed // group, slice(packed % group, None, group)
                place = plan["begins"][request] + row * chunks + chunk
                out[place, heads], lse[place, heads] = found[0][row, heads], found[1][row, heads]
        for row in range(len(q)):
            sets = slice(plan["ends"][row], plan["ends"][row + 1])
            whole = lse[sets].logsumexp(0)
            weights = torch.exp(lse[sets] - torch.where(whole.isinf(), 0.0, whole))
            results[0][row] = (weights[..., None] * out[sets]).sum(0).to(q.dtype)
            results[1][row] = whole.float() / math.log(2.0)


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
    monkeypatch.setattr("algorithms.attention.backends.flashinfer._HEAD_DIMS", (16,))


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
