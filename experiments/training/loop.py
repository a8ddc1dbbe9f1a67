"""The training loop: schedule, optimizers, checkpoints, log, progress.

A run is bounded by steps, by minutes, or by both. The learning rate follows the larger of the two fractions: it warms
up, stays, and falls linearly to zero over the last part (WSD). Batches are pure functions of the step, so a checkpoint
needs weights, optimizer state, step and elapsed time only, and resuming continues the same run.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn

from experiments.app.schema import LARGEST_INT32, expect_at_least, expect_between

CHECKPOINT = "checkpoint.pt"
LOG = "training.jsonl"
# Time in which the process or the machine was suspended does not count as training time.
LONGEST_STEP_S = 60.0


@dataclass
class TrainSettings:
    """What every objective accepts under `train`."""

    max_minutes: float | None = 45.0
    max_steps: int | None = None
    seed: int = 0
    device: str = "cpu"
    threads: int = 2
    autocast: bool = True
    compile: bool = False
    matrix_lr: float = 0.006
    other_lr: float = 0.003
    weight_decay: float = 0.1
    warmup_fraction: float = 0.02
    decay_fraction: float = 0.5
    final_lr_fraction: float = 0.0
    grad_clip: float = 1.0
    log_every_steps: int = 20
    eval_every_steps: int = 200
    checkpoint_every_minutes: float = 4.0

    def __post_init__(self) -> None:
        if self.max_minutes is None and self.max_steps is None:
            raise ValueError("train.max_minutes or train.max_steps must be set")
        for key in ("log_every_steps", "eval_every_steps", "threads", "max_steps"):
            expect_at_least(f"train.{key}", getattr(self, key), 1)
        for key in ("weight_decay", "checkpoint_every_minutes"):
            expect_at_least(f"train.{key}", getattr(self, key), 0)
        for key in ("matrix_lr", "other_lr", "grad_clip"):
            expect_between(f"train.{key}", getattr(self, key), 0, math.inf, above=True)
        for key in ("warmup_fraction", "final_lr_fraction"):
            expect_between(f"train.{key}", getattr(self, key), 0, 1)
        expect_between("train.decay_fraction", self.decay_fraction, 0, 1, above=True)
        if self.max_minutes is not None:
            expect_between("train.max_minutes", self.max_minutes, 0, math.inf, above=True)
        expect_between("train.seed", self.seed, 0, LARGEST_INT32)
        self._expect_device()

    def _expect_device(self) -> None:
        try:
            kind = torch.device(self.device).type
        except RuntimeError as error:
            raise ValueError(f"train.device: expected cpu or cuda, got {self.device!r}") from error
        if kind == "cuda" and not torch.cuda.is_available():
            raise ValueError("train.device=cuda, but torch sees no CUDA device; use train.device=cpu")


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices of linear layers, and everything else (embeddings, LM heads, norms, biases)."""
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    matrices = {id(module.weight) for name, module in linear.items() if not name.endswith("lm_head")}
    trained = [p for p in model.parameters() if p.requires_grad]
    return [p for p in trained if id(p) in matrices], [p for p in trained if id(p) not in matrices]


def build_optimizers(model: nn.Module, settings: TrainSettings) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the rest."""
    matrices, others = split_parameters(model)
    return [
        torch.optim.Muon(
            matrices,
            lr=settings.matrix_lr,
            weight_decay=settings.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(others, lr=settings.other_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def schedule(progress: float, settings: TrainSettings) -> float:
    """Learning-rate factor at `progress` in 0..1."""
    if progress < settings.warmup_fraction:
        return max(progress / settings.warmup_fraction, 0.01)
    remaining = (1.0 - progress) / settings.decay_fraction
    return max(min(1.0, remaining), settings.final_lr_fraction)


class Trainer:
    """Runs `loss_of(step)` until the budget is spent.

    `loss_of` returns the loss to minimise and the number of tokens it looked at; `evaluate` returns held-out figures.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: TrainSettings,
        folder: Path,
        loss_of: Callable[[int], tuple[Tensor, int]],
        evaluate: Callable[[], Mapping[str, float]],
    ) -> None:
        self.model, self.settings, self.folder = model, settings, folder
        self.loss_of, self.evaluate = loss_of, evaluate
        self.optimizers = build_optimizers(model, settings)
        self.base_lrs = [group["lr"] for o in self.optimizers for group in o.param_groups]
        self.step, self.tokens, self.elapsed_s = 0, 0, 0.0
        self.rows: list[dict[str, Any]] = []

    def progress(self) -> float:
        """Spent share of the budget, 0..1."""
        shares = [0.0]
        if self.settings.max_steps is not None:
            shares.append(self.step / self.settings.max_steps)
        if self.settings.max_minutes is not None:
            shares.append(self.elapsed_s / (60 * self.settings.max_minutes))
        return min(1.0, max(shares))

    def save(self) -> None:
        """Write the checkpoint in one move, so that an interruption leaves the previous one."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "step": self.step,
            "tokens": self.tokens,
            "elapsed_s": self.elapsed_s,
            "rows": self.rows,
        }
        partial = self.folder / (CHECKPOINT + ".tmp")
        torch.save(state, partial)
        os.replace(partial, self.folder / CHECKPOINT)

    def resume(self) -> bool:
        """Continue from the checkpoint of the folder if there is one."""
        path = self.folder / CHECKPOINT
        if not path.is_file():
            return False
        state = torch.load(path, map_location=self.settings.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.tokens, self.elapsed_s = state["step"], state["tokens"], state["elapsed_s"]
        self.rows = state["rows"]
        return True

    def _update(self) -> tuple[Tensor, int]:
        factor = schedule(self.progress(), self.settings)
        groups = [group for o in self.optimizers for group in o.param_groups]
        for group, base in zip(groups, self.base_lrs, strict=True):
            group["lr"] = base * factor
        device_type = self.settings.device.split(":")[0]
        with torch.autocast(device_type, torch.bfloat16, enabled=self.settings.autocast):
            loss, tokens = self.loss_of(self.step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.grad_clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach(), tokens

    def _write_log(self) -> None:
        text = "".join(json.dumps(row) + "\n" for row in self.rows)
        (self.folder / LOG).write_text(text)

    def _record(self, losses: list[float], evaluated: Mapping[str, float]) -> None:
        mean = sum(losses) / len(losses)
        row: dict[str, Any] = {"step": self.step, "tokens": self.tokens, "loss": round(mean, 5)}
        row |= {key: round(value, 5) for key, value in evaluated.items()}
        row["elapsed_s"] = round(self.elapsed_s, 1)
        self.rows.append(row)
        self._write_log()

    def _held_out(self) -> dict[str, float]:
        device_type = self.settings.device.split(":")[0]
        self.model.eval()
        with torch.no_grad(), torch.autocast(device_type, torch.bfloat16, enabled=self.settings.autocast):
            figures = dict(self.evaluate())
        self.model.train()
        return figures

    def run(self, stop_after_steps: int | None = None) -> None:
        """Train to the end of the budget, or for `stop_after_steps` more steps, then write a checkpoint."""
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        last_step = None if stop_after_steps is None else self.step + stop_after_steps
        with Progress(*columns) as bar:
            task = bar.add_task("training", total=1.0)
            self._loop(last_step, lambda text: bar.update(task, completed=self.progress(), description=text))
        self.save()

    def _loop(self, last_step: int | None, show: Callable[[str], None]) -> None:
        settings = self.settings
        # Losses stay on the device between two rows of the log: reading one waits for its step.
        losses: list[Tensor] = []
        clock = saved_at = time.perf_counter()
        held_out: Mapping[str, float] = {}
        while self.progress() < 1.0 and self.step != last_step:
            loss, tokens = self._update()
            losses.append(loss)
            self.step, self.tokens = self.step + 1, self.tokens + tokens
            due = self.step % settings.log_every_steps == 0
            if due:
                losses = [loss.cpu() for loss in losses]
            now = time.perf_counter()
            self.elapsed_s, clock = self.elapsed_s + min(now - clock, LONGEST_STEP_S), now
            finished = self.progress() >= 1.0
            evaluated: Mapping[str, float] = {}
            if finished or self.step % settings.eval_every_steps == 0:
                evaluated = held_out = self._held_out()
            if finished or due:
                self._record([float(loss) for loss in losses], evaluated)
                losses = []
                clock = time.perf_counter()
                tokens_per_s = self.tokens / max(self.elapsed_s, 1e-9)
                figures = "  ".join(f"{key} {value:.3f}" for key, value in held_out.items())
                show(f"step {self.step}  {tokens_per_s:,.0f} tokens/s  loss {self.rows[-1]['loss']:.3f}  {figures}")
            if now - saved_at > 60 * settings.checkpoint_every_minutes:
                self.save()
                saved_at = now
