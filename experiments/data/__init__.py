"""Prompt sources: generated arithmetic, standard-library code, files and public sets."""
