"""The tensors that a checkpoint holds, from its headers alone.

Pickled weights are refused, since unpickling runs code from the file, except where the caller allows them: EAGLE
heads are published as `pytorch_model.bin`. Torch's restricted unpickler reads those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from algorithms.models.folder import COPY_AGAIN, PICKLE_SUFFIXES, PICKLED_WEIGHTS, ModelError, read_json

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
    """A tensor's file and header; `read` reads it."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Tensor]

    def changed(self, shape: tuple[int, ...], change: Callable[[Tensor], Tensor]) -> Stored:
        """The tensor after `change`, which gives it `shape`."""
        return replace(self, shape=shape, read=lambda: change(self.read()))

    def halves(self) -> tuple[Stored, Stored]:
        rows = self.shape[0] // 2
        shape = (rows, *self.shape[1:])
        return self.changed(shape, lambda x: x[:rows]), self.changed(shape, lambda x: x[rows : 2 * rows])

    def picked(self, rows: Sequence[int], total: int) -> Stored:
        """These rows of `total`. Raises ModelError where the tensor has another number of rows."""
        self.check_shape(self.shape[:1] == (total,), f"{total} rows")
        return self.changed((len(rows), *self.shape[1:]), lambda x: x[torch.tensor(rows)])

    def joined(self, other: Stored) -> Stored:
        """The rows of this, then those of `other`. Raises ModelError where their rows differ in length or dtype."""
        self._check_sibling(other, other.shape[:1] + self.shape[1:])
        return self.changed((self.shape[0] + other.shape[0], *self.shape[1:]), lambda x: torch.cat([x, other.read()]))

    def stacked(self, others: Sequence[Stored]) -> Stored:
        """This and others of its shape and dtype along a new first dimension. Raises ModelError for another one."""
        for other in others:
            self._check_sibling(other, self.shape)
        read = [other.read for other in others]
        return self.changed((1 + len(others), *self.shape), lambda x: torch.stack([x, *(each() for each in read)]))

    def repeated(self, count: int) -> Stored:
        return self.changed((count, *self.shape), lambda x: x.expand(count, *x.shape))

    def check_shape(self, fits: bool, expected: object) -> None:
        """Raise ModelError unless the shape `fits` config.json."""
        if not fits:
            raise ModelError(
                f"tensor '{self.name}' has the wrong shape",
                where=self.file,
                expected=f"{expected}, from config.json",
                actual=list(self.shape),
                fix="check that config.json and weights belong together",
            )

    def _check_sibling(self, other: Stored, shape: tuple[int, ...]) -> None:
        if (other.shape, other.dtype) != (shape, self.dtype):
            raise ModelError(
                f"tensor '{other.name}' differs from its siblings",
                where=other.file,
                expected=f"{list(shape)} in {self.dtype}, as '{self.name}'",
                actual=f"{list(other.shape)} in {other.dtype}",
                fix=COPY_AGAIN,
            )


def without_model(name: str) -> str:
    """The name without the prefix that some writers put before it."""
    return name.removeprefix("model.")


def stored_tensors(
    folder: Path, rename: Callable[[str], str] | None = None, pickles: bool = False
) -> dict[str, Stored]:
    """The tensors of the checkpoint in `folder`, by name after `rename`; nothing but headers is read."""
    result: dict[str, Stored] = {}
    for name, tensor in _read_headers(folder, pickles).items():
        short = name if rename is None else rename(name)
        if short in result:
            raise ModelError(
                f"tensor '{short}' is stored twice",
                where=tensor.file,
                actual=f"{result[short].name} and {name}",
                fix="remove the stale copy from the checkpoint",
            )
        result[short] = tensor
    return result


def _read_headers(folder: Path, pickles: bool) -> dict[str, Stored]:
    index_path, single = folder / INDEX_FILE, folder / SINGLE_FILE
    if pickles and not single.is_file() and (folder / PICKLED_WEIGHTS).is_file():
        return _pickled_header(folder / PICKLED_WEIGHTS)
    if single.is_file():
        return _read_header(single)
    if not index_path.is_file():
        raise _without_weights(folder)
    weight_map = read_json(index_path, fix=COPY_AGAIN).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError("the index names no tensors", where=index_path, expected="key 'weight_map'", fix=COPY_AGAIN)
    shards = sorted(set(map(str, weight_map.values())))
    headers = {shard: _read_header(_shard_file(folder, shard)) for shard in shards}
    for name, shard in weight_map.items():
        if name not in headers[str(shard)]:
            raise ModelError(
                f"tensor '{name}' is missing from its shard",
                where=folder / shard,
                expected=f"the tensor, as {INDEX_FILE} says",
                fix="download the shard and the index again: they belong to different versions",
            )
    return {name: headers[shard][name] for name, shard in weight_map.items()}


def _without_weights(folder: Path) -> ModelError:
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLE_SUFFIXES)
    if pickles:
        return ModelError(
            "pickled weights are refused: opening a pickle runs code from the file",
            where=folder / pickles[0],
            expected=f"{SINGLE_FILE} or {INDEX_FILE}",
            fix="convert once where you trust the file: load it with transformers and call "
            "model.save_pretrained(folder), which writes safetensors",
        )
    found = sorted(file.name for file in folder.glob("*.safetensors"))
    return ModelError(
        "the folder has no weights",
        where=folder,
        expected=f"{SINGLE_FILE} or {INDEX_FILE}",
        actual=", ".join(found) or "no safetensors file",
        fix="copy or download the weights into the folder",
    )


def _shard_file(folder: Path, shard: str) -> Path:
    path = folder / shard
    # By its name alone: in the hub's cache the files of a folder are links to others.
    outside = PurePath(shard).is_absolute() or ".." in PurePath(shard).parts
    if path.suffix != ".safetensors" or outside:
        raise ModelError(
            "a shard must be a safetensors file" + (" in the model's folder" if outside else ""),
            where=folder / INDEX_FILE,
            actual=shard,
            fix="convert the checkpoint to safetensors",
        )
    if not path.is_file():
        raise ModelError("a shard of the checkpoint is missing", where=path, fix="copy or download it into the folder")
    return path


def unreadable(path: Path, error: Exception) -> ModelError:
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


def check_layers(
    folder: Path, stored: Iterable[str], prefix: str, num_layers: int, key: str = "num_hidden_layers"
) -> None:
    """ModelError unless `stored` has `num_layers` layers, whose names begin with `prefix`."""
    found = {name.removeprefix(prefix).split(".")[0] for name in stored if name.startswith(prefix)}
    if len(found) != num_layers:
        raise ModelError(
            "the weights have another number of layers than the model that config.json describes",
            where=folder,
            expected=f"{key}={num_layers} layers {prefix}*",
            actual=len(found),
            fix="check that config.json and weights belong together",
        )


def _pickled_header(path: Path) -> dict[str, Stored]:
    """The tensors of a `torch.save` file, left on disk until they are read."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
            raise TypeError(f"a {type(content).__name__} that is no state dict")
    except Exception as error:  # the restricted unpickler and the archive reader raise many kinds
        raise ModelError(
            "the pickled weights hold more than tensors, or are truncated",
            where=path,
            expected="a state dict written by torch.save",
            actual=str(error).splitlines()[0] if str(error) else type(error).__name__,
            fix="get the file again from where it was published, or convert it to safetensors",
        ) from error
    return {
        name: Stored(path, name, tuple(value.shape), PICKLED_DTYPES.get(value.dtype, str(value.dtype)), value.detach)
        for name, value in content.items()
    }
