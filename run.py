"""Decode prompts speculatively, prove the output, and show where the time went.

python run.py algo=dflash backend=fa4
python run.py experiment=dflash_fa4 data.limit=16 sampling.temperature=0.7
python run.py -m data=arithmetic,code runtime.page_size=1,16
python run.py --cfg job
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from experiments.cli import main


def generate(config: Any, composed: DictConfig) -> float:
    """One job; torch is imported here so that the command line alone stays quick."""
    from experiments.generate import run

    return run(config, composed)


if __name__ == "__main__":
    main(generate)
