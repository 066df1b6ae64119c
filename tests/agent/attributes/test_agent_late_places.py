"""An agent finds what takes a method's or a function's place late, whatever stood there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cerebro_hydra.plan.messages import events
from tests.agent.late_events import Event, made
from tests.agent.lone_agent import Agent


class Base(Event):
    def act(self, x: Tensor) -> Tensor:
        return x


class Acts(Base):
    """Calls a method of its own, one of its base, a function and a class that its module has."""

    kind: type = nn.Identity

    def damp(self, x: Tensor) -> Tensor:
        return x

    @property
    def shift(self) -> float:
        return 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.damp(self.act(super().forward(x))) + self.shift
        return helper(Chosen()(self.kind()(x)))


def helper(x: Tensor) -> Tensor:
    return x


Chosen: Any = nn.Identity


@pytest.fixture(autouse=True)
def kept() -> Iterator[None]:
    """Let what trials of other tests replaced be there again."""
    held = {each: dict(vars(each)) for each in (Base, Acts)}
    own = helper, Chosen
    yield
    globals().update(zip(("helper", "Chosen"), own, strict=True))
    for each, attributes in held.items():
        for name in vars(each).keys() - attributes.keys():
            delattr(each, name)
        for name in ("act", "damp", "kind", "shift"):
            if name in attributes:
                setattr(each, name, attributes[name])


def sets_helper(*_: Any) -> None:
    global helper
    helper = torch.tanh


def sets_the_class(*_: Any) -> None:
    global Chosen
    Chosen = nn.Tanh


REPLACED: dict[str, tuple[Callable[..., object], str]] = {
    "a method": (lambda *_: setattr(Acts, "damp", lambda self, x: x.tanh()), "method 'damp' of"),
    "a method of a base": (
        lambda *_: setattr(Base, "act", lambda self, x: x.tanh()), "method 'act' of"
    ),
    "one by a builtin": (
        lambda *_: setattr(Acts, "damp", staticmethod(torch.tanh)), "attribute 'damp' of"
    ),
    "a method over that of a base": (
        lambda *_: setattr(Acts, "act", lambda self, x: x.tanh()), "method 'act' of"
    ),
    "a property": (lambda *_: setattr(Acts, "shift", 0.5), "attribute 'shift' of"),
    "a class of a class": (lambda *_: setattr(Acts, "kind", nn.Tanh), "attribute 'kind' of"),
    "a function by a builtin": (sets_helper, "global variable 'helper' of"),
    "a class": (sets_the_class, "global variable 'Chosen' of"),
}  # fmt: skip


@pytest.mark.parametrize("what", REPLACED)
def test_what_is_replaced_late_fails_its_trial_by_the_name_of_the_place(
    start: Callable[..., Agent], what: str
) -> None:
    after, name = REPLACED[what]
    agent = start(lambda: made(Acts(after), shards=2), share=0.0)
    agent.runs._looks.share = 0.01
    failed = agent.train()
    assert isinstance(failed, events.TaskFailed), failed
    assert f"training changed {name}" in failed.error, failed.error
