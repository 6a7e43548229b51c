"""What the ranks of a job in test_train_runs.py run: `outrider` with the given arguments, the second rank's clock late."""

from __future__ import annotations

import os
import sys
from typing import Any

from outrider.cli.main import run
from outrider.train.run import Ends

begin = Ends.__init__


def late(self: Any, hours: float | None) -> None:
    """As if it had 1000 hours left."""
    begin(self, None if hours is None else 1000.0)


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        Ends.__init__ = late  # type: ignore[method-assign]
    sys.exit(run(sys.argv[1:]))
