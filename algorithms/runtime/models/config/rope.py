"""The rotary embedding of a `config.json`.

Transformers 4 writes `rope_theta` and `rope_scaling` at the top level, transformers 5 writes one `rope_parameters`
mapping. Both are read, and both are written, so that either version loads the exported folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from algorithms.runtime.models.config.keys import required

if TYPE_CHECKING:
    from specdec_kernels import LinearScaling, Llama3Scaling, YarnScaling

    RopeScaling = LinearScaling | Llama3Scaling | YarnScaling

DEFAULT_THETA = 10_000.0
"""What transformers takes where a config has none, as those of Llama 2 and its drafters do."""
ROPE_TYPES = ("default", "dynamic", "linear", "llama3", "yarn")
_YARN_OPTIONS = {"beta_fast": float, "beta_slow": float, "attention_factor": float, "mscale": float,
                 "mscale_all_dim": float, "truncate": bool}  # fmt: skip


def read_rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling; ValueError for a rope type that is not supported."""
    merged: dict[str, Any] = {"rope_theta": config.get("rope_theta")}
    for source in (config.get("rope_scaling"), config.get("rope_parameters")):
        merged.update({key: value for key, value in (source or {}).items() if value is not None})
    nested = [key for key, value in merged.items() if isinstance(value, Mapping)]
    if nested:
        raise ValueError(f"model config: rope parameters of their own for {', '.join(nested)} are not supported")
    theta = float(merged["rope_theta"] or DEFAULT_THETA)
    kind = merged.get("rope_type", merged.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ValueError(f"model config: rope type '{kind}' is not supported, expected one of {', '.join(ROPE_TYPES)}")
    if kind in ("default", "dynamic"):
        # Dynamic NTK scaling begins behind `max_position_embeddings`, where the engine's longest requests end.
        return theta, None
    # As transformers does where the length before stretching is not given.
    original = config.get("original_max_position_embeddings") or config.get("max_position_embeddings")
    merged.setdefault("original_max_position_embeddings", original)
    return theta, _read_scaling(kind, merged)


def _read_scaling(kind: str, merged: Mapping[str, Any]) -> RopeScaling:
    from specdec_kernels import LinearScaling, Llama3Scaling, YarnScaling

    factor = float(required(merged, "factor"))
    if kind == "linear":
        return LinearScaling(factor)
    original = int(required(merged, "original_max_position_embeddings"))
    if kind == "llama3":
        low, high = (float(required(merged, f"{end}_freq_factor")) for end in ("low", "high"))
        return Llama3Scaling(factor, original, low, high)
    given: dict[str, Any] = {
        key: kind_of(merged[key]) for key, kind_of in _YARN_OPTIONS.items() if merged.get(key) is not None
    }
    return YarnScaling(factor, original, **given)


def write_rope(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """The keys that `read_rope` reads."""
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if scaling is not None:
        written = {key: value for key, value in vars(scaling).items() if value is not None}
        if "original_length" in written:
            written["original_max_position_embeddings"] = written.pop("original_length")
        parameters |= {"rope_type": type(scaling).__name__.removesuffix("Scaling").lower(), **written}
    return {"rope_theta": theta, "rope_parameters": parameters}
