"""A traced graph as the text that torch's own interpreter (TorchScript) reads: a line an operation, all arguments spelt out.

Each operation is called as it was traced, on whatever sizes its inputs have: nothing is fused, reordered or specialised, so
results have the bits that Python's calls of the same operations give.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from outrider.models.weights.int8_linear import product_arguments, tiles_arguments
from outrider.models.weights.packed_linear import packed_arguments

if TYPE_CHECKING:
    from torch.fx import GraphModule

# The interpreter's numbers for types (c10::ScalarType), layouts and memory formats: it knows no names for them.
_NUMBERS: dict[Any, int] = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.bool: 11,
    torch.bfloat16: 15,
    torch.strided: 0,
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
}
_LARGE = 1e200  # whose square is infinite
_INTEGERS: dict[Any, str] = {
    operator.add: "aten::add",
    operator.sub: "aten::sub",
    operator.mul: "aten::mul",
    operator.floordiv: "aten::floordiv",
    operator.neg: "aten::neg",
}


class UnwritableError(Exception):
    """The graph has something that the interpreter can't be told."""


@dataclass
class _Writer:
    """The text so far, and the names of what it has computed."""

    names: dict[Node, Any] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)  # {name: type}
    constants: dict[tuple[str, str], str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    _count: Iterator[int] = field(default_factory=count)

    def fresh(self) -> str:
        return f"%v{next(self._count)}"

    def line(self, kind: str, call: str) -> str:
        name = self.fresh()
        self.lines.append(f"{name} : {kind} = {call}")
        return name

    def constant(self, kind: str, value: str = "") -> str:
        key = (kind, value)
        if key not in self.constants:
            self.constants[key] = f"%c{len(self.constants)}"
        return self.constants[key]

    def text(self, out: str) -> str:
        given = ", ".join(f"{name} : {kind}" for name, kind in self.inputs.items())
        constants = [
            f"{name} : {kind} = prim::Constant{f'[value={value}]' if value else ''}()"
            for (kind, value), name in self.constants.items()
        ]
        body = "\n".join(f"  {line}" for line in [*constants, *self.lines, f"return ({out})"])
        return f"graph({given}):\n{body}\n"


def graph_text(traced: GraphModule) -> str:
    """A graph of tensors and whole numbers → its text; returns a list of tensors. Raises `UnwritableError`."""
    writer = _Writer()
    out = None
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            name = f"%i{len(writer.inputs)}"
            writer.names[node] = name
            kind = "Tensor" if isinstance(node.meta["val"], torch.Tensor) else "int"
            writer.inputs[name] = kind if node.users else "Any"  # a packed weight is no tensor when it is called
        elif node.op == "call_function":
            writer.names[node] = _written(writer, node)
        elif node.op == "output":
            out = writer.line("Tensor[]", f"prim::ListConstruct({', '.join(writer.names[each] for each in node.args[0])})")
        else:
            raise UnwritableError(f"it holds {node.op} {node.target}")
    assert out is not None
    return writer.text(out)


def _written(writer: _Writer, node: Node) -> Any:
    """The lines of one operation; → the name of its result, a list of names for several."""
    target: Any = node.target
    if target is operator.getitem:
        source, at = writer.names[node.args[0]], node.args[1]  # type: ignore[index]
        if isinstance(source, list):
            return source[at]  # type: ignore[index]
        return writer.line("Tensor", f"aten::__getitem__({source}, {_whole(writer, at)})")
    if target in _INTEGERS:
        given = ", ".join(_whole(writer, value) for value in node.args)
        return writer.line("int", f"{_INTEGERS[target]}({given})")
    if target is torch.ops.aten.sym_size.int:
        tensor, dimension = node.args
        return writer.line("int", f"aten::size({writer.names[tensor]}, {_whole(writer, dimension)})")  # type: ignore[index]
    return _filled(writer, node) if str(target) == "outrider.filled_linear.default" else _called(writer, node)


def _called(writer: _Writer, node: Node) -> Any:
    """Of one that torch has a kernel for."""
    target, args = _kernel(node.target, node.args)
    schema = getattr(target, "_schema", None)
    if schema is None:
        raise UnwritableError(f"it calls {target}")
    given = ", ".join(_arguments(writer, schema, args, node.kwargs))
    kinds = [each.type.str() for each in schema.returns]
    if len(kinds) == 1:
        return writer.line(kinds[0], f"{schema.name}({given})")
    found = [writer.fresh() for _ in kinds]
    left = ", ".join(f"{name} : {kind}" for name, kind in zip(found, kinds, strict=True))
    writer.lines.append(f"{left} = {schema.name}({given})")
    return found


def _filled(writer: _Writer, node: Node) -> str:
    """A product, with tokens of zeros below each row's if there are few in all (`packed_linear.PackedLinear.filled`)."""
    x, weight, bias, fill = node.args
    size = writer.constant("int", str(x.meta["val"].shape[-1]))  # type: ignore[union-attr]
    op = torch.ops.mkldnn._linear_pointwise.default

    def product(of: str) -> str:
        given = _arguments(writer, op._schema, packed_arguments(x, weight, bias), {})
        return f"mkldnn::_linear_pointwise({', '.join([of, *given[1:]])})"

    whole, rows, token = writer.names[x], writer.constant("int", str(fill)), writer.constant("int", "-2")  # type: ignore[index]
    zero, one = (writer.constant("int", str(number)) for number in (0, 1))
    plain = product(whole)
    count = writer.line("int", f"aten::size({whole}, {token})")
    every = writer.line("int", f"aten::floordiv({writer.line('int', f'aten::numel({whole})')}, {size})")
    few = writer.line("bool", f"aten::lt({every}, {rows})")
    name, more, pads, padded, made, cut, out = (writer.fresh() for _ in range(7))
    writer.lines += [
        f"{name} : Tensor = prim::If({few})",
        "  block0():",
        f"    {more} : int = aten::sub({rows}, {count})",
        f"    {pads} : int[] = prim::ListConstruct({zero}, {zero}, {zero}, {more})",
        f"    {padded} : Tensor = aten::constant_pad_nd({whole}, {pads}, {zero})",
        f"    {made} : Tensor = {product(padded)}",
        f"    {cut} : Tensor = aten::slice({made}, {token}, {zero}, {count}, {one})",
        f"    -> ({cut})",
        "  block1():",
        f"    {out} : Tensor = {plain}",
        f"    -> ({out})",
    ]
    return name


def _arguments(writer: _Writer, schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """All of them, those left out as the schema has them."""
    found = []
    for i, wanted in enumerate(schema.arguments):
        if i < len(args):
            value = args[i]
        elif wanted.name in kwargs:
            value = kwargs[wanted.name]
        elif wanted.has_default_value():
            value = wanted.default_value
        else:
            raise UnwritableError(f"{schema.name} lacks {wanted.name}")
        found.append(_argument(writer, value, wanted.type))
    return found


def _argument(writer: _Writer, value: Any, kind: Any) -> str:
    name = kind.kind()
    if name == "OptionalType":
        return writer.constant("NoneType") if value is None else _argument(writer, value, kind.getElementType())
    if isinstance(value, Node):
        if name == "ClassType":  # a weight in a layout of its own, a tensor while it was traced
            writer.inputs[writer.names[value]] = kind.str()
        found: str = writer.names[value]
        return found
    if name == "ListType":
        element = kind.getElementType()
        numbers = {"int": int, "float": float}.get(element.str())
        if numbers is not None and value and all(type(item) is numbers for item in value):
            return writer.constant(kind.str(), f"[{', '.join(map(repr, value))}]")
        items = ", ".join(_argument(writer, item, element) for item in value)
        return writer.line(f"{element.str()}[]", f"prim::ListConstruct({items})")
    return _constant(writer, value, as_float=name == "FloatType")


def _constant(writer: _Writer, value: Any, as_float: bool) -> str:
    number = _NUMBERS.get(value) if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)) else None
    if number is not None:
        return writer.constant("int", str(number))
    if isinstance(value, torch.device):
        return writer.constant("Device", f'"{value}"')
    if isinstance(value, bool):
        return writer.constant("bool", str(int(value)))
    if isinstance(value, float) and math.isinf(value) and not _reads_infinity():
        large = writer.constant("float", repr(math.copysign(_LARGE, value))), writer.constant("float", repr(_LARGE))
        return writer.line("float", f"aten::mul({', '.join(large)})")
    if isinstance(value, int | float):
        return (
            writer.constant("float", repr(float(value))) if as_float else writer.constant(type(value).__name__, repr(value))
        )
    if isinstance(value, str) and not set(value) & set('"\\\n'):
        return writer.constant("str", f'"{value}"')
    raise UnwritableError(f"it has a constant {value!r}")


@cache
def _reads_infinity() -> bool:
    """Whether the interpreter knows a word for it (2.7's does not)."""
    try:
        torch._C.parse_ir("graph():\n  %c : float = prim::Constant[value=-inf]()\n  return (%c)\n")
    except RuntimeError:
        return False
    return True


def _whole(writer: _Writer, value: Any) -> str:
    if isinstance(value, Node):
        found: str = writer.names[value]
        return found
    if isinstance(value, int) and not isinstance(value, bool):
        return writer.constant("int", str(value))
    raise UnwritableError(f"it computes with {value!r}")


def _kernel(target: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """What is called: for what stands in the graph for kernels that can't be traced (`tracing`), these."""
    name = str(target)
    if name == "outrider.packed_linear.default":
        return torch.ops.mkldnn._linear_pointwise.default, packed_arguments(*args)
    if name == "outrider.int8_product.default":
        return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default, product_arguments(*args)
    if name == "outrider.int8_tiles.default":
        return torch.ops.onednn.qlinear_pointwise.default, tiles_arguments(*args)
    return target, args
