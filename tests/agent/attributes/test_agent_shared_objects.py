"""What a forward sets in an object is seen by whoever else refers to it, in every sub-epoch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cerebro_hydra.plan.messages import events
from cerebro_hydra.recipe import Recipe
from tests.agent.late_events import made
from tests.agent.lone_agent import Agent


class Plain:
    scale: Any = None
    """Is set by each forward before anybody reads it."""

    def get(self) -> Any:
        return self.scale


@dataclass(slots=True)
class InSlots:
    scale: Any = None


class InDict(dict[str, Any]):
    """Has attributes that are its entries, as a configuration has."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class Nested:
    def __init__(self) -> None:
        self.inner = {"kept": [None]}

    @property
    def scale(self) -> Any:
        return self.inner["kept"][0]

    @scale.setter
    def scale(self, value: Any) -> None:
        self.inner["kept"][0] = value


class Writer(nn.Module):
    """Sets a number that falls from step to step in an object."""

    def __init__(self, shared: Any) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        self.shared.scale = 0.5 + 1 / (1 + float(self.steps))
        return x


class Reader(nn.Module):
    def __init__(self, read: Callable[[], Any]) -> None:
        super().__init__()
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return x * self.read()


class ReaderOf(nn.Module):
    def __init__(self, shared: Any) -> None:
        super().__init__()
        self.others = defaultdict(list, {"all": [shared]})

    def forward(self, x: Tensor) -> Tensor:
        (shared,) = self.others["all"]
        return x * shared.scale


class Hooked(nn.Linear):
    """Has an object that its hook writes to."""

    def __init__(self, shared: Any) -> None:
        super().__init__(16, 16)
        shared.scale = None
        self.register_forward_hook(lambda module, given, out: setattr(shared, "scale", out.mean()))


class Model(nn.Module):
    def __init__(self, shared: Any, *middle: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*middle)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Loss(nn.CrossEntropyLoss):
    def __init__(self, shared: Any) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return super().forward(outputs * self.shared.scale, labels)


def read_by(reader: Callable[[Any], nn.Module], kind: Callable[[], Any] = Plain):
    def model() -> tuple[nn.Module, nn.Module | None]:
        shared = kind()
        return Model(shared, Writer(shared), nn.Linear(16, 16), reader(shared)), None

    return model


def by_closure(shared: Any) -> nn.Module:
    return Reader(lambda: shared.scale)


def by_loss() -> tuple[nn.Module, nn.Module | None]:
    shared = Plain()
    return Model(shared, Writer(shared), nn.Linear(16, 16)), Loss(shared)


def by_hook() -> tuple[nn.Module, nn.Module | None]:
    shared = Plain()
    return Model(shared, Hooked(shared), nn.Linear(16, 16), by_closure(shared)), None


class HandsOut(Model):
    """Gives its modules a new object in each forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.shared = Plain()
        self.layers[0].shared = self.shared
        self.layers[2].others = defaultdict(list, {"all": [self.shared]})
        return super().forward(x)


def by_new_object() -> tuple[nn.Module, nn.Module | None]:
    shared = Plain()
    return HandsOut(shared, Writer(shared), nn.Linear(16, 16), ReaderOf(shared)), None


SHARED = {
    "new object": by_new_object,
    "attributes": read_by(ReaderOf),
    "closure": read_by(by_closure),
    "method": read_by(lambda shared: Reader(shared.get)),
    "partial": read_by(lambda shared: Reader(partial(getattr, shared, "scale"))),
    "namespace": read_by(ReaderOf, SimpleNamespace),
    "slots": read_by(ReaderOf, InSlots),
    "dict": read_by(ReaderOf, InDict),
    "nested": read_by(ReaderOf, Nested),
    "loss": by_loss,
    "hook": by_hook,
}


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("build", SHARED.values(), ids=SHARED)
def test_what_a_forward_sets_in_an_object_is_seen_by_whoever_refers_to_it(
    start: Callable[..., Agent], build: Callable[[], Any], shards: int
) -> None:
    def make() -> Recipe:
        torch.manual_seed(3)
        return made(*build(), shards=shards)

    agent = start(make, share=0.0)
    for state in (1, 2):
        done = agent.train(state)
        assert isinstance(done, events.SubEpochDone), done
        assert done.digests == agent.known(state)
        measured = agent.evaluate(state)
        assert isinstance(measured, events.EvaluationDone), measured
