"""Trains the tiny target: standard-library source and arithmetic word problems, from scratch.

    python -m experiments.train_target train.max_minutes=45 out_dir=outputs/train_target

Writes a Hugging Face folder (bfloat16 weights, tokenizer, chat template) with the loss curve as data and picture, and
measures greedy accuracy on the held-out problems with the rounded weights. Runs on a CPU or a GPU and resumes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from hydra.core.config_store import ConfigStore
from tokenizers import Tokenizer
from torch import Tensor

from algorithms.runtime.models.config import DecoderConfig
from algorithms.runtime.models.decoder import Decoder
from algorithms.runtime.models.dense_mixer import DenseMixer
from experiments.data.arithmetic import Problem, heldout_problems, parse_answer
from experiments.training.corpus import IGNORED, Corpus, Rows, join, tokenizer_sample
from experiments.training.curve import plot_curve
from experiments.training.export import export_weights, round_weights, write_json
from experiments.training.generate import greedy
from experiments.training.loop import Trainer, TrainSettings
from experiments.training.mixer import compile_layers, restore_layers
from experiments.training.program import run_program
from experiments.training.tokenizer import (
    ASSISTANT,
    END,
    USER,
    chat_prompt,
    save_tokenizer,
    token_id,
    train_tokenizer,
)

TOKENIZER_FILE = "tokenizer.json"
MAX_ANSWER_TOKENS = 120


@dataclass
class ModelSettings:
    """Shape of the target."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 768
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0


@dataclass
class BatchSettings:
    """Rows of each kind in one step; every `long_code_every`-th step has half as many code rows of twice the length.

    Attention over long rows is the dearest part of a step on a CPU, and a few of them suffice to learn far positions.
    From step `focus_from_step` on, questions carry no loss and the answers' mean loss has the share `focus_weight`: the
    numbers and names of a question cannot be predicted, and their gradients drown those of the answers.
    """

    arithmetic_rows: int = 6
    drill_rows: int = 2
    arithmetic_length: int = 384
    code_rows: int = 4
    code_length: int = 512
    long_code_every: int = 4
    focus_from_step: int = 660
    focus_weight: float = 0.7


@dataclass
class TrainTargetConfig:
    """Schema of `configs/train_target.yaml`."""

    out_dir: str = "outputs/train_target"
    resume: bool = True
    model: ModelSettings = field(default_factory=ModelSettings)
    batch: BatchSettings = field(default_factory=BatchSettings)
    train: TrainSettings = field(default_factory=TrainSettings)


ConfigStore.instance().store(name="train_target_schema", node=TrainTargetConfig)


def decoder_config(settings: ModelSettings, eos: int) -> DecoderConfig:
    """The Qwen3 shape of `settings`."""
    return DecoderConfig(
        architecture="qwen3",
        vocab_size=settings.vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_layers=settings.num_layers,
        num_heads=settings.num_heads,
        num_kv_heads=settings.num_kv_heads,
        head_dim=settings.head_dim,
        rms_norm_eps=1e-6,
        rope_theta=settings.rope_theta,
        rope_scaling=None,
        max_position_embeddings=settings.max_position_embeddings,
        tie_word_embeddings=True,
        qk_norm=True,
        mlp_bias=False,
        eos_token_ids=(eos,),
    )


class TargetObjective:
    """Next-token loss over a mixed batch, and the held-out losses of each kind of text."""

    def __init__(self, model: Decoder, corpus: Corpus, batch: BatchSettings, device: str) -> None:
        self.model, self.corpus, self.batch, self.device = model, corpus, batch, device
        self.user = token_id(corpus.tokenizer, USER)
        self.assistant = token_id(corpus.tokenizer, ASSISTANT)
        self.mixer = DenseMixer(model.config, max(batch.arithmetic_length, 2 * batch.code_length), device)
        arithmetic = corpus.arithmetic_rows(
            "loss", batch.arithmetic_rows + batch.drill_rows, batch.arithmetic_length, "heldout"
        )
        self.heldout = {
            "heldout_arithmetic": arithmetic,
            "heldout_answers": self._focused(arithmetic),
            "heldout_code": corpus.code_rows("loss", batch.code_rows // 2, 2 * batch.code_length, "heldout"),
        }

    def _focused(self, rows: Rows) -> Rows:
        """The same rows with labels on answers only."""
        answers = (rows.inputs == self.assistant).int().cumsum(1) > (rows.inputs == self.user).int().cumsum(1) - 1
        return Rows(rows.inputs, torch.where(answers, rows.labels, IGNORED))

    def _sum(self, rows: Rows) -> Tensor:
        hidden, _ = self.model(rows.inputs.to(self.device), self.mixer)
        labels = rows.labels.to(self.device).flatten()
        logits = self.model.logits(hidden.flatten(0, 1)[labels != IGNORED]).float()
        return F.cross_entropy(logits, labels[labels != IGNORED], reduction="sum")

    def loss(self, step: int) -> tuple[Tensor, int]:
        """Loss of the step's two kinds of rows, and the number of tokens that carry it."""
        batch = self.batch
        rows, length = batch.code_rows, batch.code_length
        if step % batch.long_code_every == batch.long_code_every - 1:
            rows, length = max(1, rows // 2), 2 * length
        arithmetic = join(
            self.corpus.arithmetic_rows(step, batch.arithmetic_rows, batch.arithmetic_length),
            self.corpus.drill_rows(step, batch.drill_rows, batch.arithmetic_length),
        )
        focus = step >= batch.focus_from_step
        if focus:
            arithmetic = self._focused(arithmetic)
        code = self.corpus.code_rows(step, rows, length)
        counts = [int((rows.labels != IGNORED).sum()) for rows in (arithmetic, code)]
        share = batch.focus_weight if focus else counts[0] / sum(counts)
        loss = share * self._sum(arithmetic) / counts[0] + (1 - share) * self._sum(code) / counts[1]
        return loss, sum(counts)

    def held_out(self) -> Mapping[str, float]:
        """Loss per token on held-out problems (none of the evaluation set's) and held-out modules."""
        return {key: float(self._sum(rows)) / int((rows.labels != IGNORED).sum()) for key, rows in self.heldout.items()}


def arithmetic_accuracy(model: Decoder, tokenizer: Tokenizer, problems: list[Problem]) -> float:
    """Share of `problems` whose greedy answer is right."""
    stop = token_id(tokenizer, END)
    prompts = [tokenizer.encode(chat_prompt(problem.question)).ids for problem in problems]
    answers = greedy(model, prompts, MAX_ANSWER_TOKENS, stop)
    right = [parse_answer(tokenizer.decode(a)) == p.answer for a, p in zip(answers, problems, strict=True)]
    return sum(right) / len(right)


def load_or_train_tokenizer(folder: Path, settings: TrainTargetConfig) -> Tokenizer:
    """The tokenizer of a run that is resumed, or a new one."""
    path = folder / TOKENIZER_FILE
    if settings.resume and path.is_file():
        return Tokenizer.from_file(str(path))
    tokenizer = train_tokenizer(tokenizer_sample(settings.train.seed), settings.model.vocab_size)
    save_tokenizer(tokenizer, folder, settings.model.max_position_embeddings)
    return tokenizer


def export(trainer: Trainer, model: Decoder, tokenizer: Tokenizer) -> dict[str, Any]:
    """Round, measure and write the trained model; returns the summary that is written beside it."""
    folder = trainer.folder
    restore_layers(model)
    round_weights(model)
    model.eval()
    summary = {
        "heldout_arithmetic_accuracy": arithmetic_accuracy(model, tokenizer, heldout_problems()),
        "steps": trainer.step,
        "tokens": trainer.tokens,
        "elapsed_s": round(trainer.elapsed_s, 1),
        "device": trainer.settings.device,
        "threads": trainer.settings.threads,
        **{key: value for key, value in trainer.rows[-1].items() if key.startswith("heldout")},
    }
    export_weights(model, model.config.to_hf(), folder)
    end = token_id(tokenizer, END)
    write_json(folder / "generation_config.json", {"eos_token_id": end, "pad_token_id": end, "do_sample": False})
    write_json(folder / "training_summary.json", summary)
    plot_curve(trainer.rows, folder / "training.svg", "target: training and held-out loss")
    return summary


def train_target(settings: TrainTargetConfig) -> dict[str, Any]:
    """Train, export and measure; returns the summary."""
    folder = Path(settings.out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(settings.train.threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(settings.train.seed)
    tokenizer = load_or_train_tokenizer(folder, settings)
    corpus = Corpus(tokenizer, settings.train.seed)
    model = Decoder(decoder_config(settings.model, token_id(tokenizer, END)))
    model.reset_parameters()
    model.to(settings.train.device)
    if settings.train.compile:
        compile_layers(model)
    objective = TargetObjective(model, corpus, settings.batch, settings.train.device)
    trainer = Trainer(model, settings.train, folder, objective.loss, objective.held_out)
    if settings.resume:
        trainer.resume()
    trainer.run()
    return export(trainer, model, tokenizer)


def main() -> None:
    """Command line entry."""
    run_program("train_target", train_target)


if __name__ == "__main__":
    main()
