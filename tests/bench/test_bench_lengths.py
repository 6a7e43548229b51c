"""Policies on recorded texts: copies asked anew, what models draft drawn once, by the law of draft and text together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from scipy import stats

import outrider
from outrider.bench.chains import RecordedChains, _Coupled, draws_chains, record_chains
from outrider.bench.lengths import check_replayed, replay
from outrider.bench.recorded import Recorded, cells_of, record
from outrider.bench.tasks import Task
from outrider.cli.main import cli
from outrider.costs import Costs
from outrider.decode import decode
from outrider.draft_length import AdaptiveLength, DraftLength, FixedLength
from outrider.draft_length.predicted import plain_seconds, predicted_seconds
from outrider.drafters import (
    ChoiceDrafter,
    Drafter,
    EarlyExitDrafter,
    HeadDrafter,
    ModelDrafter,
    PromptLookupDrafter,
    RandomDrafter,
    SpeculativeDrafter,
    SuffixDrafter,
)
from outrider.errors import ParameterError
from outrider.models.base import LanguageModel
from outrider.randomness import RandomStream
from outrider.sampling import SamplingSettings
from tests.helpers.enumerate import target_joint
from tests.helpers.heads import write_head
from tests.helpers.marks import thinned
from tests.helpers.requests import GREEDY, requests
from tests.helpers.samples import ALARM, V, run
from tests.helpers.tiny_models import tiny
from tests.helpers.toys import PROMPT, SETTINGS, law_of, table

DRAWN = SETTINGS["temperature 1"]


def test_policies_are_replayed_on_what_the_model_wrote(target_folder: Path, flat_costs: Costs) -> None:
    """The replayed rounds are those of the model itself, and no length beats the oracle where passes cost much the same."""
    model = outrider.load(target_folder, dtype="float64")
    tasks = [Task("words", "the quick brown fox"), Task("digits", "0123 0123 0123")]
    for text in record(model, tasks, 60):
        live = outrider.generate(
            model,
            text.tokens[: text.prompt_tokens],
            draft="prompt-lookup",
            num_draft_tokens=4,
            max_new_tokens=60,
            ignore_eos=True,
        )
        cell = replay(model, [text], PromptLookupDrafter(), flat_costs)
        assert text.tokens[text.prompt_tokens :] == live.tokens
        costs, plain = flat_costs, plain_seconds(live.rounds, flat_costs, text.prompt_tokens)
        assert cell.fixed[4] == pytest.approx(plain / predicted_seconds(live.rounds, costs, {}, text.prompt_tokens))
        assert cell.against_best_fixed == pytest.approx(cell.adaptive / max(1.0, *cell.fixed.values()))
        assert cell.oracle > 0.9 * max(cell.fixed.values())


def test_drawn_texts_are_replayed_for_copies(target_folder: Path, draft_folder: Path, flat_costs: Costs) -> None:
    model = outrider.load(target_folder, dtype="float64")
    texts = list(record(model, [Task("digits", "0123 0123 0123")], 40, temperatures=(1.0, 0.0), seeds=2))
    assert [(text.temperature, text.seed) for text in texts] == [(1.0, 0), (1.0, 1), (0.0, 0)]
    assert len({tuple(text.tokens) for text in texts}) == 3
    drafter = PromptLookupDrafter()
    check_replayed(model, drafter, (1.0, 0.0))
    drawn, greedy = cells_of(texts)
    assert (drawn, greedy) == (texts[:2], texts[2:])
    both, *each = [replay(model, some, drafter, flat_costs) for some in (drawn, texts[:1], texts[1:2])]
    assert (both.temperature, both.seeds, each[0].seeds) == (1.0, 2, 1)
    for length, speedup in both.fixed.items():  # seconds are summed up, so speed-ups meet in their harmonic mean
        assert 2.0 / speedup == pytest.approx(sum(1.0 / one.fixed[length] for one in each), rel=0.01)
    drawing = ModelDrafter(outrider.load(draft_folder, dtype="float64"))
    for refused in (RandomDrafter(), ChoiceDrafter([drafter, drawing]), SpeculativeDrafter(drawing.model, drafter)):
        with pytest.raises(ParameterError, match="must be one model"):
            check_replayed(model, refused, (0.0, 1.0))
    with pytest.raises(ParameterError, match=r"at temperature 0, got prompt-lookup \+ head: name its parts one by one"):
        check_replayed(model, ChoiceDrafter([drafter, HeadDrafter()]), (0.0,))
    with pytest.raises(ParameterError, match="remembers earlier texts"):
        check_replayed(model, SuffixDrafter(memory=True), (0.0,))


def test_wrong_numbers_of_lengths_are_refused() -> None:
    refused = CliRunner().invoke(cli, ["bench", "lengths", "--humaneval", "99"])
    assert refused.exit_code != 0


def rounds_of(target: LanguageModel, drafter: Drafter, policy: DraftLength) -> list[tuple[int, int, tuple[int, ...] | None]]:
    (rounds,) = decode(target, requests()[:1], GREEDY, drafter, policy, alternatives=0)[1]
    return [(made.drafted, made.accepted, made.signals) for made in rounds]


@pytest.mark.parametrize(
    ("kind", "policy"),
    thinned(
        ["model", "head", "layered", "blockwise", "early exit"],
        [FixedLength(3), AdaptiveLength(Costs({1: 1.0, 2: 1.05, 8: 1.3}), longest=6)],
    ),
)
def test_greedy_chains_are_what_the_model_drafts(kind: str, policy: DraftLength, tmp_path: Path) -> None:
    """A generation that is offered the recorded chains has the rounds of the one that drafts by itself."""
    target = tiny("Llama", 4)
    drafter: Drafter
    if kind == "model":
        drafter = ModelDrafter(target, SamplingSettings(temperature=0.0), step_seconds=0.05)
    elif kind == "early exit":
        drafter = EarlyExitDrafter(1)
    else:
        shape = {"head": "autoregressive"}.get(kind, kind)
        drafter = HeadDrafter(write_head(tmp_path, shape), step_seconds=0.05)  # type: ignore[arg-type]
    drafter.bind(target)
    request = requests()[0]
    (written,) = decode(target, [request], GREEDY)[0]
    text = Recorded("text", [*request.prompt, *written], len(request.prompt))
    chains = record_chains(target, drafter, text)
    assert len(chains.chains) == len(written)
    live = rounds_of(target, drafter, policy)
    assert rounds_of(target, chains, policy) == live
    assert any(drafted for drafted, _, _ in live)


def drawn_chains(samples: int) -> list[tuple[list[int], RecordedChains]]:
    """Texts of two tokens, and what was drafted before the first of them."""
    target, draft = table(1, V), ModelDrafter(table(2, V))
    draft.bind(target)
    found = []
    for seed, tokens in enumerate(run(target, None, DRAWN, FixedLength(0), new_tokens=2, samples=samples)[0]):
        text = Recorded("text", [*PROMPT, *tokens], len(PROMPT), 1.0, seed)
        found.append((tokens, record_chains(target, draft, text)))
    return found


def fits(found: list[tuple[list[int], RecordedChains]]) -> tuple[float, float]:
    """The p-values of the drafted pairs, by the draft's law, and of the numbers accepted, by the acceptance rule."""
    target, draft = law_of(table(1, V), DRAWN), law_of(table(2, V), DRAWN)
    pairs = torch.zeros(V, V)
    accepted = torch.zeros(3)
    for tokens, chains in found:
        first, second = chains.chains[0].tokens[:2]
        pairs[first, second] += 1
        accepted[0 if first != tokens[0] else 1 if second != tokens[1] else 2] += 1
    least = [torch.minimum(target(new), draft(new)) for new in [(), *((token,) for token in range(V))]]
    one, two = float(least[0].sum()), float(sum(least[0][token] * least[1 + token].sum() for token in range(V)))
    expected = torch.tensor([1.0 - one, one - two, two]) * len(found)
    joint = target_joint(draft, V, 2).flatten() * len(found)
    drafted = float(stats.chisquare(pairs.flatten(), joint * float(pairs.sum() / joint.sum())).pvalue)
    return drafted, float(stats.chisquare(accepted, expected * float(accepted.sum() / expected.sum())).pvalue)


@pytest.mark.slow
def test_drawn_chains_follow_the_drafts_law_and_are_accepted_by_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    drafted, accepted = fits(drawn_chains(700))
    assert drafted > ALARM
    assert accepted > ALARM
    monkeypatch.setattr(_Coupled, "aim", RandomStream.aim)  # planted: drafts that know nothing of the text
    drafted, accepted = fits(drawn_chains(400))
    assert drafted > ALARM
    assert accepted < ALARM


def test_what_is_replayed_by_chains(target_folder: Path, draft_folder: Path, flat_costs: Costs) -> None:
    model, draft = (outrider.load(folder, dtype="float64") for folder in (target_folder, draft_folder))
    drafter = ModelDrafter(draft, step_seconds=0.1)
    assert draws_chains(drafter, 0.0)
    assert not draws_chains(PromptLookupDrafter(), 1.0)
    check_replayed(model, drafter, (0.0, 1.0))
    for texts in cells_of(list(record(model, [Task("words", "the quick")], 24, (0.0, 1.0), seeds=2))):
        cell = replay(model, texts, drafter, flat_costs)
        assert cell.seeds == len(texts)
        assert cell.oracle > max(cell.fixed.values()) * 0.99
        assert cell.captured is None or cell.captured <= 1.0
