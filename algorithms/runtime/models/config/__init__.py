"""Shapes of models and drafters, read from and written to Hugging Face `config.json`; imports no torch."""

from algorithms.runtime.models.config.decoder import DecoderConfig
from algorithms.runtime.models.config.dflash import DFlashConfig
from algorithms.runtime.models.config.eagle import Eagle3Config, EagleConfig

__all__ = ["DFlashConfig", "DecoderConfig", "Eagle3Config", "EagleConfig"]
