"""The command line of a program that trains a drafter: settings in, summary out, a wrong setting as one line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig, OmegaConf
from tokenizers import Tokenizer

from algorithms.runtime.models.loading import Target
from experiments.training.drafting import DrafterObjective, run
from experiments.training.responses import ResponseSource


def command_line(
    name: str, config: DictConfig, build: Callable[[Any, Target, Tokenizer, ResponseSource], DrafterObjective]
) -> None:
    """Train what `build(settings, target, tokenizer, source)` makes and print the summary."""
    try:
        settings: Any = OmegaConf.to_object(config)
        summary = run(settings, lambda target, tokenizer, source: build(settings, target, tokenizer, source))
    except ValueError as error:  # bad settings, and ModelError with the folder that cannot be used
        sys.exit(f"{name}: {error}")
    for key, value in summary.items():
        print(f"{key}: {value}")
