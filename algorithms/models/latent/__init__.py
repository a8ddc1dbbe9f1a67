"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): the heads of a layer share one stored row a token."""
