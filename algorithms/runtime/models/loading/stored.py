"""The tensors that a checkpoint holds, from its headers alone.

Pickled weights are refused, since unpickling runs code from the file, except where the caller asks for them: EAGLE
heads are published as `pytorch_model.bin`. Torch's restricted unpickler reads those: it builds tensors and plain
containers and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from algorithms.runtime.models.folder import COPY_AGAIN, PICKLE_SUFFIXES, PICKLED_WEIGHTS, ModelError, read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLED_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
    torch.uint8: "U8",
}


@dataclass(frozen=True)
class Stored:
    """Where a tensor is and what its header says; `read` reads it."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Tensor]


def stored_tensors(folder: Path, optional_prefix: str = "", pickles: bool = False) -> dict[str, Stored]:
    """What the checkpoint in `folder` holds, by name without the prefix; nothing but headers is read."""
    return _without_prefix(_read_headers(folder, pickles), optional_prefix)


def _read_headers(folder: Path, pickles: bool) -> dict[str, Stored]:
    index_path = folder / INDEX_FILE
    if pickles and not (folder / SINGLE_FILE).is_file() and (folder / PICKLED_WEIGHTS).is_file():
        return _pickled_header(folder / PICKLED_WEIGHTS)
    if (folder / SINGLE_FILE).is_file() or not index_path.is_file():
        return _read_header(_single_file(folder))
    weight_map = read_json(index_path, fix=COPY_AGAIN).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError("the index names no tensors", where=index_path, expected="key 'weight_map'", fix=COPY_AGAIN)
    headers = {shard: _read_header(_shard_file(folder, shard)) for shard in sorted(set(weight_map.values()))}
    for name, shard in weight_map.items():
        if name not in headers[shard]:
            raise ModelError(
                f"tensor '{name}' is missing from its shard",
                where=folder / shard,
                expected=f"the tensor, as {INDEX_FILE} says",
                fix="download the shard and the index again: they belong to different versions",
            )
    return {name: headers[shard][name] for name, shard in weight_map.items()}


def _single_file(folder: Path) -> Path:
    path = folder / SINGLE_FILE
    if path.is_file():
        return path
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise ModelError(
            "pickled weights are refused: opening a pickle runs code from the file",
            where=folder / pickles[0],
            expected=f"{SINGLE_FILE} or {INDEX_FILE}",
            fix="convert once where you trust the file: load it with transformers and call "
            "model.save_pretrained(folder), which writes safetensors",
        )
    found = sorted(file.name for file in folder.glob("*.safetensors"))
    raise ModelError(
        "the folder has no weights",
        where=folder,
        expected=f"{SINGLE_FILE} or {INDEX_FILE}",
        actual=", ".join(found) or "no safetensors file",
        fix="copy or download the weights into the folder",
    )


def _shard_file(folder: Path, shard: str) -> Path:
    path = folder / shard
    if path.suffix != ".safetensors":
        raise ModelError(
            "a shard must be a safetensors file",
            where=folder / INDEX_FILE,
            actual=shard,
            fix="convert the checkpoint to safetensors",
        )
    if not path.is_file():
        raise ModelError(
            "a shard of the checkpoint is missing",
            where=path,
            fix="copy or download this file into the folder",
        )
    return path


def unreadable(path: Path, error: Exception) -> ModelError:
    """The error for a file that `safe_open` cannot read."""
    return ModelError(
        "the weights file is truncated or corrupt",
        where=path,
        expected="a complete safetensors file",
        actual=f"{path.stat().st_size} bytes; {error}",
        fix=COPY_AGAIN,
    )


def _read_header(path: Path) -> dict[str, Stored]:
    try:
        file = safe_open(path, framework="pt")
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        return {
            name: Stored(path, name, tuple(part.get_shape()), part.get_dtype(), partial(file.get_tensor, name))
            for name, part in slices.items()
        }
    except (SafetensorError, OSError) as error:
        raise unreadable(path, error) from error


def _without_prefix(stored: dict[str, Stored], prefix: str) -> dict[str, Stored]:
    result: dict[str, Stored] = {}
    for name, tensor in stored.items():
        short = name.removeprefix(prefix)
        if short in result:
            raise ModelError(
                f"tensor '{short}' is stored twice, with and without the prefix '{prefix}'",
                where=tensor.file,
                expected="one of the two",
                fix="remove the stale copy from the checkpoint",
            )
        result[short] = tensor
    return result


def _unpickled(path: Path) -> dict[str, Tensor]:
    """The tensors of a `torch.save` file, left on disk until they are read."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # the restricted unpickler and the archive reader raise many kinds
        raise ModelError(
            "the pickled weights hold more than tensors, or are truncated",
            where=path,
            expected="a state dict written by torch.save",
            actual=str(error).splitlines()[0] if str(error) else type(error).__name__,
            fix="get the file again from where it was published, or convert it to safetensors",
        ) from error
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ModelError(
            "the pickled weights are not a state dict",
            where=path,
            expected="tensors by name",
            actual=type(content).__name__,
            fix="save the module's state_dict()",
        )
    return content


def _pickled_header(path: Path) -> dict[str, Stored]:
    return {
        name: Stored(path, name, tuple(value.shape), PICKLED_DTYPES.get(value.dtype, str(value.dtype)), value.detach)
        for name, value in _unpickled(path).items()
    }
