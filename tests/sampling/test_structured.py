"""Constraints that keep a state: rolled back with the sequence, so the same law and the same greedy tokens as without."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PrefixConstrainedLogitsProcessor

import outrider
from outrider import structured
from outrider.cli.main import run as run_cli
from outrider.decode import Decoder, Request, decode
from outrider.draft_length import FixedLength
from outrider.drafters import ChoiceDrafter, Drafter, ModelDrafter, PromptLookupDrafter, RandomDrafter, SpeculativeDrafter
from outrider.errors import NumericalError, ParameterError, VocabularyMismatchError
from outrider.models.table import TableModel
from outrider.randomness import RandomStream
from outrider.round import Extras
from outrider.sampling import SamplingSettings
from outrider.sampling.stateful import Constraint, StatefulProcessor
from tests.helpers.marks import slow
from tests.helpers.real_models import pruned_draft, smollm2
from tests.helpers.samples import ALARM, V, p_value, run
from tests.helpers.toys import table

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "languages": {"type": "array", "items": {"enum": ["Python", "C++", "Rust"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "languages"],
    "additionalProperties": False,
}


def test_a_constraint_for_another_models_tokens_is_refused(target_folder: Path, foreign_folder: Path) -> None:
    own, other = outrider.load(target_folder), outrider.load(foreign_folder)
    constraint = structured.regex(own, "[ab]{3}")
    assert len(outrider.generate(own, "x", processors=[constraint], max_new_tokens=9).text) <= 3
    with pytest.raises(VocabularyMismatchError, match="got one that was made for another model: make it for this one"):
        outrider.generate(other, "x", processors=[constraint])
    with pytest.raises(VocabularyMismatchError, match="made for another model"):
        decode(table(1, 5), [Request([1], 3, RandomStream(0))], SamplingSettings(processors=(constraint,)))


class NoThirdInARow:
    """A toy matcher over V tokens: none may come three times in a row."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def mask(self) -> Tensor:
        allowed = torch.ones(V, dtype=torch.bool)
        if len(self.taken) >= 2 and self.taken[-1] == self.taken[-2]:
            allowed[self.taken[-1]] = False
        return allowed

    def advance(self, token: int) -> bool:
        if not bool(self.mask()[token]):
            return False
        self.taken.append(token)
        return True

    def rollback(self, count: int) -> None:
        assert 0 < count <= len(self.taken)
        del self.taken[len(self.taken) - count :]


class CountsItsCalls:
    """A processor in the manner of many libraries: it believes that it is called once per token, in order."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        scores[:, self.calls % V] -= 1.5
        return scores


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "model": lambda: ModelDrafter(table(2, V)),
    "copy": PromptLookupDrafter,
    "choice": lambda: ChoiceDrafter([RandomDrafter(), PromptLookupDrafter()]),
}


def settings(kind: str) -> SamplingSettings:
    made: Any = Constraint(NoThirdInARow) if kind == "constraint" else StatefulProcessor(CountsItsCalls)
    return SamplingSettings(temperature=1.0, processors=(made,))


@pytest.mark.parametrize("kind", ["constraint", slow("stateful")])
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_law_is_that_of_the_constrained_target(kind: str, name: str) -> None:
    target = table(1, V, sharpness=0.7)
    drafter: Drafter = DRAFTERS[name]()
    tokens, rounds = run(target, drafter, settings(kind), FixedLength(3), samples=1500)
    assert p_value(tokens, target, settings(kind)) > ALARM
    assert sum(r.drafted for r in rounds) > 500
    if kind == "constraint":
        assert not [row for row in tokens for i in range(2, len(row)) if row[i] == row[i - 1] == row[i - 2]]


@pytest.mark.parametrize("alternatives", [0, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_processors_are_not_asked_behind_a_drafted_end(temperature: float, alternatives: int) -> None:
    """Plain decoding never is there, and transformers' own raise where nothing is allowed."""
    end = V - 1

    def allowed(_: int, ids: Tensor) -> list[int]:
        return [] if end in ids.tolist()[2:] else [*range(V)]

    processor = PrefixConstrainedLogitsProcessor(allowed, 1)
    sampling = SamplingSettings(temperature=temperature, processors=(processor,))
    target, ended = table(1, V), 0
    drafters: list[Drafter] = [ModelDrafter(table(2, V), step_seconds=0.1)]
    if not alternatives:
        drafters.append(SpeculativeDrafter(table(2, V), ModelDrafter(table(3, V), step_seconds=0.1), step_seconds=0.2))
    for drafter in drafters:
        requests = [Request([0, 1], 12, RandomStream(i), frozenset({end})) for i in range(20)]
        decoder = Decoder(target, requests, sampling, drafter, FixedLength(4), alternatives=alternatives)
        records = [record for made in decoder.rounds() for _, record in made]
        ended += sum(record.finish_reason == "eos" and record.drafted > 1 for record in records)
    assert ended > 5 or temperature == 0.0


def test_a_processor_that_counts_calls_is_wrong_unless_wrapped() -> None:
    """The negative control: given as it is, speculation calls it at positions that are taken back."""
    target = table(1, V, sharpness=0.7)
    bare = SamplingSettings(processors=(CountsItsCalls(),))
    wrapped = SamplingSettings(processors=(StatefulProcessor(CountsItsCalls),))
    plain = decode(target, [Request([0, 1], 40, RandomStream(0))], wrapped)[0][0]
    drafter = ModelDrafter(table(2, V))
    assert decode(target, [Request([0, 1], 40, RandomStream(0))], wrapped, drafter, FixedLength(3))[0][0] == plain
    assert decode(target, [Request([0, 1], 40, RandomStream(0))], bare, drafter, FixedLength(3))[0][0] != plain


@pytest.mark.slow
def test_a_json_schema_is_honoured_with_and_without_speculation() -> None:
    model = smollm2()
    prompt = [{"role": "user", "content": "Describe a programmer as JSON with the keys name, age and languages."}]
    drafts: tuple[Any, ...] = (None, pruned_draft(), "prompt-lookup")
    texts = []
    for draft in drafts:
        result = outrider.generate(
            model,
            prompt,
            draft=draft,
            num_draft_tokens=4,
            max_new_tokens=80,
            processors=[structured.json_schema(model, SCHEMA)],
        )
        assert result.finish_reason == "eos"
        assert (result.stats.drafted > 0) is (draft is not None)
        texts.append(result.text)
    assert len(set(texts)) == 1
    answer = json.loads(texts[0])
    assert set(answer) == {"name", "age", "languages"}
    assert 0 <= answer["age"] <= 130
    assert set(answer["languages"]) <= {"Python", "C++", "Rust"}


@pytest.mark.slow
def test_samples_fit_the_schema_in_a_batch() -> None:
    model = smollm2()
    constraint = structured.json_schema(model, SCHEMA)
    results = outrider.generate(
        model,
        ["A person: ", "JSON: ", "{"],
        num_draft_tokens=3,
        max_new_tokens=120,
        temperature=1.0,
        seed=5,
        processors=[constraint],
    )
    ended = [result for result in results if result.finish_reason == "eos"]
    assert ended
    for result in ended:
        assert set(json.loads(result.text)) == {"name", "age", "languages"}


@pytest.mark.slow
def test_the_command_takes_a_schema_or_a_pattern(
    target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps({"enum": ["red", "green"]}))
    common = ["generate", "A colour", "--target", str(target_folder), "--max-new-tokens", "12", "--json"]
    assert run_cli([*common, "--json-schema", str(file)]) == 0
    assert json.loads(json.loads(capsys.readouterr().out)["text"]) in ("red", "green")
    assert run_cli([*common, "--regex", "[0-9]{3}-[0-9]{4}"]) == 0
    text = json.loads(capsys.readouterr().out)["text"]
    assert len(text) == 8
    assert text[3] == "-"
    assert not capsys.readouterr().err
    assert run_cli([*common, "--regex", "[0-9]{30}", "--max-new-tokens", "5"]) == 0
    assert "cut after 5 tokens and is not yet a match of the regex: give a larger --max" in capsys.readouterr().err


@pytest.mark.slow
def test_a_text_that_was_cut_is_not_complete() -> None:
    model = smollm2()
    ids = model.tokenizer.encode('{"age": 7}', add_special_tokens=False)
    schema = json.dumps({"type": "object", "properties": {"age": {"type": "integer"}}, "additionalProperties": False})
    both = structured.Structure(schema, r".*7\}")
    assert both.complete(model, ids)
    assert not both.complete(model, ids[:-1])
    assert not structured.Structure(schema, ".*8.*").complete(model, ids)
    assert not structured.Structure(schema).complete(model, [*ids, *ids])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [("{", "json_schema must be JSON"), ('{"type": "no such type"}', "JSON schema can't be used: .*no such type")],
)
def test_bad_schemas_are_refused_in_one_line(wrong: str, said: str) -> None:
    with pytest.raises(ParameterError, match=said) as error:
        structured.json_schema(smollm2(), wrong)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("wrong", "said"), [("{", "must be JSON"), ('{"type": "no such type"}', "no such type")])
def test_a_bad_schemas_file_is_named(wrong: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "schema.json"
    file.write_text(wrong)
    assert run_cli(["generate", "hi", "--json-schema", str(file), "--regex", ".*"]) == 2
    err = capsys.readouterr().err
    assert f"json-schema file {file}: " in err
    assert said in err
    file.write_text("{}")
    assert run_cli(["generate", "hi", "--json-schema", str(file), "--regex", "("]) == 2
    assert str(file) not in capsys.readouterr().err


def test_rows_that_begin_alike_do_not_share_a_state() -> None:
    """One row's prompt is another's prompt and output: the processor of the former has seen less."""
    target = table(1, V, sharpness=0.7)
    first = decode(target, [Request([0, 1], 12, RandomStream(0))], SamplingSettings(processors=(made(),)))[0][0]
    prompts = [[0, 1], [0, 1, *first[:1]], [0, 1, *first[:3]]]
    shared = SamplingSettings(processors=(made(),))
    for drafter in (None, PromptLookupDrafter()):
        batch = decode(target, [Request(p, 30, RandomStream(0)) for p in prompts], shared, drafter, FixedLength(3))[0]
        for prompt, tokens in zip(prompts, batch, strict=True):
            alone = SamplingSettings(processors=(made(),))
            assert decode(target, [Request(prompt, 30, RandomStream(0))], alone)[0][0] == tokens


def made() -> StatefulProcessor:
    return StatefulProcessor(CountsItsCalls)


class EndsForGood:
    """After token 2 nothing may come; it ends the text."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def mask(self) -> Tensor:
        return torch.full((V,), 2 not in self.taken)

    def advance(self, token: int) -> bool:
        self.taken.append(token)
        return True

    def rollback(self, count: int) -> None:
        del self.taken[len(self.taken) - count :]


class Counting:
    """A matcher that allows everything, and counts what it is asked to do."""

    def __init__(self, done: list[int]) -> None:
        self.done = done

    def mask(self) -> Tensor:
        return torch.ones(9, dtype=torch.bool)

    def advance(self, token: int) -> bool:
        self.done.append(token)
        return True

    def rollback(self, count: int) -> None:
        self.done += [-1] * count


def test_rows_side_by_side_keep_a_matcher_each() -> None:
    """Texts that begin alike, after many that have ended: a token costs a step, not the way to another row and back."""
    done: list[int] = []
    constraint = Constraint(lambda: Counting(done))
    texts = [[1] * 10 + [(i * (row + 2)) % 7 for i in range(50)] for row in range(8)]
    scores = torch.zeros(9)
    for _ in range(40):
        for text in texts:
            constraint.apply(torch.tensor(text), 0, scores)
    done.clear()
    for length in range(60):
        for text in texts:
            constraint.apply(torch.tensor(text[:length]), 0, scores)
    assert len(done) < 2 * 8 * 60


def test_a_matcher_that_an_interrupt_parts_from_its_tokens_is_forgotten() -> None:
    """Ctrl-C arrives when the matcher has taken a token and nobody has noted it yet."""
    interrupt = [False]

    class Interrupted(NoThirdInARow):
        def advance(self, token: int) -> bool:
            taken = super().advance(token)
            if interrupt[0]:
                raise KeyboardInterrupt
            return taken

    constraint, scores = Constraint(Interrupted), torch.zeros(V)
    wanted = Constraint(NoThirdInARow).apply(torch.tensor([1, 1]), 0, scores)
    constraint.apply(torch.tensor([1]), 0, scores)
    interrupt[0] = True
    with pytest.raises(KeyboardInterrupt):
        constraint.apply(torch.tensor([1, 0]), 0, scores)
    interrupt[0] = False
    assert torch.equal(constraint.apply(torch.tensor([1, 1]), 0, scores), wanted)


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_constraint_with_nothing_after_the_end_is_no_error(name: str) -> None:
    target = table(1, V, sharpness=0.7)
    law = SamplingSettings(temperature=1.0, processors=(Constraint(EndsForGood),))
    requests = [Request([0, 1], 20, RandomStream(1, i), frozenset({2})) for i in range(30)]
    tokens, _ = decode(target, requests, law, DRAFTERS[name](), FixedLength(3))
    assert all(row.count(2) == 1 and row[-1] == 2 for row in tokens if len(row) < 20)


def test_processors_are_not_shown_what_they_forbid() -> None:
    """transformers' own prefix constraint raises on an empty list: after a forbidden draft it must not be asked."""

    def allowed(row: int, ids: Tensor) -> list[int]:
        del row
        return [] if any(int(token) == 2 for token in ids[2:]) else [0, 1]

    law = SamplingSettings(temperature=1.0, processors=(PrefixConstrainedLogitsProcessor(allowed, 1),))
    target = table(1, V, sharpness=0.7)
    for drafter in (RandomDrafter(), ModelDrafter(table(2, V))):
        tokens, _ = decode(target, [Request([0, 1], 40, RandomStream(0, i)) for i in range(5)], law, drafter, FixedLength(3))
        assert not any(2 in row for row in tokens)


def test_a_grammar_beyond_what_can_be_followed_is_no_constraint_lifted() -> None:
    """llguidance stops at 2,000 ways to go on, for good and without a word: a draft that goes there changes nothing, a text
    that does has no law, and the constraint serves the next text.
    """
    llguidance = pytest.importorskip("llguidance")
    tokens = llguidance.LLTokenizer("byte")
    words = "\n".join(f'r{i}: "a" /{"".join(chr(98 + (i >> place & 1)) for place in range(12))}/ s' for i in range(2500))
    ways = " | ".join(f"r{i}" for i in range(2500))
    compiled = llguidance.LLMatcher.grammar_from_lark(f'start: A | "x" s\nA: /[ab]{{1,40}}/\ns: {ways} | "q"\n{words}')
    assert not llguidance.LLMatcher.validate_grammar(compiled, tokens)
    size = tokens.vocab_size

    def says(**likely: float) -> TableModel:
        laws = torch.full((size, size), 1e-6)
        for letter, weight in likely.items():
            laws[:, ord(letter)] = weight
        return TableModel(laws / laws.sum(-1, keepdim=True))

    def matcher() -> structured._Matcher:
        return structured._Matcher(llguidance.LLMatcher(tokens, compiled, log_level=0), size)

    law = SamplingSettings(processors=(Constraint(matcher),))
    ask = Request([65], 12, RandomStream(1), frozenset([tokens.eos_token]))
    target, strays = says(z=8, a=4, b=2, x=1), says(z=8, x=4, a=2)
    plain = decode(target, [ask], law)[0]
    assert bytes(plain[0]) == b"a" * 12
    drafter = ModelDrafter(says(x=9, a=1), step_seconds=0.1)
    written, rounds = decode(target, [ask], law, drafter, FixedLength(1), Extras(drafts=True))
    assert any(ord("x") in (each.drafts or ()) for each in rounds[0])
    assert written == plain
    with pytest.raises(NumericalError, match="no distribution for row 0 after token 1"):
        decode(strays, [ask], law)
    with pytest.raises(NumericalError, match="no distribution for row 0 after token 1"):
        decode(strays, [ask], law, drafter, FixedLength(1))
    assert decode(target, [ask], law)[0] == plain


def test_texts_that_ignore_their_end_have_no_constraint(target_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = outrider.load(target_folder)
    law = structured.regex(target, "a+")
    with pytest.raises(ParameterError, match="ignore_eos must be false with a constraint"):
        outrider.generate(target, "abc", processors=[law], ignore_eos=True)
    assert outrider.generate(target, "abc", processors=[made()], ignore_eos=True, max_new_tokens=3).text
    assert run_cli(["generate", "hi", "--target", str(target_folder), "--regex", "a+", "--ignore-eos"]) == 2
    assert "ignore_eos must be false with a schema or regex" in capsys.readouterr().err


class Reused(TableModel):
    """Its logits are overwritten by the next pass, as engines may do."""

    memory = torch.empty(0, dtype=torch.float64)

    def score(self, sequences: Any, tokens: Tensor, lengths: Any, logits: Any = "all") -> Any:
        made = super().score(sequences, tokens, lengths, logits)
        if made is None:
            return None
        if self.memory.numel() < made.numel():
            self.memory = torch.empty(made.numel(), dtype=made.dtype)
        self.memory[: made.numel()] = made.flatten()
        return self.memory[: made.numel()].view(made.shape)


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_processor_may_generate_with_the_model_it_is_asked_for(temperature: float, with_state: bool) -> None:
    target = Reused(table(1, 6)._probs)

    def generates(tokens: Tensor, scores: Tensor) -> Tensor:
        decode(
            target, [Request([3, 4, 3, 4, 3], 4, RandomStream(9))], SamplingSettings(), PromptLookupDrafter(), FixedLength(3)
        )
        return scores

    def written(law: SamplingSettings, drafter: Drafter | None) -> tuple[list[int], list[float]]:
        request = Request([1, 2, 1, 2, 1], 40, RandomStream(5, by_position=True))
        tokens, rounds = decode(target, [request], law, drafter, FixedLength(3), Extras(logprobs=True))
        return tokens[0], [value for one in rounds[0] for value in one.logprobs or ()]

    plain, logprobs = written(SamplingSettings(temperature=temperature), None)
    processor = StatefulProcessor(lambda: generates) if with_state else generates
    for drafter in (None, PromptLookupDrafter(), ModelDrafter(target, step_seconds=0.1)):
        found, told = written(SamplingSettings(temperature=temperature, processors=(processor,)), drafter)
        assert found == plain
        assert told == pytest.approx(logprobs, abs=1e-9)
