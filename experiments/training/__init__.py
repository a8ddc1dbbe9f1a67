"""Shared parts of the training programs: corpus, tokenizer, attention, loop, export."""
