"""Attention backends, one file each. `protocol` is their contract, `registry` finds and checks them by name."""
