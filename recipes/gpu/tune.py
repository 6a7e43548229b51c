"""How the products of lean passes are cut best on a GPU (`outrider.models.lean.run.Shape`): each kind of a model's weights
by many shapes, over all layers in turn, which no cache holds.

    python recipes/gpu/tune.py OUT.jsonl [--target 1.5B] [--tokens 1 6]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from successor import SHAPES, VOCABULARY, cycle, say, successor

from outrider.models.lean.layout import Layer
from outrider.models.lean.run import LeanPass, Shape, lean_pass
from outrider.models.transformers_model import TransformersModel


def kinds(lean: LeanPass, tokens: int) -> Iterator[tuple[str, tuple[int, int], Callable[[], object], int]]:
    """Name, rows and columns as `LeanPass` knows them, all layers' products, bytes of their weights."""
    layout = lean._layout
    x, wide = (
        torch.randn(tokens, n, dtype=layout.table.dtype, device=layout.table.device)
        for n in (layout.width, layout.heads * layout.size)
    )
    inner = torch.randn(tokens, layout.layers[0].gate.shape[0], dtype=x.dtype, device=x.device)

    def over(run: Callable[[Layer], object]) -> Callable[[], object]:
        def every() -> None:
            for layer in layout.layers:
                run(layer)

        return every

    layer, count = layout.layers[0], len(layout.layers)
    of: dict[str, tuple[list[torch.Tensor], Callable[[], object]]] = {
        "qkv": (
            [layer.query[0], layer.key[0], layer.value[0]],
            over(lambda layer: lean._product(x, layer.query[0], layer.key[0], layer.value[0])),
        ),
        "out": ([layer.out], over(lambda layer: lean._product(wide, layer.out))),
        "gated": ([layer.gate, layer.up], over(lambda layer: lean._gated(x, layer))),
        "down": ([layer.down], over(lambda layer: lean._product(inner, layer.down))),
        "head": ([layout.head], lambda: lean._product(x, layout.head, whole=True)),
    }
    for name, (weights, run) in of.items():
        rows, columns = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
        times = 1 if name == "head" else count
        yield name, (rows, columns), run, times * sum(weight.nbytes for weight in weights)


def seconds(run: Callable[[], object], repeats: int = 6) -> float:
    """Of a captured call."""
    run()
    torch.cuda.synchronize()
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def shapes(name: str) -> Iterator[Shape]:
    """That are tried: few, since each is compiled."""
    cuts: tuple[tuple[int, int, int], ...]
    if name in ("gated", "head"):
        cuts = (
            (16, 128, 4),
            (16, 256, 4),
            (32, 128, 4),
            (32, 256, 4),
            (64, 64, 4),
            (64, 128, 4),
            (64, 128, 8),
            (128, 64, 4),
        )
        depths: tuple[int, ...] = (3, 5)
        parts: tuple[int, ...] = (1,)
    else:
        cuts = ((16, 256, 4), (32, 128, 4), (16, 128, 4), (32, 256, 4), (16, 256, 2), (64, 128, 4))
        depths, parts = (4,), (1, 2, 4, 8)
    for (rows, columns, warps), stages, split in product(cuts, depths, parts):
        if stages * (rows * (2 if name == "gated" else 1) + 16) * columns * 2 <= 200_000:
            yield Shape(rows, columns, split, warps, stages)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--target", default="1.5B", choices=list(SHAPES))
    parser.add_argument("--tokens", type=int, nargs="*", default=(1, 6))
    parser.add_argument("--seconds", type=float, default=60.0, help="to stop after")
    given = parser.parse_args()
    begun = time.monotonic()
    module = successor(SHAPES[given.target], VOCABULARY, "cuda", torch.bfloat16)
    say(module, cycle(VOCABULARY))
    model = TransformersModel(module, name=given.target)
    lean = lean_pass(model)
    assert lean is not None
    for tokens in given.tokens[:1]:
        for name, size, run, read in kinds(lean, tokens):
            usual = lean._shape(*size, whole=name in ("gated", "head"))
            found = []
            for shape in shapes(name):
                if time.monotonic() - begun > given.seconds:
                    break
                lean.shapes[size] = shape
                try:
                    found.append((seconds(run), shape))
                except Exception as error:
                    print(name, shape, str(error)[:100], flush=True)
            lean.shapes[size] = usual
            took = seconds(run)
            found.sort(key=lambda each: each[0])
            lean.shapes[size] = found[0][1] if found else usual
            wide = {n: seconds(again) for n in given.tokens for kind, _, again, _ in kinds(lean, n) if kind == name}
            line = {
                "target": given.target, "kind": name, "size": size, "tokens": tokens, "bytes": read,
                "usual": [took, read / took, vars(usual)], "by_tokens": wide,
                "best": [[each, read / each, vars(shape)] for each, shape in found[:6]],
            }  # fmt: skip
            print(json.dumps(line), flush=True)
            with given.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
