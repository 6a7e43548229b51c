"""Other projects' servers as contenders: whatever speaks OpenAI's completions and takes token ids as a prompt.

They run in environments and processes of their own, with the same weights, started by the user (`recipes/peers` has some).
The time is that of the request, which on one machine is a millisecond or two more than that of the server's work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.audio import Audio
from outrider.endpoint import EndpointError, post, request_body
from outrider.errors import ParameterError

if TYPE_CHECKING:
    from outrider.bench.contest import Contender
    from outrider.bench.settings import Setting
    from outrider.request.prompts import Asked

FRESH = {"cache_prompt": False}  # llama.cpp's server would not read a prompt again that it has seen


def parse_server(text: str) -> tuple[str, str]:
    """NAME=URL → the two."""
    name, equals, url = text.partition("=")
    if not equals or not name.strip() or not url.strip().startswith(("http://", "https://")):
        raise ParameterError(f"server must be NAME=URL, got {text!r}: for example llama.cpp=http://localhost:8080/v1")
    return name.strip(), url.strip().rstrip("/")


def served(url: str) -> Contender:
    """The server at a URL with the version. It counts the new tokens itself, and tells of drafts if it is llama.cpp's."""

    def run(prompt: Asked, setting: Setting, tokens: int, seed: int) -> tuple[int, float | None, float | None]:
        if isinstance(prompt, Audio):
            raise ParameterError(f"server {url} is asked for completions of text: leave it out where recordings are heard")
        answer = post(f"{url}/completions", {**request_body(prompt, setting.sampling, tokens, seed), **FRESH})
        usage = answer.get("usage")
        count = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if not isinstance(count, int) or count < 1:
            raise EndpointError(f"endpoint {url} gave {str(answer)[:120]!r} without usage.completion_tokens of 1 or more")
        return count, *_drafts(answer.get("timings"), count)

    return run


def _drafts(timings: Any, count: int) -> tuple[float | None, float | None]:
    """Tokens a round and acceptance rate from llama.cpp's `timings`."""
    if not isinstance(timings, dict):
        return None, None
    drafted, accepted = timings.get("draft_n"), timings.get("draft_n_accepted")
    if not isinstance(drafted, int) or not isinstance(accepted, int) or not drafted or accepted >= count:
        return None, None
    return count / (count - accepted), accepted / drafted
