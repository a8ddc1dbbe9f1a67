"""Requests of asynchronous copies to shared memory in Gluon kernels, by the name that Triton has for them."""

from __future__ import annotations

from triton.experimental.gluon.language.nvidia.ampere import async_copy

# Triton 3.9 renamed it.
request_copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
