"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437): layers that were trained with the target predict the token
after the next one, and draft token after token as an EAGLE head does.

The head is in the target's own folder, or in one of speculators that is given as `model.draft_path`. Its layers keep
keys of all committed tokens, from the prompt on. One layer drafts any number of steps: it reads its own output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from algorithms.algorithm import AttentionCalls
from algorithms.drafting.draft_sampling import LevelSettings
from algorithms.drafting.level_drafter import STREAMS, FeatureDrafter

if TYPE_CHECKING:
    from algorithms.models.loading import Target, TargetFolder


class MTP(FeatureDrafter):
    name = "mtp"
    finds_draft_model = True

    @dataclass
    class Config(LevelSettings):
        name: str = "mtp"
        steps: int = 3
        hidden_in: Annotated[str | None, STREAMS] = None
        """Feature from the target: raw, or normed by the target's final norm; None takes the family's convention."""
        feedback: Annotated[str | None, STREAMS] = None
        """Feature from the step before: raw, or normed by the head's final norm; None takes the family's convention."""

    @classmethod
    def check(cls, config: Any, target: TargetFolder, draft_path: str | None) -> AttentionCalls:
        from algorithms.mtp.loading import read_mtp

        head = read_mtp(draft_path, target, config.hidden_in, config.feedback).config
        return cls.calls(config, head.decoder, head.decoder.vocab_size)

    def __init__(self, config: Config, target: Target, draft_path: str | None) -> None:
        from algorithms.mtp.loading import load_mtp

        self.set_head(load_mtp(draft_path, target, config.hidden_in, config.feedback), config)
