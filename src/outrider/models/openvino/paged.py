"""Marked attention replaced by OpenVINO's paged attention: caches in blocks, as many sequences as a call names.

The operation's inputs in the order of OpenVINO 2026.4; what we don't use (alibi, score outputs, cache rotation, sparse
attention, sinks, eviction, token types) is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.errors import ModelError
from outrider.models.openvino.trace import MARK, AttentionLayer

INDICES = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")
LONGEST = "max_context_len"


def insert_paged_attention(graph: Any, layers: Sequence[AttentionLayer]) -> None:
    """Replace every mark in the graph, and add the inputs past_lens … max_context_len, key_cache.i and value_cache.i."""
    import openvino as ov

    shared = [_parameter([-1], ov.Type.i32, name) for name in INDICES]
    longest = _parameter([], ov.Type.i32, LONGEST)
    added = [*shared, longest]
    marks = {int(n.get_friendly_name()[len(MARK) :]): n for n in graph.get_ops() if n.get_friendly_name().startswith(MARK)}
    if sorted(marks) != list(range(len(layers))):
        raise ModelError(f"the converted model is damaged ({len(marks)} of {len(layers)} layers): delete its cache folder")
    for i, layer in enumerate(layers):
        caches = [
            _parameter([-1, layer.kv_heads, -1, size], ov.Type.dynamic, f"{what}_cache.{i}")
            for what, size in (("key", layer.key_size), ("value", layer.value_size))
        ]
        added += caches
        new = _attention(marks[i], layer, caches, shared, longest)
        for reader in marks[i].output(0).get_target_inputs():
            reader.replace_source_output(new.output(0))
    graph.add_parameters(added)
    graph.validate_nodes_and_infer_types()


def _attention(mark: Any, layer: AttentionLayer, caches: list[Any], shared: list[Any], longest: Any) -> Any:
    from openvino.op import _PagedAttentionExtension

    flat = [x.get_source_output() for x in mark.input(0).get_source_output().get_node().inputs()]
    no_floats, no_ints = _constant(np.zeros(0, np.float32)), _constant(np.zeros(0, np.int32))
    zero = _constant(np.int32(0))
    inputs = [
        *flat,
        *(cache.output(0) for cache in caches),
        *(index.output(0) for index in shared),
        _constant(np.float32(layer.scale)),
        _constant(np.int32(layer.window)),
        no_floats,  # alibi slopes
        longest.output(0),
        no_ints,  # score aggregation window
        no_ints,  # rotated block indices
        no_ints,  # rotation deltas
        no_floats,  # rotation table
        no_floats,  # sparse attention: threshold
        zero,  # block size
        zero,  # stride
        _constant(np.zeros((0, 0, 0, 0), np.float32)),  # sinks
        zero,  # eviction: start size
        no_ints,  # evictable sizes
        no_ints,  # diversity block set indices
        no_ints,  # their begins
        no_ints,  # token types
        _constant(np.zeros(0, np.uint8)),  # query-query bias
        no_ints,  # its begins
    ]
    node = _PagedAttentionExtension(inputs)
    about = node.get_rt_info()
    about["num_k_heads"] = about["num_v_heads"] = layer.kv_heads
    about["k_head_size"], about["v_head_size"] = layer.key_size, layer.value_size
    return node


def _parameter(shape: list[int], kind: Any, name: str) -> Any:
    from openvino import opset13 as ops

    made = ops.parameter(shape, kind, name=name)
    made.output(0).get_tensor().set_names({name})
    return made


def _constant(value: Any) -> Any:
    from openvino import opset13 as ops

    return ops.constant(np.asarray(value)).output(0)
