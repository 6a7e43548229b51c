"""Errors that a user can act on: one line each, naming the parameter, its range, the value and the remedy.

The command line prints the message and exits with `exit_code`; nothing else in the package prints errors.
"""


def in_one_line(error: object, limit: int = 240) -> str:
    """What somebody else's error says, cut where a sentence or a word ends; its kind if it says nothing."""
    text = " ".join(str(error).split()) or type(error).__name__
    if len(text) <= limit:
        return text
    kept = text[:limit]
    sentence = kept.rfind(". ")
    return kept[: sentence + 1] if sentence > limit // 3 else kept[: kept.rfind(" ")] + " …"


def why_unread(error: Exception) -> str:
    """Why a file could not be read or written, without numbers and names that only Python knows."""
    if isinstance(error, OSError):
        return error.strerror or in_one_line(error)
    return "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else in_one_line(error)


class Interrupted(KeyboardInterrupt):
    """An interrupt that says what is kept and how to go on."""


class OutriderError(Exception):
    """Base of every error that Outrider raises on purpose. Its message is one line."""

    exit_code = 1


class ParameterError(OutriderError, ValueError):
    """A parameter is outside its range."""

    exit_code = 2


class ContextLengthError(ParameterError):
    """The prompt does not fit into the context of the model."""


class ModelError(OutriderError):
    """A model can't be found, loaded or used for speculation."""


class VocabularyMismatchError(ModelError):
    """Draft and target do not speak the same tokens."""


class MissingPackageError(OutriderError):
    """An optional package is not installed."""


class CacheFolderError(OutriderError):
    """The folder for converted models can't be written."""


class NumericalError(OutriderError, ArithmeticError):
    """A model returned logits that are not a distribution (NaN, or everything excluded)."""
