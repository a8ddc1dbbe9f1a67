"""Programs that ask a question of the toolkit: generation, measurement, training."""

import os

from experiments.app.cpu_threads import settle_threads

os.environ.setdefault("SPECDEC_FAST_INTERPRETER", "1")  # see `specdec_kernels.interpreter`
settle_threads()  # here, because programs of this package import torch before they call anything
