"""What of a target one process holds, and which targets cannot be shared out. No weights are read."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from algorithms.models.config import DecoderConfig
from algorithms.models.experts.config import MXFP4_GROUP, ExpertsConfig
from algorithms.models.folder import ModelError
from algorithms.models.linear.config import LinearConfig
from algorithms.models.loading.target import CONFIG_FILE, TargetFolder


def check_shareable(found: TargetFolder, processes: int) -> None:
    """ModelError where the weights cannot be divided among `processes`, ValueError where the shape cannot be."""
    if processes == 1:
        return
    if found.weight_format is not None:
        raise ModelError(
            f"runtime.tensor_parallel={processes}: the scales of float8 weights are not divided among processes",
            where=found.path / CONFIG_FILE,
            expected="weights that are not quantised",
            fix="use runtime.tensor_parallel=1, or the unquantised checkpoint",
        )
    parallel_config(found.config, processes)


def parallel_config(config: DecoderConfig, world_size: int) -> DecoderConfig:
    """The shape of one rank's slice. Raises ValueError where heads or MLP columns cannot be shared out evenly."""
    names = ["num_heads", "num_kv_heads"]
    if not config.mlps or None in config.mlps:  # else no layer has an MLP of this width
        names.append("intermediate_size")
    return replace(
        config,
        **_divided({name: getattr(config, name) for name in names}, world_size),
        mixings=tuple(_mixing(sizes, world_size) for sizes in config.mixings),
        mlps=tuple(_mlp(sizes, world_size) for sizes in config.mlps),
    )


def _mixing(sizes: Any, world_size: int) -> Any:
    if not isinstance(sizes, LinearConfig):
        return sizes  # latents are whole on every rank
    given = {"linear_num_key_heads": sizes.key_heads, "linear_num_value_heads": sizes.value_heads}
    keys, values = _divided(given, world_size).values()
    return replace(sizes, key_heads=keys, value_heads=values)


def _mlp(sizes: ExpertsConfig | None, world_size: int) -> ExpertsConfig | None:
    if sizes is None:
        return None
    given = {"experts' width": sizes.width, "shared expert's width": sizes.gated_shared}
    width, gated_shared = _divided(given, world_size).values()
    if sizes.mxfp4 and width % MXFP4_GROUP:
        raise ValueError(
            f"runtime.tensor_parallel={world_size} splits blocks of the target's MXFP4 experts: expected a width that "
            f"{world_size * MXFP4_GROUP} divides, got {sizes.width}"
        )
    return replace(sizes, width=width, gated_shared=gated_shared)


def _divided(sizes: Mapping[str, int], world_size: int) -> dict[str, Any]:
    for name, size in sizes.items():
        if size % world_size:
            raise ValueError(
                f"runtime.tensor_parallel={world_size} does not divide the target's {name}: expected a multiple of "
                f"{world_size}, got {size}"
            )
    return {name: size // world_size for name, size in sizes.items()}
