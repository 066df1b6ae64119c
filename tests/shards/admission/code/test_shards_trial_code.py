"""The code of a trial is described alike in every process, and what differs has a name."""

from __future__ import annotations

import argparse
import functools
import json
import os
import tempfile
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from cerebro_hydra.documents import decode
from cerebro_hydra.errors import StoreError
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.admission.trial_code import trial_code
from cerebro_hydra.storage.trial_code import TrialCode, told
from tests.processes import CHECKOUT, run_python
from tests.shards.admission.code import coded_models
from tests.shards.admission.code.coded_models import FACTORIES, described, net, recipe

MODULE = "tests.shards.admission.code.coded_models"


def elsewhere(seed: int, *arguments: str) -> dict[str, TrialCode]:
    """Return what another process says of every factory."""
    done = run_python("-m", MODULE, *arguments, PYTHONHASHSEED=str(seed))
    said = json.loads(done.stdout.splitlines()[-1])
    return {name: decode(TrialCode, code, name) for name, code in said.items()}


@pytest.mark.parametrize(("seed", "arguments"), [(1, ()), (2, ("pickled",))])
def test_a_factory_that_is_the_same_has_the_same_code_in_every_process(
    seed: int, arguments: tuple[str, ...]
) -> None:
    there = elsewhere(seed, *arguments)
    assert there.keys() == {factory.__name__ for factory in FACTORIES}
    for factory in FACTORIES:
        then, first = there[factory.__name__], factory()
        now, again = trial_code(first), described(factory)
        assert now is not None
        assert then.versions == now.versions
        if factory is not coded_models.unlike:
            assert then == now, factory.__name__
            continue
        found = then.differences(now, again)  # the order of a set, which another process has
        assert all(each.is_value and "attribute 'words'" in each.part for each in found)


def test_what_other_trials_have_changed_in_a_shared_object_is_no_other_code() -> None:
    then = described(coded_models.unlike)
    coded_models.SHARED.calls += 3
    now, again = described(coded_models.unlike), described(coded_models.unlike)
    assert then.differences(now) and then.differences(now, again) == []


def smoothed(outputs: Any, labels: Any) -> Any:
    return functional.cross_entropy(outputs, labels, label_smoothing=0.1)


def by_lr(lr: float, **options: Any) -> Recipe:
    model = net()
    return recipe(model, optimizer=torch.optim.Adam(model.parameters(), lr=lr, **options))


def frozen() -> Recipe:
    model = net()
    model[0].weight.requires_grad_(False)
    return recipe(model)


def by_sgd() -> Recipe:
    model = net()
    return recipe(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))


def tanh() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (lambda: recipe(tanh()), ["the ReLU modules of the model, which it has no more",
                                  "the Tanh modules of the model, which it did not have"]),
        (lambda: recipe(net(nn.Dropout())), ["the Dropout modules of the model, which it did not"]),
        (frozen, ["which parameters of the model train"]),
        (by_sgd, ["the class of the optimizer, SGD and not Adam"]),
        (lambda: by_lr(0.05), ["the optimizer's lr, 0.05 and not 0.01"]),
        (lambda: by_lr(0.01, amsgrad=True), ["the optimizer's amsgrad, True and not False"]),
        (lambda: recipe(loss=nn.CrossEntropyLoss(label_smoothing=0.1)), ["loss"]),
        (lambda: recipe(loss=smoothed), ["loss"]),
        (lambda: recipe(batch_size=8), ["batch_size, 8 and not 32"]),
        (lambda: recipe(metrics=["accuracy"]), ["metrics, ['accuracy'] and not []"]),
        (lambda: recipe(ema=0.9), ["ema, 0.9 and not None"]),
        (lambda: recipe(accumulate=2), ["accumulate, 2 and not 1"]),
        (lambda: recipe(clip_grad_norm=0.1), ["clip_grad_norm, 0.1 and not None"]),
        (lambda: recipe(collate=lambda batch, training: batch), ["collate, "]),
    ],
)  # fmt: skip
def test_what_is_another_one_has_a_name(other: Callable[[], Recipe], told: list[str]) -> None:
    found = [str(each) for each in described(recipe).differences(described(other))]
    for line in told:
        assert any(each.startswith(line) for each in found), found
    assert not [each for each in found if "optimizer's betas" in each], "SGD has none"


class Held(nn.Sequential):
    """Has something beside its layers."""

    def __init__(self, **held: Any) -> None:
        super().__init__(nn.Linear(8, 16), nn.Linear(16, 3))
        vars(self).update(held)


class Attributes(dict[str, Any]):
    """Is a dict with attributes, as configurations are."""


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale


def nested(value: float) -> dict[str, Any]:
    return {"a": {"b": {"c": {"d": {"e": value}}}}}


VALUES: dict[str, Callable[[float], Any]] = {
    "number": lambda v: {"drop_path_rate": v},
    "namespace": lambda v: {"args": argparse.Namespace(scale=v)},
    "simple namespace": lambda v: {"args": SimpleNamespace(scale=v)},
    "dict": lambda v: {"config": Attributes(scale=v)},
    "nested": lambda v: {"config": nested(v)},
    "slots": lambda v: {"config": Slotted(v)},
    "array": lambda v: {"scale": np.float32(v)},
    "range": lambda v: {"steps": range(int(v))},
    "set": lambda v: {"layers": {1, v}},
    "keys": lambda v: {"by": {v: 1}},
    "function": lambda v: {"act": functional.silu if v > 1 else functional.gelu},
}


@pytest.mark.parametrize("kind", VALUES)
def test_other_values_of_the_users_modules_are_told_and_are_no_other_code(kind: str) -> None:
    held = VALUES[kind]
    then, same, now = (described(lambda v=v: recipe(Held(**held(v)))) for v in (1.0, 1.0, 4.0))
    assert then.differences(same) == []
    found = then.differences(now)
    assert found and all(each.is_value for each in found)
    assert str(found[0]).startswith("attribute '"), found


STAMPS: dict[str, Callable[[], Any]] = {
    "time": time.time,
    "uuid": lambda: str(uuid.uuid4()),
    "hex": lambda: uuid.uuid4().hex[:8],
    "date": lambda: f"{datetime.now():%Y-%m-%d}",
    "of Hydra": lambda: f"{datetime.now():%Y-%m-%d_%H-%M-%S}",
    "of TensorBoard": lambda: f"runs/{datetime.now():%b%d_%H-%M-%S}_host",
    "path": tempfile.mkdtemp,
}


@pytest.mark.parametrize("kind", STAMPS)
def test_times_ids_and_places_are_no_values(kind: str) -> None:
    def named(moment: Any) -> Recipe:
        class Loss(nn.CrossEntropyLoss):
            run = moment

        return recipe(Held(made=moment, at=f"it is {moment}"), loss=Loss())

    made = STAMPS[kind]
    then, now = (described(lambda: named(made())) for _ in "12")
    assert then.differences(now) == []


@pytest.mark.parametrize("kind", ["process", "host"])
def test_other_numbers_and_names_of_a_process_are_told_and_refuse_nothing(kind: str) -> None:
    class Loss(nn.CrossEntropyLoss):
        def __init__(self, where: Any) -> None:
            super().__init__()
            self.where = where

    of = {"process": (3, 4), "host": ("north", "south")}[kind]
    then, now = (described(lambda v=v: recipe(loss=Loss(v))) for v in of)
    (found,) = then.differences(now)
    assert found.is_value
    assert str(found) == f"attribute 'where' of the loss, {of[1]!r} and not {of[0]!r}"


class Remembers(nn.Module):
    """Keeps tables where all of its instances and calls find them."""

    tables: ClassVar[dict[int, float]] = {}
    calls = 0

    def forward(self, x: torch.Tensor, known: list[int] = []) -> torch.Tensor:  # noqa: B006
        known.append(len(x))
        Remembers.calls += 1
        return x * self.tables.setdefault(len(x), 1.0)


def test_what_calls_have_left_in_a_class_or_a_default_is_no_other_value() -> None:
    then = described(lambda: recipe(nn.Sequential(nn.Linear(8, 3), Remembers())))
    Remembers()(torch.ones(7, 3))
    now = described(lambda: recipe(nn.Sequential(nn.Linear(8, 3), Remembers())))
    assert then.differences(now) == []


def hooked(scale: float) -> nn.Module:
    model = net()
    if scale > 1:
        model[0].register_forward_hook(lambda module, inputs, output: output)
    return model


def in_order(scale: float) -> nn.Module:
    layers = {"tanh": nn.Tanh(), "relu": nn.ReLU()}
    names = sorted(layers, reverse=scale > 1)
    inner = nn.Sequential(OrderedDict((name, layers[name]) for name in names))
    return nn.Sequential(nn.Linear(8, 16), inner, nn.Linear(16, 3))


def steps_with_a_hook(scale: float) -> Recipe:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if scale > 1:
        optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: None)
    return recipe(model, optimizer=optimizer)


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda v: recipe(hooked(v)), "the Linear modules of the model"),
        (lambda v: recipe(in_order(v)), "the order of the model's layers"),
        (steps_with_a_hook, "the hooks of the optimizer's steps"),
    ],
)
def test_what_code_is_made_with_counts(make: Callable[[float], Recipe], part: str) -> None:
    then, same, now = (described(lambda v=v: make(v)) for v in (1.0, 1.0, 4.0))
    assert then.differences(same) == []
    (found,) = then.differences(now)
    assert found.part == part and not found.is_value


PACKAGE = """
from torch import nn

class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.line, self.act, self.gain = nn.Linear(8, 3), nn.Softplus(beta={beta}), 2.0

    def forward(self, x):
        return self.act(self.line(x)) * self.gain
"""
DESCRIBES = """
import dataclasses, json
from mlps import Mlp
from tests.shards.admission.code.coded_models import described, recipe
print(json.dumps(dataclasses.asdict(described(lambda: recipe(Mlp())))))
"""


def test_a_package_of_the_users_is_the_same_code_once_it_is_installed(tmp_path: Path) -> None:
    found = []
    for place, beta in (("checkout", 1.0), ("site-packages", 1.0), ("site-packages", 3.0)):
        folder = tmp_path / f"{place} {beta}" / place
        folder.mkdir(parents=True)
        (folder / "mlps.py").write_text(PACKAGE.format(beta=beta))
        done = run_python("-c", DESCRIBES, PYTHONPATH=f"{folder}{os.pathsep}{CHECKOUT}")
        found.append(decode(TrialCode, json.loads(done.stdout.splitlines()[-1]), place))
    checkout, installed, other = found
    assert checkout.code and not installed.code
    assert checkout.differences(installed) == installed.differences(checkout) == []
    (option,) = checkout.differences(other)
    assert str(option) == "the options of the Softplus modules of the model"


LOSS = """
class Loss(torch.nn.CrossEntropyLoss):
    def forward(self, outputs, labels):
        "{doc}"
        def scaled(x):
            "{doc}"
            return helper(x)
        return scaled(super().forward(outputs, labels))
"""
NAMED = {
    "by a name": "def helper(x):\n    return x * {factor}",
    "with a cache": "@functools.cache\ndef helper(x):\n    return x * {factor}",
    "in a tuple": "def helper(x):\n    return x * sum((1, {factor}))",
    "in a set": "def helper(x):\n    return x if x in {{'a', {factor}}} else x",
    "by an option": "def helper(x):\n    return x.view(-1).sum(dim=0, keepdim={factor} > 2)",
    "of a class": "class helper(torch.autograd.Function):\n    @staticmethod\n"
    "    def forward(ctx, x):\n        return x * {factor}\nhelper = helper.apply",
    "in an object": "class Helps:\n    def __call__(self, x):\n        return x * {factor}\n"
    "helper = Helps()",
    "in a dict": "def one(x):\n    return x * {factor}\nhelpers = {{'one': one}}\n"
    "def helper(x):\n    return helpers['one'](x)",
    "of another base": "class A:\n    pass\nclass B:\n    pass\n"
    "class helper([A, B][{factor} - 2]):\n    pass",
}
HELD = {
    "global variable 'FACTOR'": "FACTOR = {factor}\ndef helper(x):\n    return x * FACTOR",
    "global variable 'CONFIG'": "CONFIG = {{'by': {factor}}}\ndef helper(x):\n    return CONFIG",
    "global variable 'STEPS'": "STEPS = (1, {factor})\ndef helper(x):\n    return STEPS",
    "global variable 'helper'": "def helper(x, by={factor}):\n    return x * by",
    "global variable 'made'": "def by(f):\n    return lambda x: x * f\nmade = by({factor})\n"
    "def helper(x):\n    return made(x)",
    "attribute 'by' of class": "class helper:\n    by = {factor}",
    "global variable 'share'": "class Has:\n    def __init__(self, by):\n        self.by = by\n"
    "share = Has({factor})\ndef helper(x):\n    return x * share.by",
    "global variable 'act'": "act = [torch.tanh, torch.relu][{factor} - 2]\n"
    "def helper(x):\n    return act(x)",
    "global variable 'Kind'": "Kind = [torch.nn.SiLU, torch.nn.GELU][{factor} - 2]\n"
    "def helper(x):\n    return Kind()(x)",
    "global variable 'table'": "table = torch.tensor([1, {factor}])\ndef helper(x):\n"
    "    return x * table",
}


def written(text: str, factor: int = 2, doc: str = "", before: str = "") -> TrialCode:
    """Return the code of a trial whose loss stands in a file that was written so."""
    names: dict[str, Any] = {"torch": torch, "functools": functools, "__name__": "__main__"}
    text = before + text.format(factor=factor) + LOSS.format(doc=doc)
    exec(compile(text, f"/at/{before!r}", "exec"), names)
    return described(lambda: recipe(loss=names["Loss"]()))


@pytest.mark.parametrize("kind", NAMED)
def test_code_counts_and_not_where_or_how_it_is_written(kind: str) -> None:
    then = written(NAMED[kind])
    assert then.differences(written(NAMED[kind], doc="Say more.", before="\n# Why.\n")) == []
    (found,) = then.differences(written(NAMED[kind], factor=3))
    assert not found.is_value and str(found).startswith("the code of "), found


@pytest.mark.parametrize("name", HELD)
def test_what_code_names_is_told(name: str) -> None:
    then = written(HELD[name])
    assert then.differences(written(HELD[name], before="# Why.\n")) == []
    found = then.differences(written(HELD[name], factor=3))
    assert found and all(each.is_value for each in found)
    assert all(str(each).startswith(name) for each in found), found


OWN_NETS = """
import torch
import own.deep.layers

def imported(x):
    from own.deep.layers import scaled
    import own.deep.layers as mine
    return mine.BY * scaled(x)

class Dots(torch.nn.Linear):
    def forward(self, x):
        return own.deep.layers.scaled(super().forward(x))

class Imports(torch.nn.Linear):
    def forward(self, x):
        return imported(super().forward(x))
"""
DESCRIBES_OWN = """
import dataclasses, json, nets
from tests.shards.admission.code.coded_models import described, recipe
kinds = {"dots": nets.Dots, "imports": nets.Imports}
codes = {n: described(lambda: recipe(kind(8, 3))) for n, kind in kinds.items()}
print(json.dumps({name: dataclasses.asdict(code) for name, code in codes.items()}))
"""


def test_code_of_modules_behind_dots_and_of_imports_in_functions_counts(tmp_path: Path) -> None:
    found = []
    for number, (by, factor) in enumerate([(1, 2), (1, 3), (4, 2)]):
        folder = tmp_path / str(number)
        (folder / "own" / "deep").mkdir(parents=True)
        for package in (folder / "own", folder / "own" / "deep"):
            (package / "__init__.py").touch()
        layers = f"BY = {by}\ndef scaled(x):\n    return x * {factor} * BY\n"
        (folder / "own" / "deep" / "layers.py").write_text(layers)
        (folder / "nets.py").write_text(OWN_NETS)
        done = run_python("-c", DESCRIBES_OWN, PYTHONPATH=f"{folder}{os.pathsep}{CHECKOUT}")
        said = json.loads(done.stdout.splitlines()[-1])
        found.append({name: decode(TrialCode, code, name) for name, code in said.items()})
    for kind in ("dots", "imports"):
        then, other_code, other_value = (each[kind] for each in found)
        assert [str(each) for each in then.differences(other_code)] == ["the code of scaled"]
        (value,) = then.differences(other_value)
        assert value.is_value and str(value) == "global variable 'BY', 4 and not 1"


def of_text(factor: int) -> nn.Module:
    """Return a model whose forward torch.fx makes of a text, in no module."""

    class Scales(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * factor

    return nn.Sequential(torch.fx.symbolic_trace(Scales()), nn.Linear(8, 3))


def with_buffer(scale: float) -> nn.Module:
    model = net()
    model[0].register_buffer("table", torch.ones(3) * scale, persistent=False)
    return model


def test_code_that_was_made_of_a_text_counts() -> None:
    then, same, now = (described(lambda f=f: recipe(of_text(f))) for f in (2, 2, 3))
    assert then.differences(same) == []
    code = [each for each in then.differences(now) if not each.is_value]
    assert [str(each) for each in code] == ["the code of forward"]


def test_what_users_set_on_modules_of_libraries_and_other_buffers_are_values() -> None:
    def named(run: str, scale: float) -> Recipe:
        model = with_buffer(scale)
        model.run, model[0].moment = run, time.perf_counter()
        return recipe(model)

    then, now = described(lambda: named("brave", 1.0)), described(lambda: named("calm", 2.0))
    found = then.differences(now)
    assert all(each.is_value for each in found)
    assert {str(each).partition(",")[0] for each in found} == {
        "attribute 'run' of the model (Sequential)",
        "attribute 'moment' of module '0'",
        "buffer '0.table'",
    }


def test_other_versions_of_a_library_are_not_compared() -> None:
    then, now = described(recipe), described(lambda: recipe(batch_size=8))
    assert then.is_comparable(now) and then.differences(now)
    assert not then.is_comparable(replace(now, versions={**now.versions, "torch": "0.1"}))
    assert then.is_comparable(replace(now, versions={**now.versions, "timm": "0.1"}))


class Strange(nn.CrossEntropyLoss):
    """A loss whose attributes can't be looked at."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("look away")


def test_what_can_not_be_looked_at_has_no_code() -> None:
    made = recipe()
    made.loss = Strange.__new__(Strange)
    assert trial_code(made) is None


@pytest.mark.parametrize(
    "forged",
    [{"versions": 5}, {"parts": 7}, {"parts": {"loss": 5}}, {"code": {"f": "x"}}, {"more": {}}],
)
def test_a_forged_description_is_an_error_with_the_name_of_the_field(forged: Any) -> None:
    with pytest.raises(StoreError, match=r"trial\.code"):
        decode(TrialCode, forged, "trial.code")


def test_names_and_texts_that_anybody_wrote_are_harmless_and_short() -> None:
    then = TrialCode(parts={f"\x1b[2J{number}": "\u202e" * 10**6 for number in range(1000)})
    said = told(then.differences(TrialCode()))
    assert len(said) < 2000 and said.endswith("992 more") and not set("\x1b\u202e") & set(said)
