"""Beam search is transformers' own, and speculation changes nothing but the number of passes.

On tables the comparisons are to the bit: a table's logits do not depend on the shape of a pass. The engines that break
roll-back or copying are the negative controls.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.beam import BeamDecoder, BeamSettings, beam_search
from outrider.beam.draft import draft_model
from outrider.beam.length import BeamLength
from outrider.beam.records import BeamRound
from outrider.beam.state import Finished
from outrider.cli.main import run
from outrider.drafters import ModelDrafter, PromptLookupDrafter
from outrider.errors import ParameterError
from outrider.models.base import CopiesPrefixes, LanguageModel
from outrider.models.base import Sequence as ModelSequence
from outrider.models.loading import load_transformers
from outrider.models.table import TableModel, TableSequence
from outrider.models.transformers_model import TransformersModel
from outrider.sampling import SamplingSettings
from outrider.settings.beams import EarlyStopping
from tests.helpers.marks import thinned
from tests.helpers.samples import RollbackOffByOne, StaleAfterRollback
from tests.helpers.tiny_models import module, tiny
from tests.helpers.toys import PROMPT, table

PENALTIES = (0.0, 1.0, 2.0, -1.0)
STOPPING: tuple[EarlyStopping, ...] = (False, True, "never")
V = 4
END = frozenset({2})


class NoCopies:
    """A table behind the bare contract: no `copy_prefix`."""

    def __init__(self, model: TableModel) -> None:
        self._model = model
        self.name, self.vocab_size, self.max_length = model.name, model.vocab_size, model.max_length
        self.device = model.device

    def open(self, reserve: int = 0) -> TableSequence:
        return self._model.open(reserve)

    def score(self, *arguments: Any) -> torch.Tensor | None:
        return self._model.score(*arguments)


def search(
    target: LanguageModel,
    settings: BeamSettings,
    draft: LanguageModel | None = None,
    steps: int = 0,
    new_tokens: int = 6,
    eos: frozenset[int] = END,
    prompt: Sequence[int] = PROMPT,
    wide: int | None = None,
) -> tuple[tuple[Finished, ...], list[BeamRound]]:
    decoder = BeamDecoder(target, prompt, settings, new_tokens, eos, draft, BeamLength(steps), wide)
    rounds = list(decoder.rounds())
    assert decoder.state.done
    return decoder.state.finished, rounds


@pytest.mark.parametrize("width", thinned(range(1, 9), every=3))
def test_beam_search_is_that_of_transformers(width: int) -> None:
    """Texts and scores, for every penalty and way of stopping. transformers adds up in float32: scores to 1e-4."""
    architecture = ("Llama", "GPT2")[width % 2]
    theirs, ours = module(architecture, width), tiny(architecture, width)
    prompt = [1, 5, 9 + width]
    free, _ = search(ours, BeamSettings(8), new_tokens=8, eos=frozenset(), prompt=prompt)
    eos = sorted({free[0].tokens[3], free[-1].tokens[2], free[3].tokens[6]})  # within reach of the search
    ended = 0
    for penalty, early in itertools.product(PENALTIES, STOPPING):
        with torch.no_grad():
            out = theirs.generate(
                torch.tensor([prompt]),
                num_beams=width,
                num_return_sequences=width,
                max_new_tokens=8,
                do_sample=False,
                eos_token_id=eos,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
                **({"length_penalty": penalty, "early_stopping": early} if width > 1 else {}),
            )
        found, _ = search(ours, BeamSettings(width, penalty, early, width), new_tokens=8, eos=frozenset(eos), prompt=prompt)
        wanted = [cut(row[len(prompt) :], eos) for row in out.sequences.tolist()]
        assert [list(one.tokens) for one in found] == wanted
        ended += sum(one.reason == "eos" for one in found)
        if width > 1:
            assert [one.score for one in found] == pytest.approx(out.sequences_scores.tolist(), abs=1e-4)
    assert ended


def cut(tokens: list[int], eos: list[int]) -> list[int]:
    """Up to the end token; transformers pads behind it."""
    return next((tokens[: i + 1] for i, token in enumerate(tokens) if token in eos), tokens)


@pytest.mark.parametrize("penalty", PENALTIES)
def test_beams_wider_than_all_texts_find_them_all_in_order(penalty: float) -> None:
    """Against plain enumeration of every text of at most three tokens."""
    target = table(3, 3)
    found, _ = search(target, BeamSettings(64, penalty), new_tokens=3)
    every = []
    for length in (1, 2, 3):
        for text in itertools.product(range(3), repeat=length):
            if 2 not in text[:-1] and (text[-1] == 2 or length == 3):
                whole = [*PROMPT, *text]
                laws = [target.probs_after(whole[: len(PROMPT) + i])[token] for i, token in enumerate(text)]
                total = float(torch.stack(laws).log().sum())
                every.append((total / length**penalty, text))
    every.sort(reverse=True)
    assert [one.tokens for one in found] == [text for _, text in every]
    assert [one.score for one in found] == pytest.approx([score for score, _ in every])


@pytest.mark.parametrize("width", thinned(range(1, 9), every=3))
def test_speculative_and_plain_beams_are_the_same_to_the_bit(width: int) -> None:
    """All penalties, ways of stopping, draft lengths and kinds of draft; one engine that copies and one that can't."""
    target, ended, accepted = table(1, V), 0, 0
    near = TableModel(0.7 * target._probs + 0.3 * table(5, V)._probs, "near")
    drafts = {"far": table(2, V), "near": near, "same": table(1, V), "flat": TableModel(torch.ones(V, V) / V)}
    for penalty, early in itertools.product(PENALTIES, STOPPING):
        settings = BeamSettings(width, penalty, early)
        plain, _ = search(target, settings)
        ended += sum(one.reason == "eos" for one in plain)
        for i, (name, draft) in enumerate(drafts.items()):
            for steps in (1, 2, 5):
                engine = (target, NoCopies(target))[(i + steps) % 2]
                found, rounds = search(engine, settings, draft, steps, wide=width + steps % 3)
                assert found == plain, (penalty, early, name, steps)
                accepted += sum(one.accepted for one in rounds) if name == "near" else 0
    assert ended or width == 1  # greedy, this table never ends; the comparison with transformers does
    assert accepted


@pytest.mark.parametrize("seed", range(4))
def test_equal_scores_are_ordered_alike(seed: int) -> None:
    """Laws with many equal probabilities, some of them zero: ties at every edge."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randint(0, 3, [5, 5, 5], generator=generator).double()
    weights[..., seed] += 1.0
    target = TableModel(weights / weights.sum(-1, keepdim=True))
    for width in (1, 2, 3, 5, 8):
        plain, _ = search(target, BeamSettings(width, early_stopping="never"), new_tokens=5)
        for draft in (target, table(seed, 5)):
            assert search(target, BeamSettings(width, early_stopping="never"), draft, 3, new_tokens=5)[0] == plain


@pytest.mark.parametrize("width", [1, 3, 8])
def test_a_perfect_draft_has_every_step_accepted(width: int) -> None:
    """A stale or misplaced row of the draft would leave the texts right and lose acceptance: so that is asserted."""
    target = table(1, V)
    _, rounds = search(target, BeamSettings(width), table(1, V), 2, new_tokens=9, eos=frozenset())
    assert [(one.steps, one.drafted, one.accepted) for one in rounds] == [(3, 2, 2)] * 3


class WrongCopies(TableModel):
    """Copies all but the last token, which becomes another one."""

    def copy_prefix(self, source: ModelSequence, target: ModelSequence, length: int) -> None:
        assert isinstance(target, TableSequence)
        before = target.length
        super().copy_prefix(source, target, length)
        if length > before:
            target.tokens[-1] = (target.tokens[-1] + 1) % self.vocab_size


@pytest.mark.parametrize("broken", [WrongCopies, RollbackOffByOne, StaleAfterRollback])
def test_engines_that_lose_track_are_noticed(broken: type[TableModel]) -> None:
    settings = BeamSettings(4, early_stopping="never")
    good, bad = table(1, V), broken(table(1, V)._probs)
    assert isinstance(bad, CopiesPrefixes)
    right = search(good, settings, table(2, V), 3)[0]
    assert right == search(good, settings)[0]
    assert search(bad, settings, table(2, V), 3)[0] != right


def test_drafts_cost_passes_only_and_the_records_add_up() -> None:
    target = table(1, V)
    _, plain = search(target, BeamSettings(3), new_tokens=12, eos=frozenset())
    _, fast = search(target, BeamSettings(3), table(1, V), 3, new_tokens=12, eos=frozenset())
    assert sum(one.steps for one in fast) == sum(one.steps for one in plain) == len(plain) == 12
    assert len(fast) == 3
    for one in [*plain, *fast]:
        assert one.steps == one.accepted + 1
        assert one.scored == one.hypotheses + one.again
        assert one.rows <= one.hypotheses
    assert all(one.again == 0 for one in plain)  # an engine that copies scores nothing twice


def test_rows_that_are_scored_lie_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after drafted rounds, which open more of them: others would be gathered from the whole cache in every layer."""
    target, draft = tiny("Llama", 3), tiny("Llama", 4)
    seen: list[tuple[str, list[int]]] = []
    whole = TransformersModel.score

    def spy(model: TransformersModel, sequences: Sequence[Any], *arguments: Any) -> torch.Tensor | None:
        seen.append((model.name, sorted(sequence.slot for sequence in sequences)))
        return whole(model, sequences, *arguments)

    monkeypatch.setattr(TransformersModel, "score", spy)

    class Alternating(BeamLength):
        def plan(self) -> int:
            self.turn = (getattr(self, "turn", 0) + 1) % 3
            return 2 * (self.turn == 1)

    decoder = BeamDecoder(target, [1, 5, 9], BeamSettings(4), 14, frozenset(), draft, Alternating())
    list(decoder.rounds())
    wanted = search(target, BeamSettings(4), new_tokens=14, eos=frozenset(), prompt=[1, 5, 9])[0]
    assert decoder.state.finished == wanted
    assert max(len(slots) for name, slots in seen if name == target.name) > 4
    assert all(slots == list(range(len(slots))) for _, slots in seen)


def test_contexts_end_the_search_or_the_drafting() -> None:
    """A target whose context is full ends there; a draft with a shorter one drafts as far as it reaches."""
    wide, short = table(1, V), TableModel(table(1, V)._probs, max_length=6)
    ends = search(short, BeamSettings(3), table(2, V), 3, new_tokens=50, eos=frozenset())[0]
    assert ends == search(wide, BeamSettings(3), new_tokens=4, eos=frozenset())[0]
    found, rounds = search(wide, BeamSettings(3), short, 3, new_tokens=9, eos=frozenset())
    assert found == search(wide, BeamSettings(3), new_tokens=9, eos=frozenset())[0]
    assert rounds[0].drafted == 3
    assert rounds[-1].drafted == 0


def test_a_draft_without_a_law_ends_the_drafting_only() -> None:
    probs = table(2, V)._probs.clone()
    probs[..., 1, :] = 0.0
    found, rounds = search(table(1, V), BeamSettings(3), TableModel(probs), 3, new_tokens=9, eos=frozenset())
    assert found == search(table(1, V), BeamSettings(3), new_tokens=9, eos=frozenset())[0]
    assert max(one.drafted for one in rounds) > 0
    whole = search(table(1, V), BeamSettings(3), table(2, V), 3, new_tokens=9, eos=frozenset())[1]
    assert (whole[0].drafted, rounds[0].drafted) == (3, 0)


def test_sequences_are_closed_whatever_ends_the_search() -> None:
    target = tiny("Llama", 3)
    decoder = BeamDecoder(target, [1, 5], BeamSettings(3), 20, draft=tiny("Llama", 4), length=BeamLength(2))
    for _ in decoder.rounds():
        break
    assert not target._open
    assert not tiny("Llama", 4)._open


@pytest.mark.parametrize("architecture", ["Llama", "Mistral", "Gemma3"])
def test_speculative_beams_on_the_engine_are_the_plain_ones(architecture: str) -> None:
    """float64 and random weights: no near-ties, so the texts are equal; scores to 1e-9. Sliding windows included."""
    target, draft = tiny(architecture, 0), tiny(architecture, 1)
    for width, wide in ((2, 2), (4, 7)):
        settings = BeamSettings(width, 0.5, "never")
        plain, _ = search(target, settings, new_tokens=12, eos=frozenset({2, 7}), prompt=[1, 5, 8, 13])
        for other in (draft, target):
            found, _ = search(target, settings, other, 3, 12, frozenset({2, 7}), [1, 5, 8, 13], wide)
            assert [one.tokens for one in found] == [one.tokens for one in plain]
            assert [one.score for one in found] == pytest.approx([one.score for one in plain], abs=1e-9)


def test_what_makes_no_sense_is_refused() -> None:
    for wrong in ({"num_beams": 0}, {"num_beams": True}, {"num_beams": 65}, {"num_beams": 2, "num_return_sequences": 3}):
        with pytest.raises(ParameterError, match=list(wrong)[-1]):
            BeamSettings(**wrong)
    for early in (1, "yes", None):
        with pytest.raises(ParameterError, match="early_stopping"):
            BeamSettings(2, early_stopping=early)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="length_penalty"):
        BeamSettings(2, length_penalty=float("nan"))
    with pytest.raises(ParameterError, match="can't draft for beam search"):
        draft_model(PromptLookupDrafter())
    with pytest.raises(ParameterError, match="can't sample for beam search"):
        draft_model(ModelDrafter(table(1, V), SamplingSettings(temperature=0.5)))
    with pytest.raises(ParameterError, match="draft_beams"):
        BeamDecoder(table(1, V), PROMPT, BeamSettings(3), 4, draft_beams=2)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--num-beams", "2", "--temperature", "0.7"], "--temperature can't be combined with --num-beams"),
        (["--num-beams", "2", "--repetition-penalty", "1.2"], "--repetition-penalty can't be combined"),
        (["--num-beams", "2", "--stop", "x"], "--stop can't be combined"),
        (["--num-beams", "2", "--seed", "0"], "--seed can't be combined"),
        (["--num-beams", "2", "--lenience", "0.5"], "--lenience can't be combined"),
        (["--num-beams", "2", "--draft", "prompt-lookup"], "can't draft for beam search"),
        (["--num-beams", "2", "--compare"], "compare needs a draft"),
        (["--num-beams", "2", "--num-draft-tokens", "5"], "num_draft_tokens needs a draft"),
        (["--length-penalty", "2"], "length_penalty belongs to beam search"),
        (["--num-beams", "1", "--length-penalty", "2"], "length_penalty ranks the texts of several beams"),
        (["--num-beams", "2", "--num-draft-tokens", "optimal:0.5", "--draft", "self"], "must be a number or auto"),
    ],
)
def test_the_command_refuses_in_one_line(
    options: list[str], told: str, target_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", "hello", "--target", str(target_folder), "--dtype", "float32", *options]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert told in shown.err


def test_the_command_prints_one_object_and_compares(
    target_folder: Path, draft_folder: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["generate", "the quick", "--target", str(target_folder), "--dtype", "float64", "--max-new-tokens", "12"]
    common += ["--num-beams", "4", "--num-return-sequences", "2", "--length-penalty", "0.5", "--early-stopping", "never"]
    assert run([*common, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert run([*common, "--json", "--draft", str(draft_folder), "--num-draft-tokens", "2", "--compare"]) == 0
    both = json.loads(capsys.readouterr().out)
    assert both["identical"]
    assert [one["tokens"] for one in both["sequences"]] == [one["tokens"] for one in plain["sequences"]]
    assert both["tokens"] == plain["tokens"] == plain["sequences"][0]["tokens"]
    assert len(plain["sequences"]) == 2
    assert plain["stats"]["drafted"] == 0 < both["stats"]["drafted"]
    assert both["plain"]["stats"]["passes"] == plain["stats"]["passes"]
    assert run(common) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("[1] score ")
    assert "[2] score " in shown.out
    assert shown.err == ""


def test_the_bench_reports_cost_and_agreement(
    target_folder: Path, draft_folder: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two widths, plain and two numbers of steps, resumed from the log; in float64 all texts are the same."""
    prompts, log = tmp_path / "prompts.jsonl", tmp_path / "runs.jsonl"
    prompts.write_text('{"prompt": "the quick brown"}\n{"prompt": "def f(x):"}\n')
    command = ["bench", "beams", "--target", str(target_folder), "--draft", str(draft_folder), "--dtype", "float64"]
    command += ["--task", f"jsonl:{prompts}", "--num-beams", "1", "--num-beams", "3", "--num-draft-tokens", "2"]
    command += ["--num-draft-tokens", "auto", "--max-new-tokens", "10", "--log", str(log), "--json"]
    assert run(command) == 0
    out = json.loads(capsys.readouterr().out)
    assert [(row["width"], row["drafted"]) for row in out["rows"]] == [
        (width, drafted) for width in (1, 3) for drafted in ("plain", "2", "auto")
    ]
    assert len(log.read_text().splitlines()) == 1 + 2 * 6
    for row in out["rows"]:
        assert row["identical"] == row["prompts"] == 2
        assert row["score_gap"] < 1e-9
        assert (row["acceptance"] is None) == (row["drafted"] == "plain")
        assert row["scored_per_step"] >= (1 if row["drafted"] == "plain" else row["width"] - 1)
    assert run([*command[:-1], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == out["rows"]


def test_a_search_that_is_cancelled_gives_what_there_is(target_folder: Path) -> None:
    target, asked = load_transformers(target_folder, dtype="float64"), iter([False, False, True])
    found = beam_search(target, "the quick", num_beams=2, ignore_eos=True, cancelled=lambda: next(asked))
    assert (found.finish_reason, len(found.tokens), found.stats.passes) == ("cancelled", 2, 2)
