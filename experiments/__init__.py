"""Programs that ask a question of the toolkit: generation, measurement, training."""

from experiments.app.threads import settle_threads

settle_threads()  # here, because programs of this package import torch before they call anything
