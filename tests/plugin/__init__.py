"""An algorithm that lives outside of the repository's own package: one file and its config."""
