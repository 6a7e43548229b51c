"""Speech as a prompt: samples from a WAV file, for models whose encoder hears (Whisper).

A line of a JSON file names a recording as {"audio": FILE, "language": …, "task": …}, the last two if need be.

Files are read with Python's own `wave`: PCM of 8, 16, 24 or 32 bits, channels averaged. Nothing is resampled or cut: a model
hears a recording as it is or says why not.
"""

from __future__ import annotations

import hashlib
import wave
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.errors import ContextLengthError, ParameterError, in_one_line

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.models.encoder_decoder import EncoderDecoderModel

Samples = np.ndarray[tuple[int], np.dtype[np.float32]]
_WIDTHS = (1, 2, 3, 4)  # bytes a sample
_UNKNOWN = 0x7FFFF000  # bytes from which a header names no length: of what was written to a pipe
_HOW = "ffmpeg -i FILE -c:a pcm_s16le out.wav"


@dataclass(frozen=True, eq=False)
class Audio:
    """A recording as a prompt. samples: float32 [T] in [-1, 1]. rate: in hertz.

    language, task: for multilingual Whisper models ("en", "german", …; "transcribe", "translate"); without a language the
    model judges which it is. file: where it was read from, if it was.
    """

    samples: Samples
    rate: int
    language: str | None = None
    task: str | None = None
    file: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.samples, np.ndarray) or self.samples.ndim != 1 or not len(self.samples):
            raise ParameterError("samples must be a NumPy array of one dimension with at least one number")
        if not np.issubdtype(self.samples.dtype, np.floating):
            raise ParameterError(f"samples must be floating-point numbers in [-1, 1], got {self.samples.dtype}")
        if isinstance(self.rate, bool) or not isinstance(self.rate, int) or self.rate < 1:
            raise ParameterError(f"rate must be a whole number of hertz, got {self.rate!r}")

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.rate

    @property
    def digest(self) -> bytes:
        """What tells it from other recordings."""
        return hashlib.sha256(self.samples.tobytes() + str((self.rate, self.language, self.task)).encode()).digest()


def read_wav(path: Path | str, language: str | None = None, task: str | None = None) -> Audio:
    """The recording in a WAV file. Raises `ParameterError` for files that are not PCM WAV."""
    try:
        with wave.open(str(path), "rb") as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            promised, raw = file.getnframes() * width * channels, file.readframes(file.getnframes())
    except (OSError, ValueError) as error:  # a file system takes no NUL and no halves of characters
        reason = error.strerror if isinstance(error, OSError) else in_one_line(error, 80)
        shown = str(path).encode("utf-8", "backslashreplace").decode()
        raise ParameterError(f"audio {shown} can't be read ({reason}): name a WAV file") from None
    except (wave.Error, EOFError) as error:
        reason = str(error) or "it ends early"
        raise ParameterError(f"audio {path} is no PCM WAV file ({reason}): convert it, {_HOW}") from None
    if width not in _WIDTHS:
        raise ParameterError(f"audio {path} has {8 * width} bits a sample, 8, 16, 24 or 32 are read: convert it, {_HOW}")
    if not raw:
        raise ParameterError(f"audio {path} holds no samples: record something")
    if len(raw) < promised < _UNKNOWN:
        raise ParameterError(
            f"audio {path} ends early: it has {len(raw)} of the {promised} bytes that its header names; record it again"
        )
    raw = raw[: len(raw) // (width * channels) * (width * channels)]
    samples = _decoded(raw, width).reshape(-1, channels).mean(1, dtype=np.float32)
    return Audio(samples, rate, language, task, str(Path(path).absolute()))


class Recordings:
    """Those that lines of a JSON file name, each read once. folder: what file names are relative to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[tuple[str, str | None, str | None], Audio] = {}

    def named_by(self, entry: Mapping[str, Any], where: str) -> Audio | None:
        """The recording of a line, None if it names none. where: the line, for errors."""
        if entry.get("audio") is None:
            return None
        file, language, task = entry["audio"], entry.get("language"), entry.get("task")
        if not all(isinstance(value, str) and value for value in (file, language or "none", task or "none")):
            raise ParameterError(f'{where}: must name a recording as {{"audio": FILE, "language": …, "task": …}}')
        key = (file, language, task)
        if key not in self._read:
            self._read[key] = read_wav(self._folder / _expanded(file), language, task)
        return self._read[key]


def _expanded(file: str) -> Path:
    """With a home folder in place of "~", if there is such a user."""
    try:
        return Path(file).expanduser()
    except RuntimeError:
        return Path(file)


def named(audio: Audio) -> dict[str, str]:
    """A recording as a line of a JSON file names it. Raises `ParameterError` for one that was not read from a file."""
    if audio.file is None:
        raise ParameterError("a recording that is to be named must have been read from a file: use read_wav")
    found = {"audio": audio.file, "language": audio.language, "task": audio.task}
    return {name: value for name, value in found.items() if value is not None}


def _decoded(raw: bytes, width: int) -> Samples:
    """PCM of that many bytes a sample, little endian; one byte is unsigned. → float32 in [-1, 1)"""
    if width == 1:
        return (np.frombuffer(raw, np.uint8).astype(np.float32) - 128.0) / 128.0
    if width == 3:
        parts = np.frombuffer(raw, np.uint8).reshape(-1, 3)
        wide = np.zeros((len(parts), 4), np.uint8)
        wide[:, 1:] = parts
        return wide.view("<i4").reshape(-1).astype(np.float32) / 2.0**31
    kind = {2: "<i2", 4: "<i4"}[width]
    return np.frombuffer(raw, kind).astype(np.float32) / 2.0 ** (8 * width - 1)


def features(model: EncoderDecoderModel, audio: Audio) -> Tensor:
    """What the model's encoder hears of a recording. → float32 [channels, frames]

    Raises `ParameterError` for another sampling rate, `ContextLengthError` for more than one window.
    """
    extractor = model.feature_extractor
    if extractor is None:
        raise ParameterError(f"{model.name} has no feature extractor (preprocessor_config.json): load its whole folder")
    if audio.rate != extractor.sampling_rate:
        raise ParameterError(
            f"audio has {audio.rate} Hz, {model.name} hears {extractor.sampling_rate} Hz: resample it, "
            f"ffmpeg -i FILE -ar {extractor.sampling_rate} out.wav"
        )
    if len(audio.samples) > extractor.n_samples:
        window = extractor.n_samples / extractor.sampling_rate
        raise ContextLengthError(
            f"audio has {audio.seconds:.1f} s, {model.name} hears {window:g} s at once: cut it into pieces"
        )
    found = extractor(audio.samples, sampling_rate=audio.rate, return_tensors="np")["input_features"][0]
    from torch import from_numpy  # here alone: that a file holds no recording is said before torch is imported

    return from_numpy(np.asarray(found, np.float32))
