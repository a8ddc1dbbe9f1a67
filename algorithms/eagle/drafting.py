"""EAGLE-2 (arXiv 2401.15077, 2406.16858): draft the target's next features with one layer, and tokens from those.

`FeatureDrafter` says how. P-EAGLE instead runs all levels in one pass over rows of a mask token, so its drafts are
independent: a chain, or the best paths over the most likely tokens of each position.

Such drafts are a function of the context, so the target's own choice decides. With another `draft_sampling` than
topk they are sampled in a tree of fixed shape, and an acceptance rule for sampled drafts decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from algorithms.algorithm import AttentionCalls, Batch, DraftTree, Resources
from algorithms.drafting.draft_sampling import LevelSettings
from algorithms.drafting.level_drafter import FeatureDrafter
from algorithms.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from algorithms.eagle.model import Eagle3Drafter
    from algorithms.models.loading import Target, TargetFolder


class Eagle(FeatureDrafter):
    name = "eagle"
    kind: ClassVar[str | None] = "EAGLE"
    """The kind of head that the folder must hold; None takes any."""

    @dataclass
    class Config(LevelSettings):
        name: str = "eagle"
        steps: int = 3

    @classmethod
    def options(cls, config: Any) -> dict[str, Any]:
        return {}

    @classmethod
    def check(cls, config: Any, target: TargetFolder, draft_path: str | None) -> AttentionCalls:
        from algorithms.eagle.loading import read_eagle

        _, head, _ = read_eagle(cls.drafter_folder(draft_path), target, cls.kind, **cls.options(config))
        return cls.calls(config, head.decoder, head.draft_vocab_size)

    def __init__(self, config: Any, target: Target, draft_path: str | None) -> None:
        from algorithms.eagle.loading import load_eagle

        self.set_head(load_eagle(self.drafter_folder(draft_path), target, self.kind, **self.options(config)), config)


class Eagle3(Eagle):
    """EAGLE-3 (arXiv 2503.01840): fused low, middle and high features of the target, and a reduced draft vocabulary."""

    name = "eagle3"
    kind = "EAGLE-3"

    @dataclass
    class Config(Eagle.Config):
        name: str = "eagle3"


class NaiveEagle(Eagle):
    """Either head with one step by default: verify, acceptance and draft extend as one unit (SGLang's PR 6995)."""

    name = "naive_eagle"
    kind = None

    @dataclass
    class Config(Eagle.Config):
        name: str = "naive_eagle"
        steps: int = 1


class PEagle(Eagle3):
    """P-EAGLE (arXiv 2602.01469): an EAGLE-3 head that drafts all positions in one pass."""

    name = "peagle"
    kind = "P-EAGLE"
    _drafter: Eagle3Drafter

    @dataclass
    class Config(Eagle3.Config):
        name: str = "peagle"
        steps: int = 8
        mask_token: int | None = None
        """Token of the rows that draft; None takes the one that the head's folder names."""

    @classmethod
    def options(cls, config: Any) -> dict[str, Any]:
        return {"mask_token": config.mask_token}

    @classmethod
    def check(cls, config: Any, target: TargetFolder, draft_path: str | None) -> AttentionCalls:
        calls = super().check(config, target, draft_path)
        windows = [window for window in calls.config.sliding_windows if window is not None]
        if windows and config.steps > min(windows):
            raise ValueError(f"algo.steps: expected at most the head's window of {min(windows)}, got {config.steps}")
        return calls._replace(modes={"prefill": "chain", "draft": "chain"})

    def set_shape(self, config: Any) -> None:
        super().set_shape(config)
        self.draft_slots = self._shape.steps - 1

    def bind(self, resources: Resources) -> None:
        super().bind(resources)
        token = self._drafter.config.mask_token_id
        assert token is not None
        self._mask_token = token
        with torch.no_grad():
            self._mask_feature = self._drafter.mask_feature()
        self._offsets = torch.arange(self._shape.steps, device=resources.device)

    def propose_few(self, batch: Batch, num_nodes: int) -> DraftTree:
        sampled = self._tree.sampled
        depth = min(self._shape.steps, num_nodes - 1) if sampled is None else self.max_depth
        logits = self._marginals(batch, depth)
        batch.adjust(logits, 0, self._tree.vocabulary)
        if sampled is not None:
            return sampled.sample(batch, logits)
        if self.chain:
            return self._tree.likeliest_chain(batch, logits)
        return self._tree.likeliest_tree(batch, logits, self._shape.topk, num_nodes)

    def _marginals(self, batch: Batch, depth: int) -> Tensor:
        """Logits [B, depth, V_d] after the last token. The next observed tokens write over the keys of mask rows."""
        states = self._kept.read(batch.slots)[:, None]
        if depth > 1:
            rows, count = len(states), depth - 1
            tokens = batch.last_tokens.new_full((rows, count), self._mask_token)
            positions = batch.lengths[:, None] + self._offsets[:count]
            mixer = self._memory.chained(batch, positions)
            masks = self._mask_feature.repeat(rows, count, 1)
            states = torch.cat([states, self._drafter(tokens, masks, mixer)], 1)
        return self._drafter.logits(states)
