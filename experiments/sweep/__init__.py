"""Sweeps: many runs with a name, which go on after an interrupt and become one table (`experiments.collect`)."""
