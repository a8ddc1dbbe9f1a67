"""Scores drafters on recorded text: what is drafted at each position, and the steps that follow from it."""
