"""Drafters as plain modules, side by side."""
