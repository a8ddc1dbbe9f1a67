"""Decode prompts speculatively, check the output, and show the time of each phase.

python run.py algo=dflash backend=fa4
python run.py experiment=dflash_fa4 data.limit=16 sampling.temperature=0.7
python run.py -m sweep=pages data=arithmetic,code runtime.page_size=1,16
python run.py task=compare task.limit=4
python run.py --help algo=eagle3
"""

import os
import sys

try:
    from experiments.sweep.main import main
    from experiments.tasks.run import run_task
except ModuleNotFoundError as missing:
    message = f"error: {missing.name} is not installed in this Python ({sys.executable})"
    print(f"{message}\n  install with make run, then: source .venv/bin/activate", file=sys.stderr)
    sys.exit(2)
except KeyboardInterrupt:
    sys.exit(130)

if __name__ == "__main__":
    main(run_task, [os.path.abspath(__file__)])
