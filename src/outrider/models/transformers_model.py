"""The transformers engine: any decoder-only attention model, on CPU or CUDA, behind the slot cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from outrider.errors import ModelError, ParameterError
from outrider.models.as_opened import AsOpened, decoder_config
from outrider.models.attention.in_blocks import BLOCKS, columns_of
from outrider.models.attention.in_float64 import STEADY
from outrider.models.attention.shared_keys import forget_masks
from outrider.models.base import LAST, Sequence, WhichLogits
from outrider.models.beside import score_beside, take_alternative
from outrider.models.cache.masks import attention_pattern, make_mask
from outrider.models.cache.slot_cache import Placement, cache_name
from outrider.models.cache.slots import SlotSequence
from outrider.models.cut_head import spread, tokens_of_rows
from outrider.models.engine_checks import check_copy
from outrider.models.flat import flattened, in_rows, last_of
from outrider.models.hidden_states import caught
from outrider.models.kernels.attention import KERNEL, LARGE, keys_dtype
from outrider.models.limits import context_limit, end_tokens_of
from outrider.models.passes.captured import CapturedPasses
from outrider.models.passes.captured_trial import capture_passes
from outrider.models.passes.compiled import CompiledPasses, compile_passes
from outrider.models.passes.recorded import RecordedPasses, record_passes
from outrider.models.passes.recording import Recording
from outrider.models.passes.tracing import TracedRows
from outrider.models.probe import probe, reads_alternatives
from outrider.models.rollback import refuse_without_rollback
from outrider.models.states_model import StatesModel, no_further_states
from outrider.models.weights.packed_linear import bytes_of
from outrider.models.weights.quantized import Int8Embedding, quantization_of, quantized_by
from outrider.models.weights.same_bits import multiplies
from outrider.support.device_data import index as index_of
from outrider.support.device_data import places_from
from outrider.support.inference import in_inference_mode

NARROW = 8  # up to this many columns the head is applied to all: choosing one would only make its kernel slower


class TransformersModel(StatesModel):
    """A loaded `PreTrainedModel` as a `LanguageModel`, with the tokenizer that the text interface uses.

    draft_tokens: those that a head has rows for, if it was cut: such a model can only draft. None for others.

    Refuses models that can't roll back, by name and reason. Its own methods are not for several threads at once; generations
    take turns (`alone`).
    """

    has_encoder = False
    keeps_states = False  # of recurrent layers (`recurrent.model`)

    def __init__(self, model: Any, tokenizer: Any = None, name: str | None = None) -> None:
        self._name = name or getattr(model.config, "_name_or_path", "") or type(model).__name__
        refuse_without_rollback(model, self._name, self.has_encoder, self.keeps_states)
        self.module = model.eval()
        self.device: torch.device = model.device  # asking a module means looking through it; a pass asks several times
        self._quantization = quantization_of(model.modules())
        self.tokenizer = tokenizer
        drafted = None if self.has_encoder else tokens_of_rows(model, self._name)
        self.draft_tokens = None if drafted is None else drafted.to(self.device)
        config = decoder_config(model)
        if not hasattr(config, "vocab_size"):
            raise ModelError(f"{self._name} ({config.model_type}) can't be used: it is two models with a configuration each")
        self._vocab_size = int(config.vocab_size)
        self._max_length = context_limit(config)
        self._pattern = attention_pattern(config, self._name)
        self._additive = model.dtype if config._attn_implementation == "eager" else None
        self._columns = columns_of(model)
        self._as_opened: AsOpened | None = None
        # Experts have products of their own, which nobody rounds: of as many tokens as are sent to each, by torch.
        self._multiplies = self.quantized and any(map(multiplies, model.get_decoder().modules()))
        self._takes = set(inspect.signature(model.forward).parameters)
        self._cache_as = cache_name(self._takes)
        super().__init__(self._num_layers(config))
        self._width: Callable[[int, int], int] = as_it_is
        self.compiled: CompiledPasses | None = None
        self._reads_alternatives: bool | None = None
        self._prepare(model)
        probe(self)
        narrow = keys_dtype(model)
        if narrow is not None and self._cache.largest() <= LARGE:  # only now: a pass without a cache would round otherwise
            self._cache.keep_in(narrow)
        self._as_opened = AsOpened.of(model, self._name)

    def _look_again(self) -> None:
        self._check_module()
        super()._look_again()

    def _check_module(self) -> None:
        if self._as_opened is not None:  # else it is being opened
            self._as_opened.check(self.module, self._name)

    def logits_of(self, states: Tensor) -> Tensor:
        """See `HandsOutStates`. Heads ask when they are bound, before a sequence is opened."""
        self._check_module()
        return super().logits_of(states)

    def _prepare(self, model: Any) -> None:
        """What a subclass needs before the first pass."""

    def _num_layers(self, config: Any) -> int:
        return int(config.num_hidden_layers)

    def _read_each_pass(self) -> Iterable[torch.nn.Module]:
        return self.module.modules()  # type: ignore[no-any-return]

    @property
    def name(self) -> str:
        return self._name

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def max_length(self) -> int | None:
        return self._max_length

    @property
    def window(self) -> int | None:
        """Tokens that its narrowest layer sees; None where all see everything."""
        return self._pattern.narrowest

    @property
    def dtype(self) -> torch.dtype:
        return self.module.dtype  # type: ignore[no-any-return]

    @property
    def quantized(self) -> bool:
        """Whether weights and activations are quantized (`quantized`)."""
        return self._quantization is not None

    @property
    def dtype_name(self) -> str:
        """Of its weights, and whether passes are compiled, which rounds otherwise."""
        weights = self._quantization or str(self.dtype).removeprefix("torch.")
        return weights if self.compiled is None else f"{weights} compiled"

    @property
    def same_bits(self) -> bool:
        """Whether a token's logits have the same bits in a pass of any width (`same_bits`, `quantized`)."""
        own_attention = self.module.config._attn_implementation in (KERNEL, BLOCKS, STEADY)
        return own_attention and self.compiled is None and not self._multiplies

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens that the model's generation config names as ends."""
        return end_tokens_of(self.module)

    @property
    def fingerprint(self) -> str:
        """What the costs of a pass depend on, the machine apart."""
        how = "" if self.compiled is None else f" {self.compiled.widths} where tried"
        how += "" if self.recorded is None else " recorded"
        how += "" if self.draft_tokens is None else f" {len(self.draft_tokens)} rows"
        how += f" by {quantized_by()}" if self.quantized else ""
        attention = self.module.config._attn_implementation
        how += f" {self._cache.kept_dtype}" if self._cache.kept_dtype is not None else ""
        return f"{self.dtype_name}{how} {attention} {self._configuration}"

    @cached_property
    def _configuration(self) -> str:
        """As it was loaded: writing it takes milliseconds, and each generation asks for it."""
        return str(self.module.config.to_json_string())

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a pass of one token reads, embedding tables left out unless they are the head, too."""
        tables = (torch.nn.Embedding, Int8Embedding)
        return bytes_of(layer for layer in self._read_each_pass() if not isinstance(layer, tables))

    def open(self, reserve: int = 0) -> SlotSequence:
        return self._enter(SlotSequence(self, slot=len(self._open)), min(reserve, self._max_length or reserve))

    def pad_widths(self, width: Callable[[int, int], int]) -> None:
        """From now on score n tokens of one sequence as width(n, context) ≥ n, where that is quicker (`costs`)."""
        self._width = width

    def copy_prefix(self, source: Sequence, target: Sequence, length: int) -> None:
        """See `CopiesPrefixes`."""
        source, target = self._own(source), self._own(target)
        check_copy(source, target, length)
        self._cache.move(source.slot, target.slot, length, target.length)
        target.advance(length - target.length)

    @property
    def keeps_prefixes(self) -> bool:
        """See `SlotModel`."""
        return not self.has_encoder and not self.keeps_states

    recorded_on: tuple[str, ...] = ("cpu", "cuda")

    def _record_now(self) -> RecordedPasses | CapturedPasses | None:
        make = record_passes if self.device.type == "cpu" else capture_passes
        return make(self, tuple(self._kept_states()))

    def with_a_cache_of_its_own(self) -> Self:
        """See `RecordableModel`; with no compiled passes and no padded widths."""
        twin = super().with_a_cache_of_its_own()
        twin.compiled, twin._width = None, as_it_is
        return twin

    def compile(self) -> None:
        """From now on score a few tokens of one sequence by compiled passes, where these are quicker here (`compiled`).

        Takes a minute or more the first time. `ParameterError` for quantized models and encoder-decoders; a warning for what
        can't be compiled or gains nothing, and then the model is as it was.
        """
        further = [layer for layer in self._cache.states if layer != LAST]
        if further:
            raise ParameterError(no_further_states(further))
        self.compiled = compile_passes(self)

    def _score(self, rows: list[SlotSequence], tokens: Tensor, lengths: Many[int], logits: WhichLogits) -> Tensor | None:
        # What an ordinary pass refuses must not be written in part.
        if logits == "none" and self._are_tokens(tokens, len(rows)) and self._read_in_calls(rows, tokens, lengths):
            return None
        return self._in_one_pass(rows, tokens, lengths, logits)

    def _takes_any_order(self, rows: list[SlotSequence], tokens: Tensor, lengths: Many[int], logits: WhichLogits) -> bool:
        if logits == "none" or not self.flat or len(tokens) != len(rows) or not tokens.is_cpu:
            return False  # without logits there is nothing to put in order afterwards
        width = tokens.shape[1]
        return _kept(lengths, width, logits) is None and self._recording(rows, width) is not None

    def _in_one_pass(
        self, rows: list[SlotSequence], tokens: Tensor, lengths: Many[int], logits: WhichLogits
    ) -> Tensor | None:
        wanted = tokens.shape[1]
        width = self._width(wanted, rows[0].length) if len(rows) == 1 else wanted  # rows side by side are wide already
        quick = self.compiled if len(rows) == 1 and logits != "none" else None
        compiled_width = None if quick is None else quick.width(width)
        width = compiled_width or width
        kept = _kept(lengths, width, logits)
        recording = self._recording(rows, width) if kept is None and compiled_width is None else None
        if recording is not None:
            width = self._recorded_width(recording, rows, width)
        if width > wanted:
            tokens = torch.nn.functional.pad(tokens, (0, width - wanted))
        longest = self._reserve(rows, width)
        flat = self._flat(recording, rows, tokens, lengths)
        if flat is not None:
            return None if logits == "none" else in_rows(flat, lengths) if logits == "all" else last_of(flat, lengths)
        positions = self._place(rows, width, longest)
        if quick is not None and compiled_width is not None:
            out = self._forward_compiled(quick, tokens, positions, longest)
        elif recording is not None:
            out = self._forward_recorded(recording, tokens, positions, longest, positions)
        else:
            out = self._forward(tokens, positions, longest, kept)
        for row, count in zip(rows, lengths, strict=True):
            row.advance(count)
        if logits == "none":
            return None
        if logits == "all":
            return out[:, :wanted]
        if out.shape[1] == 1:
            return out
        # Some or all positions are there: pick each row's last.
        kept = kept or list(range(width))
        pick = index_of([kept.index(count - 1) for count in lengths], out.device)
        return out[torch.arange(len(rows), device=out.device), pick].unsqueeze(1)

    def _flat(
        self, recording: Recording | CapturedPasses | None, rows: list[SlotSequence], tokens: Tensor, lengths: Many[int]
    ) -> Tensor | None:
        """The logits of all rows' tokens, one row's after the other's, [sum of lengths, V], if that is one call."""
        if recording is None or not self.flat or len(tokens) != len(rows):  # which an ordinary pass refuses
            return None
        counts = [tokens.shape[1]] if len(rows) == 1 else lengths  # a row alone may be filled up
        out = self._forward_in_one_call(recording, rows, counts, flattened(tokens, counts))
        if out is None:
            return None
        for row, count in zip(rows, lengths, strict=True):
            row.advance(count)
        return out[: lengths[0]] if len(rows) == 1 else out

    def _reserve(self, rows: list[SlotSequence], width: int) -> int:
        """Get the cache ready for so many columns more of these rows. → how many are read"""
        longest = self._columns(max(row.length for row in rows) + width)
        self._cache.reserve(len(self._open), longest)
        return longest

    def _place(self, rows: list[SlotSequence], width: int, longest: int) -> Tensor:
        """Tell the cache where they are. → the columns int64 [R, N]"""
        starts = tuple(row.length for row in rows)
        columns = places_from(starts, width, self.device)
        self._cache.placement = Placement(tuple(row.slot for row in rows), starts, columns, longest)
        return columns

    @property
    def scores_alternatives(self) -> bool:
        """See `ScoresAlternatives`. Tried once, when it is first asked.

        Not with quantized weights: a token's own key lies in another column then, so its sums are added up in another
        order, and logits must have the same bits in any pass there. Compiled passes know of no alternatives.
        """
        if self.has_encoder or self.quantized or self.compiled is not None:
            return False
        if self._reads_alternatives is None:
            self._reads_alternatives = reads_alternatives(self.with_a_cache_of_its_own())
        return self._reads_alternatives

    @in_inference_mode
    def score_beside(
        self, sequences: Many[Sequence], tokens: Tensor, lengths: Many[int], others: Tensor, places: Many[Many[int]]
    ) -> Tensor:
        """See `ScoresAlternatives`."""
        return score_beside(self, [self._own(sequence) for sequence in sequences], tokens, lengths, others, places)

    def take_alternative(self, sequence: Sequence, position: int, m: int) -> None:
        """See `ScoresAlternatives`."""
        take_alternative(self, self._own(sequence), position, m)

    def over_vocabulary(self, out: Tensor) -> Tensor:
        """What the head gives; -inf for tokens without a row, if it was cut. [.., T] → [.., V]"""
        return out if self.draft_tokens is None else spread(out, self.draft_tokens, self._vocab_size)

    def _forward(
        self, tokens: Tensor, positions: Tensor, longest: int, kept: list[int] | None, at: Tensor | None = None
    ) -> Tensor:
        arguments = self.pass_arguments(tokens, positions, longest, self._cache, self.source_rows(), at)
        width = tokens.shape[1]
        cut = kept is not None and kept != list(range(width))
        if cut and kept is not None and "logits_to_keep" in self._takes:
            tail = kept == [width - 1]
            arguments["logits_to_keep"] = 1 if tail else index_of(kept, tokens.device)
        with caught(self.module, {layer: kept.put for layer, kept in self._kept_states().items()}):
            out: Tensor = self.module(**arguments).logits
        forget_masks()
        if cut and out.shape[1] == width:  # a model that computes all logits whether asked to or not
            out = out[:, kept]
        return out

    def source_rows(self) -> list[Tensor]:
        """What a pass over the rows at hand reads of their sources: nothing here."""
        return []

    def source_like(self, rows: Any, length: Any) -> list[Tensor]:
        """The same for so many rows with sources of that length, without values."""
        del rows, length
        return []

    def placed(self, positions: Tensor, longest: int, cache: Cache) -> AbstractContextManager[None]:
        """While a pass knows its positions and its cache in some other way than by its arguments, too."""
        del positions, longest, cache
        return nullcontext()

    def traced_cache(self, layers: list[TracedRows], source: Many[Tensor], width: Any) -> Cache:
        """The cache of a traced pass of so many tokens a row. layers: those that keep keys and values."""
        del source, width
        return Cache(layers=layers)

    def states_described(self) -> list[object]:
        """What else a graph of its passes depends on, that no configuration tells: nothing here."""
        return []

    def left_in(self, cache: Cache) -> list[Tensor]:
        """What a traced pass leaves there that it does not write into keys and values: nothing here."""
        del cache
        return []

    def pass_arguments(
        self, tokens: Tensor, positions: Tensor, longest: int, cache: Any, source: Many[Tensor], at: Tensor | None = None
    ) -> dict[str, Any]:
        """What the module is called with. tokens, positions: int64 [R, N]; longest: columns of the cache that are read;
        source: `source_rows`; at: int64 [R, N], the tokens' columns where they need not be their positions.
        """
        del source
        if self._max_length is not None:
            positions = positions.clamp(max=self._max_length - 1)  # padding may lie past the last embedding
        return {
            "input_ids": tokens,
            "position_ids": positions,
            "attention_mask": make_mask(positions, longest, self._pattern, self._additive, at),
            self._cache_as: cache,
            "use_cache": True,
        }

    def _forward_compiled(self, quick: CompiledPasses, tokens: Tensor, positions: Tensor, longest: int) -> Tensor:
        """All logits of one row, by a compiled pass of its width."""
        out, states = quick.run(self._cache.placement.slots[0], tokens, positions, longest)
        if self._cache.states:
            self._cache.states[LAST].put(states)
        return out


def as_it_is(tokens: int, context: int) -> int:
    """Passes that nobody widens."""
    del context
    return tokens


def _kept(lengths: Many[int], width: int, logits: WhichLogits) -> list[int] | None:
    """The positions whose logits are computed, None for all of them."""
    if logits == "none":
        return [width - 1]
    if logits == "all" or width <= NARROW:
        return None
    return sorted({count - 1 for count in lengths})
