"""Parts of a converted model: its embeddings and its head by themselves, and the outputs that are wanted of the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.errors import ParameterError
from outrider.models.base import LAST
from outrider.models.openvino.saved import Saved
from outrider.models.openvino.trace import EMBEDDINGS, LOGITS, state_name


class Embeddings:
    """Input embeddings of tokens, from the same weights as the whole model."""

    def __init__(self, saved: Saved) -> None:
        import openvino as ov

        graph = saved.graph()
        wanted = graph.output(EMBEDDINGS).get_node().input(0).get_source_output()
        tokens = graph.input("input_ids").get_node()
        self._request = _request(ov.Model([wanted], [tokens]))

    def __call__(self, tokens: Tensor) -> Tensor:
        """int64 [..] → [.., W], overwritten by the next call"""
        import openvino as ov

        self._request.infer({0: ov.Tensor(np.ascontiguousarray(tokens.reshape(1, -1).numpy()))})
        out = torch.from_numpy(self._request.get_output_tensor(0).data)
        return out.view(*tokens.shape, -1)


class Head:
    """What stands between last states and logits."""

    def __init__(self, saved: Saved) -> None:
        import openvino as ov
        from openvino import opset13 as ops

        graph = saved.graph()
        states = graph.output(state_name(LAST)).get_node().input(0).get_source_output()
        given = ops.parameter([1, -1, saved.about.width], ov.Type.f32, name="states")
        for reader in states.get_target_inputs():
            reader.replace_source_output(given.output(0))
        wanted = graph.output(LOGITS).get_node().input(0).get_source_output()
        self._request = _request(ov.Model([wanted], [given, graph.input("keep").get_node()]))

    def __call__(self, states: Tensor) -> Tensor:
        """[N, W] → [N, V], overwritten by the next call"""
        import openvino as ov

        rows = np.ascontiguousarray(states.float().unsqueeze(0).numpy())
        self._request.infer({0: ov.Tensor(rows), 1: ov.Tensor(np.arange(len(states), dtype=np.int64))})
        return torch.from_numpy(self._request.get_output_tensor(0).data)[0]


def _request(model: Any) -> Any:
    import openvino as ov

    exact = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
    return ov.Core().compile_model(model, "CPU", exact).create_infer_request()


def leave_outputs(graph: Any, wanted: set[str], name: str) -> None:
    """Take the outputs off that nobody wants. `ParameterError` if it has not all that are wanted."""
    left = set()
    for result in graph.get_results():
        names = result.output(0).get_names()
        if wanted & names:
            left |= names
        else:
            graph.remove_result(result)
    if not wanted <= left:
        raise ParameterError(f"states of single layers can't be read from {name}: its layers are in no list")
