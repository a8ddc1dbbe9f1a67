"""State slots: the memory of linear attention.

A request owns a slot from its first prompt token on. Verification reads its state and writes none: the inputs of all
nodes are kept, and the commit takes the state along the accepted path. So a tree costs no state per node, and the state
after a step has the bits of decoding one by one. A tree that is solved at once gives outputs with other roundings.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import specdec_kernels as kernels
from algorithms.algorithm import Batch, Prompts, Resources
from algorithms.models.config import DecoderConfig
from algorithms.models.linear.config import LinearConfig
from algorithms.models.linear.module import LinearInputs, empty_state, of_layer


@dataclass(frozen=True)
class Rows:
    """Rows of a forward that are planned together; `kept` takes their inputs of all layers."""

    num_rows: int
    links: kernels.RowLinks
    paths: kernels.Paths | kernels.Trees
    kept: kernels.DeltaInputs | None = None
    chunks: kernels.Chunks | None = None
    """Whole chunks of prompts, which go before `paths`."""


@dataclass(frozen=True)
class LinearMixer:
    """One forward over groups of rows, one after the other."""

    state: kernels.DeltaState
    slots: Tensor
    """[B] int64: the state slots of the rows of the first group."""
    groups: tuple[Rows, ...]
    impl: str

    def __call__(self, layer: int, /, inputs: LinearInputs) -> Tensor:
        qkv, b, a = (part.reshape(-1, part.shape[-1]) for part in inputs[:3])
        state, found, first = of_layer(self.state, layer), [], 0
        for group in self.groups:
            rows = slice(first, first + group.num_rows)
            kept = None if group.kept is None else kernels.DeltaInputs(*(tensor[layer] for tensor in group.kept))
            read = kernels.delta_rule_inputs(
                qkv[rows], b[rows], a[rows], inputs.weights, state, group.links, out=kept, impl=self.impl
            )
            first += group.num_rows
            if isinstance(group.paths, kernels.Trees):
                found.append(kernels.delta_rule_tree(read, group.paths, state, impl=self.impl))
                continue
            done = None
            if group.chunks is not None:
                done = kernels.delta_rule_chunks(read, group.chunks, state, impl=self.impl)
            found.append(kernels.delta_rule(read, group.paths, state, out=done, impl=self.impl))
        out = found[0] if len(found) == 1 else torch.cat(found)
        return out.unflatten(0, inputs.qkv.shape[:-1])


class StateMemory:
    def __init__(self, config: DecoderConfig, sizes: LinearConfig, resources: Resources) -> None:
        self._sizes, self._resources, self._layers = sizes, resources, config.num_layers
        slots, device = resources.max_batch, resources.device
        self.state = empty_state(sizes, config.num_layers, slots, resources.dtype, device)
        # A state stays where it is when its request moves; the slots behind those of requests are padding's.
        self._slot_of = torch.cat([torch.arange(slots), torch.full((2,), -1)]).to(device)

    def nodes(self, batch: Batch, links: kernels.TreeLinks, chain: bool, max_depth: int) -> LinearMixer:
        """Chains go node by node, with the bits of decoding; so do trees with `deterministic`, or where they have more
        nodes than are solved at once: there each path repeats its ancestors."""
        count, impl = links.positions.shape[1], self._resources.impl
        slots = self._slot_of[batch.slots]
        paths: kernels.Paths | kernels.Trees
        if chain:
            rows, paths = kernels.chain_paths(slots, count)
        elif count <= kernels.CHUNK and not self._resources.deterministic:
            rows, paths = kernels.tree_masks(slots, kernels.tree_parents(links.mask, impl=impl), links.mask)
        else:
            rows, paths = kernels.tree_paths(slots, kernels.mask_paths(links.mask, max_depth + 1, impl=impl))
        return self._mixer(slots, Rows(len(slots) * count, rows, paths, self._kept(len(slots) * count)))

    def tiles(self, batch: Batch, positions: Tensor, counts: Tensor, prompts: Prompts) -> LinearMixer:
        slots = self._slot_of[prompts.slots]
        firsts = prompts.last - (prompts.counts - 1).clamp(min=0)
        segments = (slots, prompts.start, prompts.counts, firsts, positions.numel())
        # All tiles of a run have one width, and segments are of whole tiles: chunks are at fixed places of a text.
        if self._resources.deterministic or positions.shape[1] % kernels.CHUNK:
            rows, paths = kernels.prompt_paths(*segments)
            return self._mixer(slots, Rows(positions.numel(), rows, paths))
        rows, chunks, paths = kernels.chunk_paths(*segments)
        return self._mixer(slots, Rows(positions.numel(), rows, paths, chunks=chunks))

    def joint(self, mixers: Sequence[LinearMixer]) -> LinearMixer:
        return self._mixer(mixers[0].slots, *(rows for mixer in mixers for rows in mixer.groups))

    def _mixer(self, slots: Tensor, *groups: Rows) -> LinearMixer:
        return LinearMixer(self.state, slots, groups, self._resources.impl)

    def _kept(self, rows: int) -> kernels.DeltaInputs:
        sizes, dtype, device = self._sizes, self._resources.dtype, self._resources.device
        wide = torch.promote_types(dtype, torch.float32)

        def empty(width: int, dtype: torch.dtype) -> Tensor:
            return torch.empty((self._layers, rows, width), dtype=dtype, device=device)

        mixed, raw = empty(sizes.channels, wide), empty(sizes.channels, dtype)
        return kernels.DeltaInputs(mixed, empty(sizes.value_heads, wide), empty(sizes.value_heads, wide), raw)

    def commit(self, nodes: LinearMixer, batch: Batch, committed: kernels.Committed, chain: bool) -> None:
        group = nodes.groups[0]
        assert group.kept is not None
        paths = kernels.accepted_paths(nodes.slots, committed.nodes, group.num_rows // len(nodes.slots))
        kernels.commit_delta_rule(group.kept, paths, self.state, impl=self._resources.impl)

    def move_slot(self, source: int, target: int) -> None:
        both = torch.tensor([source, target], device=self._slot_of.device)
        self._slot_of[both] = self._slot_of[both.flip(0)]
