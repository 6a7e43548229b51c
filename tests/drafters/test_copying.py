"""Copying from the context: the suffix automaton against brute force, what is proposed, memory and store."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from outrider.decode import Request, decode
from outrider.draft_length import FixedLength, SimplePlan
from outrider.drafters import PromptLookupDrafter, SuffixDrafter, token_store
from outrider.drafters.base import DraftContext, Drafter
from outrider.drafters.suffix_automaton import ROOT, SuffixAutomaton
from outrider.drafters.token_store import TokenStore
from outrider.errors import ParameterError
from outrider.models.compatibility import fingerprint
from outrider.models.table import TableModel, TableSequence
from outrider.proposal import DraftRow
from outrider.randomness import RandomStream
from outrider.sampling import SamplingSettings
from outrider.support.clock import PhaseClock
from tests.helpers.marks import slow
from tests.helpers.toys import table


def longest_earlier(tokens: list[int], end: list[int]) -> int:
    """The longest suffix of `end` that occurs in `tokens`."""
    for n in range(min(len(end), len(tokens)), 0, -1):
        if any(tokens[i : i + n] == end[-n:] for i in range(len(tokens) - n + 1)):
            return n
    return 0


@pytest.mark.parametrize("vocabulary", [1, 2, 3, 10])
@pytest.mark.parametrize("seed", range(4))
def test_the_end_is_matched_with_its_longest_earlier_occurrence(vocabulary: int, seed: int) -> None:
    chance = random.Random(seed)
    tokens: list[int] = []
    automaton = SuffixAutomaton()
    for _ in range(120):
        tokens.append(chance.randrange(vocabulary))
        automaton.append(tokens[-1])
        state, length = automaton.end_match()
        assert length == longest_earlier(tokens[:-1], tokens)
        if length:
            after = automaton.occurrence(state)
            assert tokens[after - length : after] == tokens[-length:]
            assert after < len(tokens)


@pytest.mark.parametrize("seed", [0, *map(slow, range(1, 4))])
def test_another_text_is_followed_token_by_token(seed: int) -> None:
    chance = random.Random(seed)
    held = [chance.randrange(4) for _ in range(200)]
    automaton = SuffixAutomaton(held)
    state, length, read = ROOT, 0, []
    for _ in range(300):
        read.append(chance.randrange(5))
        state, length = automaton.step(state, length, read[-1])
        assert length == longest_earlier(held, read)
        if length:
            after = automaton.occurrence(state)
            assert held[after - length : after] == read[-length:]


def row_of(tokens: list[int], drafter: Drafter, uncertain: int = 0) -> DraftRow:
    row = DraftRow(tokens, len(tokens), RandomStream(0), TableSequence(), uncertain=uncertain)
    drafter.begin([row], context())
    return row


def context() -> DraftContext:
    return DraftContext(SamplingSettings(), table(1, 9), 9, PhaseClock())


@pytest.mark.parametrize("drafter", [PromptLookupDrafter(), SuffixDrafter()], ids=["prompt-lookup", "suffix"])
@pytest.mark.parametrize("length", [1, 3, 12])
def test_a_copy_promises_less_where_the_text_is_drawn(drafter: Drafter, length: int) -> None:
    repeated = list(range(length))
    promised = []
    for temperature in (0.0, 0.5, 1.0, 1.5):
        row = DraftRow([*repeated, 20, *repeated], 2 * length + 1, RandomStream(0), TableSequence())
        drafter.begin([row], DraftContext(SamplingSettings(temperature=temperature), table(1, 30), 30, PhaseClock()))
        (prospect,) = drafter.prospects(row)
        assert prospect.longest
        promised.append((prospect.first, prospect.later))
    greedy, half, drawn, hot = promised
    assert greedy > half > drawn == hot
    assert half == pytest.approx(((greedy[0] + drawn[0]) / 2, (greedy[1] + drawn[1]) / 2))


@pytest.mark.parametrize("drafter", [PromptLookupDrafter(), SuffixDrafter()], ids=["prompt-lookup", "suffix"])
@pytest.mark.parametrize(
    ("tokens", "limit", "wanted"),
    [
        ([1, 2, 3, 4, 1, 2], 4, [3, 4, 1, 2]),
        ([1, 2, 1, 2], 5, [1, 2, 1, 2, 1]),
        ([5, 5], 3, [5, 5, 5]),
        ([1, 2, 3], 3, []),
        ([7], 3, []),
        ([0, 0, 8, 0, 0], 2, [8, 0]),
    ],
)
def test_what_followed_is_proposed_again(drafter: Drafter, tokens: list[int], limit: int, wanted: list[int]) -> None:
    row = row_of(tokens, drafter)
    proposal = drafter.propose([row], [SimplePlan(limit=limit)], context())
    assert proposal.tokens[0, : proposal.lengths[0]].tolist() == wanted
    assert drafter.prospects(row)[0].longest == (64 if wanted else 0)


@pytest.mark.parametrize("drafter", [PromptLookupDrafter(), SuffixDrafter()], ids=["prompt-lookup", "suffix"])
def test_tokens_that_are_taken_back_leave_no_trace(drafter: Drafter) -> None:
    tokens = [1, 2, 3, 1]
    row = row_of(tokens, drafter)
    row.uncertain = 2
    tokens += [2, 3]
    first = drafter.propose([row], [SimplePlan(limit=2)], context())
    assert first.tokens[0].tolist() == [1, 2]
    del tokens[4:]
    tokens += [8, 1, 2]
    row.uncertain = 0
    assert drafter.propose([row], [SimplePlan(limit=4)], context()).tokens[0].tolist() == [3, 1, 8, 1]


def test_a_memory_copies_from_earlier_generations() -> None:
    cycle = [3, 1, 4, 1, 5, 2, 6, 0, 7, 3]
    probs = table(1, 8)._probs * 0
    for a, b in zip([*cycle], [*cycle[1:], cycle[0]], strict=True):
        for before in range(8):
            probs[before, a, b] += 1.0
    probs[:, 1] = 0
    probs[3, 1, 4] = probs[4, 1, 5] = 1.0
    probs[:, 3] = 0
    probs[:, 3, 1] = 1.0
    probs = probs + 1e-9
    target = TableModel(probs / probs.sum(-1, keepdim=True))
    counts = {}
    for memory in (False, True):
        drafter = SuffixDrafter(memory=memory)
        for _ in range(2):
            tokens, rounds = decode(
                target, [Request([7, 3], 9, RandomStream(0))], SamplingSettings(), drafter, FixedLength(4)
            )
        counts[memory] = len(rounds[0])
        assert tokens[0] == decode(target, [Request([7, 3], 9, RandomStream(0))], SamplingSettings())[0][0]
    assert counts[True] < counts[False]


@pytest.mark.parametrize("steps", [1, 2, 40])
def test_a_memory_that_an_interrupt_cut_off_is_as_it_was(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while it takes up a text that has ended: it has states by then that the next text could not be added to."""
    target, drafter, sampling = table(1, 3), SuffixDrafter(memory=True), SamplingSettings(temperature=1.0)

    def text(seed: int) -> list[int]:
        return decode(target, [Request([0, 1], 30, RandomStream(seed))], sampling, drafter, FixedLength(3))[0][0]

    first = [0, 1, *text(1)]
    lead, left = SuffixAutomaton._lead, steps

    def interrupted(automaton: SuffixAutomaton, *given: int) -> None:
        nonlocal left
        if automaton is drafter._memory:
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        lead(automaton, *given)

    monkeypatch.setattr(SuffixAutomaton, "_lead", interrupted)
    with pytest.raises(KeyboardInterrupt):
        text(2)
    third = text(3)
    assert drafter._memory is not None
    assert [*drafter._memory.tokens] == [*first, 0, 1, *third]


def test_a_store_keeps_outputs_across_processes(tmp_path: Path) -> None:
    path = tmp_path / "outputs.tokens"
    drafter = SuffixDrafter(store=path)
    decode(table(1, 9), [Request([1, 2, 3, 4], 8, RandomStream(0))], SamplingSettings(), drafter, FixedLength(2))
    store = TokenStore(path, fingerprint(table(1, 9)))
    held = store.read()
    assert held[:4] == [1, 2, 3, 4]
    assert len(held) == 12
    with path.open("ab") as file:
        file.write(b"\x01\x02")  # a write cut short
    assert store.read() == held
    store.append([5, 6])
    assert store.read() == [*held, 5, 6]
    again = SuffixDrafter(store=path)
    again.bind(table(1, 9))
    row = row_of([8, 1, 2], again)
    assert again.propose([row], [SimplePlan(limit=2)], context()).tokens[0].tolist() == [3, 4]


def test_a_store_that_several_write_at_once_loses_nothing(tmp_path: Path) -> None:
    def write(number: int) -> None:
        store = TokenStore(tmp_path / "store", "x")
        for _ in range(20):
            store.append([number] * 50)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    held = TokenStore(tmp_path / "store", "x").read()
    runs = [held[at : at + 50] for at in range(0, len(held), 50)]
    assert all(len(set(run)) == 1 for run in runs)
    assert sorted(run[0] for run in runs) == sorted([0, 1, 2, 3] * 20)


def test_of_a_large_store_its_last_tokens_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_store, "LAST", 5)
    store = TokenStore(tmp_path / "store", "x")
    assert store.read() == []
    for count in (3, 4):
        store.append(range(count))
    with store.path.open("ab") as file:
        file.write(b"\x01\x02\x03")  # a write cut short
    assert store.read() == [2, 0, 1, 2, 3]
    store.path.write_bytes(b"")  # by somebody else, meanwhile
    assert store.read() == []


def test_an_empty_store_is_begun(tmp_path: Path) -> None:
    """Another process has just made it, or was killed before its first line."""
    (tmp_path / "store").touch()
    TokenStore(tmp_path / "store", "x").append([1])
    assert TokenStore(tmp_path / "store", "x").read() == [1]


def test_a_memory_is_kept_for_each_vocabulary_apart(tmp_path: Path) -> None:
    drafter = SuffixDrafter(memory=True)
    for size in (9, 4, 9):
        decode(table(1, size), [Request([0, 1, 2, 3], 8, RandomStream(0))], SamplingSettings(), drafter, FixedLength(3))
    assert len(drafter._memories) == 2
    stored = SuffixDrafter(store=tmp_path / "store")
    stored.bind(table(1, 9))
    with pytest.raises(ParameterError, match="written with another tokenizer"):
        stored.bind(table(1, 4))


def test_bad_stores_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("something else")
    with pytest.raises(ParameterError, match="not a token store"):
        SuffixDrafter(store=other).bind(table(1, 9))
    (tmp_path / "file").write_text("")
    with pytest.raises(ParameterError, match="can't be used"):
        SuffixDrafter(store=tmp_path / "file" / "store").bind(table(1, 9))
    with pytest.raises(ParameterError, match=r"\(No such file or directory\): name another file"):
        SuffixDrafter(store=tmp_path / "a folder that is misspelt" / "store").bind(table(1, 9))
    with pytest.raises(ParameterError, match="min_match must be"):
        SuffixDrafter(min_match=0)


def test_a_match_survives_the_growth_of_the_text_it_follows() -> None:
    """A state may be split while another text is being followed: the length may then be understated, never overstated."""
    chance = random.Random(5)
    automaton = SuffixAutomaton(chance.randrange(3) for _ in range(50))
    state, length, read = ROOT, 0, []
    for _ in range(2000):
        read.append(chance.randrange(3))
        state, length = automaton.step(state, length, read[-1])
        assert len(automaton) > 250 or length <= longest_earlier(list(automaton.tokens), read)
        automaton.append(chance.randrange(3))
