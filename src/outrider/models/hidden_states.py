"""Where a transformers model's hidden states come from: its layers, and its body as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
    with ExitStack() as hooks:
        for layer, put in wanted.items():
            hooks.callback(_catch(module, layer, put).remove)
        yield


def _catch(module: Any, layer: int, put: Put) -> Any:
    if layer == LAST:
        return module.get_decoder().register_forward_hook(lambda _m, _a, out: put(out.last_hidden_state))
    layers = body_layers(module)
    assert layers is not None  # `keep_states` has looked
    return layers[layer - 1].register_forward_hook(lambda _m, _a, out: put(out if isinstance(out, Tensor) else out[0]))
