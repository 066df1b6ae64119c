"""Blocks that are compiled have equal bits in one shard, in several, and wherever these lie.

Each test shares what the first one compiles, which takes some ten seconds where no cache has it.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import PlainTrainer, compiled_units
from cerebro_hydra.shards.engine.microbatch import UsesElsewhere
from cerebro_hydra.shards.places import Places
from tests.shards import plain, zoo
from tests.shards.compiled_blocks import blocks, compiled, compiled_by_user
from tests.shards.executors import test_shards_executors as executors
from tests.shards.executors.executor_case import Proof
from tests.shards.hopping import STEPS_PER_EPOCH
from tests.shards.trials import recipe_of

pytestmark = pytest.mark.slow

SUB_EPOCHS = [zoo.singly(zoo.vectors(8, 8)), zoo.singly(zoo.vectors(8, seed=1))]
EXECUTORS = ("Keep", "Again", "Alone", "Queue", "Kept", "Uncut")


@functools.cache
def proof(shards: int) -> Proof:
    found = Proof(compiled(shards, ema=0.9), SUB_EPOCHS, "modules")
    assert found.trial.cut_model.num_shards == shards
    assert "compiled: 1, 2, 3" in found.trial.admission.report.text()
    return found


@pytest.mark.parametrize("executor", EXECUTORS)
def test_bits_are_those_of_the_plain_trainer_that_compiles(executor: str) -> None:
    getattr(executors, f"Test{executor}")().prove([proof(4)])


def test_the_number_of_shards_changes_no_bit_and_nothing_is_compiled_anew() -> None:
    sums = proof(4).sums
    graphs = counters["stats"]["unique_graphs"]
    for shards in (1, 2):
        executors.TestKeep().prove([proof(shards)])
        assert proof(shards).sums == sums
    assert counters["stats"]["unique_graphs"] == graphs


def test_the_bits_are_not_those_of_the_plain_model() -> None:
    eager = PlainTrainer(recipe_of(blocks, ema=0.9)(), plain.TRIAL_SEED, STEPS_PER_EPOCH)
    assert [eager.train(each)[0] for each in SUB_EPOCHS] != proof(4).sums


class Passes(TorchDispatchMode):
    """Is a mode of the user's own, which is to see each operation."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("watched", [Passes, compiled_units.uncompiled])
def test_a_block_runs_plainly_while_each_of_its_operations_is_watched(
    watched: Callable[[], AbstractContextManager[object]],
) -> None:
    recipe, x = compiled()(), torch.ones(8, 6)
    recipe.model.eval()
    with torch.no_grad(), watched():
        expected = recipe.model(x)
        with recipe.compiled(recipe.model):
            assert torch.equal(recipe.model(x), expected)


@functools.cache
def proof_by_user() -> Proof:
    """Of batches that differ in size, for which torch would compile again for any size."""
    sub_epochs = [zoo.singly(zoo.vectors(8, 5)), zoo.singly(zoo.vectors(5, 8, seed=1))]
    found = Proof(recipe_of(compiled_by_user, shards=3), sub_epochs, "modules")
    assert found.trial.cut_model.num_shards == 3
    return found


@pytest.mark.parametrize("executor", EXECUTORS)
def test_layers_that_the_user_compiles_stay_so_whoever_watches(executor: str) -> None:
    getattr(executors, f"Test{executor}")().prove([proof_by_user()])


def test_what_the_user_compiles_does_not_depend_on_shapes_that_came_before() -> None:
    shapes: list[torch.Size] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> torch.fx.GraphModule:
        shapes.append(inputs[0].shape)
        return graph

    compiled_by_user = torch.compile(lambda x: x + 1, backend=backend)
    with compiled_units.compiled_alike():
        for rows in (8, 5, 3, 8):
            compiled_by_user(torch.ones(rows, 2))
    assert shapes == [(8, 2), (5, 2), (3, 2)]


def test_more_forms_than_torch_keeps_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compiled_units._ALIKE, "recompile_limit", 1)
    recipe = recipe_of(lambda: blocks(1)[1:2], compile=True)()
    said = r"torch.compile can't take unit '1', a Block \(FailOnRecompileLimitHit"
    with recipe.compiled(recipe.model), torch.no_grad():
        recipe.model.eval()(torch.ones(8, 6))
        with pytest.raises(ConfigurationError, match=said):
            recipe.model.train()(torch.ones(8, 6))


def test_a_batch_of_another_shape_is_told_as_without_a_compiler() -> None:
    recipe = compiled()()
    with recipe.compiled(recipe.model), pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
        recipe.model[1](torch.ones(8, 5))


def test_modes_of_other_threads_let_nothing_be_compiled_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those end in any order where visits take turns, and torch notes them for all threads."""
    for name in [name for name in vars(_python_dispatch) if name.startswith("_is_in_")]:
        monkeypatch.setattr(_python_dispatch, name, False)  # given back afterwards
    recipe, x = compiled()(), torch.ones(8, 6)

    def run() -> None:
        with recipe.compiled(recipe.model), UsesElsewhere(Places()):
            recipe.model(x)

    run()
    graphs = counters["stats"]["unique_graphs"]
    first, second = Passes(), Passes()
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        for thread, step in (
            (one, first.__enter__),
            (other, second.__enter__),
            (one, partial(first.__exit__, None, None, None)),
            (other, partial(second.__exit__, None, None, None)),
        ):
            thread.submit(step).result()
        run()
    assert counters["stats"]["unique_graphs"] == graphs


def test_modules_are_as_they_were_after_they_ran_compiled() -> None:
    made = compiled()()
    before = [dict(vars(module)) for module in made.model.modules()]
    with made.compiled(made.model), made.compiled(made.model):
        assert "forward" in vars(made.model[1])
    assert [dict(vars(module)) for module in made.model.modules()] == before


PROGRAM = """
import torch
from cerebro_hydra.recipe import PlainTrainer
from cerebro_hydra.shards.digest import tensor_digest
from tests.shards.executors.test_shards_compiled import SUB_EPOCHS, compiled

torch.set_num_threads(1)
trainer = PlainTrainer(compiled()(), 1, 4)
trainer.train(SUB_EPOCHS[0])
print({name: tensor_digest(each) for name, each in trainer.tensors().items()})
"""


@pytest.mark.long
def test_processes_that_compile_anew_have_equal_bits(tmp_path: Path) -> None:
    def run(cache: str) -> str:
        told = subprocess.run(
            [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True,
            env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / cache)},
        )  # fmt: skip
        return told.stdout

    first = run("first")
    assert "param:1.linear.weight" in first
    assert run("second") == first
    assert run("first") == first, "what the cache has is other code"


SCRIPT = """
class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return x + torch.relu(self.layer(x))
"""


def test_a_class_whose_module_is_not_here_is_compiled() -> None:
    """Such is one of a notebook, on a worker."""
    names: dict[str, Any] = {"__name__": "a_notebook", "nn": nn, "torch": torch}
    exec(SCRIPT, names)
    model = nn.Sequential(names["Scripted"](), names["Scripted"]())
    units, x = (
        compiled_units.CompiledUnits(compiled_units.compilable_units(model)),
        torch.ones(3, 4),
    )
    assert units.names == ("0", "1")
    with units.of(model):
        found = model(x)
    torch.testing.assert_close(found, model(x))
