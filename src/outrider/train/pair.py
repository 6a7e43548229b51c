"""A small language model and its draft, both from nothing: the set-up of Leviathan et al. 2022, section 4.2, on LM1B.

Two GPT-like decoders with Gelu over one vocabulary, and unigrams and bigrams of the same tokens beside them. The paper has
97 and 6 million parameters (12 layers of width 768, 2 of width 256; their embeddings not tied to their heads) and BERT's
word pieces cut to 8k; here byte pairs learnt from the data, so that any text will do.

output/text           windows of tokens, and what they were made of
output/target, draft  models as transformers loads them, with the tokenizer; their checkpoints
output/ngrams         the table of both orders
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from outrider.errors import ParameterError
from outrider.models.pretrained import without_bars
from outrider.support.checks import check_count
from outrider.train.apart import check_outside
from outrider.train.checkpoints import CHECKPOINTS, last_checkpoint
from outrider.train.corpus import Source, cut, marked, stamp, texts_of
from outrider.train.run import Report, RunSettings, processes, train
from outrider.train.states import digest

BEGIN = "<|endoftext|>"  # stands before every document, so that a text can begin without a prompt
HELD_OUT_TOKENS = 50_000
HEAD_SIZE = 64  # of both of the paper's models
LEARNT_FROM = 20_000_000  # characters of a source that the vocabulary is learnt from at most
CHARACTERS = 5  # of a token, about
FOLLOWERS = 512  # of a token in the table of bigrams; what is rarer is left to the unigrams


@dataclass(frozen=True)
class Shape:
    """Of a decoder."""

    layers: int
    width: int

    def __post_init__(self) -> None:
        check_count("layers", self.layers)
        if self.width < HEAD_SIZE or self.width % HEAD_SIZE:
            raise ParameterError(f"width must be a multiple of {HEAD_SIZE}, the size of an attention head, got {self.width}")

    @property
    def size(self) -> int:
        """Of its matrices, but for a factor that is the same for all."""
        return self.layers * self.width**2


@dataclass(frozen=True)
class PairSettings:
    """length: of a window, and the longest text of both models. vocabulary: tokens, 257 … 65,536."""

    sources: tuple[Source, ...]
    target: Shape = Shape(12, 768)
    draft: Shape = Shape(2, 256)
    vocabulary: int = 8192
    length: int = 128

    def __post_init__(self) -> None:
        check_count("vocabulary", self.vocabulary, 257, 1 << 16)
        check_count("length", self.length, 16, 8192)
        if self.draft.size >= self.target.size:
            raise ParameterError(
                f"draft-layers and draft-width must make a smaller model than the target, got {self.draft.layers} of width "
                f"{self.draft.width} beside {self.target.layers} of {self.target.width}"
            )


@dataclass(frozen=True)
class Made:
    """A trained model. loss: nats a token on held-out text; of the table none is measured."""

    folder: Path
    parameters: int
    loss: float
    report: Report


class TokenWindows(Dataset[dict[str, Tensor]]):
    """Windows in a file."""

    def __init__(self, path: Path, length: int) -> None:
        self.length = length
        self._windows: NDArray[np.uint16] = np.memmap(path, dtype=np.uint16, mode="r").reshape(-1, length)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"tokens": torch.from_numpy(np.array(self._windows[number], dtype=np.int64))}


class LanguageTrainee(nn.Module):
    """A decoder and its cross-entropy."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, tokens: Tensor) -> dict[str, Any]:
        """Tokens int64 [R, L] → the loss, and the sums of nats over positions."""
        logits = self.module(input_ids=tokens, use_cache=False).logits[:, :-1]
        wanted = tokens[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten())
        counts = {"nats": loss.detach() * wanted.numel(), "positions": torch.tensor(wanted.numel())}
        return {"loss": loss, "counts": [counts]}


def make_pair(settings: PairSettings, run: RunSettings, output: Path) -> dict[str, Made]:
    """Learn a vocabulary, count the table, train target and draft. Raises `ParameterError`.

    With `run.resume`, a model that was not begun yet begins, and one that has its steps is left as it is.
    """
    check_outside([source.name for source in settings.sources], [output])
    last_checkpoint(output / "target" / CHECKPOINTS, run.resume)
    text = output / "text"
    about = {"vocabulary": settings.vocabulary, "length": settings.length, "data": _version(settings.sources)}
    if run.resume and _made_of(text) != about:
        raise ParameterError(f"resume must keep data, vocabulary and length of {output}: give those, or name another output")
    with processes().main_process_first():  # the others find it done
        tokenizer = _prepare(settings, output, about)
    parts = [TokenWindows(text / name, settings.length) for name in ("train", "held_out")]
    made = {}
    for name, shape in (("target", settings.target), ("draft", settings.draft)):
        made[name] = _train(tokenizer, shape, parts, run, output / name, about)
    return made


def make_decoder(shape: Shape, vocabulary: int, length: int, begin: int = 0) -> Any:
    """A GPT-2 of that shape, untrained: Gelu, learnt positions, its head apart from its embeddings."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocabulary,
            n_positions=length,
            n_embd=shape.width,
            n_layer=shape.layers,
            n_head=shape.width // HEAD_SIZE,
            activation_function="gelu",
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            tie_word_embeddings=False,
            bos_token_id=begin,
            eos_token_id=begin,
        )
    )


def _train(
    tokenizer: Any, shape: Shape, parts: list[TokenWindows], run: RunSettings, folder: Path, about: dict[str, object]
) -> Made:
    torch.manual_seed(run.seed)
    module = make_decoder(shape, len(tokenizer), parts[0].length, tokenizer.bos_token_id)
    begun = run.resume and any((folder / CHECKPOINTS).glob("checkpoint-*"))
    trainee, own = LanguageTrainee(module), replace(run, resume=begun)
    report = train(trainee, parts[0], {"held_out": parts[1]}, folder / CHECKPOINTS, own, {**about, **asdict(shape)})
    if processes().is_main_process:
        with without_bars():
            module.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    parameters = sum(parameter.numel() for parameter in module.parameters())
    return Made(folder, parameters, report.held_out["held_out"]["nats"][0], report)


def _version(sources: Iterable[Source]) -> str:
    """Changes when the files do."""
    return digest([[source.name, source.limit, stamp(source.name)] for source in sources])


def _made_of(folder: Path) -> object:
    """What the text in a folder was made of, None if it is not complete."""
    path = folder / "about.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _prepare(settings: PairSettings, output: Path, about: dict[str, object]) -> Any:
    """The vocabulary, the windows and the table, unless they are there. → the tokenizer"""
    from transformers import PreTrainedTokenizerFast

    folder = output / "text"
    if _made_of(folder) == about:
        return PreTrainedTokenizerFast.from_pretrained(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "about.json").unlink(missing_ok=True)
    tokenizer = learn_tokenizer(_learnt_from(settings.sources), settings.vocabulary)
    for name, apart in (("train", False), ("held_out", True)):
        with (folder / name).open("wb") as file:
            for window in _windows(settings, tokenizer, apart):
                file.write(window.astype(np.uint16).tobytes())
        if not (folder / name).stat().st_size:
            raise ParameterError(
                f"data must hold a window of {settings.length} tokens to train on and one more in a document that is kept "
                "apart: give more text"
            )
    _count(TokenWindows(folder / "train", settings.length), tokenizer, output / "ngrams")
    tokenizer.save_pretrained(folder)
    (folder / "about.json").write_text(json.dumps(about), encoding="utf-8")
    return tokenizer


def learn_tokenizer(texts: Iterable[str], vocabulary: int) -> Any:
    """Byte pairs; no more of them than the text has. `BEGIN` is the only special token, and begins and ends texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    learnt = Tokenizer(models.BPE())
    learnt.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learnt.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BEGIN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    learnt.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=learnt, bos_token=BEGIN, eos_token=BEGIN)


def _learnt_from(sources: Iterable[Source]) -> Iterator[str]:
    """The first characters of each source that are trained on; somewhat more than a limit in tokens has."""
    for source in sources:
        left = LEARNT_FROM if source.limit is None else min(LEARNT_FROM, source.limit * CHARACTERS)
        for text, apart in _texts(source):
            if not apart:
                yield text[:left]
                left -= len(text)
            if left <= 0:
                break


def _texts(source: Source) -> Iterator[tuple[str, bool]]:
    """The documents of a source, and whether each is kept apart. Raises `ParameterError` for texts of another tokenizer."""
    for text, apart in marked(texts_of(source.name)):
        if not isinstance(text, str):
            raise ParameterError(f"data {source.name} holds tokens of another model: give text")
        yield text, apart


def _windows(settings: PairSettings, tokenizer: Any, apart: bool) -> Iterator[NDArray[np.uint32]]:
    """As they are trained on, or the first ones of what is kept apart."""

    def encode(text: str) -> list[int]:
        found: list[int] = tokenizer(BEGIN + text, add_special_tokens=False)["input_ids"]
        return found

    def of(source: Source) -> Iterator[NDArray[np.uint32]]:
        return cut((encode(text) for text, is_apart in _texts(source) if is_apart is apart), settings.length, source.limit)

    every = chain.from_iterable(of(source) for source in settings.sources)
    return islice(every, max(1, HELD_OUT_TOKENS // settings.length)) if apart else every


def _count(trained_on: TokenWindows, tokenizer: Any, path: Path) -> None:
    """The table of unigrams and bigrams of what is trained on, one document after the other."""
    from outrider.models.compatibility import fingerprint_of
    from outrider.ngram.training import Settings
    from outrider.ngram.training import train as count

    def encode(numbers: list[int]) -> list[list[int]]:
        return [trained_on[number]["tokens"].tolist() for number in numbers]

    size = len(tokenizer)
    count([range(len(trained_on))], encode, size, fingerprint_of(tokenizer), path, Settings(2, 1, FOLLOWERS))
