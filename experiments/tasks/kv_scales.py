"""Scales of a KV cache in float8, from keys and values that the target computes for the run's prompts.

The requests are decoded autoregressively with a cache of the weights' dtype. The scale of a head is its largest
magnitude, times a margin for text that is not among the prompts, over the largest number of e4m3. The run folder
receives `kv_scales.safetensors` for `runtime.kv_scales`.
"""

from collections.abc import Sequence
from typing import Annotated, TypedDict

import torch
from safetensors.torch import save

from algorithms.attention.memory import PagedMemory
from algorithms.engine.request import EngineError
from algorithms.parallel.collectives import join_columns, parallel
from experiments.app.errors import UserError, user_errors
from experiments.report.run_folder import KV_SCALES
from experiments.report.tables import Metric, Result, columns
from experiments.tasks.base import Task
from experiments.tasks.decoding import AUTOREGRESSIVE, baseline_config

LARGEST_E4M3 = 448.0


class ScaleResult(TypedDict):
    layer: Annotated[int, Metric("Layer of the target.", "layer", digits=0)]
    largest_key: Annotated[float, Metric("Largest magnitude of a key over the prompts.", "largest |key|", digits=3)]
    largest_value: Annotated[float, Metric("Largest magnitude of a value.", "largest |value|", digits=3)]
    k_scale: Annotated[float, Metric("Largest scale of a head's keys.", "key scale", digits=5)]
    v_scale: Annotated[float, Metric("Largest scale of a head's values.", "value scale", digits=5)]
    num_tokens: Annotated[int, Metric("Tokens that were stored.", "tokens", digits=0)]


class KVScales(Task):
    """One result per layer."""

    objective = "num_tokens"
    columns = columns(ScaleResult)

    def measure(self) -> list[ScaleResult]:
        largest, num_tokens = self._largest()
        # A head of zeros takes the smallest scale that divides without overflow.
        scales = (largest * self.plan.config.task.margin / LARGEST_E4M3).clamp(min=torch.finfo(torch.float32).tiny)
        k_scale, v_scale = (scales[:, half].contiguous() for half in (0, 1))
        self.folder.write(KV_SCALES, save({"k_scale": k_scale, "v_scale": v_scale}))
        return [
            {
                "layer": layer,
                "largest_key": float(largest[layer, 0].max()),
                "largest_value": float(largest[layer, 1].max()),
                "k_scale": float(k_scale[layer].max()),
                "v_scale": float(v_scale[layer].max()),
                "num_tokens": num_tokens,
            }
            for layer in range(len(largest))
        ]

    def label(self, result: Result) -> str:
        return f"layer {result['layer']}"

    def show(self, results: Sequence[Result]) -> None:
        found = self.folder.path / KV_SCALES
        self.console.print(f"use it by runtime.kv_dtype=fp8_e4m3 runtime.kv_scales={found}", soft_wrap=True)

    def _largest(self) -> tuple[torch.Tensor, int]:
        """Largest magnitudes [layers, 2, H_kv] float32 of keys and values, and the number of stored tokens."""
        (workload,) = self.plan.workloads
        engine = self.engine_for(self.plan, self.target, baseline_config(), workload)
        if not isinstance(engine.parts.memory, PagedMemory):
            raise UserError("task=kv_scales: expected a target whose layers all have attention")
        cache, batch = engine.parts.memory.cache, self.plan.config.runtime.max_batch
        found, num_tokens, record = None, 0, self.recorder(workload.name, AUTOREGRESSIVE)
        with user_errors(EngineError):
            # Pages are used again by later requests, so the cache is read after each batch.
            for start in range(0, len(workload.requests), batch):
                requests = workload.requests[start : start + batch]
                done = engine.generate(requests, on_end=record).completions
                num_tokens += sum(len(request.prompt_ids) for request in requests)
                num_tokens += sum(len(completion.token_ids) for completion in done)
                seen = cache.kv.abs().amax(dim=(2, 3, 5)).float()
                found = seen if found is None else torch.maximum(found, seen)
        assert found is not None
        # A rank of a tensor-parallel run stores its own heads.
        return (join_columns(found) if parallel() else found).cpu(), num_tokens
