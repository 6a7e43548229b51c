"""What a search is about: a prompt, for an encoder–decoder also a source, and what its generation config says."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from outrider.beam.laws import BeamLaw
from outrider.models.base import LanguageModel, Source, has_encoder, tokens_of
from outrider.request.prompts import Prepared


@dataclass(frozen=True)
class BeamTask:
    """prompt: tokens that all hypotheses begin with. source: what an encoder reads. law: what tokens score.

    given: how many of the prompt's last tokens count as new ones in penalties, as those do in transformers that a generation
    config forces to be the first.
    """

    prompt: list[int]
    source: Source | None = None
    law: BeamLaw = field(default_factory=BeamLaw)
    given: int = 0

    @property
    def reading(self) -> list[int]:
        """Source and prompt as one text, for a model without an encoder."""
        return [*tokens_of(self.source), *self.prompt]

    def with_beams(self, num_beams: int) -> BeamTask:
        """For so many of them: one beam is greedy decoding, whose rules see logits."""
        return self if num_beams > 1 else replace(self, law=replace(self.law, greedy=True))


def task_of(target: LanguageModel, prepared: Prepared, max_new_tokens: int | None) -> BeamTask:
    """With what the target's config says. max_new_tokens: where texts end at the latest, None if no end is to be forced."""
    if not has_encoder(target):
        return BeamTask(prepared.tokens)
    from outrider.models.decoder_rules import decoder_rules, forces_first
    from outrider.models.encoder_decoder import EncoderDecoderModel

    assert isinstance(target, EncoderDecoderModel)
    rules = decoder_rules(target, len(prepared.tokens), max_new_tokens)
    law = BeamLaw(tuple(prepared.tokens), rules.bias, rules.processors, rules.normalised)
    return BeamTask(prepared.tokens, prepared.source, law, int(forces_first(target.module.generation_config)))
