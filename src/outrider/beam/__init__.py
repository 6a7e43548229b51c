"""Beam search, plain and speculative (Leviathan A.4): the same hypotheses and scores, fewer passes of the target."""

from outrider.beam.generate import beam_search
from outrider.beam.records import BeamResult
from outrider.beam.search import BeamDecoder
from outrider.settings.beams import BeamSettings

__all__ = ["BeamDecoder", "BeamResult", "BeamSettings", "beam_search"]
