"""A factory makes the same trial each time that it is called, or its trial is refused by name."""

from __future__ import annotations

import itertools
import os
import random
import sys
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.recipe.batch.columns import Columns
from cerebro_hydra.recipe.build import build_recipe
from cerebro_hydra.shards.admission.effects.isolated_factory import IsolatedFactory
from cerebro_hydra.shards.admission.same_builds import SameBuilds, check_same_builds, read_build
from tests.processes import run_python

BUILDS = itertools.count()
COLUMNS = Columns(("x",), ("y",))


class Net(nn.Module):
    """Has what it is given as attributes."""

    def __init__(self, **held: Any) -> None:
        super().__init__()
        self.line = nn.Linear(8, 3)
        vars(self).update(held)

    def forward(self, x: Tensor) -> Tensor:
        if (order := getattr(self, "order", None)) is not None:
            x = x[:, order]
        return self.line(x) * getattr(self, "gain", 1.0)


class Table(nn.Module):
    def __init__(self, table: Tensor, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("table", table, persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.table  # type: ignore[no-any-return]


def recipe(model: nn.Module | None = None, **options: Any) -> Recipe:
    model = Net() if model is None else model
    options = {"loss": nn.CrossEntropyLoss(), **options}
    return Recipe(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def unseeded() -> np.random.Generator:
    return np.random.default_rng()


def matrix() -> Tensor:
    return torch.tensor(unseeded().normal(size=(8, 8)), dtype=torch.float32)


def self_seeded() -> Tensor:
    generator = torch.Generator()
    generator.seed()
    return torch.randperm(8, generator=generator)


def shifted(by: float) -> Callable[..., Any]:
    return lambda batch, training: {**batch, "x": batch["x"] + by}


def with_weights(values: Any, **held: Any) -> Recipe:
    model = Net(**held)
    with torch.no_grad():
        model.line.weight.copy_(torch.as_tensor(values))
    return recipe(model)


def of_width(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.Linear(width, 3))


def by_lr(lr: float) -> Recipe:
    model = Net()
    return Recipe(model, torch.optim.SGD(model.parameters(), lr=lr), nn.CrossEntropyLoss())


def frozen(place: int) -> Recipe:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3))
    model[place].requires_grad_(False)
    return recipe(model)


def later(step: int) -> Callable[..., Any]:
    return lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step)


COIN = itertools.cycle([nn.Tanh, nn.SiLU, nn.Tanh, nn.Tanh, nn.SiLU])
SHARED = nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3))


def logged(model: nn.Module) -> Recipe:
    """Give each build one more hook, on modules that all builds share."""
    model.run = uuid.uuid4().hex  # type: ignore[assignment]
    model.register_forward_hook(lambda module, inputs, output: None)
    return recipe(model)


OTHER_EACH_TIME: dict[str, tuple[Callable[[], Recipe], str]] = {
    "list": (lambda: recipe(Net(order=unseeded().permutation(8).tolist())), "attribute 'order'"),
    "array": (lambda: recipe(Net(order=unseeded().permutation(8))), "attribute 'order'"),
    "number": (lambda: recipe(Net(gain=random.Random().random())), "attribute 'gain'"),
    "generator of torch": (lambda: recipe(Net(order=self_seeded())), "attribute 'order'"),
    "constant": (lambda: recipe(nn.Sequential(Table(matrix(), False), Net())), "'0.table'"),
    "option": (lambda: recipe(nn.Sequential(nn.Dropout(random.Random().random()), Net())),
               "attribute 'p' of module '0'"),
    "layers": (lambda: recipe(of_width(30 + next(BUILDS))), "attribute 'out_features'"),
    "loss": (lambda: recipe(loss=nn.CrossEntropyLoss(torch.tensor(unseeded().random(3)).float())),
             "buffer 'weight' of the loss"),
    "clipping": (lambda: recipe(clip_grad_norm=random.Random().random()), "clip_grad_norm"),
    "learning rate": (lambda: by_lr(random.Random().random()), "the optimizer's lr"),
    "frozen layers": (lambda: frozen(next(BUILDS) % 2), "which parameters of the model train"),
    "activation": (lambda: recipe(nn.Sequential([nn.Tanh, nn.SiLU][next(BUILDS) % 2](), Net())),
                   "module '0'"),
    "schedule": (lambda: recipe(lr_scheduler=later(100 + next(BUILDS))), "the lr_scheduler"),
    "coin": (lambda: recipe(nn.Sequential(next(COIN)(), Net())), "module '0'"),
    "collate": (lambda: recipe(collate=shifted(unseeded().random())), "the collate"),
}  # fmt: skip
ALIKE: dict[str, Callable[[], Recipe]] = {
    "NumPy": lambda: recipe(Net(order=np.random.permutation(8).tolist())),
    "Python": lambda: recipe(Net(order=random.sample(range(8), 8))),
    "torch": lambda: recipe(Net(order=torch.randperm(8))),
    "seeded": lambda: recipe(Net(order=np.random.default_rng(3).permutation(8))),
    "persistent": lambda: recipe(nn.Sequential(Table(matrix(), True), Net())),
    "weights": lambda: with_weights(unseeded().normal(size=(3, 8))),
    "weights and names": lambda: with_weights(unseeded().normal(size=(3, 8)), run=uuid.uuid4().hex),
    "names": lambda: recipe(Net(run=uuid.uuid4().hex, at=time.perf_counter(), by=os.getpid())),
    "number of the build": lambda: recipe(Net(number=next(BUILDS))),
    "class": lambda: recipe(type(f"Net{next(BUILDS)}", (Net,), {})()),
    "a model of a notebook": lambda: logged(SHARED),
    "state": lambda: recipe(nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5), Net())),
}


TEACHER: nn.Module | None = None


def with_a_teacher(first: bool, kept: bool) -> Recipe:
    """Return a trial with a teacher that all share, built before its model or behind it."""
    global TEACHER

    def teacher() -> nn.Module:
        if not kept:
            return nn.Linear(8, 3)
        with torch.random.fork_rng():
            return nn.Linear(8, 3)

    if TEACHER is None and first:
        TEACHER = teacher()
    model = Net()
    if TEACHER is None:
        TEACHER = teacher()
    return recipe(model, loss=lambda outputs, labels: (outputs - TEACHER.weight.sum()).mean())


def factory(params: dict[str, bool]) -> Recipe:
    return with_a_teacher(**params)


def importing(params: dict[str, bool]) -> Recipe:
    import draws_when_imported  # type: ignore[import-not-found]

    return recipe(Net(gain=draws_when_imported.GAIN))


def built(how: str, params: dict[str, bool], factory: Callable[[Any], Recipe] = factory) -> Recipe:
    isolated = IsolatedFactory(factory)
    build, builds = partial(build_recipe, isolated, params, 7, COLUMNS), SameBuilds(isolated)
    with isolated:
        if how == "first":
            return builds.first(build)
        return builds.of(build, lambda _: ((torch.randn(6, 8),), (torch.arange(6) % 3,)), 5)[0]


@pytest.mark.parametrize("how", ["first", "of"])
def test_what_is_built_once_may_not_take_the_random_numbers_of_the_first_model(how: str) -> None:
    global TEACHER
    for _ in range(2):  # nor the second time
        with pytest.raises(
            ConfigurationError, match=r"in its first call .*torch\.random\.fork_rng"
        ):
            built(how, {"first": True, "kept": False})
        assert TEACHER is None
    for params in ({"first": True, "kept": True}, {"first": False, "kept": False}):
        model = built(how, params).model
        assert TEACHER is not None
        TEACHER = None
        alone = build_recipe(factory, params, 7, COLUMNS).model
        assert all(map(torch.equal, model.parameters(), alone.parameters()))
        TEACHER = None


@pytest.mark.parametrize("how", ["first", "of"])
def test_what_a_module_draws_when_the_factory_imports_it_moves_no_weight(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import torch\n\nGAIN = torch.rand(1).item()\n"
    (tmp_path / "draws_when_imported.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        model = built(how, {}, importing).model
        there = build_recipe(importing, {}, 7, COLUMNS).model
    finally:
        del sys.modules["draws_when_imported"]
    assert all(map(torch.equal, model.parameters(), there.parameters()))


def check(make: Callable[[], Recipe]) -> None:
    """Build a trial as admission does, and check that it is the same one each time."""
    build = partial(build_recipe, lambda params: make(), {}, 7, COLUMNS)
    readings = []
    for _ in range(2):
        found = read_build(build())
        assert found is not None
        readings.append(found[0])
    example = (torch.randn(6, 8),), (torch.arange(6) % 3,)
    check_same_builds(*readings, build, example, 5)


@pytest.mark.parametrize("kind", OTHER_EACH_TIME)
def test_a_trial_that_is_another_one_each_time_is_refused_by_the_name_of_what_differs(
    kind: str,
) -> None:
    make, name = OTHER_EACH_TIME[kind]
    with pytest.raises(ConfigurationError) as refusal:
        check(make)
    said = str(refusal.value)
    assert said.startswith("estimator_gen_fn makes another trial each time") and name in said


@pytest.mark.parametrize("kind", ALIKE)
def test_what_changes_no_step_may_differ(kind: str) -> None:
    check(ALIKE[kind])


def drawn(seed: int) -> list[Any]:
    """Return what a factory draws from the generators that it finds."""
    found: list[Any] = []

    def factory(params: dict[str, Any]) -> Recipe:
        found.extend([random.random(), np.random.permutation(8).tolist(), torch.rand(1).item()])
        return recipe()

    build_recipe(factory, {}, seed, COLUMNS)
    return found


def test_what_a_factory_draws_is_the_same_in_every_process_and_is_taken_from_nobody() -> None:
    random.seed(1)
    np.random.seed(1)
    expected = random.random(), np.random.rand()
    random.seed(1)
    np.random.seed(1)
    here = drawn(3)
    assert (random.random(), np.random.rand()) == expected
    done = run_python("-c", f"from {__name__} import drawn; print(repr(drawn(3)))")
    assert done.stdout.strip().splitlines()[-1] == repr(here) == repr(drawn(3)) != repr(drawn(4))
