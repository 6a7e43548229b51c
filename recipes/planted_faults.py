"""Does the audit see faults that are really there? Each is planted in the rule, then `outrider audit` runs as a user
would run it.

    python recipes/planted_faults.py OUT [options of `outrider audit`]

Leaves a line of JSON for each fault in OUT/found.jsonl (from which it goes on) and prints the table. Exit code 1 if an audit
let a fault pass.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SIGNIFICANCE = 1e-4


def audit(fault: str, options: list[str]) -> int:
    """The command in this process, with the fault in place of the rule."""
    sys.path.insert(0, str(ROOT))
    import outrider.round
    from outrider.cli.main import run as command
    from tests.helpers.toys import WRONG_RULES

    setattr(outrider.round, "verify", WRONG_RULES[fault])  # noqa: B010 - the module does not export it
    return command(["audit", "--json", *options])


def run(out: Path, options: list[str]) -> int:
    """All faults, one after the other, each in a process of its own."""
    sys.path.insert(0, str(ROOT))
    from tests.helpers.toys import WRONG_RULES

    out.mkdir(parents=True, exist_ok=True)
    kept = out / "found.jsonl"
    found = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    done = {entry["fault"] for entry in found if entry["options"] == options}
    for fault in WRONG_RULES:
        if fault in done:
            continue
        start = time.time()
        command = [sys.executable, __file__, "--plant", fault, *options]
        ended = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
        if ended.returncode not in (0, 1, 2) or not ended.stdout.startswith("{"):
            print(f"the audit of {fault!r} did not end as an audit does", file=sys.stderr)
            return 3
        (result,) = json.loads(ended.stdout)["audits"]
        seconds = round(time.time() - start)
        entry = {"fault": fault, "options": options, "seconds": seconds}
        entry |= {name: result[name] for name in ("verdict", "p", "tokens", "alpha")}
        with kept.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        found.append(entry)
    mine = [entry for entry in found if entry["options"] == options]
    for entry in mine:
        print(
            f"{entry['fault']:32s} {entry['verdict']:16s} p {entry['p']:.1e}  {entry['tokens']} tokens  {entry['seconds']} s"
        )
    return int(any(entry["verdict"] != "not exact" or entry["p"] >= SIGNIFICANCE for entry in mine))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    if sys.argv[1] == "--plant":
        sys.exit(audit(sys.argv[2], sys.argv[3:]))
    sys.exit(run(Path(sys.argv[1]), sys.argv[2:]))
