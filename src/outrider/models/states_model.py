"""A model whose hidden states drafts read (`HandsOutStates`): which are kept with the keys and values, and handed out."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Many
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ParameterError
from outrider.models.base import LAST, Sequence, check_layers
from outrider.models.cache.slot_cache import StateLayer
from outrider.models.cache.slots import SlotSequence
from outrider.models.hidden_states import body_layers
from outrider.models.passes.compiled import CompiledPasses
from outrider.models.passes.recordable import RecordableModel
from outrider.models.weights.quantized import Int8Embedding
from outrider.support.inference import in_inference_mode


class StatesModel(RecordableModel):
    """See `HandsOutStates`."""

    module: Any
    compiled: CompiledPasses | None

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype: ...

    @property
    def state_size(self) -> int:
        return int(self.module.config.get_text_config().hidden_size)

    @property
    def num_layers(self) -> int:
        return int(self.module.config.get_text_config().num_hidden_layers)

    @property
    def state_dtype(self) -> torch.dtype:
        return self.dtype

    @property
    def token_table(self) -> torch.nn.Module | None:
        """What embeds tokens, int64 [..] → [.., W], if that is no more than a table."""
        table = self.module.get_input_embeddings()
        plain = type(table) is torch.nn.Embedding and table.max_norm is None
        return table if plain or type(table) is Int8Embedding else None

    @in_inference_mode
    def embed(self, tokens: Tensor) -> Tensor:
        """See `HandsOutStates`."""
        out: Tensor = self.module.get_input_embeddings()(tokens)
        return out

    @in_inference_mode
    def logits_of(self, states: Tensor) -> Tensor:
        """See `HandsOutStates`."""
        return self.over_vocabulary(self.module.get_output_embeddings()(states))

    def keep_states(self, layers: Many[int] = ()) -> None:
        """See `HandsOutStates`."""
        self.check_layers(layers)
        for layer in (LAST, *layers):
            self._cache.keep_states(layer)
        if self._recorded is not None and self._recorded.layers != tuple(self._kept_states()):
            self.record()

    def check_layers(self, layers: Many[int]) -> None:
        """Raise `ParameterError` unless the states of these layers can be kept."""
        if not layers:
            return
        body = body_layers(self.module)
        if body is None:
            raise ParameterError(f"states of single layers can't be read from {self.name}: its layers are in no list")
        check_layers(layers, len(body), self.name)
        if self.compiled is not None:
            raise ParameterError(no_further_states(layers))

    def states(self, sequence: Sequence, start: int, stop: int, layers: Many[int] = ()) -> Tensor:
        """See `HandsOutStates`."""
        found = self.states_by_layer(sequence, start, stop, layers)
        return (found[0] if len(found) == 1 else torch.cat(found, dim=-1))[0]

    def states_by_layer(self, sequence: Sequence, start: int, stop: int, layers: Many[int] = ()) -> list[Tensor]:
        """The same, of each layer apart, where they are kept. → [1, stop - start, W] each"""
        every = [self._cache.states.get(layer) for layer in (LAST, *layers)]
        kept = [one for one in every if one is not None]
        if len(kept) < len(every) or not isinstance(sequence, SlotSequence) or not self._is_open(sequence):
            raise ParameterError(
                f"states must be of an open sequence of {self.name} that were kept: call keep_states() first"
            )
        if not 0 <= start <= stop <= sequence.length:
            raise ParameterError(f"states must be of positions in 0 … {sequence.length}, got {start} … {stop}")
        slot = sequence.slot
        return [self._no_states(stop - start) if one.keys is None else one.between(slot, start, stop) for one in kept]

    def _no_states(self, count: int) -> Tensor:
        """What is known of positions if there has been no pass since states are kept."""
        return torch.zeros(1, count, self.state_size, dtype=self.dtype, device=self.device)

    def _kept_states(self) -> dict[int, StateLayer]:
        """Where the hidden states of a pass are put, by layer."""
        return self._cache.states


def no_further_states(layers: Many[int]) -> str:
    """Why compiled passes and a draft that reads these layers, none for those that are not named, exclude each other."""
    which = f"layers {', '.join(map(str, layers))}" if layers else "several layers"
    return (
        f"compile can't be used with a draft that reads states of {which}: compiled passes hand out the last ones alone; "
        "leave out either"
    )
