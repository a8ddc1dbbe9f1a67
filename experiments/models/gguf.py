"""Reads GGUF files with numpy alone: metadata, and tensors as float32.

Source: the GGUF specification and the block layouts of ggml (github.com/ggml-org/ggml, docs/gguf.md and
src/ggml-quants.h). A block of 32 weights is stored as

    Q4_1  float16 d, float16 m, 16 bytes: weights d q + m; the low halves of the bytes are q of the first 16 weights
    Q4_0  float16 d, 16 bytes: weights d (q - 8), in the same order
    Q8_0  float16 d, 32 int8: weights d q

The products are exact in float32, and the sum of Q4_1 is rounded once.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
BLOCK = 32


class GgufError(ValueError):
    """A file that cannot be read as GGUF; the message names what was expected and found."""


def _halves(packed: Array) -> Array:
    """[blocks, 16] bytes to [blocks, 32] float32: the low halves, then the high ones."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1).astype(np.float32)


def _float16(raw: Array) -> Array:
    """[blocks, 2] bytes to [blocks, 1] float32."""
    return raw.copy().view("<f2").astype(np.float32)


def _q4_0(raw: Array) -> Array:
    return _float16(raw[:, :2]) * (_halves(raw[:, 2:]) - np.float32(8))


def _q4_1(raw: Array) -> Array:
    return _float16(raw[:, :2]) * _halves(raw[:, 4:]) + _float16(raw[:, 2:4])


def _q8_0(raw: Array) -> Array:
    return _float16(raw[:, :2]) * raw[:, 2:].view(np.int8).astype(np.float32)


@dataclass(frozen=True)
class Layout:
    """How a tensor is stored: weights and bytes of a block, and [blocks, bytes] uint8 to [blocks, weights] float32."""

    name: str
    weights: int
    bytes: int
    read: Callable[[Array], Array]


LAYOUTS = {
    0: Layout("F32", 1, 4, lambda raw: raw.copy().view("<f4").astype(np.float32)),
    1: Layout("F16", 1, 2, lambda raw: raw.copy().view("<f2").astype(np.float32)),
    2: Layout("Q4_0", BLOCK, 18, _q4_0),
    3: Layout("Q4_1", BLOCK, 20, _q4_1),
    8: Layout("Q8_0", BLOCK, 34, _q8_0),
}
"""By ggml's number of the type."""


@dataclass(frozen=True)
class GgufTensor:
    """One stored tensor. `shape` is outermost first, as in torch; the file lists it innermost first."""

    name: str
    shape: tuple[int, ...]
    layout: Layout
    raw: memoryview = field(repr=False)

    def read(self) -> Array:
        """The weights as float32."""
        blocks = np.frombuffer(self.raw, np.uint8).reshape(-1, self.layout.bytes)
        return self.layout.read(blocks).reshape(self.shape)


@dataclass(frozen=True)
class Gguf:
    """Metadata and tensors of a file, by name."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def get(self, key: str) -> Any:
        """The metadata under `key`; GgufError where there is none."""
        if key not in self.metadata:
            raise GgufError(f"GGUF metadata: expected the key {key!r}, and there is none")
        return self.metadata[key]


class _Reader:
    """Reads little-endian values one after the other."""

    def __init__(self, content: bytes) -> None:
        self.content, self.at = content, 0

    def scalar(self, code: str) -> Any:
        size = struct.calcsize(code)
        if self.at + size > len(self.content):
            raise GgufError(f"GGUF: the file ends at byte {len(self.content)} inside its header")
        (value,) = struct.unpack_from(f"<{code}", self.content, self.at)
        self.at += size
        return value

    def text(self) -> str:
        length = self.scalar("Q")
        raw = self.content[self.at : self.at + length]
        if len(raw) < length:
            raise GgufError(f"GGUF: the file ends at byte {len(self.content)} inside its header")
        self.at += length
        return raw.decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            inner, count = self.scalar("I"), self.scalar("Q")
            return [self.value(inner) for _ in range(count)]
        if kind not in SCALARS:
            raise GgufError(f"GGUF metadata: expected a type from 0 to 12, got {kind}")
        return self.scalar(SCALARS[kind])


def read_gguf(content: bytes) -> Gguf:
    """Read a whole file. Tensors stay where they are in `content` until they are read.

    Raises GgufError for another format, another version, an unsupported type, and a file that ends early.
    """
    reader = _Reader(content)
    magic = content[:4]
    if magic != MAGIC:
        raise GgufError(f"expected a GGUF file, which begins with {MAGIC!r}, got {magic!r}")
    reader.at = len(MAGIC)
    version = reader.scalar("I")
    if version not in VERSIONS:
        raise GgufError(f"GGUF version: expected one of {VERSIONS}, got {version}")
    num_tensors, num_keys = reader.scalar("Q"), reader.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = reader.text()
        metadata[key] = reader.value(reader.scalar("I"))
    entries = []
    for _ in range(num_tensors):
        name, rank = reader.text(), reader.scalar("I")
        shape = tuple(reversed([reader.scalar("Q") for _ in range(rank)]))
        entries.append((name, shape, reader.scalar("I"), reader.scalar("Q")))
    alignment = int(metadata.get("general.alignment", DEFAULT_ALIGNMENT))
    start = math.ceil(reader.at / alignment) * alignment
    return Gguf(metadata, {entry[0]: _tensor(content, start, *entry) for entry in entries})


def _tensor(content: bytes, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
    if kind not in LAYOUTS:
        known = ", ".join(layout.name for layout in LAYOUTS.values())
        raise GgufError(f"GGUF tensor {name}: expected one of the types {known}, got ggml type {kind}")
    layout = LAYOUTS[kind]
    if shape and shape[-1] % layout.weights:
        raise GgufError(f"GGUF tensor {name}: expected rows of whole blocks of {layout.weights}, got shape {shape}")
    begin = start + offset
    end = begin + math.prod(shape) // layout.weights * layout.bytes
    if end > len(content):
        raise GgufError(f"GGUF tensor {name}: expected bytes up to {end}, the file has {len(content)}")
    return GgufTensor(name, shape, layout, memoryview(content)[begin:end])
