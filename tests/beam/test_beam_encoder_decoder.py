"""Beam search with encoder–decoders: transformers' texts and scores under a checkpoint's own rules, whoever drafts."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.beam import BeamDecoder, BeamSettings, beam_search
from outrider.beam.compare import logprob
from outrider.beam.length import BeamLength
from outrider.beam.state import Finished
from outrider.beam.task import task_of
from outrider.models.base import LanguageModel
from outrider.models.decoder_rules import decoder_prefix
from outrider.models.encoder_decoder import EncoderDecoderModel
from outrider.models.loading import load_transformers
from outrider.request.prompts import Prepared
from outrider.settings.beams import EarlyStopping
from tests.helpers.commands import call
from tests.helpers.encoder_decoder import FOUR, ruled, some_source
from tests.helpers.folders import save_encoder_decoder
from tests.helpers.marks import slow
from tests.helpers.tiny_models import module, tiny, tiny_encoder_decoder

COUNT = 12
SEARCHES: list[tuple[int, float, EarlyStopping]] = [(1, 1.0, False), (3, 2.0, False), (4, -0.5, True), (4, 0.6, "never")]


def configured(architecture: str, **rules: Any) -> EncoderDecoderModel:
    """With another generation config than `ruled`."""
    model = EncoderDecoderModel(module(architecture), name=f"configured-{architecture}")
    for name, value in rules.items():
        setattr(model.module.generation_config, name, value)
    return model


def searched(
    model: EncoderDecoderModel, settings: BeamSettings, draft: LanguageModel | None = None, seed: int = 1
) -> tuple[tuple[Finished, ...], int]:
    """What was found for a source, and the passes that it took."""
    source = some_source(model, seed, 9)
    task = task_of(model, Prepared(decoder_prefix(model, source), source), COUNT)
    decoder = BeamDecoder(model, task, settings, COUNT, model.end_tokens, draft, BeamLength(2))
    passes = len(list(decoder.rounds()))
    assert decoder.state.done
    assert not model._open
    return decoder.state.finished, passes


@cache
def by_transformers(
    architecture: str, width: int, penalty: float, early: EarlyStopping
) -> tuple[list[list[int]], list[float]]:
    """The texts behind the prefix and their scores; a forced first token counts as new there, and is prefix here."""
    model = ruled(architecture)
    source = some_source(model, 1, 9)
    key = "input_features" if model.hears else "input_ids"
    prefix = decoder_prefix(model, source)
    with torch.inference_mode():
        out = model.module.generate(
            **{key: source.unsqueeze(0) if isinstance(source, Tensor) else torch.tensor([source])},
            do_sample=False,
            use_cache=False,  # which a decoder with more layers than its encoder can't have there
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=COUNT + len(prefix) - 1,
            return_dict_in_generate=True,
            output_scores=True,
            **({"length_penalty": penalty, "early_stopping": early} if width > 1 else {}),
        )
    texts = []
    for row in out.sequences.tolist():
        new = row[len(prefix) :] if row[: len(prefix)] == prefix else row
        end = next((i + 1 for i, token in enumerate(new) if token in model.end_tokens), len(new))
        texts.append(new[:end])
    return texts, out.sequences_scores.tolist() if width > 1 else []


@pytest.mark.parametrize("architecture", FOUR)
@pytest.mark.parametrize(("width", "penalty", "early"), SEARCHES)
def test_texts_and_scores_are_those_of_transformers(
    architecture: str, width: int, penalty: float, early: EarlyStopping
) -> None:
    """Forbidden and forced tokens, least lengths and repetitions among them. transformers adds up in float32."""
    texts, scores = by_transformers(architecture, width, penalty, early)
    found, _ = searched(ruled(architecture), BeamSettings(width, penalty, early, width))
    told = 1 if architecture == "Whisper" else width  # whose `generate` gives the best one again and again
    assert [list(one.tokens) for one in found[:told]] == texts[:told]
    if width > 1:
        assert [one.score for one in found[:told]] == pytest.approx(scores[:told], abs=1e-4)
    assert len({one.tokens for one in found}) == width


@pytest.mark.parametrize("architecture", FOUR)
@pytest.mark.parametrize("drafting", ["itself", "encoder-decoder", "decoder-only"])
def test_a_draft_changes_the_number_of_passes_alone(architecture: str, drafting: str) -> None:
    model, settings = ruled(architecture), BeamSettings(3, early_stopping="never")
    plain, passes = searched(model, settings)
    draft = {"itself": model, "encoder-decoder": tiny_encoder_decoder(architecture, 1), "decoder-only": tiny("Llama")}
    found, fewer = searched(model, settings, draft[drafting])
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    assert [one.score for one in found] == pytest.approx([one.score for one in plain], abs=1e-9)
    assert fewer < passes if drafting == "itself" else fewer <= passes


@pytest.mark.parametrize("width", [1, 3, 8])
def test_log_probabilities_follow_the_rules_in_any_width(width: int) -> None:
    """What the comparison of two searches measures rounding by."""
    model, source = ruled("T5"), some_source(ruled("T5"), 1, 9)
    task = task_of(model, Prepared(decoder_prefix(model, source), source), COUNT)
    for one in searched(model, BeamSettings(3))[0]:
        assert logprob(model, task, one.tokens, width) == pytest.approx(one.logprob, abs=1e-9)


@pytest.mark.usefixtures("unrecorded")
def test_the_interface_and_the_command_read_a_source(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [save_encoder_decoder(tmp_path / f"t5-{seed}", "T5", seed) for seed in (0, 1)]
    options: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": COUNT}
    target, draft = (load_transformers(folder, dtype="float64") for folder in folders)
    found = beam_search(target, "the quick brown fox", draft=draft, num_draft_tokens=2, **options)
    command = ["generate", "the quick brown fox", "--target", folders[0], "--dtype", "float64", "--json"]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    printed = call(capsys, *command, "--draft", folders[1], "--num-draft-tokens", 2, "--compare")
    assert call(capsys, *command)["source_tokens"] > 1
    assert printed["identical"]
    assert [one["tokens"] for one in printed["sequences"]] == [one.tokens for one in found.sequences]
    assert found.stats.drafted


@pytest.mark.parametrize(
    ("architecture", "rules"),
    [
        ("Marian", {"renormalize_logits": True, "bad_words_ids": [[39], [44], [17]], "forced_eos_token_id": 2}),
        ("T5", {"renormalize_logits": True, "no_repeat_ngram_size": 1, "repetition_penalty": 1.3}),
        ("T5", {"repetition_penalty": 1.2}),
        ("Bart", {"repetition_penalty": 1.2, "min_length": 6}),
    ],
)
@pytest.mark.parametrize("width", [slow(1), 4])
def test_what_is_left_is_normalised_where_the_config_says_so(architecture: str, rules: dict[str, Any], width: int) -> None:
    """And with one beam, penalties are greedy decoding's: on logits, not on log-probabilities."""
    model = configured(architecture, **rules)
    for seed in range(6):
        source = torch.tensor([list(map(int, some_source(model, seed, 9)))])
        out = model.module.generate(
            source,
            do_sample=False,
            use_cache=False,
            num_beams=width,
            max_new_tokens=COUNT,
            return_dict_in_generate=True,
            output_scores=True,
        )
        best = searched(model, BeamSettings(width), None, seed)[0][0]
        new = out.sequences[0, 1:].tolist()
        end = next((i + 1 for i, token in enumerate(new) if token in model.end_tokens), len(new))
        assert list(best.tokens) == new[:end]
        if width > 1:
            assert best.score == pytest.approx(float(out.sequences_scores[0]), abs=1e-4)
        prefix = decoder_prefix(model, source[0].tolist())
        task = task_of(model, Prepared(prefix, source[0].tolist()), COUNT).with_beams(width)
        assert logprob(model, task, best.tokens, 3) == pytest.approx(best.logprob, abs=1e-9)
