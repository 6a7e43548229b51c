"""One round on the device: score the draft, standardise, verify, and read everything back in a single transfer.

The decoder's rounds and those inside a drafter that is itself a speculative decoder are the same computation.
"""

from outrider.round.contract import Outcome, Scorer
from outrider.round.run import verify_round
from outrider.settings.extras import Extras

__all__ = ["Extras", "Outcome", "Scorer", "verify_round"]
