"""What beam search is asked for. The meanings are those of transformers 5.23, `generate(num_beams=…)`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outrider.errors import ParameterError
from outrider.support.checks import check_count, check_number

EarlyStopping = bool | Literal["never"]
MOST_BEAMS = 64


@dataclass(frozen=True)
class BeamSettings:
    """num_beams: hypotheses that are followed; 1 is greedy decoding.

    length_penalty: a finished text's score is its log-probability / (its new tokens ^ length_penalty); above 0 favours long
    texts, below 0 short ones.
    early_stopping: when to stop once num_beams texts are finished. True: at once. False: when the best running one, at its
    present length, scores no better than the worst of them. "never": when it could not even at the greatest length
    (for length_penalty > 0; otherwise as False).
    num_return_sequences: how many of the finished texts to return, best first.
    """

    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    num_return_sequences: int = 1

    def __post_init__(self) -> None:
        check_count("num_beams", self.num_beams, 1, MOST_BEAMS, "use 1 for greedy decoding")
        advice = "no more texts are kept than num_beams"
        check_count("num_return_sequences", self.num_return_sequences, 1, self.num_beams, advice)
        check_number("length_penalty", self.length_penalty, -4.0, 4.0, "in [-4, 4]", "use 1 for the mean, 0 for the sum")
        if self.early_stopping not in (True, False, "never") or isinstance(self.early_stopping, int | float) != isinstance(
            self.early_stopping, bool
        ):
            raise ParameterError(f'early_stopping must be True, False or "never", got {self.early_stopping!r}')
