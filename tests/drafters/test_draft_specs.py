"""Drafters by name: every form of `--draft`, and one clear line for what is wrong with one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.main import run
from outrider.drafters import (
    ChoiceDrafter,
    EarlyExitDrafter,
    ModelDrafter,
    PromptLookupDrafter,
    RandomDrafter,
    SpeculativeDrafter,
    SuffixDrafter,
)
from outrider.errors import OutriderError, ParameterError
from outrider.models.base import LanguageModel
from outrider.models.table import TableModel
from outrider.models.transformers_model import TransformersModel
from outrider.request.choices import make_drafter
from outrider.request.draft_specs import NAMED, check_spec, is_named
from outrider.request.from_specs import MAKERS, loading_options, make_from_spec, make_named
from tests.helpers.heads import write_head
from tests.helpers.tiny_models import module, tiny
from tests.helpers.toys import table

TARGET = table(1, 5)
LOADED: list[str] = []
OWN: dict[str, Any] = {}


def load(name: str, own: dict[str, Any]) -> LanguageModel:
    LOADED.append(name)
    OWN.update(own)
    return TableModel(table(2, 5)._probs, name=name)


def test_every_name_is_made() -> None:
    assert MAKERS.keys() == NAMED.keys()


def test_names_and_options() -> None:
    lookup = make_named("prompt-lookup:max_ngram=5,min_ngram=2", TARGET)
    assert isinstance(lookup, PromptLookupDrafter)
    assert (lookup.max_ngram, lookup.min_ngram) == (5, 2)
    suffix = make_named("suffix:min_match=3,memory=yes", TARGET)
    assert isinstance(suffix, SuffixDrafter)
    assert suffix.min_match == 3
    assert isinstance(make_named("early-exit:layers=3", TARGET), EarlyExitDrafter)
    assert isinstance(make_named("random", TARGET), RandomDrafter)


def test_what_drafts_without_a_name_has_the_head_that_comes_with_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For that target alone, and as far as it hands out the states that the head reads."""
    monkeypatch.setattr("outrider.drafters.head.SHIPPED", str(tmp_path))
    for target in (TARGET, tiny("Llama")):
        assert isinstance(make_named("auto", target), PromptLookupDrafter)
    path = write_head(tmp_path / "ours", "layered")
    stored = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**stored, "target": tiny("Llama").name}))
    both = make_named("auto", tiny("Llama"))
    assert isinstance(both, ChoiceDrafter)
    assert [part.name for part in both.parts()] == ["prompt-lookup", "head"]
    for target in (TARGET, tiny("GPT2")):
        assert isinstance(make_named("auto", target), PromptLookupDrafter)
    compiled = TransformersModel(module("Llama"), name=tiny("Llama").name)
    assert isinstance(make_named("auto", compiled), ChoiceDrafter)
    compiled.compiled = object()  # type: ignore[assignment]
    assert isinstance(make_named("auto", compiled), PromptLookupDrafter)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("head:foo=3", "has no option 'foo'"),
        ("prompt-lookup:max_ngram=many", "is no value of this option"),
        ("prompt_lookup", "did you mean prompt-lookup"),
        ("none", "is no drafter"),
        ("org/model:temprature=1", "has no option 'temprature'"),
        ("org/model:draft=org/other:draft=sufix", "did you mean suffix"),
    ],
)
def test_what_is_wrong_by_itself_is_told_before_anything_is_loaded(
    spec: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ParameterError, match=said):
        check_spec(spec)
    monkeypatch.setattr("outrider.load", lambda *_, **__: pytest.fail("loaded"))
    assert run(["generate", "x", "--draft", "suffix", "--draft", spec]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_what_may_be_right_is_left_to_loading() -> None:
    for spec in (
        "auto",
        "random",
        "suffix:memory=yes",
        "org/model:draft=org/other:temperature=1,draft=suffix",
        "no-such-name",
    ):
        assert check_spec(spec) is None  # type: ignore[func-returns-value]


def test_a_drafts_own_options_go_before_the_targets() -> None:
    assert loading_options({}, "int8", "transformers") == {"dtype": "int8", "engine": "transformers"}
    assert loading_options({"dtype": "int4"}, "int8", "transformers") == {"dtype": "int4", "engine": "auto"}
    own = {"engine": "openvino", "num_tokens": 5}
    assert loading_options(own, "int8", "transformers") == {"dtype": "int8", **own}


def test_a_drafts_own_engine_does_not_get_a_dtype_that_it_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.models.loading.can_quantize", lambda bits: bits == 8)
    for engine, dtype in (
        ("llama.cpp", "int8"),
        ("llama.cpp", "float32"),
        ("openvino", "bfloat16"),
        ("transformers", "int4"),
    ):
        assert loading_options({"engine": engine}, dtype, "auto") == {"dtype": "auto", "engine": engine}
    for dtype in ("float64", "int8"):
        assert loading_options({"engine": "transformers"}, dtype, "auto")["dtype"] == dtype
    assert loading_options({"engine": "auto"}, "int4", "openvino")["dtype"] == "int4"
    said = {"engine": "llama.cpp", "dtype": "int8"}  # left to `load` to refuse
    assert loading_options(said, "auto", "auto") == said


def test_models_with_options_and_a_draft_of_their_own() -> None:
    plain = make_from_spec("org/draft", load, TARGET)
    assert isinstance(plain, ModelDrafter)
    assert plain.sampling is None
    warm = make_from_spec("/some/dir:with/colon.gguf:temperature=0.5,top_k=4", load, TARGET)
    assert isinstance(warm, ModelDrafter)
    assert warm.sampling is not None
    assert (warm.sampling.temperature, warm.sampling.top_k) == (0.5, 4)
    assert LOADED[-1] == "/some/dir:with/colon.gguf"
    make_from_spec("org/draft:dtype=int4,top_k=4,engine=openvino,num_tokens=3", load, TARGET)
    assert OWN == {"dtype": "int4", "engine": "openvino", "num_tokens": 3}
    nested = make_from_spec("a:num_draft_tokens=3,draft=b:top_k=2,draft=prompt-lookup:max_ngram=3", load, TARGET)
    assert isinstance(nested, SpeculativeDrafter)
    assert nested.name == "a < b < prompt-lookup"
    inner = nested.drafter
    assert isinstance(inner, SpeculativeDrafter)
    assert isinstance(inner.drafter, PromptLookupDrafter)
    assert inner.drafter.max_ngram == 3


def test_a_colon_in_an_existing_path_belongs_to_it(tmp_path: Path) -> None:
    odd = tmp_path / "model:draft=x"
    odd.mkdir()
    assert isinstance(make_from_spec(str(odd), load, TARGET), ModelDrafter)
    assert LOADED[-1] == str(odd)


def test_several_in_one_text_are_a_choice_too() -> None:
    """For commands that take each --draft by itself."""
    made = make_from_spec("prompt-lookup:max_ngram=3 + m", load, TARGET)
    assert isinstance(made, ChoiceDrafter)
    assert [type(part) for part in made.drafters] == [PromptLookupDrafter, ModelDrafter]
    named = make_drafter("prompt-lookup + random", TARGET)
    assert named is not None
    assert named.name == "prompt-lookup + random"
    assert is_named("random + suffix:min_match=3")
    assert not is_named("random + m")
    with pytest.raises(ParameterError, match="random has no option 'seed'"):
        check_spec("prompt-lookup + random:seed=1")


def test_several_make_a_choice() -> None:
    chosen = make_drafter(["prompt-lookup", table(2, 5), RandomDrafter()], TARGET)
    assert isinstance(chosen, ChoiceDrafter)
    assert chosen.name == "prompt-lookup + table-2 + random"
    with pytest.raises(ParameterError, match="different names"):
        make_drafter(["random", "random"], TARGET)
    with pytest.raises(ParameterError, match="draft must be"):
        make_drafter([], TARGET)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("prompt-lookup:length=3", "draft prompt-lookup has no option 'length': its options are max_ngram, min_ngram"),
        ("prompt-lookup:max_ngram=x", "max_ngram='x'"),
        ("suffix:memory=maybe", "memory='maybe'"),
        ("random:seed=1", "its options are none"),
        ("ngram", "needs a table"),
        ("m:temperature=hot", "temperature='hot'"),
        ("m:temperature=-1", "temperature must be"),
        ("m:wrong=1", "has no option 'wrong'"),
        ("m:num_draft_tokens=3", "belongs to a draft with a draft of its own"),
        ("m:vocabulary=half", "vocabulary must be intersection or text"),
        ("m:vocabulary=text,draft=random", "vocabulary and draft exclude each other"),
        ("m:vocabulary=text,top_k=3", "top_k belongs to a draft that samples"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(spec: str, message: str) -> None:
    with pytest.raises(OutriderError, match=message) as error:
        make_from_spec(spec, load, TARGET)
    assert "\n" not in str(error.value)
