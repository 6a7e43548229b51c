"""Engines behind one contract (`base`): transformers (encoder–decoders, too), OpenVINO, llama.cpp, written-down tables."""

from outrider.models.base import LanguageModel, Sequence
from outrider.models.table import TableModel

__all__ = ["LanguageModel", "Sequence", "TableModel"]
