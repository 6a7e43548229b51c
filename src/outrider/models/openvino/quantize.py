"""Weights in 8 or 4 bits: rounded to the nearest, a scale and a zero per row (8) or per group of columns in a row (4).

Only matrices that multiply activations and the embedding table are quantized; OpenVINO multiplies them as they are. The head
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
GROUPS = (128, 32)
SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8)
_CHUNK = 1 << 24  # elements quantized at once, so that memory stays bounded


def group_size(graph: Any) -> int:
    """The largest size that divides the columns of all matrices, the smallest if none does.

    One for all, because activations are quantized in groups of one size, which must not exceed that of the weights.
    """
    columns = []
    for constant, readers, head in _matrices(graph):
        shape = list(constant.get_output_shape(0))
        columns += [] if head else [int(shape[0] if _untransposed(readers) else shape[1])]
    return next((size for size in GROUPS if not any(count % size for count in columns)), GROUPS[-1])


def quantize(graph: Any, bits: Bits, group: int) -> Iterator[int]:
    """Replace the matrices of an `openvino.Model`. Yields how many there are, then 1 after each.

    group: columns that share a scale, in 4 bits.
    """
    found = list(_matrices(graph))
    yield len(found)
    for constant, inputs, head in found:
        weights = np.ascontiguousarray(constant.get_data(), dtype=np.float32)
        transposed = _untransposed(inputs)
        if transposed:
            weights = np.ascontiguousarray(weights.T)
        new = _eight_bits(weights) if bits == 8 or head else _four_bits(weights, group)
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
    quantized = np.empty(weights.shape, np.uint8)
    step = max(1, _CHUNK // weights.shape[1])
    for at in range(0, len(weights), step):
        part = slice(at, at + step)
        quantized[part] = np.clip(np.rint(weights[part] / scale[part]) + zero[part], 0, 255)
    plain = ops.subtract(_as_float(ops.constant(quantized)), _as_float(ops.constant(zero.astype(np.uint8))))
    return ops.multiply(plain, ops.constant(scale))


def _four_bits(weights: Weights, size: int) -> Any:
    """Weights [O, I] as 4-bit integers, a zero and a scale per group of `size` columns; in 8 bits where it does not fit."""
    from openvino import opset13 as ops

    rows, columns = weights.shape
    if columns % size:
        return _eight_bits(weights)
    groups = columns // size
    quantized = np.empty((rows, columns), np.uint8)
    scale, zero = np.empty((rows, groups, 1), np.float32), np.empty((rows, groups, 1), np.uint8)
    step = max(1, _CHUNK // columns)
    for at in range(0, rows, step):
        part = slice(at, at + step)
        values, scale[part], zero[part] = _quantize_groups(weights[part].reshape(-1, groups, size))
        quantized[part] = values.reshape(-1, columns)
    values4 = _packed(quantized, [rows, groups, size])
    zeros4 = _packed(zero, [rows, groups, 1])
    plain = ops.subtract(_as_float(values4), _as_float(zeros4))
    scaled = ops.multiply(plain, ops.constant(scale))
    return ops.reshape(scaled, np.array([rows, columns]), special_zero=False)


def _packed(values: NDArray[np.uint8], shape: list[int]) -> Any:
    """Numbers of 0 … 15 as a constant of two a byte, the first in the lower half."""
    import openvino as ov
    from openvino import opset13 as ops

    flat = values.reshape(-1)
    if len(flat) % 2:
        flat = np.append(flat, np.uint8(0))
    packed = np.ascontiguousarray(flat[0::2] | (flat[1::2] << 4))
    return ops.constant(ov.Tensor(packed, shape, ov.Type.u4), shared_memory=False)


def _quantize_groups(groups: Weights) -> tuple[NDArray[np.uint8], Weights, NDArray[np.uint8]]:
    """Groups [R, G, size] → integers in 0 … 15, scale and zero [R, G, 1], of the candidate with the least squared error."""
    low = np.minimum(groups.min(-1, keepdims=True), 0.0)
    high = np.maximum(groups.max(-1, keepdims=True), 0.0)
    full = np.maximum((high - low) / np.float32(15.0), np.float32(1e-12))
    best: tuple[NDArray[np.uint8], Weights, NDArray[np.uint8]] | None = None
    least = np.full_like(full, np.inf)
    for shrink in SHRINK:
        scale = full * np.float32(shrink)
        zero = np.clip(np.rint(-low * np.float32(shrink) / scale), 0, 15)
        values = np.clip(np.rint(groups / scale) + zero, 0, 15)
        error = np.square((values - zero) * scale - groups).sum(-1, keepdims=True)
        found = (values.astype(np.uint8), scale, zero.astype(np.uint8))
        better = error < least
        if best is not None:
            found = (
                np.where(better, found[0], best[0]),
                np.where(better, scale, best[1]),
                np.where(better, found[2], best[2]),
            )
        best = found
        least = np.minimum(error, least)
    assert best is not None
    return best


def _as_float(constant: Any) -> Any:
    import openvino as ov
    from openvino import opset13 as ops

    return ops.convert(constant, ov.Type.f32)
