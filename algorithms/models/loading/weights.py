"""Reading checkpoints into a module, checked against its shapes before anything large is allocated.

The module is built on the meta device. The headers of all shards are compared with it first; then tensors are read
one at a time, cast, checked for NaN and infinity, and assigned.
"""

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from algorithms.models.decoder import Block
from algorithms.models.experts.module import ExpertTensors
from algorithms.models.experts.scaled import make_scaled
from algorithms.models.folder import COPY_AGAIN, ModelError
from algorithms.models.fusion import Fusable
from algorithms.models.loading.stored import Stored, stored_tensors, unreadable
from algorithms.models.scaled_linear import WeightFormat, dequantised

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
FLOAT8_DTYPE = "F8_E4M3"
# What a buffer of token ids, of marks or of packed numbers may be stored as.
INTEGER_DTYPES = {torch.int64: ("I64", "I32"), torch.bool: ("BOOL", "U8"), torch.uint8: ("U8",)}
STORED_DTYPES = {**INTEGER_DTYPES, torch.float8_e4m3fn: (FLOAT8_DTYPE,)}
NAMES_SHOWN = 5
ROTARY_BUFFER = "rotary_emb.inv_freq"  # stored by old versions of transformers; computed here


def load_weights(
    module: nn.Module,
    folder: Path,
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    ignored: Container[str] = (),
    rename: Callable[[str], str] | None = None,
    pickles: bool = False,
    weight_format: WeightFormat | None = None,
) -> None:
    """Fill `module` (built on the meta device) from `folder`, on `device` in `dtype`, without gradients.

    Integers and booleans keep their dtype. Stored tensors that the module does not have are refused unless `ignored`
    holds their name. `rename` gives the module's name for a stored one. `pickles` allows `pytorch_model.bin`. Linear
    layers of decoder layers whose weights are stored in float8 become scaled ones of `weight_format`. Raises ModelError
    naming the file or tensor.
    """
    stored = {
        name: tensor
        for name, tensor in stored_tensors(folder, rename, pickles).items()
        if name not in ignored and not name.endswith(ROTARY_BUFFER)
    }
    if weight_format is not None:
        experts = [name for name, part in module.named_modules() if isinstance(part, ExpertTensors)]
        make_scaled(module, weight_format, _in_float8(experts, ".0.down_proj.weight", stored))
    parts = {f"{name}.": part for name, part in module.named_modules() if isinstance(part, Fusable)}
    for prefix, part in parts.items():
        part.adopt(prefix, stored)
    if weight_format is not None:
        for name in [prefix + name for prefix, part in parts.items() for name in part.unscaled]:
            _dequantise(stored, name, weight_format)
        make_scaled(module, weight_format, _in_float8(_projections(module), ".weight", stored))
    wanted = module.state_dict()
    parts = {f"{name}.": part for name, part in module.named_modules() if isinstance(part, Fusable)}
    wide = {prefix + name for prefix, part in parts.items() for name in part.float32}
    _check_names(folder, set(wanted), set(stored))
    for name, tensor in wanted.items():
        _check_header(stored[name], tuple(tensor.shape), tensor.dtype)
    dtypes = {name: t.dtype if t.dtype in STORED_DTYPES else dtype for name, t in wanted.items()}
    dtypes |= dict.fromkeys(wide & set(wanted), torch.float32)
    module.load_state_dict({name: _read(stored[name], device, dtypes[name]) for name in wanted}, assign=True)
    module.requires_grad_(False).eval()


def _projections(module: nn.Module) -> list[str]:
    """Names of the linear layers in decoder layers."""
    return [
        f"{prefix}.{name}"
        for prefix, block in module.named_modules()
        if isinstance(block, Block)
        for name, part in block.named_modules()
        if isinstance(part, nn.Linear)
    ]


def _in_float8(names: Iterable[str], suffix: str, stored: Mapping[str, Stored]) -> set[str]:
    """Those of `names` whose tensor with this suffix is stored in float8. The stored dtype decides, not the config's
    list of modules that stay: no weight is then read as what it is not."""
    return {name for name in names if name + suffix in stored and stored[name + suffix].dtype == FLOAT8_DTYPE}


def _dequantise(stored: dict[str, Stored], name: str, weight_format: WeightFormat) -> None:
    """Read a projection that its module uses otherwise as the numbers that its float8 codes and scales are."""
    codes, scales = stored.get(f"{name}.weight"), stored.get(f"{name}.{weight_format.scale_name}")
    if codes is None or scales is None or codes.dtype != FLOAT8_DTYPE:
        return
    scales.check_shape(scales.shape == (shape := weight_format.scale_shape(*codes.shape)), list(shape))
    del stored[f"{name}.{weight_format.scale_name}"]
    weight = codes.changed(codes.shape, lambda x: dequantised(x, scales.read(), weight_format))
    stored[f"{name}.weight"] = replace(weight, dtype="F32")


def _check_names(folder: Path, wanted: set[str], stored: set[str]) -> None:
    lacking = ("lack tensors of", "missing", wanted - stored)
    unknown = ("hold tensors unknown to", "unknown", stored - wanted)
    for what, how, names in (lacking, unknown):
        if names:
            shown = ", ".join(sorted(names)[:NAMES_SHOWN])
            raise ModelError(
                f"the weights {what} the model that config.json describes",
                where=folder,
                expected=f"{len(wanted)} tensors",
                actual=f"{len(stored)} tensors; {how} {len(names)}: {shown}"
                + (", ..." if len(names) > NAMES_SHOWN else ""),
                fix="check that config.json and weights belong together and the architecture is supported",
            )


def _check_header(stored: Stored, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    stored.check_shape(stored.shape == shape, list(shape))
    supported = STORED_DTYPES.get(dtype, FLOAT_DTYPES)
    if stored.dtype not in supported:
        raise ModelError(
            f"tensor '{stored.name}' has an unsupported dtype",
            where=stored.file,
            expected=" or ".join(supported),
            actual=stored.dtype,
            fix="use the unquantised checkpoint",
        )


def _all_finite(tensor: Tensor) -> bool:
    if tensor.dtype == torch.float8_e4m3fn:  # has no infinity, and one magnitude that is no number
        return not bool((tensor.view(torch.uint8) & 0x7F == 0x7F).any())
    return bool(torch.isfinite(torch.stack(tensor.aminmax())).all())


def _read(stored: Stored, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    try:
        value = stored.read()
    except (SafetensorError, OSError) as error:
        raise unreadable(stored.file, error) from error
    # A copy even where nothing changes: the value may be a view of the file, which others may overwrite. Repeated
    # values are moved once and repeated on the device.
    once = value[:1] if value.ndim and value.stride(0) == 0 else value
    result = once.to(device=device, dtype=dtype, copy=True).expand(value.shape).contiguous()
    if not dtype.is_floating_point or _all_finite(result):
        return result
    overflow = _all_finite(value)
    raise ModelError(
        f"tensor '{stored.name}' " + (f"does not fit {dtype}" if overflow else "holds NaN or infinity"),
        where=stored.file,
        expected="finite numbers",
        fix="load the model in bfloat16 or float32" if overflow else "the checkpoint is damaged: " + COPY_AGAIN,
    )
