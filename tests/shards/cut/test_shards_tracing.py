"""A traced forward takes the way that it takes when it runs plainly, and its failures are told."""

from __future__ import annotations

import functools
import logging
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.cut.export import PlainAnswers, export_program
from cerebro_hydra.shards.cut.trace import CutFailed, FlatGraph, trace
from cerebro_hydra.shards.engine.differences import same_bits
from cerebro_hydra.shards.export.program import load_exported, save_exported
from tests.shards import zoo
from tests.shards.trials import rotary_recipe

pytestmark = pytest.mark.kernels

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


class Asks(nn.Module):
    """Multiplies where it is traced, and adds where it is not."""

    def __init__(self, asks: str) -> None:
        super().__init__()
        self.a = nn.Linear(6, 3)
        self.asks = asks

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        traced = {
            "compiling": lambda: torch.compiler.is_compiling(),
            "exporting": lambda: torch.compiler.is_exporting(),
            "dynamo": lambda: torch._dynamo.is_compiling(),
            "tensor": lambda: isinstance(y, torch._subclasses.FakeTensor),
        }[self.asks]()
        return y * 2 if traced else y + 1


def operators(flat: FlatGraph) -> list[Any]:
    return [node.target for node in flat.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("asks", ["compiling", "exporting", "dynamo", "tensor"])
def test_a_forward_that_asks_is_traced_as_it_runs(tmp_path, asks):
    model = Asks(asks)
    traced = trace(model, zoo.sample(zoo.vectors(4)[0]))
    for flat in (traced.train, traced.eval):
        assert torch.ops.aten.add.Tensor in operators(flat)
        assert torch.ops.aten.mul.Tensor not in operators(flat)
    recipe = Recipe(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())
    save_exported(recipe, zoo.vectors(4)[0].features, tmp_path)
    (x,) = zoo.vectors(3, seed=3)[0].features
    with torch.no_grad():
        assert same_bits(load_exported(tmp_path)(x)[0], model.eval()(x))


def test_torch_itself_has_the_true_answers():
    given: dict[str, Any] = {}
    answers = PlainAnswers()
    with answers.given():
        inside = "class C:\n    values = torch.compiler.is_exporting, torch._subclasses.FakeTensor"
        for name in ("torch.of_torch", "torchvision"):
            scope = {"torch": torch, "__name__": name}
            exec(inside, scope)
            given[name] = scope["C"].values
    true = torch.compiler.is_exporting, torch._subclasses.FakeTensor
    assert given["torch.of_torch"] == true
    assert not set(given["torchvision"]) & set(true)
    assert answers.asked
    assert type(torch.compiler) is type(torch._subclasses) is type(torch)


class Reads(zoo.One):
    """Reads a value where it is not traced."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if not torch.compiler.is_compiling() and bool(y.isnan().any()):
            raise ValueError("not a number")
        return y


def test_a_forward_that_reads_values_unless_it_is_traced_is_told_that_it_is():
    assert torch.ops.aten.linear.default in operators(
        trace(Reads(), zoo.sample(zoo.vectors(4)[0])).train
    )


class Calls(TorchFunctionMode):
    """Notes how attention is called."""

    def __init__(self) -> None:
        super().__init__()
        self.attention: list[tuple[Any, ...]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            given = dict(kwargs or {})
            self.attention.append(
                (
                    args[1].shape[1],
                    given.get("attn_mask") is None,
                    given.get("is_causal", False),
                    given.get("enable_gqa", False),
                )
            )
        return func(*args, **(kwargs or {}))


def test_a_traced_llama_calls_attention_as_it_does_plainly():
    (batch,) = zoo.tokens(4)
    model = rotary_recipe("Llama")().model
    with Calls() as plain:
        model(*batch.features)
    assert plain.attention == [(1, True, True, True)] * 2
    traced = trace(model, zoo.sample(batch))
    assert traced.any_rows
    for flat in (traced.train, traced.eval):
        called = [
            (
                node.args[1].meta["val"].shape[1],
                node.args[3] is None,
                node.args[5],
                node.kwargs["enable_gqa"],
            )
            for node in flat.graph.nodes
            if node.target is ATTENTION
        ]
        assert called == plain.attention


class Repeats(nn.Module):
    """Branches on what it makes of a constant that it repeats for each row."""

    def __init__(self, made: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a = nn.Linear(6, 3)
        self.made = made

    def forward(self, x: Tensor) -> Tensor:
        repeated = torch.arange(3.0)[None].expand(x.shape[0], 3)
        return self.a(x + 1 if self.made(repeated) else x)


@pytest.mark.parametrize(
    "made",
    [
        lambda repeated: (repeated[:, -1] == 2).all(),
        lambda repeated: repeated.cumsum(-1).max() == 3,
        lambda repeated: (repeated.diff(dim=0) == 0).all(),
    ],
)
def test_a_value_is_known_that_is_the_same_for_every_number_of_rows(made):
    traced = trace(Repeats(made), zoo.sample(zoo.vectors(4)[0]))
    assert traced.any_rows
    assert torch.ops.aten.add.Tensor in operators(traced.train)


@pytest.mark.parametrize(
    "made",
    [
        lambda repeated: repeated.sum() > 13,  # 12 of four rows, 15 of five
        lambda repeated: repeated.sum() < 100,
        lambda repeated: (repeated.cumsum(0) < 100).all(),
    ],
)
def test_a_value_is_not_known_that_depends_on_the_number_of_rows(made):
    with pytest.raises(CutFailed, match="data-dependent"):
        trace(Repeats(made), zoo.sample(zoo.vectors(4)[0]))


class ChangedMask(zoo.Pair):
    """Asks for the value of a mask into which it has written what is no constant."""

    def forward(self, x):
        mask = torch.zeros(6)
        view = mask[:3]
        view += x[0, :3]
        return self.b(self.a(x) * (2 if mask.sum() > 0 else 1))


@pytest.mark.parametrize("kind", [ChangedMask, zoo.Decides])
def test_questions_about_other_values_are(kind):
    with pytest.raises(CutFailed, match="data-dependent"):
        trace(kind(), zoo.sample(zoo.vectors(4)[0]))


class Misfit(nn.Module):
    def forward(self, x):
        return x @ x


def test_a_failed_export_names_the_line_and_logs_no_traceback(caplog, capfd):
    with pytest.raises(CutFailed) as failed:
        trace(Misfit(), zoo.sample(zoo.vectors(4)[0]))
    assert re.search(r"test_shards_tracing\.py:\d+: return x @ x", str(failed.value))
    assert not [each for each in caplog.records if each.levelname in ("WARNING", "ERROR")]
    assert not capfd.readouterr().err


def decorated(forward):
    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        return forward(self, *args, **kwargs)

    return wrapper


class Decorated(zoo.Decides):
    @decorated
    def forward(self, x):
        return self.drop(self.a(x))


def test_a_decorated_forward_is_traced_by_its_own_arguments():
    traced = trace(Decorated(), zoo.sample(zoo.vectors(4)[0]))
    assert traced.train.markers.keys() == {"a@0", "drop@0"}


def test_torch_warns_of_nothing_while_it_traces(recwarn, caplog):
    class Warns(zoo.One):
        def forward(self, x):
            warnings.warn("a trace", stacklevel=1)
            logging.getLogger("torch.export").warning("a trace")
            return self.a(x)

    export_program(Warns(), (torch.zeros(2, 6),), None, None)
    assert not [each for each in recwarn if "a trace" in str(each.message)]
    assert not [each for each in caplog.records if each.levelname == "WARNING"]
