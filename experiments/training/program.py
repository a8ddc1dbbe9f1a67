"""The command line of a training program: settings in, summary out, a wrong setting as one screen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import DictConfig
from tokenizers import Tokenizer

from algorithms.runtime.models.loading import Target
from experiments.app import cli
from experiments.app.errors import user_errors
from experiments.training.drafting import DrafterObjective, run
from experiments.training.responses import ResponseSource


def run_program(name: str, train: Callable[[Any], Mapping[str, Any]]) -> None:
    """Compose `configs/NAME.yaml` with the command line, train by it and print the summary."""

    def task(settings: Any, composed: DictConfig) -> None:
        with user_errors(ValueError):  # bad settings, and ModelError with the folder that cannot be used
            summary = train(settings)
        for key, value in summary.items():
            print(f"{key}: {value}")

    cli.main(task, name)


def command_line(name: str, build: Callable[[Any, Target, Tokenizer, ResponseSource], DrafterObjective]) -> None:
    """Train the drafter that `build(settings, target, tokenizer, source)` makes."""
    run_program(
        name,
        lambda settings: run(settings, lambda target, tokenizer, source: build(settings, target, tokenizer, source)),
    )
