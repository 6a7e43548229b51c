"""The target as its own draft (Chen 3: "self"), sampling otherwise than the target if asked to.

Nothing is gained in time, since a drafted token costs a pass. It is for looking: the acceptance rate is whatever the two
samplings make it, one without a difference in sampling, so that every part of the method can be tried on a single model.
"""

from __future__ import annotations

from outrider.drafters.model import ModelDrafter
from outrider.models.base import LanguageModel
from outrider.sampling import SamplingSettings


class SelfDrafter(ModelDrafter):
    """temperature, top_k, top_p, min_p: the draft's own, the target's if none is given."""

    def __init__(
        self,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
    ) -> None:
        given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        law = {key: value for key, value in given.items() if value is not None}
        self.sampling = SamplingSettings(**{"temperature": 1.0, **law}) if law else None  # type: ignore[arg-type]
        self._costs = None
        said = ",".join(f"{key}={value:g}" for key, value in law.items())
        self.name = f"self:{said}" if said else "self"

    def bind(self, target: LanguageModel) -> None:
        self.model = target
