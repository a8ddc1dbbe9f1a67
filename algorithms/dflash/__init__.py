"""DFlash (arXiv 2602.06036): drafting, the drafter's model, its configuration and its loading."""
