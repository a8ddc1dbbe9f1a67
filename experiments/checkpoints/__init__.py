"""Fetching and converting real models."""
