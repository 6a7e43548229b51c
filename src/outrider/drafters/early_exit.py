"""The target's own first layers with its head as the draft: no second model, no second cache.

The layers write keys and values for drafted tokens into the target's own slots; the verification writes the same ones
again, and a roll-back is the target's. How well it drafts depends on training: few checkpoints were made for it.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

from outrider.draft_length.base import Prospect
from outrider.drafters.base import DraftContext
from outrider.drafters.model import ModelDrafter
from outrider.errors import ModelError, ParameterError
from outrider.models.base import LanguageModel
from outrider.models.cache.slots import SlotSequence
from outrider.models.first_layers import FirstLayers, SharedSequence, first_layers
from outrider.models.transformers_model import TransformersModel
from outrider.proposal import DraftRow
from outrider.support.checks import check_count

PRIOR = 0.3  # most checkpoints were not made for it: to be probed before it is used


class EarlyExitDrafter(ModelDrafter):
    """layers: how many of the target's layers draft, a third of them by default."""

    first = later = PRIOR

    def __init__(self, layers: int | None = None) -> None:
        if layers is not None:
            check_count("layers", layers)
        self._layers = layers
        self._target: LanguageModel | None = None
        self._view: FirstLayers | None = None
        self.sampling = None
        self._costs = None
        self.name = "early-exit" if layers is None else f"early-exit:{layers}"

    def bind(self, target: LanguageModel) -> None:
        if target is self._target:
            return
        if not isinstance(target, TransformersModel) or target.has_encoder:
            wanted = "a decoder-only model of the transformers engine, in one process"
            raise ModelError(f"early-exit can't draft for {target.name}: it needs {wanted}; name another draft")
        if target.keeps_states:
            raise ModelError(
                f"early-exit can't draft for {target.name}: its recurrent layers keep states, which the first layers would "
                "change; name another draft"
            )
        total = int(target.module.config.get_text_config().num_hidden_layers)
        layers = self._layers or max(1, total // 3)
        if layers >= total:
            raise ParameterError(f"layers must be below the target's {total}, got {layers}")
        self.model = self._view = first_layers(target, layers)
        self.name = f"early-exit:{layers}"
        self._costs = None
        self._target = target

    def begin(self, rows: Many[DraftRow], context: DraftContext) -> None:
        del context
        assert self._view is not None
        self._view.look_again()
        for row in rows:
            if not isinstance(row.sequence, SlotSequence):  # of a text that is read without the target
                raise ParameterError(
                    f"{self.name} drafts in the target's own sequences, and can't be asked without them, as one of several "
                    "that are audited is: name it alone"
                )
            row.state = SharedSequence(row.sequence)

    def prospects(self, row: DraftRow) -> list[Prospect]:
        row.state.truncate(row.sequence.length)
        return super().prospects(row)

    def observe(self, rows: Many[DraftRow]) -> None:
        for row in rows:
            row.state.truncate(row.sequence.length)

    def end(self, row: DraftRow) -> None:
        """The slot is the target's."""
