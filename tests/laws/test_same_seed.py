"""Generations with one seed: what an earlier one gave may be copied by a later one, whose numbers must be others.

With the same numbers in both, a draft that copies is a function of the numbers that judge it.
False-alarm rate: each test rejects at p < 1e-6; the seeds are fixed, so a pass stays a pass.
"""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats

import outrider
from outrider.decode import Request, decode
from outrider.draft_length import FixedLength
from outrider.drafters import Drafter, ModelDrafter, NgramDrafter, SuffixDrafter
from outrider.drafters.choice import ChoiceDrafter
from outrider.drafters.speculative import SpeculativeDrafter
from outrider.models.compatibility import fingerprint
from outrider.models.table import TableModel
from outrider.ngram import NgramTable, train
from outrider.ngram.table import read_table
from outrider.ngram.training import Settings
from outrider.randomness import RandomStream, stream_after
from outrider.sampling import SamplingSettings
from tests.helpers.enumerate import target_joint
from tests.helpers.marks import slow
from tests.helpers.toys import table

ALARM = 1e-6
SAMPLES = 600
LETTERS = "abc"


class Letters:
    """A token a letter."""

    eos_token_id = bos_token_id = chat_template = None
    all_special_ids: tuple[int, ...] = ()

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(letter) % len(LETTERS) for letter in text]

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(LETTERS[i] for i in ids)

    def get_vocab(self) -> dict[str, int]:
        return {letter: i for i, letter in enumerate(LETTERS)}

    def __len__(self) -> int:
        return len(LETTERS)


class Speaking(TableModel):
    """A table that has a tokenizer."""

    tokenizer = Letters()
    eos_token_ids = frozenset[int]()


LAWS = (2.0 * torch.randn([3, 3, 3], generator=torch.Generator().manual_seed(3), dtype=torch.float64)).softmax(-1)
TARGET: Any = Speaking(LAWS, name="letters")
PROMPT = [0, 1]


def p_value(texts: list[list[int]]) -> float:
    """Chi-square of two tokens after the prompt's end, which are all that this table looks at."""

    def law(new: tuple[int, ...]) -> torch.Tensor:
        after: torch.Tensor = TARGET.probs_after([*PROMPT, *new])
        return after

    expected = target_joint(law, 3, 2).flatten() * len(texts)
    counts = Counter(map(tuple, texts))
    observed = [counts[i // 3, i % 3] for i in range(9)]
    return float(stats.chisquare(observed, expected * (sum(observed) / expected.sum())).pvalue)


@pytest.mark.parametrize(
    "how", [slow({}), slow({"draft": None}), {"draft": "suffix", "num_draft_tokens": 2}], ids=["auto", "plain", "suffix"]
)
def test_the_next_turn_of_a_conversation_has_the_targets_law(how: dict[str, Any]) -> None:
    texts = []
    for seed in range(SAMPLES):
        options = {"max_new_tokens": 2, "temperature": 1.0, "seed": seed, "ignore_eos": True, **how}
        first = outrider.generate(TARGET, PROMPT, **options)
        second = outrider.generate(TARGET, [*PROMPT, *first.tokens, *PROMPT], **options)
        texts.append(list(second.tokens))
    assert p_value(texts) > ALARM


def remembering(kind: str) -> Drafter:
    suffix = SuffixDrafter(memory=True)
    if kind == "suffix":
        return suffix
    if kind == "choice":
        return ChoiceDrafter([suffix, ModelDrafter(table(5, 3))])
    return SpeculativeDrafter(table(5, 3), suffix, FixedLength(2))


@pytest.mark.parametrize("kind", ["suffix", slow("choice"), slow("hierarchical")])
def test_what_a_drafter_remembers_was_drawn_by_other_numbers(kind: str) -> None:
    """A second generation after the same prompt, with the same seed, by a drafter that remembers the first."""
    texts = []
    for seed in range(SAMPLES):
        drafter = remembering(kind)
        assert drafter.remembers
        for _ in range(2):
            options: dict[str, Any] = {"max_new_tokens": 2, "temperature": 1.0, "seed": seed, "ignore_eos": True}
            result = outrider.generate(TARGET, PROMPT, draft=drafter, num_draft_tokens=2, **options)
        texts.append(list(result.tokens))
    assert p_value(texts) > ALARM


def test_a_store_keeps_other_processes_texts_which_were_drawn_by_other_numbers(tmp_path: Path) -> None:
    texts = []
    for seed in range(SAMPLES // 2):
        for _ in range(2):
            drafter = SuffixDrafter(store=tmp_path / f"{seed}.tokens")
            options: dict[str, Any] = {"max_new_tokens": 2, "temperature": 1.0, "seed": seed, "ignore_eos": True}
            result = outrider.generate(TARGET, PROMPT, draft=drafter, num_draft_tokens=2, **options)
        texts.append(list(result.tokens))
    assert p_value(texts) > ALARM


@pytest.mark.slow
def test_a_table_of_what_the_same_seed_gave_meets_other_numbers(tmp_path: Path) -> None:
    """Counted from the end of a text whose third and fourth number would judge the table's draft of two tokens.

    The first two would draw it, and a table that says one thing draws the same by any number.
    """
    texts = []
    for seed in range(SAMPLES // 2):
        options: dict[str, Any] = {"temperature": 1.0, "seed": seed, "ignore_eos": True}
        made = outrider.generate(TARGET, PROMPT, draft=None, max_new_tokens=4, **options).tokens
        drafter = NgramDrafter(counted(tmp_path / "table", [*PROMPT, *made[2:]] * 20))
        options |= {"max_new_tokens": 2, "num_draft_tokens": 2}
        result = outrider.generate(TARGET, PROMPT, draft=drafter, **options)
        texts.append(list(result.tokens))
        if seed < 3:  # the same table, read once more, gives the same text
            again = outrider.generate(TARGET, PROMPT, draft=NgramDrafter(tmp_path / "table"), **options)
            assert again.tokens == result.tokens
    assert p_value(texts) > ALARM


def test_tables_are_told_apart_by_all_that_they_hold(tmp_path: Path) -> None:
    tables = [counted(tmp_path / "table", text) for text in ([0, 1, 2, 0], [0, 2, 1, 0], [0, 1, 2, 0, 1])]
    occasions = [tuple(NgramDrafter(table).occasion()) for table in tables]
    assert len(set(occasions)) == 3
    again = counted(tmp_path / "again", [0, 1, 2, 0, 1])
    assert tuple(NgramDrafter(tmp_path / "again").occasion()) == occasions[2]
    file = tmp_path / "again"
    file.write_bytes(file.read_bytes()[:-16])  # as they were written before
    assert read_table(file).digest == again.digest


def test_a_shorter_order_has_the_digest_of_the_whole_table(tmp_path: Path) -> None:
    """Whether or not anyone asked for that before, and in a file without one."""
    table, file = counted(tmp_path / "table", [0, 1, 2, 0, 1]), tmp_path / "table"
    file.write_bytes(file.read_bytes()[:-16])
    for again in (read_table(file), read_table(file)):
        assert list(NgramDrafter(again, order=2).occasion()) == [int.from_bytes(table.digest, "little")]
        assert len(NgramDrafter(again, order=2).table.levels) == 1
        assert list(NgramDrafter(again).occasion()) == list(NgramDrafter(again, order=2).occasion())


def counted(path: Path, text: list[int]) -> NgramTable:
    """A table of one text, read from its file."""
    settings = Settings(order=3, min_count=1)
    train([[" ".join(map(str, text))]], encoded, len(LETTERS), fingerprint(TARGET), path, settings)
    return read_table(path)


def encoded(pieces: list[str]) -> list[list[int]]:
    return [[int(word) for word in piece.split()] for piece in pieces]


def test_numbers_that_judge_what_they_made_are_found() -> None:
    """The negative control: the same numbers in both turns, of the seed alone, bend the law."""
    texts = []
    for seed in range(SAMPLES):
        prompt = list(PROMPT)
        for _ in range(2):
            request = Request(prompt, 2, RandomStream(seed))
            (new,), _ = decode(TARGET, [request], SamplingSettings(temperature=1.0), SuffixDrafter(), FixedLength(2))
            prompt = [*prompt, *new, *PROMPT]
        texts.append(new)
    assert p_value(texts) < ALARM


def test_streams_are_told_apart_by_all_that_can_differ() -> None:
    sound = torch.zeros(2, 3)
    streams = [
        stream_after(0, 0, [1, 2]),
        stream_after(1, 0, [1, 2]),
        stream_after(0, 1, [1, 2]),
        stream_after(0, 0, [1, 2, 3]),
        stream_after(0, 0, [2, 1]),
        stream_after(0, 0, [1, 2], occasion=(1,)),
        stream_after(0, 0, [1, 2], occasion=(2,)),
        stream_after(0, 0, [1], source=[2]),
        stream_after(0, 0, [1, 2], source=[2]),
        stream_after(0, 0, [1, 2], source=sound),
        stream_after(0, 0, [1, 2], source=sound + 1),
        stream_after(0, 0, [1, 2], source=(sound + 2).bfloat16()),
    ]
    assert len({tuple(stream.take(3)) for stream in streams}) == len(streams)
    assert stream_after(0, 0, [1, 2]).take(3) == stream_after(0, 0, (1, 2)).take(3)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_stream_can_not_be_copied(copied: Callable[[RandomStream], object]) -> None:
    with pytest.raises(TypeError, match="would be given twice"):
        copied(RandomStream(0))
