"""RMS norms of a decoder: alone, after a residual addition, after the embedding, beside that of a feature."""

from specdec_kernels.norm.api import add_rms_norm, embed_join_rms_norm, embed_rms_norm, rms_norm
from specdec_kernels.norm.types import Normed

__all__ = ["Normed", "add_rms_norm", "embed_join_rms_norm", "embed_rms_norm", "rms_norm"]
