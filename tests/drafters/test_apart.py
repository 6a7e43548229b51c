"""One drafter object in several generations at a time: each has what it is bound to and measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import outrider
from outrider.compare import compare
from outrider.costs import Costs
from outrider.draft_length import FixedLength
from outrider.drafters import (
    ChoiceDrafter,
    Drafter,
    EarlyExitDrafter,
    HeadDrafter,
    ModelDrafter,
    PromptLookupDrafter,
    SelfDrafter,
    SpeculativeDrafter,
    SuffixDrafter,
)
from outrider.drafters.apart import apart
from outrider.models.base import TextModel
from outrider.report.trace_header import _predicted
from tests.helpers.folders import save_model
from tests.helpers.heads import write_head

PROMPT = "the quick brown fox"
OPTIONS: dict[str, Any] = {"num_draft_tokens": 3, "max_new_tokens": 24, "temperature": 0.7, "seed": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def targets(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[TextModel, TextModel]:
    """Of other depths and weights."""
    other = save_model(tmp_path_factory.mktemp("other"), 7, num_hidden_layers=3)
    return outrider.load(target_folder, dtype="float64"), outrider.load(other, dtype="float64")


def one_of(kind: str, folder: Path, target: TextModel) -> Drafter:
    if kind == "head":
        return HeadDrafter(write_head(folder, "autoregressive", target.vocab_size))
    if kind == "choice":
        return ChoiceDrafter([SelfDrafter(temperature=0.5), PromptLookupDrafter()])
    if kind == "early exit":
        return EarlyExitDrafter(1)
    return SuffixDrafter(memory=True) if kind == "suffix" else SelfDrafter()


@pytest.mark.parametrize("kind", ["self", "early exit", "head", "choice", "suffix"])
def test_streams_of_two_targets_may_take_turns_with_one_drafter(
    kind: str, targets: tuple[TextModel, TextModel], tmp_path: Path
) -> None:
    if kind != "suffix":  # which remembers, so that its texts depend on what came before
        want = [outrider.generate(target, PROMPT, draft=one_of(kind, tmp_path, target), **OPTIONS) for target in targets]
    drafter = one_of(kind, tmp_path, targets[0])
    streams = [outrider.stream(target, PROMPT, draft=drafter, **OPTIONS) for target in targets]
    while not all(stream.result.finish_reason == "length" for stream in streams):
        for stream in streams:
            next(stream, None)
    if kind == "suffix":
        first, second = (stream.result.tokens for stream in streams)
        (memory,) = vars(drafter)["_memories"].values()
        for text in (first, second):
            assert any(list(memory.tokens[i : i + 24]) == text for i in range(len(memory.tokens)))
        return
    assert [stream.result.tokens for stream in streams] == [one.tokens for one in want]
    assert [[made.counts for made in stream.result.rounds] for stream in streams] == [
        [made.counts for made in one.rounds] for one in want
    ]


def test_what_is_inside_of_it_is_apart_too_and_models_and_memories_are_not(draft_folder: Path) -> None:
    model = outrider.load(draft_folder, dtype="float64")
    inner, memory = PromptLookupDrafter(), SuffixDrafter(memory=True)
    whole = ChoiceDrafter([SpeculativeDrafter(model, inner, FixedLength(2)), memory])
    own = apart(whole)
    assert isinstance(own, ChoiceDrafter)
    first, second = own.drafters
    assert isinstance(first, SpeculativeDrafter)
    assert own.name == whole.name
    assert not {id(one) for one in (whole, *whole.drafters, inner)} & {
        id(one) for one in (own, first, second, first.drafter)
    }
    assert first.model is model
    assert vars(second)["_memories"] is vars(memory)["_memories"]
    vars(whole.drafters[0])["_seconds"] = "changed"
    assert vars(first)["_seconds"] != "changed"


def test_one_of_a_users_own_class_stays_what_it_is() -> None:
    class Mine(PromptLookupDrafter):
        pass

    mine = Mine()
    assert apart(mine) is mine


def test_predictions_know_what_was_measured_for_the_copies(targets: tuple[TextModel, TextModel], draft_folder: Path) -> None:
    target, drafter = targets[0], ModelDrafter(outrider.load(draft_folder, dtype="float64"))
    options: dict[str, Any] = {"num_draft_tokens": 2, "max_new_tokens": 8, "ignore_eos": True}
    found = compare(target, PROMPT, drafter, options, lambda _: None)
    assert found.draft_seconds[drafter.name].token > 0.0
    result = outrider.generate(target, PROMPT, draft=(again := ModelDrafter(drafter.model)), **options)
    costs = Costs({1: 1e-9, 9: 1e-9})  # so that the draft's time is all that is predicted
    assert _predicted(result, again, costs) == pytest.approx(again.seconds.token * result.stats.drafted, rel=0.5)
    assert again.seconds.token > 0.0
