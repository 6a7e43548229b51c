"""n-gram language models with back-off, counted from text files in bounded memory and read from a mapped file."""

from outrider.ngram.table import NgramTable
from outrider.ngram.training import train

__all__ = ["NgramTable", "train"]
