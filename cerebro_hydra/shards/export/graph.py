"""The grammar of a stored graph: a document of plain values becomes calls of known operators.

```
{"features": [[{"size": 0, "least": null, "most": 64}, 12], ...],
 "tensors": [{"name": "0.weight", "kind": "parameter", "dtype": "float32", "shape": [16, 6],
              "order": [0, 1]}, ...],
 "regions": [{"autocast": null, "calls": [
     {"operator": "aten.linear.default", "args": [{"feature": 0}, {"tensor": 0}], "kwargs": {}}]}],
 "outputs": [{"call": 0}]}
```

A feature is a list of its sizes. A tensor's order begins with its slowest dimension in memory. Its
kind is parameter, frozen (a parameter without gradient), buffer or constant.
A value is what the operator's schema says at its place. References go to features, tensors and
earlier calls alone. Whatever else is in a document is refused, so nothing in it is ever evaluated.

An exported program is written as such a document, with its tensors apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from cerebro_hydra.errors import kind_of
from cerebro_hydra.shards.cut.regions import inline_regions, regions_of
from cerebro_hydra.shards.export.operators import (
    MANY,
    NUMBER,
    TENSOR,
    Operator,
    Parameter,
    name_of,
    operator_named,
)

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16,
        torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
        torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
    )
}  # fmt: skip
LAYOUTS = {"strided": torch.strided}
MEMORY_FORMATS = {
    name: getattr(torch, name)
    for name in ("preserve_format", "contiguous_format", "channels_last", "channels_last_3d")
}
AUTOCAST_DTYPES = ("bfloat16", "float16")
KINDS = ("parameter", "frozen", "buffer", "constant")
DEVICE = "model"
"""The one device that a document can name: where the model's features are."""

_NAMED: dict[str, dict[str, Any]] = {
    "ScalarType": DTYPES,
    "Layout": LAYOUTS,
    "MemoryFormat": MEMORY_FORMATS,
}
_NOT_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_NUMBERS = {"number": (bool, int, float), "int": (int,), "float": (int, float), "bool": (bool,)}
_REFERRED = {  # what a reference may go to, by the type of its place
    TENSOR: (TENSOR, NUMBER), MANY: (MANY,), **dict.fromkeys(_NUMBERS, (NUMBER,))
}  # fmt: skip
_LARGEST = 2**63
_LONGEST = 4096  # of a name or text

_DROPPED = (torch.ops.aten._assert_tensor_metadata.default,)  # what it asserts, the sizes say


class InvalidGraph(Exception):
    """A document is no stored graph; the message says what and where."""


@dataclass(frozen=True)
class Ref:
    """Refers to the value of a feature, tensor or earlier call."""

    to: str
    number: int


@dataclass(frozen=True)
class Here:
    """Stands for the device on which the model runs."""


Argument = Any
"""A Ref, a Here, a constant, or a list of Refs and constants."""


@dataclass(frozen=True)
class Size:
    """Says which sizes a dimension may have; equal symbols have equal sizes."""

    symbol: int
    least: int | None
    most: int | None


@dataclass(frozen=True)
class StoredTensor:
    """Describes a weight or constant, which lies in another file under its name."""

    name: str
    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """Calls an operator with arguments."""

    operator: Operator
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]


@dataclass(frozen=True)
class Region:
    """Holds calls that run in one precision."""

    autocast: torch.dtype | None
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class StoredGraph:
    """Holds a checked graph. A size of None is not checked."""

    features: tuple[tuple[int | Size | None, ...], ...]
    tensors: tuple[StoredTensor, ...]
    regions: tuple[Region, ...]
    outputs: tuple[Ref, ...]
    state: tuple[tuple[str, int], ...]
    """The names of the original model's state dict, in its order, with the tensor of each."""


def read_graph(document: Any) -> StoredGraph:
    """Check a document, and return the graph that it describes.

    Raises:
        InvalidGraph: it has anything that the grammar does not allow.
    """
    fields = _fields(document, "the graph", "features", "tensors", "regions", "outputs", "state")
    features = tuple(
        tuple(_size(size, f"features[{i}]") for size in _list(sizes, f"features[{i}]"))
        for i, sizes in enumerate(_list(fields["features"], "features"))
    )
    tensors = tuple(
        _tensor(each, f"tensors[{i}]") for i, each in enumerate(_list(fields["tensors"], "tensors"))
    )
    if len({(tensor.name, tensor.kind == "constant") for tensor in tensors}) < len(tensors):
        raise InvalidGraph("tensors: two have one name")
    values = _Values(len(features), len(tensors), [])
    regions = []
    for i, region in enumerate(_list(fields["regions"], "regions")):
        parts = _fields(region, f"regions[{i}]", "autocast", "calls")
        calls = _list(parts["calls"], f"regions[{i}].calls")
        autocast = parts["autocast"]
        if autocast is not None:
            autocast = DTYPES[_one_of(autocast, AUTOCAST_DTYPES, f"regions[{i}].autocast")]
        regions.append(Region(autocast, tuple(_call(call, values) for call in calls)))
    outputs = tuple(
        _ref(each, (TENSOR,), values, "outputs") for each in _list(fields["outputs"], "outputs")
    )
    if not features or not outputs:
        raise InvalidGraph("it has no features or no outputs")
    state = tuple(_state(each, tensors, "state") for each in _list(fields["state"], "state"))
    return StoredGraph(features, tensors, tuple(regions), outputs, state)


def dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor without gaps whose dimensions lie in memory in an order."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


@dataclass
class _Values:
    """Counts what a reference can go to while a document is read."""

    features: int
    tensors: int
    calls: list[str]  # what each call gives

    def kind(self, to: str, number: int) -> str | None:
        if to == "call":
            return self.calls[number] if number < len(self.calls) else None
        count = {"feature": self.features, "tensor": self.tensors}.get(to, 0)
        return TENSOR if number < count else None


def _call(given: Any, values: _Values) -> Call:
    where = f"call {len(values.calls)}"
    fields = _fields(given, where, "operator", "args", "kwargs")
    name = _text(fields["operator"], where)
    operator = operator_named(name)
    if operator is None:
        raise InvalidGraph(f"{where}: it calls {name}, which is no allowed operator")
    where = f"{where} ({name})"
    args, kwargs = _list(fields["args"], where), fields["kwargs"]
    places = [parameter for parameter in operator.parameters if parameter.positional]
    named = {parameter.name: parameter for parameter in operator.parameters[len(args) :]}
    if len(args) > len(places):
        raise InvalidGraph(f"{where} takes {len(places)} arguments and has {len(args)}")
    if not isinstance(kwargs, dict) or not kwargs.keys() <= named.keys():
        raise InvalidGraph(f"{where}: its keyword arguments are not those of the operator")
    missing = [name for name, each in named.items() if each.required and name not in kwargs]
    if missing:
        raise InvalidGraph(f"{where}: argument {missing[0]!r} is missing")
    call = Call(
        operator,
        tuple(_argument(p, x, values, where) for p, x in zip(places, args, strict=False)),
        tuple((key, _argument(named[key], x, values, where)) for key, x in kwargs.items()),
    )
    values.calls.append(operator.result)
    return call


def _argument(parameter: Parameter, given: Any, values: _Values, where: str) -> Argument:
    where, kind = f"{where}: {parameter.name}", parameter.type
    optional, kind = _unwrapped(kind, "Optional")
    if given is None and (optional or kind == "Generator"):
        return None
    is_list, kind = _unwrapped(kind, "List")
    if is_list and isinstance(given, list):
        optional, kind = _unwrapped(kind, "Optional")
        return [
            None if optional and each is None else _value(kind, each, values, where)
            for each in given
        ]
    if is_list and kind == TENSOR:
        return _ref(given, (MANY,), values, where)
    return _value(kind, given, values, where)  # one number stands for a list of equal ones


def _unwrapped(kind: str, wrapper: str) -> tuple[bool, str]:
    if kind.startswith(f"{wrapper}["):
        return True, kind[len(wrapper) + 1 : -1]
    return False, kind


def _value(kind: str, given: Any, values: _Values, where: str) -> Argument:
    if isinstance(given, dict) and kind in _REFERRED:
        return _ref(given, _REFERRED[kind], values, where)
    if kind in _NAMED:
        return _NAMED[kind][_one_of(given, _NAMED[kind], where)]
    if kind == "Device":
        _one_of(given, (DEVICE,), where)
        return Here()
    if kind == "str":
        return _text(given, where)
    if kind == TENSOR:
        kind = NUMBER  # torch makes tensors of numbers
    if kind in ("number", "float") and isinstance(given, str):
        return _NOT_FINITE[_one_of(given, _NOT_FINITE, where)]
    if type(given) not in _NUMBERS.get(kind, ()):
        raise InvalidGraph(f"{where} is {_shown(given)} and must be of type {kind}")
    if isinstance(given, float) and not math.isfinite(given):
        raise InvalidGraph(f"{where} is {given}, which is written as a text")
    if isinstance(given, int) and not -_LARGEST <= given < _LARGEST:
        raise InvalidGraph(f"{where} is a number of more than 64 bits")
    return given


def _ref(given: Any, kinds: Sequence[str], values: _Values, where: str) -> Ref:
    if not isinstance(given, dict) or len(given) != 1:
        raise InvalidGraph(f"{where} is {_shown(given)} and must refer to a {kinds[0]}")
    ((to, number),) = given.items()
    if values.kind(to, _count(number, where)) not in kinds:
        raise InvalidGraph(f"{where} refers to {_shown(to)} {number}, no earlier {kinds[0]}")
    return Ref(to, number)


def _size(given: Any, where: str) -> int | Size | None:
    if given is None or isinstance(given, int):
        return given if given is None else _count(given, where)
    fields = _fields(given, where, "size", "least", "most")
    least, most = (
        None if fields[key] is None else _count(fields[key], where) for key in ("least", "most")
    )
    return Size(_count(fields["size"], where), least, most)


def _tensor(given: Any, where: str) -> StoredTensor:
    fields = _fields(given, where, "name", "kind", "dtype", "shape", "order")
    shape, order = (
        tuple(_count(each, where) for each in _list(fields[key], where))
        for key in ("shape", "order")
    )
    if sorted(order) != list(range(len(shape))):
        raise InvalidGraph(f"{where}: its order is not one of its dimensions")
    return StoredTensor(
        _text(fields["name"], where),
        _one_of(fields["kind"], KINDS, where),
        DTYPES[_one_of(fields["dtype"], DTYPES, where)],
        shape,
        order,
    )


def _state(given: Any, tensors: Sequence[StoredTensor], where: str) -> tuple[str, int]:
    fields = _fields(given, where, "name", "tensor")
    number = _count(fields["tensor"], where)
    if number >= len(tensors):
        raise InvalidGraph(f"{where} refers to tensor {number}, and there are {len(tensors)}")
    return _text(fields["name"], where), number


def _fields(given: Any, where: str, *names: str) -> dict[str, Any]:
    if not isinstance(given, dict) or given.keys() != set(names):
        raise InvalidGraph(f"{where} must have exactly the fields {', '.join(names)}")
    return given


def _list(given: Any, where: str) -> list[Any]:
    if not isinstance(given, list):
        raise InvalidGraph(f"{where} is {_shown(given)} and must be a list")
    return given


def _count(given: Any, where: str) -> int:
    if type(given) is not int or not 0 <= given < _LARGEST:
        raise InvalidGraph(f"{where} has {_shown(given)} in place of a number from 0")
    return given


def _text(given: Any, where: str) -> str:
    if not isinstance(given, str) or len(given) > _LONGEST:
        raise InvalidGraph(f"{where} has {_shown(given)} in place of a text")
    return given


def _one_of(given: Any, allowed: Any, where: str) -> str:
    if not isinstance(given, str) or given not in allowed:
        raise InvalidGraph(f"{where} has {_shown(given)}, which is none of {', '.join(allowed)}")
    return given


def _shown(given: Any) -> str:
    if isinstance(given, dict | list):
        return kind_of(given)
    text = repr(given)
    return text if len(text) <= 80 else f"{text[:77]}..."


@dataclass
class GraphDocument:
    """Holds calls and descriptions of tensors in the form of a document, and the tensors."""

    features: list[Any]
    weights: frozenset[str]
    prefix: str
    regions: list[dict[str, Any]] = field(default_factory=list)
    descriptions: list[dict[str, Any]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    state: list[dict[str, Any]] = field(default_factory=list)
    calls: int = 0

    @classmethod
    def of(
        cls,
        program: ExportedProgram,
        prefix: str,
        autocast: str | None,
        state: Mapping[str, Tensor],
    ) -> GraphDocument:
        """Write a program that takes tensors and returns a tuple of tensors.

        Args:
            program: exported on the CPU.
            prefix: what the name of every weight begins with, and is left out.
            autocast: the precision of the whole program, or None.
            state: the model's state dict, tied tensors as one; what the program doesn't read of it
                is written, too.

        Raises:
            InvalidGraph: the program has something that a document can't say.
        """
        document = cls(list(_features(program)), frozenset(program.state_dict), prefix)
        module = program.module(check_guards=False)
        inline_regions(module)
        document._write(module, autocast)
        document._write_state(state)
        return document

    def fields(self) -> dict[str, Any]:
        """Return what `read_graph` takes."""
        return {
            "features": self.features,
            "tensors": self.descriptions,
            "regions": self.regions,
            "outputs": self.outputs,
            "state": self.state,
        }

    def _write(self, module: Any, autocast: str | None) -> None:
        """Write the calls of a graph, and its outputs."""
        features = module.graph.find_nodes(op="placeholder")
        values: dict[fx.Node, Any] = {node: {"feature": i} for i, node in enumerate(features)}
        for node in module.graph.nodes:
            if node.op == "get_attr":
                values[node] = self._attribute(module, node.target)
            elif node.op == "call_function":
                values[node] = self._call(node, values, _autocast_of(node, autocast))
            elif node.op not in ("placeholder", "output"):
                raise InvalidGraph(f"its graph calls the module {node.target}")
        self.outputs = _encoded(module.graph.output_node().args[0], values)

    def _attribute(self, module: nn.Module, target: str) -> Any:
        found: Any = module
        for part in target.split("."):
            found = getattr(found, part)
        if isinstance(found, fx.GraphModule):
            return found
        if not isinstance(found, Tensor) or type(found.data) is not Tensor:
            raise InvalidGraph(f"{target} is {kind_of(found)} and not a plain tensor")
        for number, tensor in enumerate(self.tensors):
            if tensor is found:
                return {"tensor": number}
        is_weight = target in self.weights
        name = target.removeprefix(self.prefix) if is_weight else target
        return {"tensor": self._store(name, found, is_weight)}

    def _write_state(self, state: Mapping[str, Tensor]) -> None:
        """Say which tensor each entry of the state dict is, and store those that no call reads."""
        numbers = {
            each["name"]: number
            for number, each in enumerate(self.descriptions)
            if each["kind"] != "constant"
        }
        stored = {id(tensor): numbers[name] for name, tensor in state.items() if name in numbers}
        for name, tensor in state.items():
            if id(tensor) not in stored:
                stored[id(tensor)] = self._store(name, tensor, True)
            self.state.append({"name": name, "tensor": stored[id(tensor)]})

    def _store(self, name: str, found: Tensor, is_weight: bool) -> int:
        """Describe a tensor and return its number."""
        kind = "buffer" if is_weight else "constant"
        if isinstance(found, nn.Parameter) and is_weight:
            kind = "parameter" if found.requires_grad else "frozen"
        strides = found.stride()
        order = sorted(range(found.dim()), key=lambda dim: -strides[dim])
        if dense_strides(found.shape, order) != strides:
            order = list(range(found.dim()))
        self.tensors.append(found)
        self.descriptions.append(
            {
                "name": name,
                "kind": kind,
                "dtype": _name(found.dtype),
                "shape": list(found.shape),
                "order": order,
            }
        )
        return len(self.tensors) - 1

    def _call(self, node: fx.Node, values: dict[fx.Node, Any], autocast: str | None) -> Any:
        target: Any = node.target
        if target in _DROPPED:
            return None
        name = name_of(target)
        if name is None:
            name = getattr(target, "__name__", str(target))
            raise InvalidGraph(f"its graph calls {name}, which is no allowed operator")
        if not self.regions or self.regions[-1]["autocast"] != autocast:
            self.regions.append({"autocast": autocast, "calls": []})
        self.regions[-1]["calls"].append(
            {
                "operator": name,
                "args": [_encoded(x, values) for x in node.args],
                "kwargs": {key: _encoded(x, values) for key, x in node.kwargs.items()},
            }
        )
        self.calls += 1
        return {"call": self.calls - 1}


def _autocast_of(node: fx.Node, autocast: str | None) -> str | None:
    """Return the precision in which a node runs; evaluation records no gradients in any region."""
    for region in regions_of(node):
        if region.autocast is not None:
            device, dtype, enabled = region.autocast
            if device == "cpu":  # where it is exported; no other device is autocast there
                autocast = _name(dtype) if enabled else None
    return autocast


def _encoded(value: Any, values: dict[fx.Node, Any]) -> Any:
    """Return a value of a graph's node as the document writes it."""
    if isinstance(value, fx.Node):
        return values[value]
    if isinstance(value, list | tuple):
        return [_encoded(each, values) for each in value]
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return _name(value)
    if isinstance(value, torch.device) and value.type == "cpu":
        return DEVICE
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise InvalidGraph(f"its graph holds {value!r}, {kind_of(value)}")


def _name(value: torch.dtype | torch.layout | torch.memory_format) -> str:
    return str(value).removeprefix("torch.")


def _features(program: ExportedProgram) -> Iterator[list[Any]]:
    """Return the sizes of each input; those that an expression ties to another are left open."""
    symbols: dict[Any, int] = {}
    placeholders = program.graph.find_nodes(op="placeholder")
    for spec, node in zip(program.graph_signature.input_specs, placeholders, strict=True):
        if spec.kind is not InputKind.USER_INPUT:
            continue
        sizes: list[Any] = []
        for size in node.meta["val"].shape:
            symbol = size.node.expr if isinstance(size, torch.SymInt) else None
            if symbol is None or symbol.is_number:
                sizes.append(int(size))
            elif not symbol.is_symbol:
                sizes.append(None)
            else:
                sizes.append(
                    {"size": symbols.setdefault(symbol, len(symbols))}
                    | _bounds(program.range_constraints.get(symbol))
                )
        yield sizes


def _bounds(constraint: Any) -> dict[str, int | None]:
    least, most = (None, None) if constraint is None else (constraint.lower, constraint.upper)
    # torch.export asks for at least 2 of each size that may differ, and 0 and 1 run as well.
    return {
        "least": int(least) if least is not None and least.is_Integer and least > 2 else None,
        "most": int(most) if most is not None and most.is_Integer else None,
    }
