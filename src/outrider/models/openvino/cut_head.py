"""The head of a converted model cut to its first rows (`models.cut_head`), when it is opened: the files stay whole."""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider.errors import ModelError
from outrider.models.openvino.trace import LOGITS


def cut_head(graph: Any, num_tokens: int, name: str) -> None:
    """Leave the first `num_tokens` rows of the matrix that gives the graph's result; embeddings tied to it stay whole."""
    head = graph.output(LOGITS).get_node().input(0).get_source_output().get_node()
    if head.get_type_name() != "MatMul":
        raise ModelError(f"the head of {name} can't be cut: it is no plain product; leave num_tokens out")
    axis = 0 if head.get_attributes()["transpose_b"] else 1
    source = head.input(1).get_source_output()
    head.input(1).replace_source_output(_cut(source.get_node(), axis, num_tokens, name).output(0))
    graph.validate_nodes_and_infer_types()


def _cut(node: Any, axis: int, count: int, name: str) -> Any:
    """A copy of the nodes that unpack the matrix, with the first `count` entries along the axis."""
    import openvino as ov
    from openvino import opset13 as ops

    kind = node.get_type_name()
    if kind == "Constant":
        data = node.data
        return ops.constant(np.ascontiguousarray(data[:count] if axis == 0 else data[:, :count]))
    parts = [_cut(value.get_node(), axis, count, name) for value in node.input_values()]
    if kind == "Convert":
        return ops.convert(parts[0], ov.Type.f32)
    if kind in ("Subtract", "Multiply"):
        return (ops.subtract if kind == "Subtract" else ops.multiply)(*parts)
    raise ModelError(f"the head of {name} can't be cut: its weights are unpacked by {kind}; leave num_tokens out")
