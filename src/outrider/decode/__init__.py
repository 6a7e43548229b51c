"""The loop: autoregressive and speculative generation over a ragged batch of token sequences."""

from outrider.decode.loop import Decoder, decode
from outrider.decode.row import Request
from outrider.decode.together import read_together, step_together

__all__ = ["Decoder", "Request", "decode", "read_together", "step_together"]
