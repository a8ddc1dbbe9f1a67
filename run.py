"""Decode prompts speculatively, prove the output, and show where the time went.

python run.py algo=dflash backend=fa4
python run.py experiment=dflash_fa4 data.limit=16 sampling.temperature=0.7
python run.py -m sweep=pages data=arithmetic,code runtime.page_size=1,16
python run.py task=compare data.limit=4
python run.py --cfg job
"""

from __future__ import annotations

import os

from experiments.sweep.main import main
from experiments.tasks.run import run_task

if __name__ == "__main__":
    main(run_task, [os.path.abspath(__file__)])
