"""Grammars in a step: what host and device exchange while it runs.

    draft ─▶ graft ─▶ verify ─▶ accept ─▶ commit          the device
         ╲   ╱   ╲             ╱
         offer    read ─▶ mask                            the host

While the drafter drafts, the host follows the tokens of the previous step and offers the jump-forward tokens of the
grammar; `graft` inserts them. While the target verifies, the host traverses the tree and writes the token mask of each
node, which `accept` reads. All buffers have fixed addresses, so every phase can be captured.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from algorithms.engine.grammar import Matcher
from specdec_kernels import MASK_BITS

News = Callable[[], list[list[int]]]
"""For each slot in use the tokens that its matcher has not seen; waits for the steps in flight."""


class ConstraintState:
    """Forced drafts and masks of up to `slots` requests whose trees have `num_nodes` nodes and `max_depth` levels."""

    def __init__(self, slots: int, num_nodes: int, max_depth: int, vocab: int, device: torch.device) -> None:
        cuda, words = device.type == "cuda", -(-vocab // MASK_BITS)
        self._forced = torch.full((slots, max_depth), -1, dtype=torch.int64, pin_memory=cuda)
        self._bits = torch.full((slots, num_nodes, words), -1, dtype=torch.int32, pin_memory=cuda)
        self._constrained = torch.zeros(slots, dtype=torch.int32, pin_memory=cuda)
        self._trees = torch.zeros((slots, 3, num_nodes), dtype=torch.int64, pin_memory=cuda)
        self.forced, self.bits, self.constrained = (
            held.to(device) for held in (self._forced, self._bits, self._constrained)
        )
        """[slots, D] int64, -1 after the last; [slots, N, ceil(V / 32)] int32; [slots] int32."""
        self._tree_is_here = torch.cuda.Event() if cuda else None
        self._copies = torch.cuda.Stream(device) if cuda else None
        self._matchers: Sequence[Matcher | None] = ()
        self._news: News = list

    def begin(self, matchers: Sequence[Matcher | None], news: News) -> None:
        """The next step is over requests with these matchers, None for those without a grammar."""
        self._matchers, self._news = matchers, news

    def offer(self) -> None:
        """Follow the outputs of the requests, and offer their jump-forward tokens."""
        self._forced.fill_(-1)
        for slot, (matcher, tokens) in enumerate(zip(self._matchers, self._news(), strict=True)):
            if matcher is None:
                continue
            matcher.follow(tokens)
            forced = matcher.forced(self._forced.shape[1])
            self._forced[slot, : len(forced)] = torch.tensor(forced, dtype=torch.int64)
        self.forced.copy_(self._forced, non_blocking=True)

    def read(self, nodes: Tensor) -> None:
        """Start reading the draft: `nodes` [B, 3, N] int64 are its tokens, first children and next siblings."""
        self._trees[: len(nodes)].copy_(nodes, non_blocking=True)
        if self._tree_is_here is not None:
            self._tree_is_here.record()

    def mask(self) -> None:
        """Write the token masks of the draft, and start copying them while the device works."""
        if self._tree_is_here is not None:
            self._tree_is_here.synchronize()
        # As arrays: the library takes tensors in pinned memory for tensors of a device.
        trees, bits = self._trees.numpy(), self._bits.numpy()
        for slot, matcher in enumerate(self._matchers):
            tokens, first_child, next_sibling = trees[slot]
            constrained = matcher is not None and matcher.fill(first_child, next_sibling, tokens, bits[slot])
            self._constrained[slot] = int(constrained)
        slots = slice(len(self._matchers))
        with torch.cuda.stream(self._copies) if self._copies else nullcontext():
            self.bits[slots].copy_(self._bits[slots], non_blocking=True)
            self.constrained[slots].copy_(self._constrained[slots], non_blocking=True)
        if self._copies is not None:
            torch.cuda.current_stream(self.bits.device).wait_stream(self._copies)
