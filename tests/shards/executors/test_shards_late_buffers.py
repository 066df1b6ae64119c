"""A small buffer that begins to move after the first steps is trained right in every executor."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cerebro_hydra.errors import ConfigurationError, StepDiffers
from cerebro_hydra.recipe import PlainTrainer
from cerebro_hydra.shards.cut.small_buffers import MOST_OF_SMALL_BUFFER
from cerebro_hydra.testing.model_case import assert_same_state
from tests.shards import plain, zoo
from tests.shards.executors.executor_case import described
from tests.shards.executors.test_shards_late_writes import EXECUTORS, in_turn
from tests.shards.hopping import STEPS_PER_EPOCH, start, train_uncut
from tests.shards.trials import SubEpoch, made

WINDOWS = zoo.singly(zoo.vectors(8, 8))
LATER = zoo.singly(zoo.vectors(8, 8, 8, seed=1))


class Observer(nn.Linear):
    """Scales what it gives by a buffer, which moves with the batches once it is late."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("mean", torch.ones(sizes[1]))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.training and Observers.late:
            Observers.move(self, out.detach().mean(0))
        return out * self.mean


class Observers(zoo.Net):
    late = False  # of the class, because an attribute of a module must not change late
    move: Callable[[Any, Tensor], object]

    def add(self) -> None:
        self.a, self.c = Observer(6, 6), Observer(6, 3)


def by_lerp(layer: Any, mean: Tensor) -> None:
    layer.mean.lerp_(mean, 0.1)


def by_data(layer: Any, mean: Tensor) -> None:
    layer.mean.data.lerp_(mean, 0.1)


def by_assignment(layer: Any, mean: Tensor) -> None:
    layer.mean = layer.mean * 0.9 + mean * 0.1


def by_a_rare_event(layer: Any, mean: Tensor) -> None:
    if mean.max() > 0.3:
        layer.mean += 1


MOVES = {each.__name__: each for each in (by_lerp, by_data, by_assignment, by_a_rare_event)}


@contextmanager
def late(move: Callable[[Any, Tensor], object]) -> Iterator[None]:
    """Let the buffers move for a while."""
    Observers.late, Observers.move = True, staticmethod(move)
    try:
        yield
    finally:
        Observers.late = False


def joined(windows: SubEpoch) -> SubEpoch:
    """Return the same batches as one window."""
    return [[batch for window in windows for batch in window]]


ACCUMULATED = {"accumulate": 3, "ema": 0.9}


@pytest.mark.parametrize(
    ("case", "executor"), in_turn(itertools.product(MOVES, ({}, ACCUMULATED))), ids=str
)
def test_a_buffer_that_moves_late_has_the_bits_of_plain_training(
    case: tuple[str, dict[str, Any]], executor: str
) -> None:
    move, rules = case
    make = made(Observers, **rules)
    first, later = (joined(each) if rules else each for each in (WINDOWS, LATER))
    trial = start(make(), first)
    assert trial.cut_model.num_shards == 2
    profile = described(trial, later)
    trial.train(first)
    with late(MOVES[move]):
        EXECUTORS[executor](trial, profile, later)
    reference = PlainTrainer(make(), plain.TRIAL_SEED, STEPS_PER_EPOCH)
    reference.train(first)
    with late(MOVES[move]):
        reference.train(later)
    assert not torch.equal(reference.tensors()["buffer:c.mean"], torch.ones(3)), "it has moved"
    assert_same_state(trial.tensors(), reference)


class Lagging(zoo.Net):
    """Its loss moves a buffer late, which the graph of the model only reads."""

    late = False

    def add(self) -> None:
        self.register_buffer("shift", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.shift)


def lagging_loss(model: Lagging) -> Callable[..., Tensor]:
    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        if Lagging.late:
            model.shift += 0.5
        return nn.functional.cross_entropy(outputs, labels)

    return loss


def test_one_beside_the_graph_lets_the_trial_train_in_one_piece_and_hops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make = made(Lagging, lagging_loss, cut="export")
    trial = start(make(), WINDOWS)
    assert trial.admission.spec.mode == "export" and trial.cut_model.num_shards == 2
    trial.train(WINDOWS)
    state = trial.shards.copy(), trial.step
    monkeypatch.setattr(Lagging, "late", True)
    with pytest.raises(StepDiffers, match="buffer 'shift' was written to by code beside"):
        trial.train(LATER)
    trial.shards, trial.step = state
    train_uncut(trial, LATER, make())
    train_uncut(trial, LATER, make())
    reference = PlainTrainer(make(), plain.TRIAL_SEED, STEPS_PER_EPOCH)
    monkeypatch.setattr(Lagging, "late", False)
    reference.train(WINDOWS)
    monkeypatch.setattr(Lagging, "late", True)
    reference.train(LATER)
    reference.train(LATER)
    assert_same_state(trial.tensors(), reference)


# ---------------------------------------------------------------------- what is refused


def growing(of: str, persistent: bool, first: int = 6) -> type[nn.Module]:
    """Return a model that may make a buffer anew late, as a cache that is too short."""

    class Grows(zoo.Net):
        late = False

        def add(self) -> None:
            self.register_buffer("cache", torch.ones(first), persistent)

        def forward(self, x: Tensor) -> Tensor:
            if Grows.late and self.cache.dtype == torch.float32 and len(self.cache) == first:
                anew = {
                    "size": torch.ones(first + 2),
                    "one element": torch.ones(1),
                    "type": self.cache.double(),
                }
                self.register_buffer("cache", anew[of], persistent)
            return super().forward(x * self.cache[0].float())

    return Grows


FORMS = [
    ("size", True, r"from float32\[6\] to float32\[8\]"),
    ("one element", True, r"from float32\[6\] to float32\[1\]"),
    ("type", True, r"from float32\[6\] to float64\[6\]"),
    ("size", False, r"from float32\[6\] to float32\[8\]"),
]


@pytest.mark.parametrize(("form", "executor"), in_turn(FORMS), ids=str)
def test_a_buffer_that_is_made_anew_in_another_form_is_told_with_both(
    form: tuple[str, bool, str], executor: str
) -> None:
    of, persistent, told = form
    model = growing(of, persistent)
    trial = start(made(model)(), WINDOWS)
    profile = described(trial, LATER)
    model.late = True
    message = rf"training made buffer 'cache' anew, {told}.* as large as it is ever needed"
    with pytest.raises(ConfigurationError, match=message):
        EXECUTORS[executor](trial, profile, LATER)


class Large(zoo.Net):
    """Has a buffer that is not small, and moves late; it may be touched in every step."""

    late, touched, persistent = False, False, True
    elements = MOST_OF_SMALL_BUFFER

    def add(self) -> None:
        self.register_buffer("large", torch.ones(self.elements), self.persistent)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and Large.late:
            self.large *= 0.5
        elif self.training and self.touched:
            self.large += 0
        return super().forward(x * self.large[0])


PERSISTENT = r"`buffer \+= 0`, or register it with persistent=True, or never"


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({}, r"`buffer \+= 0`, or never"),
        ({"elements": 6, "persistent": False}, PERSISTENT),
    ],
    ids=["large", "not persistent"],
)
def test_a_remedy_that_is_told_works(
    more: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = start(made(type("Large", (Large,), more))(), WINDOWS)
    trial.train(WINDOWS)
    monkeypatch.setattr(Large, "late", True)
    with pytest.raises(ConfigurationError, match=f"wrote to buffer 'large'.*{told}"):
        trial.train(LATER)
    remedies = [{**more, "touched": True}]
    if "persistent" in more:
        remedies.append({**more, "persistent": True})
    for remedy in remedies:
        monkeypatch.setattr(Large, "late", False)
        make = made(type("Large", (Large,), remedy))
        trial, reference = start(make(), WINDOWS), PlainTrainer(make(), plain.TRIAL_SEED, 4)
        for windows in (WINDOWS, LATER):
            trial.train(windows)
            reference.train(windows)
            monkeypatch.setattr(Large, "late", True)
        assert_same_state(trial.tensors(), reference)
