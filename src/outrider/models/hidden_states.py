"""Where a transformers model's hidden states come from: its layers, and its body as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outrider.models.base import LAST

Put = Callable[[Tensor], None]


def body_layers(module: Any) -> torch.nn.ModuleList | None:
    """The layers of a decoder-only model, None if they are in no list."""
    count = int(module.config.get_text_config().num_hidden_layers)
    lists = (child for child in module.get_decoder().children() if isinstance(child, torch.nn.ModuleList))
    return next((found for found in lists if len(found) == count), None)


@contextmanager
def caught(module: Any, wanted: dict[int, Put]) -> Iterator[None]:
    """Hand what comes out of layers (from 1), or of the whole body (`LAST`), to the functions given for them.

    By hooks for the time of a pass: lasting ones would also be run by views of the model (`drafters.early_exit`).
    """
    body = body_layers(module) if any(layer != LAST for layer in wanted) else None
    with ExitStack() as hooks:
        for layer, put in wanted.items():
            if layer == LAST:
                hook = module.get_decoder().register_forward_hook(partial(_put_last, put))
            else:
                assert body is not None  # `keep_states` has looked
                hook = body[layer - 1].register_forward_hook(partial(_put, put))
            hooks.callback(hook.remove)
        yield


def _put_last(put: Put, _module: Any, _given: Any, out: Any) -> None:
    put(out.last_hidden_state)


def _put(put: Put, _module: Any, _given: Any, out: Any) -> None:
    put(out if isinstance(out, Tensor) else out[0])
