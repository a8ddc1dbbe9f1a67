"""Programs that each serve one table of the results."""
