"""From the command line to a checked plan: what a user types, and what it resolves to."""
