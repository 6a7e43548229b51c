"""Whether two models speak the same tokens, so that one can draft for the other."""

from __future__ import annotations

import hashlib
from typing import Any
from weakref import WeakKeyDictionary

from outrider.errors import VocabularyMismatchError
from outrider.models.base import has_encoder

# Of each tokenizer its size and the digest of its entries: reading 150,000 of them takes a tenth of a second.
_known: WeakKeyDictionary[Any, tuple[int, hashlib._Hash]] = WeakKeyDictionary()
_SAMPLE = "def f(x):\n\treturn x**2  # naïve 数 🙂 1234"


def same_tokens(target: Any, draft: Any) -> bool:
    """Whether token ids mean the same to both models."""
    try:
        check_same_tokens(target, draft)
    except VocabularyMismatchError:
        return False
    return True


def share_source(target: Any, draft: Any) -> None:
    """Let a draft with the target's own encoder use what that has made of a source (`EncoderDecoder.share_encoder`).

    Raises `VocabularyMismatchError` if the draft has an encoder that can't read what the target's encoder reads.
    """
    if not has_encoder(draft):
        return
    if not has_encoder(target):
        raise VocabularyMismatchError(
            f"draft {draft.name} is an encoder-decoder model, target {target.name} is not: there is no source for it to read"
        )
    if target.source_kind != draft.source_kind:
        kinds = f"{draft.source_kind} and {target.source_kind}"
        raise VocabularyMismatchError(f"draft {draft.name} and target {target.name} read different sources: {kinds}")
    draft.share_encoder(target)


def fingerprint(model: Any) -> str:
    """What identifies a model's tokens: its tokenizer's entries, or the size of a vocabulary without text."""
    tokenizer = getattr(model, "tokenizer", None)
    return f"size {model.vocab_size}" if tokenizer is None else fingerprint_of(tokenizer)


def fingerprint_of(tokenizer: Any) -> str:
    """A digest of a tokenizer's entries and of how it cuts a text. Entries are read again if their number changes."""
    digest = _of_entries(tokenizer).copy()
    digest.update(f"{tokenizer.encode(_SAMPLE)!r})".encode())
    return digest.hexdigest()[:32]


def _of_entries(tokenizer: Any) -> hashlib._Hash:
    """Of the first part of the pair (entries, a text cut)."""
    try:
        size = len(tokenizer)
        found = _known.get(tokenizer)
    except TypeError:  # no length, or no hash: nothing that could be kept
        size, found = -1, None
    if found is None or found[0] != size:
        found = (size, hashlib.sha256(f"({sorted(tokenizer.get_vocab().items())!r}, ".encode()))
        if size >= 0:
            _known[tokenizer] = found
    return found[1]


def check_same_tokens(target: Any, draft: Any) -> None:
    """Raise `VocabularyMismatchError`, with both names, unless token ids mean the same to both models.

    Embeddings padded to different sizes are fine if the tokenizers agree. Models without tokenizers (tables) must have
    vocabularies of the same size.
    """
    ours, theirs = getattr(target, "tokenizer", None), getattr(draft, "tokenizer", None)
    remedy = "use a draft of the target's family, or the draft prompt-lookup"
    names = f"draft {draft.name} and target {target.name}"
    if ours is None or theirs is None:
        if target.vocab_size != draft.vocab_size:
            sizes = f"{draft.vocab_size} and {target.vocab_size} tokens"
            raise VocabularyMismatchError(f"{names} have vocabularies of {sizes}: {remedy}")
        return
    if fingerprint_of(ours) == fingerprint_of(theirs):
        return
    mine, other = ours.get_vocab(), theirs.get_vocab()
    if mine != other:
        differing = len(set(mine.items()) ^ set(other.items()))
        raise VocabularyMismatchError(f"{names} have different tokenizers ({differing} entries differ): {remedy}")
    if ours.encode(_SAMPLE) != theirs.encode(_SAMPLE):
        raise VocabularyMismatchError(f"{names} have tokenizers that split the same text differently: {remedy}")
