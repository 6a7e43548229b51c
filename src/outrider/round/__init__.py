"""One round on the device: score the draft, standardise, verify, and read everything back in a single transfer.

The decoder's rounds and those inside a drafter that is itself a speculative decoder are the same computation.
"""

from outrider.round.contract import Outcome, Scorer
from outrider.round.run import Group, verify_round, verify_together
from outrider.settings.extras import Extras

__all__ = ["Extras", "Group", "Outcome", "Scorer", "verify_round", "verify_together"]
