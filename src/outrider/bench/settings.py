"""How the texts of a measurement are drafted and sampled."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.settings.sampling import SamplingSettings

AUTO = -1  # in place of a draft length: adapted


@dataclass(frozen=True)
class Setting:
    """How to sample."""

    temperature: float
    top_p: float

    @property
    def name(self) -> str:
        return "greedy" if self.temperature == 0 else f"temperature {self.temperature:g}, top-p {self.top_p:g}"

    @property
    def sampling(self) -> SamplingSettings:
        """The law that is drawn from."""
        return SamplingSettings(temperature=self.temperature, top_p=self.top_p)
