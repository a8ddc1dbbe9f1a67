"""Other implementations of the same work, timed where they are installed.

A peer is imported only for a run that names it. One that is not installed, or cannot do a call, is named with the
reason. Each result is compared with our kernel's before the peer is timed.

torch's own attention reads no pages: it receives keys and values that were gathered beforehand, outside of its time,
which favours it. FlashInfer and FlashAttention-4 are called through the runtime's backends and planned beforehand; what
the backends add around the kernel of the package is part of the time. FlashAttention-3 is the library inside vLLM's
wheel (`vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so`, called as of vLLM 0.24); its scheduler runs beforehand too.

sgl-kernel's operations have the signatures of `specdec_kernels.compat.sglang`. Its compiled library is enough
(`sgl_kernel/**/common_ops*.so`), with a copy of FlashInfer's renormalisations.
"""

import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from algorithms.attention.backends.flash_attention_4 import FlashAttention4
from algorithms.attention.backends.flashinfer import FlashInferBackend
from algorithms.attention.backends.protocol import BackendError, LayerInputs
from specdec_kernels.attention import AttentionMetadata, AttentionShape, visible_keys
from specdec_kernels.compat import sglang
from specdec_kernels.parity import tensors_in

FOLDER_VARIABLE = "SPECDEC_PEERS"  # environment variable: a folder with libraries of wheels that are not installed
WRITTEN = {
    "build_tree_kernel_efficient": (
        "tree_mask", "positions", "retrive_index", "retrive_next_token", "retrive_next_sibling",
    ),
    "verify_tree_greedy": ("predicts", "accept_index", "accept_token_num"),
    "tree_speculative_sampling_target_only": ("predicts", "accept_index", "accept_token_num"),
}  # fmt: skip
"""Arguments that hold the results of the functions that return none."""

Call = Callable[[], torch.Tensor | None]
Prepare = Callable[[str, dict[str, Any]], Call]
"""From the name of a public function and its arguments to a call of the peer."""


class Unavailable(Exception):
    """Why a peer cannot be compared on a case."""


@cache
def load_library(package: str, pattern: str) -> None:
    """Load the library of `package` whose file name matches `pattern`, without importing the package.

    Raises:
        Unavailable: it is not there, or cannot be loaded.
    """
    if not torch.cuda.is_available():
        raise Unavailable("runs on a GPU only")
    named, spec = os.environ.get(FOLDER_VARIABLE), find_spec(package)
    installed = (spec.submodule_search_locations if spec is not None else None) or []
    folders = [Path(folder) for folder in (named, *installed) if folder]
    found = [path for folder in folders for path in sorted(folder.rglob(pattern))]
    if not found:
        raise Unavailable(f"{package} is not installed, and {FOLDER_VARIABLE} names no folder with {pattern}")
    try:
        torch.ops.load_library(str(found[0]))
    except OSError as problem:
        reason = str(problem.__cause__ or problem).splitlines()[0]
        raise Unavailable(f"{found[0].name} cannot be loaded: {reason}") from problem


def _dense(inputs: dict[str, Any]) -> list[torch.Tensor]:
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
    sides = [plane[table].flatten(1, 2)[:, :longest] for plane in kv]
    return [side.masked_fill_(~stored[:, :, None, None], 0.0).transpose(1, 2).contiguous() for side in sides]


def _expect_plain(inputs: dict[str, Any]) -> None:
    """Refuse what only a paged kernel of this project takes."""
    told = inputs["metadata"]._asdict() | inputs
    for name in ("window", "sinks", "soft_cap", "k_scale", "v_scale", "q_lens", "tree_width", "tile_schedule"):
        if told.get(name) is not None:
            raise Unavailable(f"not compared with {name}")
    if inputs["kv"].dtype != inputs["q"].dtype:
        raise Unavailable(f"not compared with keys of {inputs['kv'].dtype}")


def _scale(inputs: dict[str, Any]) -> float:
    given = inputs["metadata"].scale
    return inputs["q"].shape[-1] ** -0.5 if given is None else float(given)


def sdpa(function: str, inputs: dict[str, Any]) -> Call:
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


def _through(backend: Callable[[], Any]) -> Prepare:
    """A package through a backend of its own, planned once: plans share what lies inside a backend."""

    def prepared(function: str, inputs: dict[str, Any]) -> Call:
        if inputs.get("k_scale") is not None or inputs.get("v_scale") is not None:
            raise Unavailable("not compared with scales of keys and values")
        q, kv = inputs["q"], inputs["kv"]
        try:
            built = backend()
            planned = built.plan(inputs["metadata"], AttentionShape.of(q, kv), "verify")
        except BackendError as reason:
            raise Unavailable(str(reason)) from reason
        return lambda: built.run(planned, LayerInputs(q, kv, inputs.get("sinks")))

    return prepared


def flash_attention_3(function: str, inputs: dict[str, Any]) -> Call:
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


def sgl_kernel(function: str, inputs: dict[str, Any]) -> Call:
    """sgl-kernel's operation of this name, on the same arguments in the same order."""
    load_library("sgl_kernel", "common_ops*.so")
    operation = getattr(torch.ops.sgl_kernel, function).default
    parameters = signature(getattr(sglang, function)).parameters
    if function == "build_tree_kernel_efficient":  # reads these results while it writes them
        inputs["retrive_next_token"].fill_(-1)
        inputs["retrive_next_sibling"].fill_(-1)
    arguments = [inputs.get(name, its.default) for name, its in parameters.items() if name != "impl"]
    return lambda: operation(*arguments)


def sgl_renorm(function: str, inputs: dict[str, Any]) -> Call:
    """sgl-kernel's copy of FlashInfer's renormalisation."""
    load_library("sgl_kernel", "common_ops*.so")
    operation = getattr(torch.ops.sgl_kernel, f"{function}_probs").default
    probs, limit = inputs["probs"], inputs[function.removesuffix("_renorm")]

    def renorm() -> torch.Tensor:
        out = torch.empty_like(probs)
        operation(probs, out, limit, 0)
        return out

    return renorm


PEERS: dict[str, dict[str, Prepare]] = {
    "sdpa": {"paged_attention": sdpa},
    "flashinfer": {"paged_attention": _through(lambda: FlashInferBackend(FlashInferBackend.Config(), "auto"))},
    "flash_attention_3": {"paged_attention": flash_attention_3},
    "flash_attention_4": {"paged_attention": _through(FlashAttention4)},
    "sgl_kernel": dict.fromkeys(WRITTEN, sgl_kernel) | dict.fromkeys(("top_k_renorm", "top_p_renorm"), sgl_renorm),
}
"""Peer to the public functions that it is compared with."""


def prepare(name: str, function: str, inputs: dict[str, Any]) -> Call:
    """The peer's call for `inputs`, planning and gathering done.

    Raises:
        Unavailable: not installed, or a call that it cannot do.
    """
    if function not in PEERS[name]:
        raise Unavailable(f"has nothing like {function}")
    return PEERS[name][function](function, inputs)


def compared(function: str, inputs: dict[str, Any], returned: Any) -> list[torch.Tensor]:
    """The tensors to compare after a call with `inputs`: the first one returned, or the arguments that it wrote."""
    if function in WRITTEN:
        return [inputs[name] for name in WRITTEN[function]]
    return [next(tensors_in(returned))]
