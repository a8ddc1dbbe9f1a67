"""How many drafts each acceptance rule accepts in expectation, on the same draws."""
