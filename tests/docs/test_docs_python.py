"""docs/python.md against the code: every keyword with its default, every field, error and drafter; the examples run."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import outrider
from outrider import drafters, errors
from outrider.generation import Generation
from outrider.models.transformers_model import TransformersModel
from outrider.records import Round, Stats
from outrider.request.from_specs import make_named
from outrider.request.options import GenerateOptions, Options, parse_options
from outrider.results import Result
from outrider.round import Extras
from outrider.sampling import SamplingSettings
from tests.helpers.heads import write_head

PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(\w+)` \| (?:`(.*?)`|never) \|", re.MULTILINE)


def section(title: str) -> str:
    """The page's text under a heading."""
    return PAGE.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def rows(text: str) -> dict[str, Any]:
    """{keyword: its default, as the table says}; None for one that is no value."""
    return {name: ast.literal_eval(default) if default else None for name, default in ROW.findall(text)}


def defaults(*classes: Any) -> dict[str, Any]:
    """{field: its default}"""
    found = {}
    for field in (field for one in classes for field in dataclasses.fields(one)):
        made = field.default_factory
        found[field.name] = field.default if made is dataclasses.MISSING else made()
    return found


def public(one: Any) -> set[str]:
    """The fields and properties of a class."""
    properties = {name for name, value in vars(one).items() if isinstance(value, property)}
    return properties | {field.name for field in dataclasses.fields(one)}


def in_code(text: str) -> set[str]:
    return set(re.findall(r"`([A-Za-z_]+)(?:\(\))?`", text))


@pytest.fixture(scope="module")
def models(target_folder: Path, draft_folder: Path) -> Mapping[str, Any]:
    return {"target": outrider.load(target_folder, dtype="float64"), "draft": outrider.load(draft_folder, dtype="float64")}


def test_every_keyword_of_load_is_there_with_its_default() -> None:
    parameters = inspect.signature(outrider.load).parameters.items()
    wanted = {name: one.default for name, one in parameters if one.kind is not one.VAR_KEYWORD}  # those are refused
    assert rows(section("`load`")) == wanted


def test_every_option_of_generate_is_there_with_its_default(
    models: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = rows(section("`generate` and `stream`"))
    assert set(said) == set(GenerateOptions.__annotations__)
    known = defaults(SamplingSettings, Options, Extras)
    assert {name: said[name] for name in said if name in known and name != "cancelled"} == {
        name: known[name] for name in said if name in known and name != "cancelled"
    }
    alone = {"draft", "num_draft_tokens", "seed", "stop", "cancelled"}  # without a default in these classes, or `never`
    assert set(said) - set(known) <= alone
    assert parse_options(1, {}).stop == said["stop"]
    target = models["target"]
    # With a head for the target at hand, what drafts by default is told from its parts.
    monkeypatch.setattr("outrider.drafters.head.SHIPPED", str(tmp_path))
    path = write_head(tmp_path / "head", "autoregressive", target.vocab_size)
    stored = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**stored, "target": target.name}))
    made = Generation(target, ["def f(x):"])
    assert made.drafter is not None
    assert made.drafter.name == make_named(said["draft"], target).name == "prompt-lookup + head"
    assert len({outrider.generate(target, "def f(x):", max_new_tokens=1, seed=said["seed"]).seed for _ in range(3)}) == 3


def test_a_missing_row_and_a_wrong_default_are_seen() -> None:
    text = section("`load`")
    assert rows(text.replace("| `pack` |", "| pack |")) != rows(text)
    assert rows(text.replace("| `pack` | `True` |", "| `pack` | `False` |")) != rows(text)


@pytest.mark.parametrize("one", [Result, Stats, Round], ids=lambda one: one.__name__)
def test_every_field_of_the_records_is_named(one: type) -> None:
    title = f"**`{one.__name__}`**"
    paragraph = next(part for part in section("What comes back").split("\n\n") if part.lstrip().startswith(title))
    assert public(one) <= in_code(paragraph)


def test_every_error_and_drafter_is_named() -> None:
    every = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    assert every <= in_code(section("Errors")) | {"OutriderError"}
    assert set(drafters.__all__) <= in_code(section("Drafts as objects"))


def test_all_of_a_continuous_batch_is_named() -> None:
    named = section("`generate` and `stream`").partition("### In a service")[2]
    for one in (outrider.ContinuousBatch, outrider.Answer):
        assert {name for name in vars(one) if not name.startswith("_")} <= set(re.findall(r"[a-z_]+", named))
    for name, parameter in list(inspect.signature(outrider.ContinuousBatch.__init__).parameters.items())[2:]:
        assert f"{name}={parameter.default!r}".replace("'", '"') in named


def test_the_examples_run(models: Mapping[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """All in one namespace, with tiny models instead of the first block's, whose keywords are tested above."""
    first, *blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert "outrider.load(" in first
    compile(first, "docs/python.md", "exec")
    assert isinstance(models["target"], TransformersModel)
    names: dict[str, Any] = {"outrider": outrider, **models}
    for block in blocks:
        exec(block, names)
    assert len(blocks) == 5
    assert isinstance(names["result"], Result)
    assert names["result"].stats.tokens > 0
    assert len(names["second"].tokens) > 0
    assert "temperature must be" in capsys.readouterr().out
    assert names["memory"].remembers
