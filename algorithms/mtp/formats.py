"""Conventions of MTP heads by family. Configs do not say them; the sources are the code of the models and engines.

MiMo-7B has `model.mtp_layers.*` in the target's folder (github.com/XiaomiMiMo/MiMo; `mimo_mtp.py` of vllm-project/vllm
and of sgl-project/sglang), speculators `mtp_layers.*` in a folder of its own (vllm-project/speculators, `models/mtp`).
A target's architecture names the prefix in `Architecture.mtp_prefix` too, so that the target loads without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from algorithms.drafting.feature_drafter import NORMED, RAW
from algorithms.models.architectures import find_architecture
from algorithms.mtp.config import EMBEDDING, HIDDEN


@dataclass(frozen=True)
class Family:
    """`prefix` of the tensors of the layers, and the fields of `MTPConfig`."""

    prefix: str
    first: str
    hidden_in: str
    feedback: str = NORMED
    norm_offset: float = 0.0


SPECULATORS = Family("mtp_layers.", first=EMBEDDING, hidden_in=RAW)
"""Trained on the last layer's output. Served by vLLM with the final norm of it: `algo.hidden_in=normed`."""
BY_MODEL_TYPE = {"mimo": Family(find_architecture("mimo").mtp_prefix or "", first=HIDDEN, hidden_in=NORMED)}


def family_of(config: Mapping[str, Any]) -> Family | None:
    """The family of a flat config; None if it has no MTP head that is supported."""
    if "kind" in config:
        return SPECULATORS if config["kind"] == "mtp" else None
    return BY_MODEL_TYPE.get(str(config.get("model_type")))
