"""What drafting takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DraftSeconds:
    """Seconds of a draft: `token` for each of its tokens, and `start` once, before the first one.

    A draft's first pass finds the caches full of the target's weights; the ones after it find its own.
    """

    token: float = 0.0
    start: float = 0.0

    def of(self, drafted: int) -> float:
        """Seconds of a draft of so many tokens."""
        return self.start + drafted * self.token if drafted else 0.0
