"""Other implementations of tree building, walks, tree sampling and renormalisation.

sgl-kernel's operations have the signatures of `specdec_kernels.compat.sglang`. Its compiled library is enough
(`sgl_kernel/**/common_ops*.so`). The renormalisations are FlashInfer's, and sgl-kernel has a compiled copy of them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch

from experiments.bench.libraries import Unavailable, load_library
from specdec_kernels.compat import sglang

Call = Callable[[], torch.Tensor | None]
WRITTEN = {
    "build_tree_kernel_efficient": (
        "tree_mask", "positions", "retrive_index", "retrive_next_token", "retrive_next_sibling",
    ),
    "verify_tree_greedy": ("predicts", "accept_index", "accept_token_num"),
    "tree_speculative_sampling_target_only": ("predicts", "accept_index", "accept_token_num"),
}  # fmt: skip
"""Arguments that hold the results of the functions that return none."""
_EMPTIED = {"build_tree_kernel_efficient": ("retrive_next_token", "retrive_next_sibling")}
"""Results that sgl-kernel reads while it writes them: they hold -1 before."""


def sgl_kernel(function: str, inputs: dict[str, Any]) -> Call:
    """sgl-kernel's operation of this name, on the same arguments in the same order."""
    load_library("sgl_kernel", "common_ops*.so")
    operation = getattr(torch.ops.sgl_kernel, function).default
    parameters = signature(getattr(sglang, function)).parameters
    for name in _EMPTIED.get(function, ()):
        inputs[name].fill_(-1)
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


def flashinfer(function: str, inputs: dict[str, Any]) -> Call:
    """FlashInfer's renormalisation of probabilities."""
    if not torch.cuda.is_available():
        raise Unavailable("runs on a GPU only")
    if find_spec("flashinfer") is None:
        raise Unavailable("flashinfer-python is not installed")
    renorm = getattr(import_module("flashinfer.sampling"), f"{function}_probs")
    probs, limit = inputs["probs"], inputs[function.removesuffix("_renorm")]
    return lambda: renorm(probs, limit)
