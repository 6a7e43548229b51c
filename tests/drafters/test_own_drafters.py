"""A drafter of a user's own: by name, exact, and refused in one line where it breaks the contract."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import outrider
from outrider.audit.verdict import EXACT, EXIT, UNCLEAR
from outrider.cli.main import run as command
from outrider.costs import Costs
from outrider.decode import Decoder, Request, decode
from outrider.draft_length import AdaptiveLength, FixedLength
from outrider.draft_length.base import Prospect
from outrider.drafters import (
    ChoiceDrafter,
    DraftContext,
    Drafter,
    DraftRow,
    Plan,
    PromptLookupDrafter,
    Proposal,
    padded_proposal,
)
from outrider.drafters.checked import _with_good_values
from outrider.errors import ParameterError
from outrider.forced import draft_laws_along
from outrider.randomness import RandomStream
from outrider.sampling import SamplingSettings
from tests.helpers.marks import slow
from tests.helpers.samples import ALARM, LENGTH, V, p_value, samples_of
from tests.helpers.toys import PROMPT, SETTINGS, table

WARM = SETTINGS["temperature 1"]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(autouse=True)
def there(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the folder of the examples, as their heading says."""
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.setattr(sys, "path", [*sys.path, str(EXAMPLES)])


def own(name: str, *arguments: Any) -> Drafter:
    made: Drafter = getattr(import_module("own_drafters"), name)(*arguments)
    return made


def test_phrases_are_proposed_and_change_nothing(target_folder: Path) -> None:
    target = outrider.load(target_folder, dtype="float64")
    options: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True}
    plain = outrider.generate(target, "the quick", draft=None, **options)
    tokenizer = target.tokenizer
    pieces = [plain.tokens[i : i + 3] for i in range(38)]
    phrase = next(text for one in pieces if tokenizer.encode(text := tokenizer.decode(one)) == one)
    phrases = own("PhraseDrafter", [phrase])
    together: list[Any] = [phrases, "random"]
    drafts: list[Any] = [phrases, together]
    for draft in drafts:
        result = outrider.generate(target, "the quick", draft=draft, num_draft_tokens=4, **options)
        assert result.tokens == plain.tokens
        assert result.stats.accepted > 0
        assert "phrases" in {record.drafter for record in result.rounds if record.accepted}


BEFORE = [0, 1, 0, 2, 1, 0, 0, 2, 2, 1, 1, 2, 0, *PROMPT]  # after each token, each was there


def p_value_with(drafter: Drafter, length: int) -> tuple[float, int]:
    """→ that of the joint law of four tokens, the tokens accepted"""
    target = table(1, V)
    requests = [Request(BEFORE, LENGTH, RandomStream(0, i)) for i in range(samples_of(WARM))]
    tokens, rounds = decode(target, requests, WARM, drafter, FixedLength(length))
    return p_value(tokens, target, WARM), sum(record.accepted for row in rounds for record in row)


@pytest.mark.parametrize("length", [slow(1), 3])
def test_followers_keep_the_law(length: int) -> None:
    p, accepted = p_value_with(own("FollowerDrafter"), length)
    assert p > ALARM
    assert accepted > 500


def test_laws_that_sum_to_nearly_1_are_tested_as_they_were_drawn_from() -> None:
    """As a softmax in half precision gives them."""
    law = torch.tensor([[[0.8, 0.2, 0.0], [0.5, 0.25, 0.25]], [[0.1, 0.1, 0.8], [0.0, 1.0, 0.0]]])
    loose = law * torch.tensor([[[1.0009], [1.0]], [[0.9992], [1.0]]])
    made = Proposal(torch.tensor([[0, 1], [2, 1]]), [2, 1], loose.clone()).knowing([[0, 1], [2]])
    checked = _with_good_values("drafter x", made, 3)
    assert checked.probs is not None
    torch.testing.assert_close(checked.probs, law, rtol=0, atol=1e-7)
    assert checked.known == made.known
    assert made.probs is not None
    assert torch.equal(made.probs, loose)  # it is the drafter's own


@pytest.mark.slow
def test_one_that_withholds_what_it_drew_is_found() -> None:
    """The third rule of docs/writing-a-drafter.md; the test of the law sees who breaks it."""

    class Withholding(type(own("FollowerDrafter"))):  # type: ignore[misc]
        def propose(self, *args: Any) -> Proposal:
            proposal = super().propose(*args)
            kept = [0 if 0 in row else len(row) for row in proposal.on_host()]
            return Proposal(proposal.tokens, kept, proposal.probs)

    assert p_value_with(Withholding(), 1)[0] < ALARM


def test_the_command_line_takes_and_audits_it(target_folder: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--target", str(target_folder), "--dtype", "float32", "--draft", "python:make=own_drafters.FollowerDrafter"]
    assert command(["generate", "the the the", *options, "--max-new-tokens", "20", "--json", "--temperature", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["stats"]["drafted"] > 0
    assert command(["audit", *options, "--tokens", "1000", "--json"]) in (EXIT[EXACT], EXIT[UNCLEAR])
    assert json.loads(capsys.readouterr().out)["draft"] == "followers"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        ("", "python:make=MODULE.NAME"),
        ("Drafter", "python:make=MODULE.NAME"),
        ("no_such_module.Drafter", "can't be made (ModuleNotFoundError: No module named 'no_such_module')"),
        ("own_drafters.NoSuch", "has no attribute 'NoSuch'"),
        ("outrider.drafters.ModelDrafter", "can't be made (TypeError: "),
        ("outrider.drafters.Drafter", "can't be made (TypeError: "),
        ("collections.OrderedDict", "must be a subclass of outrider.drafters.Drafter"),
    ],
)
def test_one_that_can_not_be_made_is_refused_in_one_line(make: str, said: str, target_folder: Path, capsys: Any) -> None:
    options = ["--draft", f"python:make={make}", "--max-new-tokens", "3"]
    assert command(["generate", "a", "--target", str(target_folder), *options]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1


FORMS: dict[str, tuple[Callable[[Proposal], Any], str]] = {
    "a list": (lambda made: made.on_host(), "must propose a Proposal"),
    "nothing": (lambda made: None, "must propose a Proposal"),
    "too long": (
        lambda made: Proposal(made.tokens.repeat(1, 9), [9 * n for n in made.lengths]),
        "tokens where 2 were allowed",
    ),
    "negative": (lambda made: Proposal(made.tokens, [-1]), "proposed -1 tokens"),
    "one row": (lambda made: Proposal(made.tokens[0], made.lengths), r"tokens \[1, K\]"),
    "another row": (lambda made: Proposal(made.tokens, [*made.lengths, 1]), r"tokens \[1, K\]"),
    "lengths": (lambda made: Proposal(made.tokens[:, :1], [2]), r"got \[1, 1\] and lengths \[2\]"),
    "laws": (
        lambda made: Proposal(made.tokens, made.lengths, torch.ones(*made.tokens.shape, 3)),
        r"distributions \[1, 2, 5\]",
    ),
    "tokens in a list": (
        lambda made: Proposal(any_of(made.tokens.tolist()), made.lengths),
        "tokens as an int64 tensor, got list",
    ),
    "sparse laws": (
        lambda made: Proposal(made.tokens, made.lengths, torch.full((*made.tokens.shape, 5), 0.2).to_sparse()),
        "sparse",
    ),
    "other tokens than it says": (lambda made: retold(padded_proposal([[1, 2]], made.tokens.device)), "must not change"),
    "halves": (lambda made: Proposal(made.tokens.float(), made.lengths), "int64 tensor, got one of torch.float32"),
    "half a length": (lambda made: Proposal(made.tokens, any_of([1.5])), r"whole numbers, got \[1.5\]"),
    "an array": (lambda made: Proposal(made.tokens, made.lengths, numpy_laws(made)), "float32 or float64, got ndarray"),
    "bfloat16": (lambda made: with_laws(made, [0.5, 0.5, 0.0, 0.0, 0.0], torch.bfloat16), "got one of torch.bfloat16"),
    "signals": (lambda made: replace(made, signals=any_of("x")), r"a whole number for each token of a row, .* \[2\]"),
    "too few signals": (lambda made: replace(made, signals=[[1]]), r"got \[\[1\]\]"),
    "alternatives": (lambda made: replace(made, beside=any_of(3)), "alternatives as Alternatives, got int"),
    "candidates": (lambda made: replace(made, candidates=any_of(3)), "candidates as a list for each row, got 3"),
    "no such token": (lambda made: Proposal(made.tokens + 5, made.lengths), r"tokens in 0 … 4, got 6"),
    "before the first": (lambda made: Proposal(-made.tokens, made.lengths), r"tokens in 0 … 4, got -1"),
    "too much": (lambda made: with_laws(made, [1.0] * 5), "got a sum of 5 and a least probability of 1 for token 0"),
    "too little": (lambda made: with_laws(made, [0.02] * 5), "got a sum of 0.1 "),
    "negative laws": (lambda made: with_laws(made, [-0.2, 0.5, 0.3, 0.2, 0.2]), "a least probability of -0.2"),
    "no number": (lambda made: with_laws(made, [torch.nan, 0.5, 0.5, 0.0, 0.0]), "got a sum of nan"),
    "never drawn": (lambda made: with_laws(made, [0.5, 0.0, 0.0, 0.5, 0.0]), "got token 0 of its draft with probability 0"),
}


def any_of(value: Any) -> Any:
    """Of whatever type."""
    return value


def with_laws(made: Proposal, law: list[float], dtype: torch.dtype = torch.float32) -> Proposal:
    return Proposal(made.tokens, made.lengths, torch.tensor(law, dtype=dtype).expand(*made.tokens.shape, -1))


def numpy_laws(made: Proposal) -> Any:
    return torch.full((*made.tokens.shape, 5), 0.2).numpy()


def retold(made: Proposal) -> Proposal:
    made.tokens.fill_(3)
    return made


def test_types_and_padding_of_other_kinds_are_taken() -> None:
    """NumPy's lengths, int32 tokens, anything behind a row's own."""

    class Loose(PromptLookupDrafter):
        def propose(self, rows: list[DraftRow], plans: list[Plan], context: DraftContext) -> Any:  # type: ignore[override]
            made = super().propose(rows, plans, context)
            tokens = torch.full((len(rows), made.tokens.shape[1] + 2), -1, dtype=torch.int32)
            for i, length in enumerate(made.lengths):
                tokens[i, :length] = made.tokens[i, :length]
            return Proposal(tokens, any_of([np.int64(length) for length in made.lengths]))

    def written(drafter: Drafter, sampling: SamplingSettings) -> list[list[int]]:
        requests = [Request([1, 2, 1, 2], 12, RandomStream(0)), Request([3, 1, 4], 12, RandomStream(1))]
        return decode(table(1, 5), requests, sampling, drafter, FixedLength(3))[0]

    for sampling in (SamplingSettings(), WARM):
        assert written(Loose(), sampling) == written(PromptLookupDrafter(), sampling)


PROSPECTS: dict[str, tuple[Any, str]] = {
    "none": ([], r"a list of one Prospect or more, got \[\]"),
    "nothing": (None, "a list of one Prospect or more, got None"),
    "another thing": ([3], r"a list of one Prospect or more, got \[3\]"),
    "negative": ([Prospect("own", longest=-1)], "whose longest is 0 or more, got -1"),
    "nameless": ([Prospect(any_of(None))], "prospects with a name, a text, got None"),
    "seconds that are text": ([Prospect("own", step_seconds=any_of("a"))], "whose step_seconds are 0 or more, got 'a'"),
    "no seconds": ([Prospect("own", start_seconds=math.nan)], "whose start_seconds are 0 or more, got nan"),
    "too sure": ([Prospect("own", first=7.0)], r"whose first is in \[0, 1\], got 7.0"),
    "less than never": ([Prospect("own", later=-0.5)], r"whose later is in \[0, 1\], got -0.5"),
    "not known": ([Prospect("own", first=math.nan)], r"whose first is in \[0, 1\], got nan"),
    "no weight": ([Prospect("own", tests=0.0)], "whose tests are more than 0, got 0.0"),
    "a kind without a hash": ([Prospect("own", kind=any_of([1]))], r"whose kind has a hash, got \[1\]"),
}


@pytest.mark.parametrize("name", PROSPECTS)
def test_what_are_no_prospects_is_refused_in_one_line(name: str) -> None:
    offered, said = PROSPECTS[name]

    class Hopeless(PromptLookupDrafter):
        def prospects(self, row: DraftRow) -> Any:
            return offered

    for drafter in (Hopeless(), ChoiceDrafter([Hopeless()])):
        for length in (FixedLength(2), AdaptiveLength(Costs({1: 1.0}))):
            with pytest.raises(ParameterError, match=said) as error:
                decode(table(1, 5), [Request([1, 2, 1, 2], 9, RandomStream(0))], SamplingSettings(), drafter, length)
            assert "\n" not in str(error.value)


def test_what_is_measured_along_a_text_is_checked_too() -> None:
    """Audits, `tune` and `bench alpha` tell of laws that nobody draws from otherwise."""

    class Twice(PromptLookupDrafter):
        def propose(self, rows: list[DraftRow], plans: list[Plan], context: DraftContext) -> Proposal:  # type: ignore[override]
            made = super().propose(rows, plans, context)
            probs = 2.0 * torch.nn.functional.one_hot(made.tokens, context.vocab_size).double()
            return Proposal(made.tokens, made.lengths, probs)

    target, tokens = table(1, 5), [1, 2, 1, 2, 1]
    laws = draft_laws_along(PromptLookupDrafter(), target, tokens, 3, WARM)
    assert torch.cat(list(laws)).argmax(-1).tolist() == [2, 1]
    with pytest.raises(ParameterError, match="drafter prompt-lookup must propose distributions"):
        list(draft_laws_along(Twice(), target, tokens, 3, WARM))


def test_one_without_a_name_is_refused() -> None:
    class Nameless(Drafter):
        def propose(self, *args: Any) -> Proposal:
            raise AssertionError

    with pytest.raises(ParameterError, match="drafter Nameless must have a name"):
        decode(table(1, 5), [Request([1, 2], 9, RandomStream(0))], SamplingSettings(), Nameless(), FixedLength(2))


@pytest.mark.parametrize("name", FORMS)
def test_what_is_no_proposal_is_refused_in_one_line(name: str) -> None:
    turn, said = FORMS[name]

    class Formless(PromptLookupDrafter):
        def propose(self, rows: list[DraftRow], plans: list[Plan], context: DraftContext) -> Any:  # type: ignore[override]
            return turn(super().propose(rows, plans, context))

    for drafter in (Formless(), ChoiceDrafter([Formless()])):
        with pytest.raises(ParameterError, match=said) as error:
            decode(table(1, 5), [Request([1, 2, 1, 2], 9, RandomStream(0))], SamplingSettings(), drafter, FixedLength(2))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("where", ["propose", "observe", "processor"])
def test_after_a_round_that_failed_no_other_is_made(where: str) -> None:
    """What it left in rows and sequences can't be gone on from: a wrong text, if it were."""
    calls: list[int] = []

    def third_fails() -> None:
        calls.append(0)
        if len(calls) == 3:
            raise RuntimeError("a fault of the user's")

    class Faulty(PromptLookupDrafter):
        def propose(self, rows: list[DraftRow], plans: list[Plan], context: DraftContext) -> Proposal:  # type: ignore[override]
            if where == "propose":
                third_fails()
            return super().propose(rows, plans, context)

        def observe(self, rows: list[DraftRow]) -> None:  # type: ignore[override]
            if where == "observe":
                third_fails()

    def processor(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if where == "processor":
            third_fails()
        return scores

    sampling = SamplingSettings(processors=(processor,))
    decoder = Decoder(table(1, 5), [], sampling, Faulty(), FixedLength(3))
    decoder.admit([Request([1, 2, 1, 2], 20, RandomStream(0))])
    with pytest.raises(RuntimeError, match="user's"):
        list(iter(decoder.step, []))
    with pytest.raises(ParameterError, match="an earlier round has failed"):
        decoder.step()
    with pytest.raises(ParameterError, match="an earlier round has failed"):
        decoder.admit([Request([1, 2], 5, RandomStream(1))])
    decoder.close()


def test_nor_after_a_drafter_that_could_not_begin() -> None:
    class Unready(PromptLookupDrafter):
        def begin(self, rows: list[DraftRow], context: DraftContext) -> None:  # type: ignore[override]
            raise RuntimeError("not ready")

    decoder = Decoder(table(1, 5), [], SamplingSettings(), Unready(), FixedLength(3))
    with pytest.raises(RuntimeError, match="not ready"):
        decoder.admit([Request([1, 2, 1, 2], 20, RandomStream(0))])
    with pytest.raises(ParameterError, match="an earlier round has failed"):
        decoder.step()
    decoder.close()
