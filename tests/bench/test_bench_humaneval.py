"""Code that a model wrote: run apart, judged by its problem's tests, and only when asked."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from outrider.bench.humaneval import _try_runner, completion_of, run_tests
from outrider.bench.quality import make_metric
from outrider.bench.tasks import problems
from outrider.cli.main import cli
from outrider.errors import ParameterError
from tests.helpers.task_data import answer


def test_programs_pass_fail_and_are_stopped() -> None:
    problem = problems()["HumanEval/0"]
    assert run_tests(problem, problem["canonical_solution"]) == "passed"
    assert run_tests(problem, "    return None\n").startswith("failed")
    assert run_tests(problem, "    while True:\n        pass\n", seconds=0.5) == "timed out"
    assert run_tests(problem, "    x = bytearray(10 ** 10)\n" + problem["canonical_solution"]).startswith("failed")
    assert run_tests(problem, "    this is no code\n").startswith("failed")


def test_an_answer_is_judged_by_the_tests_of_its_problem() -> None:
    metric, every = make_metric("pass@1", None, run_code=True), problems()
    assert metric is not None
    solution = every["HumanEval/1"]["canonical_solution"]
    assert metric.sums(answer(solution, name="HumanEval/1")) == [1.0, 1.0]
    assert metric.sums(answer(solution, name="HumanEval/2")) == [0.0, 1.0]


def test_programs_see_no_environment_and_can_not_forge_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "x")
    problem = problems()["HumanEval/0"]
    seen = "    import os\n    assert 'A_SECRET' not in os.environ\n"
    assert run_tests(problem, seen + problem["canonical_solution"]) == "passed"
    forged = '    import os\n    os.write(1, b\'{"result": "passed"}\\n\')\n    os._exit(0)\n'
    assert run_tests(problem, forged, seconds=0.5) != "passed"


def test_a_runner_that_runs_nothing_is_found_out() -> None:
    problem = dict(problems()["HumanEval/0"])
    _try_runner(problem)
    problem["test"] = "def check(candidate):\n    pass\n"  # as if the code were not executed: everything passes
    with pytest.raises(ParameterError, match="does not run code as installed"):
        _try_runner(problem)


def test_code_is_executed_only_when_asked() -> None:
    command = ["bench", "tasks", "--prompts", "1", "--target", "/no/such/model"]
    result = CliRunner().invoke(cli, command)
    assert isinstance(result.exception, ParameterError)
    assert "--execute-generated-code" in str(result.exception)
    assert "\n" not in str(result.exception)
    other = CliRunner().invoke(cli, [*command, "--task", "chat", "--metric", "pass@1", "--execute-generated-code"])
    assert "pass@1 is for task humaneval" in str(other.exception)
    none = CliRunner().invoke(cli, [*command, "--task", "chat", "--execute-generated-code"])
    assert "executes nothing: drop --execute-generated-code" in str(none.exception)


def test_the_code_of_an_answer_is_its_block_or_its_continuation() -> None:
    assert completion_of("    return x\n```\nnot this\n```") == "    return x\n```\nnot this\n```"
    assert (
        completion_of("Here:\n```python\ndef f():\n    return 1\n```\nIt returns 1.\n```\nx\n```")
        == "\n\ndef f():\n    return 1\n"
    )
    assert completion_of("```\nx = 1") == "\n\nx = 1\n", "cut short"
    assert completion_of("def f():\n    return 1") == "def f():\n    return 1"
    problem = problems()["HumanEval/53"]
    assert run_tests(problem, completion_of("```python\ndef add(x, y):\n    return x + y\n```")) == "passed"
    assert run_tests(problem, completion_of("```python\ndef add(x, y):\n    return x - y\n```")).startswith("failed")
