"""The training loop: schedule, optimizers, checkpoints, log, progress.

A run is bounded by steps, by minutes of the clock, or by both. The learning rate follows the larger of the two
fractions: it warms up, stays, and falls linearly to zero over the last part (WSD). Batches are pure functions of the
step, so a resumed run equals an uninterrupted one. At the end the model is the best one that was evaluated.
"""

import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from algorithms.checked import Between, Checked
from algorithms.engine.settings import LARGEST_INT32
from algorithms.models.experts.module import ExpertTensors
from experiments.app.files import whole_file
from experiments.app.hardware import chosen_device
from experiments.training.parallel import Replicas, local_device

CHECKPOINT = "checkpoint.pt"
BEST = "best.pt"
LOG = "training.jsonl"
COUNTERS = ("step", "tokens", "elapsed_s", "best", "rows")  # attributes of the trainer in a checkpoint
# Time in which the process or the machine was suspended does not count as training time.
LONGEST_STEP_S = 60.0
LONGEST_SILENCE_S = 60.0  # longest time without a line of the log
PRINT_INTERVAL_S = 15.0
POSITIVE = Between(0, above=True)


@dataclass
class TrainSettings(Checked):
    """Settings of every objective under `train`. `device` auto is a GPU where there is one. `threads` null keeps the
    choice of `experiments.app.cpu_threads`. `autocast` computes in bfloat16 on float32 weights. Held-out figures are
    taken every `eval_every_steps` steps, and every `eval_every_minutes` if given."""

    GROUP = "train."
    minutes: Annotated[float | None, POSITIVE] = 45.0
    steps: Annotated[int | None, Between(1)] = None
    seed: Annotated[int, Between(0, LARGEST_INT32)] = 0
    device: str = "auto"
    threads: Annotated[int | None, Between(1)] = None
    autocast: bool = True
    compile: bool = False
    matrix_lr: Annotated[float, POSITIVE] = 0.006
    other_lr: Annotated[float, POSITIVE] = 0.003
    expert_lr: Annotated[float, POSITIVE] = 0.0015
    weight_decay: Annotated[float, Between(0)] = 0.1
    warmup_fraction: Annotated[float, Between(0, 1)] = 0.02
    decay_fraction: Annotated[float, Between(0, 1, above=True)] = 0.5
    grad_clip: Annotated[float, POSITIVE] = 1.0
    log_every_steps: Annotated[int, Between(1)] = 20
    eval_every_steps: Annotated[int, Between(1)] = 200
    eval_every_minutes: Annotated[float | None, POSITIVE] = None
    checkpoint_every_minutes: Annotated[float, Between(0)] = 4.0

    def __post_init__(self) -> None:
        if self.minutes is None and self.steps is None:
            raise ValueError("train.minutes, train.steps: expected one of them at least, got none")
        super().__post_init__()
        device = chosen_device(self.device, "train.device")
        try:
            self.device = local_device(str(torch.device(device)))
        except RuntimeError as error:
            raise ValueError(f"train.device: expected auto, cpu or cuda, got {self.device!r}") from error

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def precision(self) -> torch.autocast:
        """The context in which losses are computed."""
        return torch.autocast(self.device.split(":")[0], torch.bfloat16, enabled=self.autocast)


def build_optimizers(model: nn.Module, settings: TrainSettings) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of linear layers, AdamW for embeddings, heads over a vocabulary, rows that give one number
    each, the weights of experts, norms and biases."""
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    apart = ("lm_head", "markov_w2", "embed_proj.2", "confidence_head.proj", "in_proj_a", "in_proj_b")
    of_muon = {id(m.weight) for name, m in linear.items() if not name.endswith(apart)}
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if id(p) in of_muon]
    experts = [p for m in model.modules() if isinstance(m, ExpertTensors) for p in m.parameters() if p.requires_grad]
    placed = of_muon | {id(p) for p in experts}
    others = [p for p in trained if id(p) not in placed]
    groups: list[dict[str, Any]] = [{"params": others}]
    if experts:
        groups.append({"params": experts, "lr": settings.expert_lr})
    decay, adjust = settings.weight_decay, "match_rms_adamw"
    return [
        torch.optim.Muon(matrices, lr=settings.matrix_lr, weight_decay=decay, adjust_lr_fn=adjust),
        torch.optim.AdamW(groups, lr=settings.other_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=settings.on_gpu),
    ]


def schedule(progress: float, settings: TrainSettings) -> float:
    """Learning-rate factor at `progress` in 0..1."""
    if progress < settings.warmup_fraction:
        return max(progress / settings.warmup_fraction, 0.01)
    return min(1.0, (1.0 - progress) / settings.decay_fraction)


class Objective(ABC):
    """A model with its loss and its held-out figures."""

    title: str
    model: Any  # a module whose `config` has `to_hf`

    @abstractmethod
    def loss(self, number: int, progress: float) -> tuple[Tensor, int]:
        """Loss of batch `number` after a share `progress` of the run, and its tokens; a pure function of these, the
        weights and the seed."""

    @abstractmethod
    def held_out(self) -> Mapping[str, float]:
        """Figures on held-out text."""

    def score(self, figures: Mapping[str, float]) -> float | None:
        """The figure that the best model minimises; None keeps the last model."""
        return None

    def hf_config(self) -> dict[str, Any]:
        """The `config.json` of the trained model."""
        found: dict[str, Any] = self.model.config.to_hf()
        return found

    def weights(self) -> dict[str, Tensor]:
        """Name to tensor of the exported folder."""
        return self.model.state_dict()

    @abstractmethod
    def measure(self, folder: Path) -> dict[str, Any]:
        """Figures of the exported model in `folder`, for the summary."""


class Trainer:
    """Runs the loss of an objective over batch numbers 0, 1, … until the budget is spent."""

    def __init__(
        self, objective: Objective, settings: TrainSettings, folder: Path, replicas: Replicas | None = None
    ) -> None:
        self.objective, self.model, self.settings, self.folder = objective, objective.model, settings, folder
        self.replicas = replicas or Replicas()
        self.replicas.share(self.model)
        self.optimizers = build_optimizers(self.model, settings)
        self.base_lrs = [group["lr"] for o in self.optimizers for group in o.param_groups]
        self.step, self.tokens, self.elapsed_s, self._clock_s = 0, 0, 0.0, 0.0
        self.best: tuple[float, int] | None = None  # score and step of the best model, which lies in the folder
        self.rows: list[dict[str, Any]] = []

    def progress(self) -> float:
        """Spent share of the budget, 0..1."""
        steps, minutes = self.settings.steps, self.settings.minutes
        of_steps = self.step / steps if steps is not None else 0.0
        of_time = self.elapsed_s / (60 * minutes) if minutes is not None else 0.0
        return min(1.0, max(of_steps, of_time))

    def save(self) -> None:
        """Write the checkpoint in one move: an interruption leaves the previous one."""
        if self.replicas.is_first:
            optimizers = [o.state_dict() for o in self.optimizers]
            counters = {key: getattr(self, key) for key in COUNTERS}
            self._store({"model": self.model.state_dict(), "optimizers": optimizers, **counters}, CHECKPOINT)

    def _store(self, state: dict[str, Any], name: str) -> None:
        with whole_file(self.folder / name) as partial, open(partial, "wb") as file:
            torch.save(state, file)

    def _stored(self, name: str) -> Any:
        return torch.load(self.folder / name, map_location=self.settings.device, weights_only=True)

    def resume(self) -> bool:
        """Continue from the checkpoint if there is one."""
        if not (self.folder / CHECKPOINT).is_file():
            return False
        state = self._stored(CHECKPOINT)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for key in COUNTERS:
            setattr(self, key, state[key])
        self._clock_s = self.elapsed_s
        return True

    def restore_best(self) -> int:
        """Make the model the best one that was evaluated; returns its step."""
        if self.best is None:
            return self.step
        self.model.load_state_dict(self._stored(BEST)["model"])
        return self.best[1]

    def _update(self) -> tuple[Tensor, int]:
        progress = self.progress()
        factor = schedule(progress, self.settings)
        groups = [group for o in self.optimizers for group in o.param_groups]
        for group, base in zip(groups, self.base_lrs, strict=True):
            group["lr"] = base * factor
        with self.settings.precision():
            loss, tokens = self.objective.loss(self.step * self.replicas.world + self.replicas.rank, progress)
        loss.backward()
        self.replicas.average(self.model.parameters())
        # Every process must read the same clock, or their schedules and ends would differ.
        self.elapsed_s = self.replicas.clock(self.step, self._clock_s)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.grad_clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach(), tokens * self.replicas.world

    def _record(self, losses: list[float], evaluated: Mapping[str, float]) -> None:
        mean = sum(losses) / len(losses)
        if not math.isfinite(mean):
            raise ValueError(
                f"the loss of steps {self.step - len(losses) + 1} to {self.step} is not finite; lower train.matrix_lr "
                f"and train.other_lr, and continue from {self.folder / CHECKPOINT}"
            )
        row: dict[str, Any] = {"step": self.step, "tokens": self.tokens, "loss": round(mean, 5)}
        row |= {key: round(value, 5) for key, value in evaluated.items()}
        self.rows.append(row | {"elapsed_s": round(self.elapsed_s, 1)})
        if self.replicas.is_first:
            (self.folder / LOG).write_text("".join(json.dumps(row) + "\n" for row in self.rows))

    def _held_out(self) -> dict[str, float]:
        if not self.replicas.is_first:
            return {}
        self.model.eval()
        with torch.no_grad(), self.settings.precision():
            figures = dict(self.objective.held_out())
        self.model.train()
        score = self.objective.score(figures)
        if score is not None and (self.best is None or score < self.best[0]):
            self.best = score, self.step
            self._store({"model": self.model.state_dict()}, BEST)
        return figures

    def run(self, stop_after_steps: int | None = None) -> None:
        """Train to the end of the budget, or for `stop_after_steps` more steps, then write a checkpoint."""
        last_step = None if stop_after_steps is None else self.step + stop_after_steps
        settings = self.settings
        # Losses stay on the device between two lines of the log: reading one waits for its step.
        losses: list[Tensor] = []
        clock = saved_at = evaluated_at = logged_at = time.perf_counter()
        printed_at = -math.inf
        minutes = math.inf if settings.eval_every_minutes is None else settings.eval_every_minutes
        held_out: Mapping[str, float] = {}
        while self.progress() < 1.0 and self.step != last_step:
            loss, tokens = self._update()
            losses.append(loss)
            self.step, self.tokens = self.step + 1, self.tokens + tokens
            due = self.step % settings.log_every_steps == 0 or time.perf_counter() - logged_at > LONGEST_SILENCE_S
            if due:
                losses = [loss.cpu() for loss in losses]
            now = time.perf_counter()
            self._clock_s, clock = self._clock_s + min(now - clock, LONGEST_STEP_S), now
            finished = self.progress() >= 1.0
            evaluated: Mapping[str, float] = {}
            if finished or self.step % settings.eval_every_steps == 0 or now - evaluated_at > 60 * minutes:
                evaluated = held_out = self._held_out()
                evaluated_at = time.perf_counter()
            if finished or due or evaluated:
                self._record([float(loss) for loss in losses], evaluated)
                losses, logged_at = [], time.perf_counter()
                if self.replicas.is_first and (finished or logged_at - printed_at >= PRINT_INTERVAL_S):
                    printed_at = logged_at
                    # The clock of the first step is not known before the second one.
                    rate = f"{self.tokens / self.elapsed_s:,.0f} tokens/s  " if self.elapsed_s > 0 else ""
                    figures = "  ".join(f"{key} {value:.3f}" for key, value in held_out.items())
                    loss_now = f"loss {self.rows[-1]['loss']:.3f}"
                    print(f"training  {self.progress():.0%}  step {self.step}  {rate}{loss_now}  {figures}", flush=True)
            if now - saved_at > 60 * settings.checkpoint_every_minutes:
                self.save()
                saved_at = now
        self.save()
