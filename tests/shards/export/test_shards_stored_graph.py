"""A stored graph is nothing but calls of known operators: whatever else is in it is refused."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cerebro_hydra.errors import CerebroHydraError, ConfigurationError, StoreError
from cerebro_hydra.shards.export import operators
from cerebro_hydra.shards.export.graph import InvalidGraph, read_graph
from cerebro_hydra.shards.export.operators import operator_named
from cerebro_hydra.shards.export.program import (
    CONSTANTS_FILE,
    GRAPH_FILE,
    WEIGHTS_FILE,
    ExportedModel,
    load_exported,
)
from cerebro_hydra.storage.digest import encode_format, file_digest
from tests.examples import examples


def call(operator: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return {"operator": operator, "args": list(args), "kwargs": kwargs}


X, WEIGHT, SHIFT = {"feature": 0}, {"tensor": 0}, {"tensor": 1}


def document() -> dict[str, Any]:
    """A graph with every form of value."""
    return copy.deepcopy(GRAPH)


GRAPH: dict[str, Any] = {
    "features": [[{"size": 0, "least": None, "most": 64}, 3]],
    "tensors": [
        {"name": "a", "kind": "parameter", "dtype": "float32", "shape": [2, 3],
         "order": [1, 0]},
        {"name": "b", "kind": "constant", "dtype": "float32", "shape": [2], "order": [0]},
    ],
    "regions": [
        {"autocast": None, "calls": [
            call("aten.linear.default", X, WEIGHT, SHIFT),
            call("aten.sym_size.int", {"call": 0}, 0),
            call("number.mul", {"call": 1}, 2),
            call("aten.reshape.default", {"call": 0}, [{"call": 2}, 1]),
            call("aten.split.Tensor", {"call": 3}, {"call": 1}),
            call("getitem", {"call": 4}, 1),
            call("aten.cat.default", [{"call": 5}, {"call": 5}], 1),
            call("aten.arange.default", 2, dtype="float32", device="model", layout="strided",
                 pin_memory=False),
            call("aten.add.Tensor", {"call": 6}, {"call": 7}, alpha=0.5),
            call("aten.gelu.default", {"call": 8}, approximate="tanh"),
            call("aten.clamp.default", {"call": 9}, None, "inf"),
        ]},
        {"autocast": "bfloat16", "calls": [
            call("aten.matmul.default", {"call": 10}, WEIGHT),
            call("aten.clone.default", {"call": 11}, memory_format="contiguous_format"),
            call("aten.to.dtype", {"call": 12}, "float32"),
        ]},
    ],
    "outputs": [{"call": 13}, X],
    "state": [{"name": "tied", "tensor": 0}, {"name": "a", "tensor": 0}],
}  # fmt: skip


TENSORS = (torch.arange(6.0).reshape(3, 2).T, torch.ones(2))


def run(graph: Any) -> tuple[torch.Tensor, ...]:
    return ExportedModel(read_graph(graph), TENSORS)(torch.ones(4, 3))


def test_a_graph_has_the_state_dict_of_its_model():
    state = ExportedModel(read_graph(document()), TENSORS).original_state()
    assert list(state) == ["tied", "a"] and torch.equal(state["tied"], state["a"])


def test_a_graph_with_every_form_of_value_runs():
    scores, features = run(document())
    assert torch.equal(features, torch.ones(4, 3))
    linear = torch.ones(4, 3) @ TENSORS[0].T + 1
    half = linear.reshape(8, 1)[4:]
    out = torch.cat([half, half], 1) + torch.arange(2.0) / 2
    out = torch.nn.functional.gelu(out, approximate="tanh")
    assert torch.equal(scores, (out.bfloat16() @ TENSORS[0].bfloat16()).float())


def changed(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """Return the document with one place in it replaced."""
    whole = document()
    place = whole
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return whole


CALLS = ("regions", 0, "calls")
FORGERIES: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "a file": (
        (*CALLS, 7), call("aten.from_file.default", "/etc/passwd", False, 9), "no allowed operator"
    ),
    "memory": ((*CALLS, 8, "operator"), "aten.set_.source_Tensor", "no allowed operator"),
    "resizing": ((*CALLS, 8), call("aten.resize_.default", WEIGHT, [9]), "no allowed operator"),
    "a function of Python": ((*CALLS, 2), call("os.system", "id"), "no allowed operator"),
    "eval": ((*CALLS, 2), call("builtins.eval", "1"), "no allowed operator"),
    "an attribute": ((*CALLS, 0, "operator"), "aten.linear.__class__", "no allowed operator"),
    "a number's method": ((*CALLS, 2, "operator"), "number.__class__", "no allowed operator"),
    "an out argument": ((*CALLS, 8, "operator"), "aten.add.out", "no allowed operator"),
    "code as a name": (
        (*CALLS, 0, "operator"), "aten.linear.default(x);import os", "no allowed operator"
    ),
    "no name": ((*CALLS, 0, "operator"), 7, "in place of a text"),
    "code as a size": (("features", 0, 1), "__import__('os')", "exactly the fields"),
    "a size of words": (("features", 0, 0, "size"), "s0", "in place of a number"),
    "a negative size": (("features", 0, 1), -1, "in place of a number"),
    "a later call": ((*CALLS, 0, "args", 0), {"call": 5}, "no earlier Tensor"),
    "its own result": ((*CALLS, 0, "args", 0), {"call": 0}, "no earlier Tensor"),
    "a negative call": ((*CALLS, 3, "args", 0), {"call": -1}, "in place of a number"),
    "no feature": ((*CALLS, 0, "args", 0), {"feature": 1}, "no earlier Tensor"),
    "another place": ((*CALLS, 0, "args", 0), {"module": 0}, "no earlier Tensor"),
    "two places": ((*CALLS, 0, "args", 0), {"call": 0, "feature": 0}, "must refer to"),
    "a number for a tensor": (("outputs", 0), {"call": 1}, "no earlier Tensor"),
    "a tensor for a number": ((*CALLS, 2, "args", 0), {"call": 0}, "no earlier number"),
    "a text for a number": ((*CALLS, 2, "args", 1), "2", "none of inf"),
    "a text for a tensor": ((*CALLS, 0, "args", 0), "x", "none of inf"),
    "a list for a number": ((*CALLS, 2, "args", 1), [2], "must be of type number"),
    "nested lists": ((*CALLS, 6, "args", 0), [[{"call": 5}]], "must be of type"),
    "a large number": ((*CALLS, 2, "args", 1), 2**64, "more than 64 bits"),
    "an infinite number": ((*CALLS, 8, "kwargs", "alpha"), float("inf"), "written as a text"),
    "a bool for an int": ((*CALLS, 5, "args", 1), True, "must be of type int"),
    "an unknown dtype": ((*CALLS, 7, "kwargs", "dtype"), "load", "none of bool"),
    "a device": ((*CALLS, 7, "kwargs", "device"), "cuda:0", "none of model"),
    "a layout": ((*CALLS, 7, "kwargs", "layout"), "sparse_coo", "none of strided"),
    "a long text": ((*CALLS, 9, "kwargs", "approximate"), "x" * 5000, "in place of a text"),
    "an unknown keyword": ((*CALLS, 9, "kwargs", "out"), X, "are not those of the operator"),
    "an argument twice": ((*CALLS, 0, "kwargs", "input"), X, "are not those of the operator"),
    "too many arguments": ((*CALLS, 3, "args"), [X, [1], 1], "takes 2 arguments and has 3"),
    "too few arguments": ((*CALLS, 0, "args"), [X], "'weight' is missing"),
    "a field too many": ((*CALLS, 0, "code"), "1", "exactly the fields"),
    "another field": (("source",), "x", "exactly the fields"),
    "another precision": (("regions", 1, "autocast"), "float32", "none of bfloat16"),
    "no list": (("regions",), {}, "must be a list"),
    "an order of nothing": (("tensors", 0, "order"), [0, 0], "its order"),
    "a large order": (("tensors", 0, "order"), [0, 7], "its order"),
    "a kind of nothing": (("tensors", 0, "kind"), "script", "none of parameter"),
    "no outputs": (("outputs",), [], "no outputs"),
    "a state of nothing": (("state", 0, "tensor"), 2, "there are 2"),
    "a tensor by its name": (("state", 0, "tensor"), "a", "in place of a number"),
    "no name in the state": (("state", 0, "name"), None, "in place of a text"),
    "a state of names": (("state", 0), "a", "exactly the fields"),
    "no features": (("features",), [], "no earlier Tensor"),
}  # fmt: skip


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_document_is_refused_with_its_place(forgery):
    path, value, message = FORGERIES[forgery]
    with pytest.raises(InvalidGraph, match=message) as refused:
        read_graph(changed(path, value))
    assert len(str(refused.value)) < 400


def test_two_tensors_of_one_name_are_refused():
    whole = document()
    whole["tensors"].append(whole["tensors"][0])
    with pytest.raises(InvalidGraph, match="two have one name"):
        read_graph(whole)


def written(folder, text: str, weights: Any = None, constants: Any = None) -> None:
    folder.mkdir(exist_ok=True)
    (folder / GRAPH_FILE).write_text(text)
    safetensors.torch.save_file(weights or {"a": torch.zeros(2, 3)}, folder / WEIGHTS_FILE)
    safetensors.torch.save_file(constants or {"b": torch.zeros(2)}, folder / CONSTANTS_FILE)


def sealed(folder, graph: dict[str, Any], **tensors: Any) -> None:
    """Write a folder as somebody would who knows the format and means harm."""
    written(folder, "", **tensors)
    digests = {name: file_digest(folder / name) for name in (WEIGHTS_FILE, CONSTANTS_FILE)}
    (folder / GRAPH_FILE).write_bytes(encode_format({"files": digests, **graph}, 3))


def test_a_sealed_forgery_is_refused_when_it_is_loaded(tmp_path):
    sealed(tmp_path, document())
    load_exported(tmp_path)
    path, value, message = FORGERIES["a file"]
    sealed(tmp_path, changed(path, value))
    with pytest.raises(ConfigurationError, match=rf"never writes \(.*{message}\); do not load it"):
        load_exported(tmp_path)
    for digests in ({}, {GRAPH_FILE: "0"}, None, {"../../x": "0", WEIGHTS_FILE: "0"}):
        sealed(tmp_path, document())
        (tmp_path / GRAPH_FILE).write_bytes(encode_format({"files": digests, **document()}, 3))
        with pytest.raises(ConfigurationError, match="files must be the digests of"):
            load_exported(tmp_path)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"weights": {"a": torch.zeros(2, 3), "c": torch.zeros(1)}}, "does not hold the tensors"),
        ({"weights": {"c": torch.zeros(2, 3)}}, "does not hold the tensors"),
        ({"weights": {"a": torch.zeros(3, 2)}}, "a has another type or shape"),
        ({"constants": {"b": torch.zeros(2).double()}}, "b has another type or shape"),
    ],
)
def test_tensors_that_are_not_those_of_the_graph_are_refused(tmp_path, tensors, message):
    sealed(tmp_path, document(), **tensors)
    with pytest.raises(ConfigurationError, match=message):
        load_exported(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "null", "[]", "7", '"x"', "[" * 100_000, '{"a":' * 100_000, "NaN", "\x00",
        '{"format": 2}', '{"format": 2, "digest": 7}', '{"format": 2, "format": 2}',
        json.dumps({"format": 2, "digest": "0" * 32, **document()}), "9" * 10_000,
    ],
)  # fmt: skip
def test_text_that_is_no_sealed_document_is_refused(tmp_path, text):
    written(tmp_path, text)
    with pytest.raises((StoreError, ConfigurationError), match=GRAPH_FILE) as refused:
        load_exported(tmp_path)
    assert len(str(refused.value)) < 400


def test_a_file_that_is_no_safetensors_is_refused(tmp_path):
    sealed(tmp_path, document())
    for content in (b"", b"\xff" * 64, b"\x80\x04." * 9):
        (tmp_path / WEIGHTS_FILE).write_bytes(content)
        names = (WEIGHTS_FILE, CONSTANTS_FILE)
        digests = {name: file_digest(tmp_path / name) for name in names}
        (tmp_path / GRAPH_FILE).write_bytes(encode_format({"files": digests, **document()}, 3))
        with pytest.raises(ConfigurationError, match="is no safetensors file"):
            load_exported(tmp_path)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value within a document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, each in inner:
        found.append((*path, key))
        if isinstance(each, dict | list):
            found += places(each, (*path, key))
    return found


PLACES = places(document())
PARTS = [copy.deepcopy(value) for value in (X, WEIGHT, {"call": 3}, [1], [X], {}, [], None)]
TEXTS = st.sampled_from(
    ["aten.relu.default", "aten.from_file.default", "getitem", "number.pow", "number.eval", "inf",
     "float32", "model", "__import__('os').system('id')", "aten.mul.Tensor", "../x", ""]
)  # fmt: skip
VALUES = st.one_of(
    st.sampled_from(PARTS),
    TEXTS,
    st.integers(-(2**70), 2**70),
    st.integers(-3, 20),
    st.floats(),
    st.booleans(),
    st.recursive(st.none() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)),
)


@settings(max_examples=examples(900))
@given(st.lists(st.tuples(st.sampled_from(PLACES), VALUES), min_size=1, max_size=3))
def test_a_mutated_document_is_refused_or_calls_allowed_operators_alone(mutations):
    whole = document()
    for path, value in mutations:
        place: Any = whole
        try:
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = copy.deepcopy(value)
        except (LookupError, TypeError):
            continue  # an earlier mutation took this place away
    try:
        graph = read_graph(json.loads(json.dumps(whole)))
    except InvalidGraph as error:
        assert str(error)
        return
    for region in graph.regions:
        for each in region.calls:
            assert operator_named(each.operator.name) is each.operator
    if any(isinstance(v, int) and abs(v) > 1000 for _, v in mutations):
        return  # it may well ask for much memory, which is no matter of the grammar
    try:
        predictions = ExportedModel(graph, TENSORS)(torch.ones(4, 3))
    except CerebroHydraError:
        return
    except (RuntimeError, IndexError, TypeError, ValueError, ArithmeticError) as error:
        assert error.__notes__[-1].startswith("in call ")  # an operator refused what it got
        return
    assert all(isinstance(each, torch.Tensor) for each in predictions)


def test_every_listed_operator_is_there_and_none_takes_more_than_tensors_and_numbers():
    for listed in operators._ALLOWED:
        packet, _, one = listed.partition(".")
        overloads = [one] if one else getattr(torch.ops.aten, packet).overloads()
        assert any(operator_named(f"aten.{packet}.{overload}") for overload in overloads), listed
    for packet in dir(torch.ops.aten):
        assert operator_named(packet) is None or packet == "getitem"


@pytest.mark.parametrize(
    "name",
    [
        "from_file.default", "set_.source_Tensor", "set_.source_Storage", "resize_.default",
        "record_stream.default", "_sparse_coo_tensor_unsafe.default", "lstm.data", "add.out",
        "_print.default", "warn.default", "save.default", "open.default", "requires_grad_.default",
        "sort.str", "add.str", "__class__.default", "relu.__call__", "relu", "relu.default.x", "",
    ],
)  # fmt: skip
def test_operators_beyond_the_list_are_not_found(name):
    assert operator_named(f"aten.{name}") is None


ONES = torch.ones(1, 3, 4)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("_weight_norm.default", (torch.ones(4), torch.ones(2, 0, 3))),
        ("_weight_norm.default", (torch.ones(0), torch.ones(1))),
        ("embedding_bag.default", (torch.ones(5, 4), torch.ones(6).long(), torch.ones(0).long())),
        ("embedding_bag.default", (torch.ones(5, 4), torch.ones(2).long(), torch.arange(9))),
        ("lstm.input", (ONES, [ONES, ONES], [torch.ones(3, 2)], False, 4, 0.0, False, True, False)),
        ("lstm.input", (ONES, [ONES, ONES], [], False, -1, 0.0, False, False, False)),
        ("gru.input", (ONES, ONES, [torch.ones(1, 1)] * 2, False, 1, 0.0, False, False, False)),
        ("scaled_dot_product_attention.default", (ONES, ONES, torch.ones(1, 900, 4))),
        ("repeat_interleave.Tensor", (torch.tensor([2**62] * 4 + [5]),)),
        ("repeat_interleave.self_Tensor", (ONES[0, 0], torch.tensor([2**62] * 4))),
        ("upsample_nearest1d.default", (ONES, [5], 1e-20)),
        ("_upsample_bilinear2d_aa.default", (ONES[None], [5, 5], False, 1e-10, 1e-10)),
        ("_upsample_bicubic2d_aa.default", (ONES[None], [5, 5], False, 2.0, math.nan)),
    ],
)
def test_arguments_with_which_a_kernel_would_read_beyond_a_tensor_are_refused(name, args):
    operator = operator_named(f"aten.{name}")
    assert operator is not None
    with pytest.raises(ValueError, match="don't fit together"):
        operator.run(*args)
