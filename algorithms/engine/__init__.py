"""Requests: the engine, its scheduler and session, the transfers between host and device, grammars, times."""
