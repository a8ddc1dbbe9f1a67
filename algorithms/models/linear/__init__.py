"""Linear attention with the gated delta rule (arXiv 2412.06464): a layer keeps one state a request, of fixed size."""
