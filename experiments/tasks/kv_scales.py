"""Factors for a KV cache in float8, from keys and values that the target computes for the run's prompts.

The requests are decoded autoregressively with a cache of the weights' dtype. The factor of a head is its largest
magnitude, times a margin for text that is not among the prompts, over the largest number of e4m3. The run folder
receives `kv_scales.safetensors` for `runtime.kv_scales`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from safetensors.torch import save

from experiments.app.errors import user_errors
from experiments.report.run_folder import KV_SCALES
from experiments.report.tables import Row, number
from experiments.tasks.base import Task
from experiments.tasks.decoding import AUTOREGRESSIVE, baseline_config, make_engine

LARGEST_E4M3 = 448.0


class KVScalesTask(Task):
    """One row per layer: the largest key and value, and the largest factor of a head."""

    name = "kv_scales"
    objective = "num_tokens"
    columns = (
        number("layer", "layer", 0),
        number("largest |key|", "largest_key", 3),
        number("largest |value|", "largest_value", 3),
        number("key factor", "k_scale", 5),
        number("value factor", "v_scale", 5),
        number("tokens", "num_tokens", 0),
    )

    def measure(self) -> list[Row]:
        largest, num_tokens = self._largest()
        # A head of zeros takes the smallest factor that divides without overflow.
        factors = (largest * self.plan.config.task.margin / LARGEST_E4M3).clamp(min=torch.finfo(torch.float32).tiny)
        k_scale, v_scale = (factors[:, half].contiguous() for half in (0, 1))
        self.folder.write_bytes(KV_SCALES, save({"k_scale": k_scale, "v_scale": v_scale}))
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

    def label(self, row: Row) -> str:
        return f"layer {row['layer']}"

    def warnings(self, rows: Sequence[Row]) -> list[str]:
        return []

    def failures(self, rows: Sequence[Row]) -> list[str]:
        return []

    def show(self, rows: Sequence[Row]) -> None:
        found = self.folder.path / KV_SCALES
        self.console.print(f"use it by runtime.kv_dtype=fp8_e4m3 runtime.kv_scales={found}", soft_wrap=True)

    def _largest(self) -> tuple[torch.Tensor, int]:
        """Largest magnitudes [layers, 2, H_kv] float32 of keys and values, and the number of stored tokens."""
        from algorithms.runtime.request import EngineError

        (workload,) = self.plan.workloads
        engine, _, _ = make_engine(self.plan, self.target, baseline_config(), workload.max_length)
        cache, batch = engine.parts.cache, self.plan.config.runtime.max_batch
        found, num_tokens, record = None, 0, self.recorder(workload.name, AUTOREGRESSIVE)
        with user_errors(EngineError):
            # Pages are used again by later requests, so the cache is read after each batch.
            for start in range(0, len(workload.requests), batch):
                asked = workload.requests[start : start + batch]
                done = engine.generate(asked, on_end=record).completions
                num_tokens += sum(len(request.prompt_ids) for request in asked)
                num_tokens += sum(len(completion.token_ids) for completion in done)
                seen = cache.kv.abs().amax(dim=(2, 3, 5)).float().cpu()
                found = seen if found is None else torch.maximum(found, seen)
        assert found is not None
        return found, num_tokens
