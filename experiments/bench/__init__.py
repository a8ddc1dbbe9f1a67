"""The parts of the unit benchmark `experiments.kernel_bench`."""
