"""One model over several processes: tensor parallelism by transformers' plans and torch.distributed (docs/sharded.md).

Rank 0 runs everything that decides (the loop, the drafter, the sampling, the text); the other ranks repeat its calls on the
models. So every decision is taken once, and ranks cannot disagree.
"""

from outrider.sharded.placement import PLACEMENTS
from outrider.sharded.start import lead
from outrider.sharded.team import Team, TeamError

__all__ = ["PLACEMENTS", "Team", "TeamError", "lead"]
