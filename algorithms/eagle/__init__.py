"""EAGLE, EAGLE-3 and Naive EAGLE: drafting, the head's model, its configuration and its loading."""
