"""What passes and drafts take while rows that share them come to their ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from outrider.costs.draft_seconds import DraftSeconds
from outrider.costs.table import Costs


@dataclass(frozen=True)
class SharedCosts:
    """Of so many rows. costs: of the target's passes. times: by a drafter's name, how many times as long as it says its
    drafts take with so many rows; 1 where it is not told.
    """

    costs: Costs
    times: Mapping[str, float] = field(default_factory=dict)

    def drafting(self, name: str, seconds: DraftSeconds) -> DraftSeconds:
        """What such drafts take."""
        times = self.times.get(name, 1.0)
        return DraftSeconds(times * seconds.token, times * seconds.start)


ByRows = Callable[[int], SharedCosts]
"""From how many rows share a pass."""
