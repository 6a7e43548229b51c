"""The contract between the decoding loop and an engine.

A model opens *sequences*; one call scores new tokens for several sequences of different lengths. A sequence has an
absolute `length` and `truncate(length)`; it is never told how many tokens to drop. Models know token ids only.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any, Literal, Protocol, TypeGuard, TypeVar, runtime_checkable

import torch
from torch import Tensor

from outrider.errors import ParameterError

WhichLogits = Literal["all", "last", "none"]
Source = Many[int] | Tensor
"""What an encoder reads: token ids, or the input features of one example, [channels, frames]."""


class Sequence(Protocol):
    """A sequence of tokens held by a model, with whatever the model caches for it."""

    @property
    def length(self) -> int:
        """Tokens scored so far."""

    def truncate(self, length: int) -> None:
        """Forget all tokens from position `length` on."""

    def close(self) -> None:
        """Give the memory back; the sequence can't be used again."""


class OwnedSequence(Sequence, Protocol):
    """One that knows whose it is, and whether it has been closed."""

    model: Any
    closed: bool


Owned = TypeVar("Owned", bound=OwnedSequence)


@runtime_checkable
class LanguageModel(Protocol):
    """An autoregressive model. name: for messages. max_length: positions it has, None if unlimited."""

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""

    @property
    def max_length(self) -> int | None: ...

    @property
    def device(self) -> torch.device: ...

    def open(self, reserve: int = 0) -> Sequence:
        """A new, empty sequence. reserve: the length it is expected to reach, so that memory is taken once."""

    def score(
        self, sequences: Many[Sequence], tokens: Tensor, lengths: Many[int], logits: WhichLogits = "all"
    ) -> Tensor | None:
        """Append tokens to each sequence and score them.

        tokens: int64 [R, N], row i's in the first lengths[i] ≥ 1 columns; the rest is ignored.
        Returns the logits after each token: [R, N, V] for "all" (row i valid in the first lengths[i]), [R, 1, V] after
        each row's last token for "last", None for "none". They may be overwritten by the model's next call.
        """


@runtime_checkable
class TextModel(LanguageModel, Protocol):
    """A language model that comes with what the text interface needs. tokenizer: a transformers tokenizer, or None."""

    tokenizer: Any

    @property
    def dtype_name(self) -> str:
        """Of its weights: "bfloat16", "int8", …"""

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens that its generation config names as ends of a text."""


def end_tokens(target: TextModel) -> frozenset[int]:
    """The tokens that end a sequence: the generation config's, and the tokenizer's (which chat templates rely on)."""
    own = getattr(target.tokenizer, "eos_token_id", None)
    return target.end_tokens | (frozenset() if own is None else {own})


@runtime_checkable
class EncoderDecoder(LanguageModel, Protocol):
    """A language model whose sequences begin with a source: its encoder reads it once, its decoder goes on from there.

    source_kind: what a source is, in words ("tokens", "80 × 3000 features"); models can share a source if these agree.
    has_encoder: true; see the function of that name.
    """

    has_encoder: bool

    @property
    def source_kind(self) -> str: ...

    def open(self, reserve: int = 0, source: Source | None = None) -> Sequence:
        """A new sequence whose source has been read. `ParameterError` without one, or if it is of another kind."""

    def check_source(self, source: Source) -> None:
        """Raise `ParameterError` or `ContextLengthError` for one that `open` would refuse."""

    def stand_in(self) -> Source:
        """Some source, for measuring what a pass costs."""

    def share_encoder(self, other: Any) -> bool:
        """Take over what another model's encoder makes of a source, if it is the same encoder. → whether it is"""


def has_encoder(model: object) -> TypeGuard[EncoderDecoder]:
    """Whether a model is an encoder-decoder: asked for every token, so by one attribute instead of by all of them."""
    return getattr(model, "has_encoder", False) is True


def is_flat(model: LanguageModel) -> bool:
    """Whether a row of a pass costs what its own tokens do (`flat` is true), instead of being made as wide as the widest."""
    return getattr(model, "flat", False) is True


def refuse_encoder(target: LanguageModel, what: str) -> None:
    """For what has no use for a source: raise, naming what does."""
    if has_encoder(target):
        raise ParameterError(
            f"{what} is for decoder-only models, {target.name} is an encoder-decoder: use generate, batch, tune, audit "
            "or another bench"
        )


def represented(model: LanguageModel) -> str:
    """What `repr` says of a model."""
    dtype = getattr(model, "dtype_name", None)  # drafts alone may have none
    return f"<{type(model).__name__} {model.name}, {f'{dtype}, ' if dtype else ''}{model.device}>"


def refuse_draft_only(target: LanguageModel) -> None:
    """Raise if the model's head has rows for some tokens alone: as a target it would say no others."""
    if has_few_tokens(target):
        raise ParameterError(
            f"{target.name} is a draft of {len(target.draft_tokens)} tokens and can't be a target: name the model that a "
            "student was trained for, and leave num_tokens out"
        )


def tokens_of(source: Source | None) -> list[int]:
    """A source, as far as it is text."""
    return [] if source is None or isinstance(source, Tensor) else list(source)


def open_sequence(model: LanguageModel, source: Source | None, reserve: int = 0) -> Sequence:
    """A new sequence of any model; a decoder-only one has no use for the source."""
    return model.open(reserve, source) if has_encoder(model) else model.open(reserve)


@runtime_checkable
class ReadsWeights(Protocol):
    """A model that knows what it reads."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a pass of one token reads: all but tables of which it looks up a row."""


LAST = 0  # the key of the states after the whole body, norm included, among those of layers, which count from 1


@runtime_checkable
class HandsOutStates(LanguageModel, Protocol):
    """An engine whose passes can keep hidden states, and which lends what a draft head needs of its weights (`heads`)."""

    @property
    def state_size(self) -> int:
        """Width W of a state."""

    @property
    def num_layers(self) -> int:
        """How many layers it has."""

    @property
    def state_dtype(self) -> torch.dtype:
        """In which a head is to compute beside it."""

    @property
    def quantized(self) -> bool:
        """Whether its own weights are quantized to 8 bits or fewer."""

    def keep_states(self, layers: Many[int] = ()) -> None:
        """From now on every pass keeps what the model's head reads: each position's last hidden state, after the final norm;
        and the states after some of its layers, counted from 1.

        No pass of its own, and rolled back with the sequence: W numbers a position for each, a few per cent of the keys and
        values. Raises `ParameterError` for layers that it does not have, or can't hand out.
        """

    def states(self, sequence: Sequence, start: int, stop: int, layers: Many[int] = ()) -> Tensor:
        """Of the positions start ≤ i < stop ≤ length: the last ones, beside them those of `layers`.

        → [stop - start, (1 + layers) · W], possibly overwritten by later passes
        """

    def embed(self, tokens: Tensor) -> Tensor:
        """The input embeddings of tokens. int64 [..] → [.., W], possibly overwritten by the next call"""

    def logits_of(self, states: Tensor) -> Tensor:
        """What its head makes of last states. [N, W] → [N, V], possibly overwritten by the next call"""


def check_layers(layers: Many[int], count: int, name: str) -> None:
    """Raise `ParameterError` unless a model of `count` layers has states of these that differ from the last ones."""
    if not all(1 <= layer < count for layer in layers):
        raise ParameterError(
            f"layers must be in 1 … {count - 1}, those of {name} before the last, got {', '.join(map(str, layers))}"
        )


@runtime_checkable
class ScoresAlternatives(LanguageModel, Protocol):
    """An engine that scores further tokens in the places of appended ones, in the same pass: what a draft might have said
    instead. If one of them turns out to be the next token, the token after it is known, too.
    """

    @property
    def scores_alternatives(self) -> bool:
        """Whether it does so as it was loaded."""

    def score_beside(
        self, sequences: Many[Sequence], tokens: Tensor, lengths: Many[int], others: Tensor, places: Many[Many[int]]
    ) -> Tensor:
        """As `score`, and after the tokens alternatives: others[i, m] stands where tokens[i, places[i][m]] does.

        others: int64 [R, M]; row i's in the first len(places[i]) columns. An alternative sees the tokens before its place
        and itself; nothing sees it, and it is not appended. Returns logits [R, W, V], W the most that a row has of both:
        row i's after its tokens in the first lengths[i] columns, those after its alternative m in column lengths[i] + m.
        """

    def take_alternative(self, sequence: Sequence, position: int, m: int) -> None:
        """After `score_beside`: let the sequence end with its alternative m at `position`, the place where it stood."""


def scores_alternatives(model: LanguageModel) -> TypeGuard[ScoresAlternatives]:
    """Whether a model offers `ScoresAlternatives`: asked in each round, so by one attribute."""
    return getattr(model, "scores_alternatives", False) is True


def has_same_bits(model: LanguageModel) -> bool:
    """Whether an engine gives a token's logits the same bits in a pass of any width, as it was loaded, and says so."""
    return getattr(model, "same_bits", False) is True


@runtime_checkable
class FewTokens(LanguageModel, Protocol):
    """A draft whose head has rows for some tokens alone, as long as it has any left out (`has_few_tokens`)."""

    @property
    def draft_tokens(self) -> Tensor:
        """Those, int64 [T], ascending; all others have logit -inf."""

    def score_few(
        self, sequences: Many[Sequence], tokens: Tensor, lengths: Many[int], logits: WhichLogits = "all"
    ) -> Tensor | None:
        """`score`, of these alone: [R, N, T]"""


def has_few_tokens(model: LanguageModel) -> TypeGuard[FewTokens]:
    """Whether it is one: asked in each round, so by one attribute."""
    return getattr(model, "draft_tokens", None) is not None


@runtime_checkable
class CopiesPrefixes(Protocol):
    """An engine that can copy what one sequence caches into another: what beams share need not be scored twice."""

    def copy_prefix(self, source: Sequence, target: Sequence, length: int) -> None:
        """Make `target` hold the first `length` tokens of `source`; those that it holds already must be the same ones.

        target.length ≤ length ≤ source.length.
        """


def known_tokens(tokens: list[int], vocab_size: int) -> list[int]:
    """The tokens as a model of that many sees them: a padding entry that only another model has becomes token 0."""
    return tokens if max(tokens, default=0) < vocab_size else [token if token < vocab_size else 0 for token in tokens]


def fit_vocabulary(logits: Tensor, vocab_size: int) -> Tensor:
    """Logits over `vocab_size` tokens: cut, or padded with -inf. [.., V'] → [.., V]

    Models of one family share a tokenizer but pad their embeddings to different sizes. The surplus entries stand for no
    token, so a draft must not propose them and the target gives the width.
    """
    surplus = logits.shape[-1] - vocab_size
    if surplus > 0:
        return logits[..., :vocab_size]
    if surplus < 0:
        return torch.nn.functional.pad(logits, (0, -surplus), value=-torch.inf)
    return logits
