"""Shared by drafters: draft sampling, trees, token histories, and the check of their drafts."""
