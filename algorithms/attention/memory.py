"""What a target keeps of each request's text, layer by layer.

A `Memory` belongs to the layers of one kind: pages of keys and values for attention, what its module's folder says for
another kind in `kinds`. `LayeredMemory` joins the memories of a model with several kinds.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from algorithms.algorithm import Batch, Prompts, Resources
from algorithms.attention.cache import KVCache, KVScales
from algorithms.attention.paged_attention import PagedMemory, PageMemory
from algorithms.models.config import DecoderConfig
from algorithms.models.latent.config import LatentConfig
from algorithms.models.latent.memory import LatentMemory
from algorithms.models.layers import Mixer
from algorithms.models.linear.config import LinearConfig
from algorithms.models.linear.memory import StateMemory
from specdec_kernels import Committed, TreeLinks


class Memory(Protocol):
    """What the layers of one kind keep. Layers are counted among these. All methods may be captured in a CUDA graph, so
    they run on fixed tensors, may run several times, and read nothing back."""

    def nodes(self, batch: Batch, links: TreeLinks, chain: bool, max_depth: int) -> Mixer:
        """Plan a forward over the nodes `[B, N]` of a step, which begin at position L; `chain`: node i follows node
        i - 1. What it writes behind the accepted path may not show later."""

    def tiles(self, batch: Batch, positions: Tensor, counts: Tensor, prompts: Prompts) -> Mixer:
        """Plan a forward over tiles of prompts `[B, tile]` at `positions`, of which `counts [B]` columns are tokens."""

    def joint(self, mixers: Sequence[Any]) -> Any:
        """One forward over the rows of several mixers of this memory, one after the other."""

    def commit(self, nodes: Any, batch: Batch, committed: Committed, chain: bool) -> None:
        """Keep the accepted path after the forward that `nodes` planned; `batch.lengths` have moved on already."""

    def move_slot(self, source: int, target: int) -> None:
        """Move what is kept of the request of batch slot `source` to slot `target`."""


MEMORIES: dict[type, Callable[[DecoderConfig, Any, Resources], Memory]] = {
    LatentConfig: LatentMemory,
    LinearConfig: StateMemory,
}
"""The memory of each other kind of mixing: of layers of this shape and these sizes, for one run."""


class LayeredMixer:
    def __init__(self, mixers: Mapping[Any, Any], places: Sequence[tuple[Any, int]]) -> None:
        self.mixers, self._places = mixers, places

    def __call__(self, layer: int, /, *inputs: Any) -> Tensor:
        kind, index = self._places[layer]
        return self.mixers[kind](index, *inputs)

    @property
    def real(self) -> Tensor:
        """Of a mixer that knows the rows' slots in pages; only states have none."""
        return next(mixer.real for mixer in self.mixers.values() if hasattr(mixer, "real"))


class LayeredMemory:
    def __init__(self, memories: Mapping[Any, Memory], kinds: Sequence[Any]) -> None:
        """`kinds` of all layers, each a key of `memories`."""
        self.memories = memories
        self._places = [(kind, kinds[:layer].count(kind)) for layer, kind in enumerate(kinds)]

    def nodes(self, batch: Batch, links: TreeLinks, chain: bool, max_depth: int) -> LayeredMixer:
        return self._planned(lambda kind, memory: memory.nodes(batch, links, chain, max_depth))

    def tiles(self, batch: Batch, positions: Tensor, counts: Tensor, prompts: Prompts) -> LayeredMixer:
        return self._planned(lambda kind, memory: memory.tiles(batch, positions, counts, prompts))

    def joint(self, mixers: Sequence[LayeredMixer]) -> LayeredMixer:
        return self._planned(lambda kind, memory: memory.joint([each.mixers[kind] for each in mixers]))

    def _planned(self, plan: Callable[[Any, Memory], Any]) -> LayeredMixer:
        return LayeredMixer({kind: plan(kind, memory) for kind, memory in self.memories.items()}, self._places)

    def commit(self, nodes: LayeredMixer, batch: Batch, committed: Committed, chain: bool) -> None:
        for kind, memory in self.memories.items():
            memory.commit(nodes.mixers[kind], batch, committed, chain)

    def move_slot(self, source: int, target: int) -> None:
        for memory in self.memories.values():
            memory.move_slot(source, target)


def allocate_memory(config: DecoderConfig, resources: Resources, kv_scales: KVScales | None = None) -> Memory:
    """The memory of a target of this shape, for one run; `kv_scales` belong to a float8 cache of its attention."""
    kinds = [config.mixing(layer) for layer in range(config.num_layers)]
    memories: dict[Any, Memory] = {}
    for kind in dict.fromkeys(kinds):
        part = config.of_layers([layer for layer, other in enumerate(kinds) if other == kind])
        if kind is None:
            memories[kind] = PagedMemory(KVCache.allocate(part, resources, kv_scales), resources)
        else:
            memories[kind] = MEMORIES[type(kind)](part, kind, resources)
    if len(memories) > 1 and kv_scales is not None:
        raise ValueError("runtime.kv_scales: expected a target whose layers all have attention")
    return LayeredMemory(memories, kinds) if len(memories) > 1 else memories[kinds[0]]


def allocate_draft_memory(config: DecoderConfig, resources: Resources) -> PageMemory:
    """The memory of a drafter, for one run; ValueError for layers of several kinds, or of linear attention."""
    if len(set(config.mixings)) > 1 or any(isinstance(kind, LinearConfig) for kind in config.mixings):
        kinds = [type(kind).__name__ for kind in config.mixings]
        raise ValueError(f"a drafter's layers: expected attention or latent attention in all of them, got {kinds}")
    memory = allocate_memory(config, resources)
    assert isinstance(memory, PageMemory)
    return memory
