"""Sums over the devices that share a model, fused with the norm that follows."""

from specdec_kernels.all_reduce.api import all_reduce_add_rms_norm
from specdec_kernels.all_reduce.reference import as_sent
from specdec_kernels.all_reduce.types import SLOTS, Exchange, exchange_elements

__all__ = ["SLOTS", "Exchange", "all_reduce_add_rms_norm", "as_sent", "exchange_elements"]
