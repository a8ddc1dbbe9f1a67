"""Trains the tiny target's DFlash drafter on what the target itself writes.

    python -m experiments.train_dflash target=assets/tiny/target train.max_minutes=40 out_dir=outputs/train_dflash

First the target answers training-split prompts greedily (kept in `responses.folder`, for all drafters), then the
drafter learns to fill blocks after random anchors of those answers. Reports tokens per step on the evaluation prompts
by a dense simulation of greedy decoding. Runs on a CPU or a GPU and resumes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hydra.core.config_store import ConfigStore
from tokenizers import Tokenizer

from algorithms.runtime.models.config import DecoderConfig, DFlashConfig
from algorithms.runtime.models.drafters.dflash import DFlashDrafter
from algorithms.runtime.models.loading import Target
from experiments.training.blocks import BlockDrafter, BlockObjective
from experiments.training.drafting import BatchSettings, DrafterRunConfig
from experiments.training.program import command_line
from experiments.training.responses import ResponseSource
from experiments.training.tokenizer import MASK, token_id


@dataclass
class DrafterSettings:
    """Shape of the drafter; the rest is the target's."""

    num_layers: int = 3
    block_size: int = 16
    target_layer_ids: list[int] = field(default_factory=lambda: [1, 2, 3, 4])


@dataclass
class BlockSettings:
    """Anchors of a sequence in one step, and the decay of the position weights."""

    anchors: int = 20
    gamma: float = 7.0


@dataclass
class TrainDFlashConfig(DrafterRunConfig):
    """Schema of `configs/train_dflash.yaml`."""

    out_dir: str = "outputs/train_dflash"
    # Measuring drafts from every position of a sequence at once: blocks are many, sequences few.
    batch: BatchSettings = field(default_factory=lambda: BatchSettings(evaluation_sequences=2))
    drafter: DrafterSettings = field(default_factory=DrafterSettings)
    blocks: BlockSettings = field(default_factory=BlockSettings)


ConfigStore.instance().store(name="train_dflash_schema", node=TrainDFlashConfig)


def dflash_config(settings: DrafterSettings, target: DecoderConfig, mask_token_id: int) -> DFlashConfig:
    """Draft layers shaped like the target's, all with full attention."""
    return DFlashConfig(
        decoder=replace(target, num_layers=settings.num_layers),
        block_size=settings.block_size,
        target_layer_ids=tuple(settings.target_layer_ids),
        mask_token_id=mask_token_id,
        num_target_layers=target.num_layers,
        causal_layers=(False,) * settings.num_layers,
    )


def build(config: TrainDFlashConfig, target: Target, tokenizer: Tokenizer, source: ResponseSource) -> BlockObjective:
    """A fresh drafter and its objective."""
    drafter = DFlashDrafter(dflash_config(config.drafter, target.config, token_id(tokenizer, MASK)))
    drafter.reset_parameters()
    drafter.to(config.train.device)
    length = target.config.max_position_embeddings
    drafting = BlockDrafter(target.model, drafter, length, config.train.device)
    return BlockObjective(drafting, source, config, config.blocks.anchors, config.blocks.gamma)


def main() -> None:
    """Command line entry."""
    command_line("train_dflash", build)


if __name__ == "__main__":
    main()
