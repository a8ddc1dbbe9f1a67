"""Other systems' signatures over this package's kernels, one package a system."""
