"""The loop: autoregressive and speculative generation over a ragged batch of token sequences."""

from outrider.decode.loop import Decoder, decode
from outrider.decode.row import Request
from outrider.decode.together import step_together

__all__ = ["Decoder", "Request", "decode", "step_together"]
