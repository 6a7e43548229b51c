"""Windows of tokens as drafts are trained on, made by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.train.corpus import Window


def window_of(tokens: Sequence[int], asked: int = 0) -> Window:
    """The first `asked` of them are a prompt's."""
    return Window(np.array(tokens, dtype=np.uint32), np.arange(len(tokens)) >= asked)
