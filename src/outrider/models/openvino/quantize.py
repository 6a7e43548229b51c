"""Weights in 8 or 4 bits: rounded to the nearest, one scale per row (8) or per group of columns in a row (4).

Only matrices that multiply activations and the embedding table are rounded; OpenVINO multiplies them as they are. The head
and the embeddings keep 8 bits in both, since every token passes through them. For 4 bits the scale of each group is the one
of a few candidates with the least squared error: the extremes of a group need not be exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Bits = Literal[8, 4]
Weights = NDArray[np.float32]
SMALLEST = 1 << 16  # matrices of fewer elements stay as they are
GROUPS = (128, 64, 32)
SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8)
_CHUNK = 1 << 24  # elements rounded at once, so that memory stays bounded


def quantize(graph: Any, bits: Bits) -> Iterator[int]:
    """Replace the matrices of an `openvino.Model`. Yields how many there are, then 1 after each."""
    found = list(_matrices(graph))
    yield len(found)
    for constant, inputs, head in found:
        weights = np.ascontiguousarray(constant.get_data(), dtype=np.float32)
        transposed = _untransposed(inputs)
        if transposed:
            weights = np.ascontiguousarray(weights.T)
        new = _eight_bits(weights) if bits == 8 or head else _four_bits(weights)
        for reader in inputs:
            if transposed:
                _transpose_b(reader)
            reader.replace_source_output(new.output(0))
        yield 1
    graph.validate_nodes_and_infer_types()


def _matrices(graph: Any) -> Iterator[tuple[Any, list[Any], bool]]:
    """(constant, its readers, whether it is the head or the embeddings), for every matrix that pays."""
    outputs = {result.input(0).get_source_output().get_node().get_friendly_name() for result in graph.get_results()}
    for node in graph.get_ops():
        if node.get_type_name() != "Constant" or len(shape := list(node.get_output_shape(0))) != 2:
            continue
        if shape[0] * shape[1] < SMALLEST or not node.get_element_type().is_real():
            continue
        readers = list(node.output(0).get_target_inputs())
        kinds = {(reader.get_node().get_type_name(), reader.get_index()) for reader in readers}
        if not kinds or not kinds <= {("MatMul", 1), ("Gather", 0)} or len({_untransposed([r]) for r in readers}) > 1:
            continue
        head = any(r.get_node().get_type_name() == "Gather" or r.get_node().get_friendly_name() in outputs for r in readers)
        yield node, readers, head


def _untransposed(readers: list[Any]) -> bool:
    """Whether the matrix is [in, out], as a GPT-2 keeps it, and not [out, in]."""
    node = readers[0].get_node()
    return node.get_type_name() == "MatMul" and not node.get_attributes()["transpose_b"]


def _transpose_b(reader: Any) -> None:
    reader.get_node().set_attribute("transpose_b", True)


def _eight_bits(weights: Weights) -> Any:
    """Weights [O, I] as uint8 with a zero and a scale per row."""
    from openvino import opset13 as ops

    low = np.minimum(weights.min(1, keepdims=True), 0.0)
    high = np.maximum(weights.max(1, keepdims=True), 0.0)
    scale = np.maximum((high - low) / 255.0, 1e-12).astype(np.float32)
    zero = np.clip(np.rint(-low / scale), 0, 255)
    rounded = np.empty(weights.shape, np.uint8)
    step = max(1, _CHUNK // weights.shape[1])
    for at in range(0, len(weights), step):
        part = slice(at, at + step)
        rounded[part] = np.clip(np.rint(weights[part] / scale[part]) + zero[part], 0, 255)
    plain = ops.subtract(_as_float(ops.constant(rounded)), _as_float(ops.constant(zero.astype(np.uint8))))
    return ops.multiply(plain, ops.constant(scale))


def _four_bits(weights: Weights) -> Any:
    """Weights [O, I] as 4-bit integers with a scale per group of columns; in 8 bits if no group size divides I."""
    import openvino as ov
    from openvino import opset13 as ops

    rows, columns = weights.shape
    size = next((g for g in GROUPS if columns % g == 0), None)
    if size is None:
        return _eight_bits(weights)
    rounded = np.empty((rows, columns), np.int8)
    scale = np.empty((rows, columns // size, 1), np.float32)
    step = max(1, _CHUNK // columns)
    for at in range(0, rows, step):
        part = slice(at, at + step)
        groups = weights[part].reshape(-1, columns // size, size)
        values, scale[part] = _round_groups(groups)
        rounded[part] = values.reshape(-1, columns)
    packed = np.ascontiguousarray(((rounded[:, 0::2] & 15) | ((rounded[:, 1::2] & 15) << 4)).view(np.uint8))
    tensor = ov.Tensor(packed, [rows, columns // size, size], ov.Type.i4)
    scaled = ops.multiply(_as_float(ops.constant(tensor, shared_memory=False)), ops.constant(scale))
    return ops.reshape(scaled, np.array([rows, columns]), special_zero=False)


def _round_groups(groups: Weights) -> tuple[NDArray[np.int8], Weights]:
    """Groups [R, G, size] → integers in -8 … 7, scales [R, G, 1]. The largest value in magnitude is put at -8."""
    peak = np.take_along_axis(groups, np.abs(groups).argmax(-1, keepdims=True), -1)
    full = np.where(peak == 0.0, np.float32(1e-12), peak / np.float32(-8.0))
    best: NDArray[np.int8] | None = None
    for shrink in SHRINK:
        scale = full * np.float32(shrink)
        values = np.clip(np.rint(groups / scale), -8, 7)
        error = np.square(values * scale - groups).sum(-1, keepdims=True)
        if best is None:
            best, best_scale, least = values.astype(np.int8), scale, error
            continue
        better = error < least
        best = np.where(better, values.astype(np.int8), best)
        best_scale, least = np.where(better, scale, best_scale), np.minimum(error, least)
    assert best is not None
    return best, best_scale


def _as_float(constant: Any) -> Any:
    import openvino as ov
    from openvino import opset13 as ops

    return ops.convert(constant, ov.Type.f32)
