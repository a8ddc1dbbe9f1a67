"""The parts of the unit benchmark `experiments.kernel_bench`: what is timed, whether it is right, how long it takes."""
