"""A server that speaks OpenAI's completions: what it is asked, and its answer.

Every sampling setting is sent, those that are off as well, since servers have defaults of their own; what has no place in a
request is refused.
"""

from __future__ import annotations

import json
import math
from typing import Any

from outrider.errors import OutriderError, ParameterError
from outrider.settings.sampling import SamplingSettings

SECONDS = 600.0
_SECONDS_TO_REACH = 10.0


class EndpointError(OutriderError):
    """The server can't be reached, or its answer can't be used."""

    exit_code = 2


def request_body(prompt: list[int], sampling: SamplingSettings, max_tokens: int, seed: int) -> dict[str, Any]:
    """What is sent: the settings in the names of OpenAI, llama.cpp and vLLM.

    Raises `ParameterError` for what has no place in a request.
    """
    if sampling.processors:
        raise ParameterError("processors can't be sent to a server: leave them out")
    if any(bias == -math.inf for bias in sampling.logit_bias.values()):
        raise ParameterError("logit_bias of -inf can't be sent to a server: use a large negative number, such as -1e9")
    return {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "repeat_penalty": sampling.repetition_penalty,
        "repeat_last_n": -1,
        **({"logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()}} if sampling.logit_bias else {}),
        "seed": seed,
    }


def check_reachable(url: str) -> None:
    """Raise `EndpointError` if nothing is there, before a model is loaded. url: with the version.

    Whatever is answered will do, and a server that is busy may take its time.
    """
    import requests

    if not url.startswith(("http://", "https://")):
        raise EndpointError(f"endpoint must begin with http:// or https://, got {url!r}")
    try:
        requests.get(f"{url.rstrip('/')}/models", timeout=_SECONDS_TO_REACH, stream=True).close()
    except requests.ReadTimeout:
        return
    except requests.RequestException as error:
        raise EndpointError(f"endpoint {url} gave no answer ({type(error).__name__}): check the address") from None


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The server's answer to a request. url: with the version and /completions."""
    import requests

    try:
        response = requests.post(url, json=body, timeout=SECONDS)
        response.raise_for_status()
        found = response.json()
    except requests.RequestException as error:
        answer = getattr(error, "response", None)
        said = f": {answer.text[:120]!r}" if answer is not None and answer.text else ""
        raise EndpointError(f"endpoint {url} gave no answer ({type(error).__name__}{said}): check the address") from None
    except json.JSONDecodeError:
        raise EndpointError(f"endpoint {url} did not answer in JSON: check the address") from None
    if not isinstance(found, dict):
        raise EndpointError(f"endpoint {url} gave {str(found)[:80]!r}: is it OpenAI's completions?")
    return found
