"""Seeds that a user may give."""

from __future__ import annotations

import secrets
from numbers import Integral

from outrider.errors import ParameterError

MAX_SEED = 2**63 - 1


def check_seed(seed: object) -> int:
    """The seed itself, or a fresh one for None."""
    if seed is None:
        return secrets.randbelow(2**32)
    number = -1 if isinstance(seed, bool) or not isinstance(seed, Integral) else int(seed)  # NumPy's as well
    if not 0 <= number <= MAX_SEED:
        raise ParameterError(f"seed must be a whole number in 0 … 2^63 - 1, got {seed!r}: leave it out for a random one")
    return number
