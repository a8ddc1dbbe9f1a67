"""Requests of asynchronous copies to shared memory in Gluon kernels, by the name that Triton has for them."""

from __future__ import annotations

from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

# Triton 3.9 renamed them.
request_copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
request_tensor_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
