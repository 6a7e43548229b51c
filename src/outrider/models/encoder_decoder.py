"""Encoder–decoders of transformers (T5, BART, Marian, Whisper, …) behind the slot cache.

A sequence's source is read when it is opened: the encoder runs once, every layer's cross attention keeps its keys and values
in the sequence's slot (`cross_cache`), and from then on a pass is the decoder's alone, as cheap to roll back as in a
decoder-only model. Sources are encoded one by one, so that no row's depend on another's padding; one that an open sequence
has read already (several answers to a question, a model that drafts for itself) is copied from there. A draft with the
target's own encoder, as distilled ones have (distil-whisper), takes over what that has made of a source (`share_encoder`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from collections.abc import Sequence as Many
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from outrider.errors import ContextLengthError, ModelError, ParameterError
from outrider.models.base import Source
from outrider.models.cache.cross_cache import CrossCache, SourceLayer
from outrider.models.cache.masks import make_mask
from outrider.models.cache.row_positions import at_positions, position_modules
from outrider.models.cache.slot_cache import Placement
from outrider.models.cache.slots import SlotSequence
from outrider.models.encoder_states import EncoderStates, Stamp, same_weights, source_key, stamp
from outrider.models.limits import context_limit
from outrider.models.transformers_model import TransformersModel
from outrider.support.inference import in_inference_mode

STAND_IN = 64  # tokens


class EncoderDecoderModel(TransformersModel):
    """A loaded encoder–decoder as a `LanguageModel` over its decoder's tokens.

    feature_extractor: of transformers, for a model whose encoder hears (Whisper); None for one that reads.
    A sequence holds the decoder's tokens, its start token among them; `max_length` is the decoder's.
    """

    has_encoder = True

    def __init__(self, model: Any, tokenizer: Any = None, name: str | None = None, feature_extractor: Any = None) -> None:
        self.feature_extractor = feature_extractor
        super().__init__(model, tokenizer, name)

    def _prepare(self, model: Any) -> None:
        config = model.config
        if getattr(config, "share_encoder_decoder_embeddings", True) is False:
            raise ModelError(f"{self._name} can't be used: its encoder and decoder have vocabularies of their own")
        self._decoder = model.get_decoder()
        if not isinstance(self._decoder, nn.Module) or self._decoder is model:
            raise ModelError(f"{self._name} ({config.model_type}) can't be used: its decoder was not found")
        self._tables, self._biased = position_modules(self._decoder, self._name)
        self._cross = CrossCache(_decoder_layers(config))
        self._both = EncoderDecoderCache(self._cache, self._cross)
        self._hears: bool = model.main_input_name == "input_features"
        # Relative positions have no end; the other limits are those of the tables.
        self._max_length = None if self._biased else _decoder_limit(config)
        self._longest_source = None if self._biased or self._hears else context_limit(config)
        self._size = int(config.hidden_size)
        self._read_by: dict[SlotSequence, tuple[bytes, Stamp]] = {}  # who has read what, and with which weights
        self._states = EncoderStates(self._encoder_stamp)
        # A model (weakly), both encoders' stamps, and whether they were the same
        self._compared: tuple[Any, tuple[Stamp, ...], bool] = (None, (), False)

    def _num_layers(self, config: Any) -> int:
        return _decoder_layers(config)

    @property
    def hears(self) -> bool:
        """Whether a source is audio."""
        return self._hears

    @property
    def source_kind(self) -> str:
        """What a source is, in words."""
        return "tokens" if not self._hears else " × ".join(map(str, self._features)) + " features"

    @property
    def _features(self) -> tuple[int, int]:
        """Channels and frames that the encoder hears: two frames to a position."""
        config = self.module.config
        return int(config.num_mel_bins), 2 * int(config.max_source_positions)

    def with_a_cache_of_its_own(self) -> Self:
        """See `TransformersModel`."""
        twin = super().with_a_cache_of_its_own()
        twin._cross, twin._read_by = CrossCache(len(self._cross.layers)), {}
        twin._states = EncoderStates(twin._encoder_stamp)
        twin._both = EncoderDecoderCache(twin._cache, twin._cross)
        return twin

    def stand_in(self) -> Source:
        """Some source, for measuring what a pass costs."""
        if self._hears:
            return torch.zeros(self._features)
        count = min(STAND_IN, self._longest_source or STAND_IN)
        return [(7 * i + 3) % self._vocab_size for i in range(count)]

    def encoded(self, known: Iterable[tuple[Source, Tensor]]) -> AbstractContextManager[None]:
        """Until it ends, these sources need no pass of the encoder: what it has made of each is given, [S, W]."""
        return self._states.given((source_key(self._inputs(source)), states.unsqueeze(0)) for source, states in known)

    def share_encoder(self, other: Any) -> bool:
        """Take over what another model's encoder has made of a source, if it is the same encoder. → whether it is

        The same: all weights are equal, and so is what both make of some source.
        """
        if other is self or not isinstance(other, EncoderDecoderModel):
            self._states.borrow(None)
            return False
        compared, stamps, same = self._compared
        now = self._encoder_stamp(), other._encoder_stamp()
        if compared is None or compared() is not other or stamps != now:
            same = self._has_the_encoder_of(other)
            self._compared = weakref.ref(other), now, same
        self._states.borrow(other._states if same else None)
        return same

    def _encoder_stamp(self) -> Stamp:
        return stamp(self.module.get_encoder())

    @in_inference_mode
    def _has_the_encoder_of(self, other: EncoderDecoderModel) -> bool:
        if (self.device, self.dtype, self.source_kind) != (other.device, other.dtype, other.source_kind):
            return False
        if not same_weights(self.module.get_encoder(), other.module.get_encoder()):
            return False
        return torch.equal(*(model._encode(model._inputs(self.stand_in())) for model in (self, other)))

    def _read_each_pass(self) -> Iterable[nn.Module]:
        head = self.module.get_output_embeddings()
        return dict.fromkeys([*self._decoder.modules(), *([] if head is None else [head])])

    def open(self, reserve: int = 0, source: Source | None = None) -> SlotSequence:
        """A new sequence whose source has been read: token ids, or features [channels, frames].

        Raises `ParameterError` without a source or for one of another kind, `ContextLengthError` for one that is too long.
        """
        inputs = self._inputs(source)
        key = source_key(inputs)
        read = key, stamp(self.module)
        reader = next((other for other, held in self._read_by.items() if held == read and other in self._open), None)
        sequence = super().open(reserve)
        try:
            if reader is None:
                self._read(inputs, key, sequence)
            else:
                self._cross.copy(reader.slot, sequence.slot)
        except BaseException:
            super().release(sequence)
            if reader is None:
                self._drop(key)
            raise
        self._read_by[sequence] = read
        return sequence

    def check_source(self, source: Source | None) -> None:
        """See `EncoderDecoder`."""
        if source is None:
            raise ParameterError(f"{self._name} is an encoder-decoder model: give the source that its encoder is to read")
        if self._hears:
            if not isinstance(source, Tensor) or tuple(source.shape) != self._features:
                got = f"{list(source.shape)}" if isinstance(source, Tensor) else "token ids"
                raise ParameterError(f"source must be features {list(self._features)} for {self._name}, got {got}")
            return
        if isinstance(source, Tensor) and source.dim() != 1:
            raise ParameterError(f"source must be token ids for {self._name}, got features {list(source.shape)}")
        ids = [int(token) for token in source]
        if not ids:
            raise ParameterError("source must hold at least one token, got none: give some text")
        if not 0 <= min(ids) <= max(ids) < self._vocab_size:
            raise ParameterError(f"source tokens must be in 0 … {self._vocab_size - 1}, got {min(ids)} … {max(ids)}")
        if self._longest_source is not None and len(ids) > self._longest_source:
            raise ContextLengthError(
                f"source has {len(ids)} tokens, the encoder of {self._name} has {self._longest_source} positions: shorten it"
            )

    def _inputs(self, source: Source | None) -> dict[str, Tensor]:
        """The encoder's arguments for one source, checked."""
        self.check_source(source)
        assert source is not None
        if isinstance(source, Tensor) and self._hears:
            return {"input_features": source.to(self.device, self.dtype).unsqueeze(0)}
        tokens = torch.tensor([[int(token) for token in source]], device=self.device)
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}

    def _encode(self, inputs: dict[str, Tensor]) -> Tensor:
        """What the encoder makes of a source. → [1, S, W]"""
        states: Tensor = self.module.get_encoder()(**inputs).last_hidden_state
        return states

    @in_inference_mode
    def _read(self, inputs: dict[str, Tensor], key: bytes, sequence: SlotSequence) -> None:
        """Run the encoder, and one token of the decoder, whose cross attention then keeps what it computed."""
        known = self._states.known(key)
        states = self._encode(inputs) if known is None else known
        self._states.keep(key, states)
        first = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        mask = {name: value for name, value in inputs.items() if name == "attention_mask"}
        self._cross.filling = sequence.slot
        self._cache.placement = Placement((sequence.slot,), (0,), first, 1)
        self._both.is_updated = dict.fromkeys(range(len(self._cross.layers)), False)
        with at_positions(self._tables, self._biased, first, 1):
            self.module(
                **mask,
                encoder_outputs=BaseModelOutput(last_hidden_state=states),
                decoder_input_ids=first,
                use_cache=True,
                **{self._cache_as: self._both},
            )

    def release(self, sequence: SlotSequence) -> None:
        """Free a sequence's slot; the last sequence moves into it, its source, too."""
        read = self._read_by.pop(sequence, None)
        if read is not None:
            self._drop(read[0])
        if sequence in self._open and self._open[-1] is not sequence:
            self._cross.copy(self._open[-1].slot, sequence.slot)
        super().release(sequence)

    def _drop(self, key: bytes) -> None:
        """Keep what the encoder made of a source no longer than there are sequences that have read it."""
        if all(key != held for held, _ in self._read_by.values()):
            self._states.drop(key)

    def _forward(
        self, tokens: Tensor, positions: Tensor, longest: int, kept: list[int] | None, at: Tensor | None = None
    ) -> Tensor:
        del at  # it scores no alternatives
        source = self.source_rows()
        with self.placed(positions, longest, self._cache):
            out: Tensor = self.module(**self.pass_arguments(tokens, positions, longest, self._cache, source)).logits
        return out if kept is None else out[:, kept]

    def placed(self, positions: Tensor, longest: int, cache: Cache) -> AbstractContextManager[None]:
        """See `TransformersModel`."""
        del cache
        if self._max_length is not None:
            positions = positions.clamp(max=self._max_length - 1)  # padding may lie past the last entry of the table
        return at_positions(self._tables, self._biased, positions, longest)

    def source_rows(self) -> list[Tensor]:
        """What each row may see of its source, [R, 1, 1, S], and each layer's keys and values of it, [R, heads, S, size]."""
        self._cross.slots = self._cache.placement.slots
        held = [tensor for layer in self._cross.layers for tensor in (layer.keys, layer.values)]
        return [self._cross.mask(self.device, self._additive), *(tensor for tensor in held if tensor is not None)]

    def source_like(self, rows: Any, length: Any) -> list[Tensor]:
        """See `TransformersModel`."""
        mask = torch.empty((rows, 1, 1, length), dtype=self._additive or torch.bool, device=self.device)
        shapes = [(tensor.shape[1], tensor.shape[3], tensor.dtype) for tensor in self._cross.held]
        return [mask, *(torch.empty((rows, n, length, size), dtype=dtype, device=self.device) for n, size, dtype in shapes)]

    def pass_arguments(
        self, tokens: Tensor, positions: Tensor, longest: int, cache: Any, source: Many[Tensor], at: Tensor | None = None
    ) -> dict[str, Any]:
        """See `TransformersModel`."""
        mask, *held = source
        both = EncoderDecoderCache(cache, Cache(layers=[SourceLayer(*held[i : i + 2]) for i in range(0, len(held), 2)]))
        both.is_updated = dict.fromkeys(range(len(held) // 2), True)
        # Looked at for its shape only: what it would be read for is in the cross cache.
        states = torch.zeros(1, 1, 1, dtype=self.dtype, device=self.device)
        states = states.expand(tokens.shape[0], mask.shape[3], self._size)
        return {
            "decoder_input_ids": tokens,
            "decoder_attention_mask": make_mask(positions, longest, self._pattern, self._additive, at),
            "attention_mask": mask,
            "encoder_outputs": BaseModelOutput(last_hidden_state=states),
            self._cache_as: both,
            "use_cache": True,
        }


def _decoder_layers(config: Any) -> int:
    """T5 names them one way, BART's kin another, where num_hidden_layers is the encoder's."""
    found = getattr(config, "num_decoder_layers", None) or getattr(config, "decoder_layers", None)
    return int(found or config.get_text_config(decoder=True).num_hidden_layers)


def _decoder_limit(config: Any) -> int | None:
    return getattr(config, "max_target_positions", None) or context_limit(config)
