"""Trains the tiny target's DFlash drafter on what the target itself writes.

    python -m experiments.train_dflash target=assets/tiny/target train.max_minutes=40 out_dir=outputs/train_dflash

First the target answers training-split prompts greedily (kept in the output folder), then the drafter learns to fill
blocks after random anchors of those answers. Reports tokens per step on the evaluation prompts by a dense
simulation of greedy decoding. Runs on a CPU or a GPU and resumes.
"""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import hydra
import torch
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from tokenizers import Tokenizer
from torch import Tensor

from algorithms.runtime.models.config import DecoderConfig, DFlashConfig
from algorithms.runtime.models.decoder import Decoder
from algorithms.runtime.models.dflash import DFlashDrafter
from algorithms.runtime.models.loading import ModelError, load_target
from experiments.data.arithmetic import heldout_problems
from experiments.data.code import function_beginnings, heldout_files, training_files
from experiments.training.blocks import BlockDrafter, draw_anchors, tokens_per_step
from experiments.training.corpus import encode_files
from experiments.training.curve import plot_curve
from experiments.training.export import export_weights, round_weights, write_json
from experiments.training.loop import Trainer, TrainSettings
from experiments.training.responses import (
    Continuation,
    arithmetic_prompts,
    function_prompts,
    load_sequences,
    respond,
    save_sequences,
    window_prompts,
)
from experiments.training.tokenizer import END, MASK, chat_prompt, token_id

KINDS = ("arithmetic", "code")


@dataclass
class DrafterSettings:
    """Shape of the drafter; the rest is the target's."""

    num_layers: int = 3
    block_size: int = 16
    target_layer_ids: list[int] = field(default_factory=lambda: [1, 2, 3, 4])


@dataclass
class ResponseSettings:
    """How much text the target writes for training, and how long it may be."""

    arithmetic_prompts: int = 6000
    function_prompts: int = 2000
    window_prompts: int = 1200
    max_arithmetic_tokens: int = 100
    max_code_tokens: int = 160
    validation_prompts: int = 48


@dataclass
class BlockBatchSettings:
    """Sequences and anchors of one step, and the decay of the position weights.

    Arithmetic is learned first; from step `code_focus_from_step` on the batch is mostly code.
    """

    arithmetic_sequences: int = 8
    arithmetic_anchors: int = 20
    code_sequences: int = 5
    code_anchors: int = 24
    code_focus_from_step: int = 734
    focus_arithmetic_sequences: int = 4
    focus_code_sequences: int = 10
    gamma: float = 7.0


@dataclass
class TrainDFlashConfig:
    """Schema of `configs/train_dflash.yaml`."""

    target: str = "assets/tiny/target"
    out_dir: str = "outputs/train_dflash"
    resume: bool = True
    drafter: DrafterSettings = field(default_factory=DrafterSettings)
    responses: ResponseSettings = field(default_factory=ResponseSettings)
    batch: BlockBatchSettings = field(default_factory=BlockBatchSettings)
    train: TrainSettings = field(default_factory=lambda: TrainSettings(max_minutes=40.0))


ConfigStore.instance().store(name="train_dflash_schema", node=TrainDFlashConfig)


def dflash_config(settings: DrafterSettings, target: DecoderConfig, mask_token_id: int) -> DFlashConfig:
    """Draft layers shaped like the target's, all with full attention."""
    return DFlashConfig(
        decoder=replace(target, num_layers=settings.num_layers),
        block_size=settings.block_size,
        target_layer_ids=tuple(settings.target_layer_ids),
        mask_token_id=mask_token_id,
        num_target_layers=target.num_layers,
        layer_types=("full_attention",) * settings.num_layers,
        sliding_window=None,
        causal_layers=(False,) * settings.num_layers,
    )


class ResponseSource:
    """Makes the target's continuations once and keeps them in the output folder."""

    def __init__(self, model: Decoder, tokenizer: Tokenizer, config: TrainDFlashConfig) -> None:
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.stop = token_id(tokenizer, END)

    def _limits(self, kind: str) -> int:
        settings = self.config.responses
        return settings.max_arithmetic_tokens if kind == "arithmetic" else settings.max_code_tokens

    def _training_prompts(self, kind: str) -> list[list[int]]:
        settings, seed = self.config.responses, self.config.train.seed
        if kind == "arithmetic":
            return arithmetic_prompts(self.tokenizer, seed, settings.arithmetic_prompts)
        windows = window_prompts(encode_files(self.tokenizer, training_files()), seed, settings.window_prompts)
        return function_prompts(self.tokenizer, seed, settings.function_prompts) + windows

    def training(self, kind: str) -> list[Continuation]:
        """Continuations of training-split prompts, from the file of an earlier start if there is one."""
        path = Path(self.config.out_dir) / f"responses_{kind}.safetensors"
        if self.config.resume and path.is_file():
            return load_sequences(path)
        prompts = self._training_prompts(kind)
        found = respond(self.model, prompts, self._limits(kind), self.stop, f"target writes {kind}")
        save_sequences([s for s in found if len(s.tokens) - s.start > 1], path)
        return load_sequences(path)

    def validation(self, kind: str) -> list[Continuation]:
        """Continuations of held-out text that is not among the evaluation prompts."""
        count = self.config.responses.validation_prompts
        if kind == "arithmetic":
            prompts = arithmetic_prompts(self.tokenizer, self.config.train.seed, count, "heldout")
        else:
            prompts = window_prompts(encode_files(self.tokenizer, heldout_files()), "validation", count)
        return respond(self.model, prompts, self._limits(kind), self.stop)

    def evaluation(self, kind: str) -> list[Continuation]:
        """Continuations of the evaluation prompts `data=arithmetic` and `data=code`."""
        if kind == "arithmetic":
            texts = [chat_prompt(problem.question) for problem in heldout_problems()]
        else:
            texts = [beginning.prompt for beginning in function_beginnings()]
        prompts = [self.tokenizer.encode(text).ids for text in texts]
        return respond(self.model, prompts, self._limits(kind), self.stop)


class DrafterObjective:
    """Block loss over a mixed batch; loss and tokens per step on validation text."""

    def __init__(self, drafting: BlockDrafter, source: ResponseSource, config: TrainDFlashConfig) -> None:
        self.drafting, self.batch, self.seed = drafting, config.batch, config.train.seed
        self.training = {kind: source.training(kind) for kind in KINDS}
        self.validation = {kind: source.validation(kind) for kind in KINDS}

    def _counts(self, step: int) -> dict[str, tuple[int, int]]:
        batch = self.batch
        arithmetic, code = batch.arithmetic_sequences, batch.code_sequences
        if step >= batch.code_focus_from_step:
            arithmetic, code = batch.focus_arithmetic_sequences, batch.focus_code_sequences
        return {"arithmetic": (arithmetic, batch.arithmetic_anchors), "code": (code, batch.code_anchors)}

    def loss(self, step: int) -> tuple[Tensor, int]:
        """Weighted mean loss of the step's blocks, and the number of predicted tokens."""
        rng = random.Random(f"blocks-{self.seed}-{step}")
        sums: list[Tensor] = []
        weights: list[Tensor] = []
        tokens = 0
        for kind, (sequences, anchors) in self._counts(step).items():
            chosen = rng.choices(self.training[kind], k=sequences)
            drawn = draw_anchors(chosen, anchors, rng)
            loss, weight, count = self.drafting.loss(chosen, drawn, self.batch.gamma)
            sums, weights, tokens = [*sums, loss], [*weights, weight], tokens + count
        return torch.stack(sums).sum() / torch.stack(weights).sum(), tokens

    def held_out(self) -> Mapping[str, float]:
        """Validation loss of each kind."""
        figures = {}
        for kind, sequences in self.validation.items():
            usable = [s for s in sequences if len(s.tokens) - s.start > 1]
            drawn = draw_anchors(usable, 8, random.Random("validation"))
            loss, weight, _ = self.drafting.loss(usable, drawn, self.batch.gamma)
            figures[f"heldout_{kind}"] = float(loss / weight)
        return figures


def export(trainer: Trainer, drafting: BlockDrafter, source: ResponseSource) -> dict[str, Any]:
    """Round, measure and write the trained drafter; returns the summary that is written beside it."""
    drafter, folder = drafting.drafter, trainer.folder
    round_weights(drafter)
    drafter.eval()
    summary: dict[str, Any] = {
        f"tokens_per_step_{kind}": tokens_per_step(drafting, source.evaluation(kind)) for kind in KINDS
    }
    summary |= {
        "steps": trainer.step,
        "tokens": trainer.tokens,
        "elapsed_s": round(trainer.elapsed_s, 1),
        "device": trainer.settings.device,
        "threads": trainer.settings.threads,
        **{key: value for key, value in trainer.rows[-1].items() if key.startswith("heldout")},
    }
    export_weights(drafter, drafter.config.to_hf(), folder)
    write_json(folder / "training_summary.json", summary)
    plot_curve(trainer.rows, folder / "training.svg", "DFlash drafter: training and held-out loss")
    return summary


def train_dflash(config: TrainDFlashConfig) -> dict[str, Any]:
    """Generate, train, export and measure; returns the summary."""
    folder, device = Path(config.out_dir), config.train.device
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(config.train.threads)
    torch.manual_seed(config.train.seed)
    target = load_target(config.target, device, torch.float32).model.requires_grad_(False)
    tokenizer = Tokenizer.from_file(str(Path(config.target) / "tokenizer.json"))
    shutil.copyfile(Path(config.target) / "tokenizer.json", folder / "tokenizer.json")
    drafter = DFlashDrafter(dflash_config(config.drafter, target.config, token_id(tokenizer, MASK)))
    drafter.reset_parameters()
    drafter.to(device)
    drafting = BlockDrafter(target, drafter, target.config.max_position_embeddings, device)
    source = ResponseSource(target, tokenizer, config)
    objective = DrafterObjective(drafting, source, config)
    trainer = Trainer(drafter, config.train, folder, objective.loss, objective.held_out)
    if config.resume:
        trainer.resume()
    trainer.run()
    return export(trainer, drafting, source)


@hydra.main(version_base="1.3", config_path="../configs", config_name="train_dflash")
def main(config: DictConfig) -> None:
    """Command line entry."""
    try:
        summary = train_dflash(cast(TrainDFlashConfig, OmegaConf.to_object(config)))
    except (ValueError, ModelError) as error:
        sys.exit(f"train_dflash: {error}")
    for key, value in summary.items():
        print(f"{key}: {value}")


if __name__ == "__main__":
    main()
