"""Draft heads on the target's hidden state: exact law, the states they read, roll-back, batches, refusals.

False-alarm rate as in test_end_to_end_law: each law test rejects at p < 1e-6; the seeds are fixed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.costs import Costs
from outrider.decode import Request, decode
from outrider.draft_length import AdaptiveLength, FixedLength
from outrider.drafters import (
    ChoiceDrafter,
    EarlyExitDrafter,
    HeadDrafter,
    ModelDrafter,
    PromptLookupDrafter,
    SpeculativeDrafter,
)
from outrider.drafters.head import comes_with_head, find_shipped_head
from outrider.errors import ModelError, ParameterError
from outrider.heads.config import load_config, load_head
from outrider.heads.engine import HeadSequence
from outrider.heads.opening import open_head
from outrider.models.base import LAST
from outrider.models.transformers_model import TransformersModel
from outrider.proposal import DraftRow
from outrider.randomness import RandomStream
from outrider.request.from_specs import make_from_spec
from outrider.sampling import SamplingSettings
from tests.helpers.betas import betas_along
from tests.helpers.heads import KINDS, Shape, exact_joint, first_draft, propose, sample, small_target, write_head
from tests.helpers.marks import slow, thinned
from tests.helpers.requests import GREEDY, PROMPTS, WARM, requests
from tests.helpers.samples import ALARM, SAMPLES, V, p_value_of
from tests.helpers.tiny_models import VOCABULARY, module, tiny
from tests.helpers.toys import SETTINGS, table

COSTS = Costs({1: 1.0, 2: 1.1, 5: 1.4})


@pytest.mark.parametrize(
    ("kind", "tokens", "setting"),
    [
        *(thinned(KINDS, [None], ["temperature 1"])),
        *(slow(kind, None, "greedy") for kind in KINDS),
        *(slow(kind, [0, 2], "temperature 1") for kind in KINDS),
        *(thinned(KINDS, [[0, 2]], ["all"])),
    ],
)
def test_heads_follow_the_targets_law(kind: Shape, tokens: list[int] | None, setting: str, tmp_path: Path) -> None:
    target = small_target()
    drafter = HeadDrafter(write_head(tmp_path, kind, V, tokens), step_seconds=0.1)
    written, rounds = sample(target, drafter, SETTINGS[setting], FixedLength(3))
    assert p_value_of(written, exact_joint(target, SETTINGS[setting])) > ALARM
    assert sum(record.drafted for record in rounds) > SAMPLES // 3
    if setting == "temperature 1":
        assert 0.2 < sum(r.accepted for r in rounds) / sum(r.tested for r in rounds) < 0.98


@pytest.mark.parametrize("kind", thinned(KINDS))
def test_adaptive_lengths_keep_the_law(kind: Shape, tmp_path: Path) -> None:
    target, settings = small_target(), SETTINGS["temperature 1"]
    drafter = HeadDrafter(write_head(tmp_path, kind, V), step_seconds=0.05)
    written, rounds = sample(target, drafter, settings, AdaptiveLength(COSTS, longest=4))
    assert len({record.drafted for record in rounds}) > 1
    assert p_value_of(written, exact_joint(target, settings)) > ALARM


class ClaimsTheWholeVocabulary(HeadDrafter):
    """A planted bug: the law it claims is not the one that its cut vocabulary gave."""

    def propose(self, *args: Any) -> Any:
        proposal = super().propose(*args)
        assert proposal.probs is not None
        object.__setattr__(proposal, "probs", 0.5 * proposal.probs + 0.5 / V)
        return proposal


def test_a_head_that_claims_another_law_is_rejected(tmp_path: Path) -> None:
    target, settings = small_target(), SETTINGS["temperature 1"]
    wrong = ClaimsTheWholeVocabulary(write_head(tmp_path, "autoregressive", V, [0, 2]), step_seconds=0.1)
    written, _ = sample(target, wrong, settings, FixedLength(3))
    assert p_value_of(written, exact_joint(target, settings)) < ALARM


@pytest.mark.parametrize(("kind", "architecture"), thinned(KINDS, ["Llama", "GPT2", "GPTNeoX", "Gemma3", "OPT"]))
def test_output_is_that_of_plain_decoding(kind: Shape, architecture: str, tmp_path: Path) -> None:
    target = tiny(architecture)
    drafter = HeadDrafter(write_head(tmp_path, kind, tokens=[1, 5, *range(8, 40)]), step_seconds=0.1)
    tokens, rounds = decode(target, requests(), GREEDY, drafter, FixedLength(3))
    assert tokens == decode(target, requests(), GREEDY)[0]
    assert sum(r.drafted for row in rounds for r in row) > 20
    assert drafter.model._open == target._open == []


@pytest.mark.parametrize("kind", thinned(KINDS))
def test_batches_are_single_rows_when_sampling_too(kind: Shape, tmp_path: Path) -> None:
    target, path = tiny("Llama"), write_head(tmp_path, kind)
    batch, _ = decode(target, requests(), WARM, HeadDrafter(path, 0.1), FixedLength(3))
    for i, request in enumerate(requests()):
        assert decode(target, [request], WARM, HeadDrafter(path, 0.1), FixedLength(3))[0][0] == batch[i]


def test_kept_states_are_what_the_head_of_the_model_reads() -> None:
    """After ragged passes, a roll-back, and a slot that moved."""
    target = TransformersModel(module("Llama", 1))
    target.keep_states((1,))
    first, second = target.open(), target.open()
    target.score([second, first], torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]]), [4, 2])
    second.truncate(2)
    target.score([second], torch.tensor([[11, 12]]), [2])
    first.close()
    with torch.inference_mode():
        out = target.module.model(input_ids=torch.tensor([[5, 6, 11, 12]]), output_hidden_states=True)
    wanted = out.last_hidden_state[0]
    both = torch.cat([wanted, out.hidden_states[1][0]], dim=-1)
    torch.testing.assert_close(target.states(second, 1, 4, (1,)), both[1:], atol=1e-12, rtol=0)
    torch.testing.assert_close(target.states(second, 0, 4), wanted, atol=1e-12, rtol=0)
    torch.testing.assert_close(target.states(second, 1, 3), wanted[1:3], atol=1e-12, rtol=0)
    with pytest.raises(ParameterError, match=r"states must be of positions in 0 … 4, got 0 … 5"):
        target.states(second, 0, 5)
    with pytest.raises(ParameterError, match=r"layers must be in 1 … 1, those of .* before the last, got 2"):
        target.keep_states((2,))
    second.close()


def test_states_are_asked_for_at_any_time() -> None:
    """Of positions that were scored before, zeros are known; early exit on the same target leaves them alone."""
    target = TransformersModel(module("Llama", 1, num_hidden_layers=4))
    sequence = target.open()
    target.score([sequence], torch.tensor([[5, 6, 7]]), [3])
    target.keep_states((1, 3))
    assert not target.states(sequence, 0, 3, (1, 3)).any()
    target.score([sequence], torch.tensor([[8]]), [1])
    kept = target.states(sequence, 0, 4, (1, 3)).clone()
    assert (kept.any(-1) == torch.tensor([False, False, False, True])).all()
    plain, _ = decode(target, requests(), GREEDY)
    assert decode(target, requests(), GREEDY, EarlyExitDrafter(2), FixedLength(3))[0] == plain
    torch.testing.assert_close(target.states(sequence, 0, 4, (1, 3)), kept, atol=0, rtol=0)


def test_no_states_are_kept_unless_somebody_asks() -> None:
    target = TransformersModel(module("Llama", 1))
    decode(target, requests(), GREEDY, EarlyExitDrafter(1), FixedLength(2))
    assert not target._cache.states
    with pytest.raises(ParameterError, match=r"call keep_states\(\) first"):
        target.states(target.open(), 0, 0)


def drafted_laws(path: Path, tokens: list[int], count: int) -> tuple[TransformersModel, HeadDrafter, DraftRow, torch.Tensor]:
    """A row just after the prompt, and the laws of a first draft from there."""
    target = TransformersModel(module("Llama", 1))
    return target, *first_draft(target, path, tokens, count)


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_rejection_the_head_says_what_it_would_have_said_of_the_text_alone(kind: Shape, tmp_path: Path) -> None:
    """No key, value or state of a token that was taken back is ever read again: equal to a row that never drafted."""
    path = write_head(tmp_path, kind)
    target, drafter, row, _ = drafted_laws(path, [5, 6, 7, 8, 9], 3)
    target.score([row.sequence], torch.tensor([[9, 20, 21, 22]]), [4], "none")  # the round: newest token and three drafts
    row.tokens += [20, 33]  # the first was accepted, 33 recovered
    row.sequence.truncate(6)
    drafter.observe([row])
    assert isinstance(row.state, HeadSequence)
    assert row.state.length <= 6
    again = propose(drafter, target, row, 2)
    *_, wanted = drafted_laws(path, [5, 6, 7, 8, 9, 20, 33], 2)
    torch.testing.assert_close(again[:1], wanted[:1], atol=1e-12, rtol=0)


def test_a_head_reads_no_state_of_an_uncertain_token(tmp_path: Path) -> None:
    """What the target's cache holds beyond its length must not matter: it is spoiled here."""
    path = write_head(tmp_path, "layered")
    target, _, row, laws = drafted_laws(path, [5, 6, 7, 8, 9], 3)
    assert target._cache.states.keys() == {LAST, 1}
    for kept in target._cache.states.values():
        assert kept.keys is not None
        with torch.inference_mode():
            kept.keys[:, :, row.sequence.length :] = torch.nan
    fresh = HeadDrafter(path, 0.1)
    fresh.bind(target)
    other = DraftRow(list(row.tokens), 5, RandomStream(1), row.sequence)
    torch.testing.assert_close(propose(fresh, target, other, 3, fresh=True), laws, atol=0, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_laws_along_a_text_are_those_of_first_drafts(kind: Shape, tmp_path: Path) -> None:
    """`forced` reads target and head together; a decoding run reads them round by round."""
    path, settings = write_head(tmp_path, kind), SamplingSettings(temperature=1.0)
    target = tiny("Llama")
    drafter = HeadDrafter(path, 0.1)
    from outrider.round import Extras

    tokens, rounds = decode(
        target, [Request(PROMPTS[0], 12, RandomStream(2))], settings, drafter, FixedLength(1), Extras(betas=True)
    )
    betas = betas_along(drafter, target, [*PROMPTS[0], *tokens[0]], len(PROMPTS[0]), settings)
    at = 0
    for record in rounds[0]:
        if record.betas:
            assert record.betas[0] == pytest.approx(betas[at], abs=1e-9)
        at += len(record.tokens)
    assert at == 12


def test_a_head_rides_inside_other_drafters(tmp_path: Path) -> None:
    """Under a model that drafts itself, and among drafters that leave it behind for rounds."""
    target, draft = tiny("Llama", 0), tiny("Llama", 1)
    path = write_head(tmp_path, "autoregressive")
    inside = SpeculativeDrafter(draft, HeadDrafter(path, 0.1), FixedLength(2), step_seconds=0.2)
    plain = decode(target, requests(), GREEDY)[0]
    assert decode(target, requests(), GREEDY, inside, FixedLength(4))[0] == plain
    among = ChoiceDrafter(
        [PromptLookupDrafter(), SpeculativeDrafter(draft, HeadDrafter(path, 0.1), FixedLength(2), step_seconds=0.2)]
    )
    tokens, rounds = decode(target, requests(), GREEDY, among, AdaptiveLength(COSTS, longest=4, probe_share=0.4))
    assert tokens == plain
    assert any(name and name.startswith(draft.name) for name in {r.drafter for row in rounds for r in row})
    beside = ChoiceDrafter([EarlyExitDrafter(1), HeadDrafter(path, 0.1)])  # both work on the target's slots
    assert decode(target, requests(), GREEDY, beside, AdaptiveLength(COSTS, longest=4, probe_share=0.4))[0] == plain


def test_blocks_are_the_most_that_is_drafted(tmp_path: Path) -> None:
    drafter = HeadDrafter(write_head(tmp_path, "blockwise", blocks=2), 0.1)
    _, rounds = decode(tiny("Llama"), requests(), WARM, drafter, FixedLength(5))
    assert max(r.drafted for row in rounds for r in row) == 2


def test_output_rows_are_found_whatever_the_layer_is_made_of() -> None:
    from outrider.heads.target_parts import output_rows
    from outrider.models.weights.packed_linear import pack_linears

    made = module("Phi", 0, torch.float32)  # its head has a bias
    ids = torch.tensor([3, 17, 60])
    x = torch.randn(2, 32)
    wanted = made.lm_head(x)[:, ids]
    pack_linears(made)
    torch.testing.assert_close(output_rows(TransformersModel(made), ids)(x), wanted, atol=1e-5, rtol=1e-5)


def test_what_can_not_be_used_is_refused_in_a_line(tmp_path: Path) -> None:
    path = write_head(tmp_path / "head", "autoregressive")
    with pytest.raises(ModelError, match=r"it reads hidden states.*use one of these"):
        HeadDrafter(path).bind(table(1, VOCABULARY))
    with pytest.raises(ModelError, match="was made for states of 32 and 61 tokens, not 32 and 3"):
        HeadDrafter(path).bind(small_target())
    with pytest.raises(ModelError, match="no draft head comes with Outrider for three"):
        HeadDrafter().bind(small_target())
    with pytest.raises(ModelError, match="can't be read"):
        HeadDrafter(tmp_path)
    stored = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**stored, "num_tokens": 7}))
    with pytest.raises(ModelError, match="its vocabulary is not 7 different tokens"):
        HeadDrafter(path)
    (path / "config.json").write_text(json.dumps({**stored, "intermediate_size": 25}))
    with pytest.raises(ModelError, match="size mismatch"):
        HeadDrafter(path).bind(tiny("Llama"))
    assert load_head(write_head(tmp_path / "good", "blockwise"))[0].kind == "blockwise"


def test_a_shipped_head_is_found_by_its_targets_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_head(tmp_path / "other", "blockwise", V)
    path = write_head(tmp_path / "ours", "autoregressive", V)
    stored = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**stored, "target": "three"}))
    monkeypatch.setattr("outrider.drafters.head.SHIPPED", str(tmp_path))
    drafter = HeadDrafter()
    drafter.bind(small_target())
    assert drafter.model.config.target == "three"
    with pytest.raises(ModelError, match="no draft head comes with Outrider for tiny-Llama-0"):
        HeadDrafter().bind(tiny("Llama"))


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", True),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", True),
        ("/models/SmolLM2-135M-Instruct/", True),
        ("bartowski/SmolLM2-135M-Instruct-GGUF", True),
        ("smollm2-135m-instruct-q8_0.gguf", True),
        ("SmolLM2-135M-Instruct-bf16", True),
        ("HuggingFaceTB/SmolLM2-135M", False),
        ("HuggingFaceTB/SmolLM2-360M-Instruct", False),
        ("SmolLM2-135M-Instruct-finetuned", False),
    ],
)
def test_the_shipped_head_goes_with_its_model_whoever_published_it(name: str, found: bool) -> None:
    assert (find_shipped_head(name) is not None) is found


def test_a_model_of_that_name_and_another_shape_has_no_head() -> None:
    model = TransformersModel(module("Llama", 1), name="SmolLM2-135M-Instruct")
    assert not comes_with_head(model)


@pytest.mark.parametrize(("layers", "found"), [(30, True), (4, False)])
def test_a_model_of_that_name_that_was_cut_shorter_has_none(
    layers: int, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head reads states that a shallower model has not."""
    folder = find_shipped_head("SmolLM2-135M-Instruct")
    assert folder is not None
    shape = load_config(folder)
    model = TransformersModel(module("Llama", 1), name="SmolLM2-135M-Instruct")
    for name, value in (("state_size", shape.target_width), ("vocab_size", shape.vocab_size), ("num_layers", layers)):
        monkeypatch.setattr(TransformersModel, name, value)
    assert comes_with_head(model) is found


def test_states_that_are_not_there_yet_are_not_made_up(tmp_path: Path) -> None:
    """Behind a target that has not caught up nothing is drafted; asked in spite of that, the head says so."""
    target = TransformersModel(module("Llama", 1))
    model = open_head(target, write_head(tmp_path, "autoregressive"))
    base = target.open()
    target.score([base], torch.tensor([[5, 6]]), [2], "none")
    sequence = model.open_on(base)
    with pytest.raises(ParameterError, match="2 positions ahead of its target"):
        model.score([sequence], torch.tensor([[5, 6, 7, 8, 9]]), [5], "last")


def test_a_models_reader_is_itself() -> None:
    model = table(2, V)
    assert ModelDrafter(model).reader() is model


def test_a_heads_folder_is_no_model(tmp_path: Path) -> None:
    path = write_head(tmp_path, "autoregressive")
    with pytest.raises(ParameterError, match=f"is a draft head's folder: name it head:path={path}"):
        make_from_spec(str(path), lambda *_: pytest.fail("loaded"), tiny("Llama"))
