"""What every algorithm stands on: models, KV cache, attention backends and the engine."""
