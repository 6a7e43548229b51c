"""What the layers of every cache here answer transformers alike."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin


class PlacedLayer(CacheLayerMixin):  # type: ignore[misc]
    """A layer that is told where to write and how much to read. Follows transformers' cache-layer interface."""

    is_sliding = False

    @property
    @abstractmethod
    def columns(self) -> int:
        """How many keys a pass reads."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """There is nothing to make."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        del query_length
        return self.columns, 0

    def get_seq_length(self) -> int:
        # Models ask only to guess positions, which we always give.
        return 0

    def get_max_length(self) -> int:
        return -1
