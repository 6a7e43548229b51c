"""Reading prompts in chunks, so that memory stays bounded whatever their length."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

from outrider.models.base import LanguageModel, Sequence
from outrider.support.device_data import pad_rows

CHUNK = 512


def prefill(
    model: LanguageModel,
    sequences: Many[Sequence],
    prompts: Many[Many[int]],
    cancelled: Callable[[], bool] = lambda: False,
) -> None:
    """Score the prompts into their sequences, no logits kept, at most `CHUNK` tokens of each row at a time.

    Stops between chunks once `cancelled()` is true.
    """
    while not cancelled():
        todo = [
            (sequence, prompt[sequence.length : sequence.length + CHUNK])
            for sequence, prompt in zip(sequences, prompts, strict=True)
            if sequence.length < len(prompt)
        ]
        if not todo:
            return
        tokens, lengths = pad_rows([part for _, part in todo], model.device)
        model.score([sequence for sequence, _ in todo], tokens, lengths, "none")
