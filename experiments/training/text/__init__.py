"""The text that drafters learn from: prompts, the target's answers to them, and the files that keep both."""
