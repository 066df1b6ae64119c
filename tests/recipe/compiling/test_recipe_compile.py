"""Which blocks of a model are compiled, and what is refused before anything trains."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.hopper.protocol.resources import DEFAULT_RESOURCES
from cerebro_hydra.planning.biller import Biller
from cerebro_hydra.recipe import Recipe, fingerprint_differences, numeric_fingerprint
from cerebro_hydra.recipe.compiled_units import compilable_units
from tests.shards import zoo
from tests.shards.compiled_blocks import Block, blocks
from tests.shards.cut.test_shards_foreign_models import SharesAChild


class Layer(nn.Linear):
    """A layer of the user's own, which may be several operations."""


def replaced() -> nn.Module:
    model = blocks(2)
    model[1].forward = model[1].forward
    return model


MODELS = {
    "of blocks": (blocks, ["1", "2", "3"]),
    "of layers of torch": (zoo.mlp, []),
    "of layers": (lambda: nn.Sequential(nn.Linear(6, 6), Layer(6, 3)), ["1"]),
    "with convolutions": (zoo.LongSkips, ["blocks.0", "blocks.1", "blocks.2"]),
    "whose blocks share a child": (SharesAChild, []),
    "with a block that was compiled": (
        lambda: nn.Sequential(torch.compile(Block(), backend="eager"), Block()), ["1"]
    ),
    "with one that compiles itself": (lambda: nn.Sequential(itself(), Block()), ["1"]),
    "with a forward of its own": (replaced, ["2"]),
}  # fmt: skip


def itself() -> nn.Module:
    block = Block()
    block.compile(backend="eager")
    return block


@pytest.mark.parametrize("name", MODELS)
def test_blocks_of_several_layers_are_compiled(name: str) -> None:
    make, expected = MODELS[name]
    assert list(compilable_units(make())) == expected


def recipe(model: nn.Module | None = None, **rules) -> Recipe:
    model = model or blocks()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return Recipe(model, optimizer, nn.CrossEntropyLoss(), **{"compile": True, **rules})


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"compile": 1}, r"compile is 1; it is True or False"),
        ({"cut": "export"}, r"compile is True and cut is 'export', by which a graph runs"),
        ({"schedule": "gpipe", "shards": 2, "accumulate": 2}, r"schedule is 'gpipe', which cuts"),
        ({"model": zoo.mlp()}, r"no block of this Sequential gains by it.*modules with several"),
    ],
)
def test_what_can_not_be_compiled_is_refused(rules: dict, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        recipe(**rules)


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("CXX", "no-such-compiler", r"there is no C\+\+ compiler, as 'no-such-compiler' is not"),
        ("TORCH_COMPILE_DISABLE", "1", r"TORCH_COMPILE_DISABLE is 1, by which torch compiles no"),
    ],
)
def test_a_machine_that_can_not_compile_is_told(
    variable: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert recipe().compiled_units == ("1", "2", "3")
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError, match=said):
        recipe()
    assert numeric_fingerprint()["compiler"] is None
    assert recipe(compile=False).compiled_units == ()


def test_another_compiler_is_told_of_trials_that_are_compiled() -> None:
    here = numeric_fingerprint()
    there = here | {"compiler": "g++ of another age"}
    assert list(fingerprint_differences(here, there)) == []
    assert list(fingerprint_differences(here, there, compiles=True)) == [
        ("compiler", here["compiler"], "g++ of another age")
    ]


def test_what_is_made_for_one_cpu_is_not_portable() -> None:
    bill = Biller(replace(DEFAULT_RESOURCES, numerics="portable"), 1, print)
    bill.check_compile(recipe(compile=False))
    with pytest.raises(ConfigurationError, match="numerics is 'portable', and what torch compiles"):
        bill.check_compile(recipe())
