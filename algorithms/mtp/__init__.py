"""MTP heads: drafting, the head's model, its configuration and its loading."""
