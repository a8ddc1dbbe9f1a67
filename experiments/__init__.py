"""Programs that ask a question of the toolkit: generation, measurement, training."""
