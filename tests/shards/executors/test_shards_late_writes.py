"""What writes to a shard after its update is found in every executor, with the tensor's name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from cerebro_hydra.errors import ConfigurationError, StepDiffers
from cerebro_hydra.recipe import PlainTrainer
from cerebro_hydra.shards.admission.trial_profile import TrialProfile
from cerebro_hydra.shards.engine.engine import Engine, Mode
from cerebro_hydra.shards.engine.layout import HostSegments
from cerebro_hydra.testing.model_case import assert_same_state
from tests.shards import plain, zoo
from tests.shards.executors.alone import train_alone
from tests.shards.executors.executor_case import Cut, described
from tests.shards.executors.worker import Resident, Staying, Worker, shard_run
from tests.shards.hopping import STEPS_PER_EPOCH, Trial, start
from tests.shards.trials import SubEpoch, made

Write = Callable[["Hooked"], object]

WINDOWS = zoo.singly(zoo.vectors(8, 8, 8))


class Shifts(nn.Linear):
    """Shifts and scales what it gives by a buffer and parameters; most move in each forward."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("g", torch.zeros(3))
        self.scale = nn.Parameter(torch.ones(()))
        self.other = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x):
        if self.training:
            self.g += 0.001
            self.other.data += 0.001
        return super().forward(x) * self.scale + self.g + self.other


class Hooked(zoo.Net, metaclass=zoo.Unseen):
    """A backward hook of its first layer may write to its last one, in the `late`-th less one."""

    writes: Write

    def add(self):
        self.c = Shifts(6, 3)
        self.a.register_full_backward_hook(lambda *_: self.hook())

    def hook(self):
        kind = type(self)  # an attribute of the model that changes late would be found before
        if kind.late > 0:
            kind.late -= 1
        if kind.late == 1:
            self.writes()


def in_place(self):
    with torch.no_grad():
        self.c.g.add_(0.5)


def by_data(self):
    self.c.g.data.add_(0.5)


def by_numpy(self):
    self.c.g.detach().numpy()[0] += 0.5


def by_assignment(self):
    self.c.g = self.c.g + 0.5


def to_a_parameter(self):
    with torch.no_grad():
        self.c.bias.add_(0.5)


def to_its_data(self):
    self.c.bias.data.add_(0.5)


def to_a_scalar(self):
    with torch.no_grad():
        self.c.scale.mul_(1.5)


WRITES: dict[str, tuple[Write, str]] = {
    "in place": (in_place, "buffer 'c.g'"),
    "by data": (by_data, "buffer 'c.g'"),
    "by numpy": (by_numpy, "buffer 'c.g'"),
    "by assignment": (by_assignment, "buffer 'c.g'"),
    "to a parameter": (to_a_parameter, "parameter 'c.bias'"),
    "to its data": (to_its_data, "parameter 'c.bias'"),
    "to a scalar": (to_a_scalar, "parameter 'c.scale'"),
}


def hooked(writes: Write, **more: object) -> type[Hooked]:
    return type("Hooked", (Hooked,), {"writes": writes, **more})


_admitted: dict[object, tuple[Trial, TrialProfile]] = {}


def admitted(what: str, windows: SubEpoch = WINDOWS, **rules: object) -> tuple[Trial, TrialProfile]:
    """Return a trial of two shards, whose hook has written nothing yet."""
    key = what, *rules.items()
    if key not in _admitted:
        trial = start(made(hooked(WRITES[what][0]), **rules)(), windows)
        assert trial.cut_model.num_shards == 2, trial.admission.report.text()
        _admitted[key] = trial, described(trial, windows)
    return _admitted[key]


def by_engine(mode: Mode, trial: Trial, profile: TrialProfile, windows: SubEpoch = WINDOWS) -> None:
    trial.mode = mode
    trial.train(windows)


def alone(trial: Trial, profile: TrialProfile, windows: SubEpoch = WINDOWS) -> None:
    """Let each shard be alone in memory."""
    visit = shard_run(trial, windows, shared=profile.tasks.shared)
    train_alone(trial, [visit], windows)


def in_queues(
    recompute: bool,
    share: float,
    trial: Trial,
    profile: TrialProfile,
    windows: SubEpoch = WINDOWS,
    devices: int = 1,
) -> None:
    microbatches, window = sum(map(len, windows)), trial.recipe.accumulate
    spec = profile.training(0, microbatches, window, recompute)
    make = partial(shard_run, trial, windows, None, recompute, profile.tasks.shared)
    resident = Resident(trial, spec, Staying(make))
    Worker([resident], 0, share, devices).run()
    trial.step += len(windows)


EXECUTORS: dict[str, Callable[..., object]] = {
    "keep": partial(by_engine, "keep"),
    "again": partial(by_engine, "recompute"),
    "alone": alone,
    "queue": partial(in_queues, True, 1 / 8),
    "kept": partial(in_queues, False, 1.0),
}


def in_turn(cases: Iterable[Any]) -> list[tuple[Any, str]]:
    """Return each case with two executors, so that each executor meets some of them."""
    names = [*EXECUTORS]
    return [(case, names[(n + k) % len(names)]) for n, case in enumerate(cases) for k in (0, 2)]


@contextmanager
def written_in(trial: Trial, backward: int) -> Iterator[None]:
    """Let the hook of a trial write in one of the next backwards, and bring its state back."""
    before = trial.shards.copy(), trial.step
    type(trial.recipe.model).late = 1 + backward
    try:
        yield
    finally:
        type(trial.recipe.model).late = 0
        trial.shards, trial.step = before


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("what", WRITES)
def test_a_write_after_a_shard_was_published_is_found(what: str, executor: str) -> None:
    trial, profile = admitted(what)
    with written_in(trial, len(WINDOWS)), pytest.raises(StepDiffers) as caught:
        EXECUTORS[executor](trial, profile)
    told = f"in step 2, {WRITES[what][1]} was written to after the update"
    assert told in str(caught.value)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("what", ["in place", "by assignment", "to a parameter"])
def test_one_in_an_earlier_step_is_found_or_kept_as_in_plain_training(
    what: str, executor: str
) -> None:
    trial, profile = admitted(what)
    with written_in(trial, 1):
        if executor in ("keep", "again"):
            EXECUTORS[executor](trial, profile)
            check_as_plain(what, trial)
        else:
            with pytest.raises(StepDiffers, match="was written to after"):
                EXECUTORS[executor](trial, profile)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("rules", [{"accumulate": 3}, {"accumulate": 3, "clip_grad_norm": 0.1}])
def test_one_between_microbatches_is_found_or_kept_as_in_plain_training(
    rules: dict[str, Any], executor: str
) -> None:
    """No shard was updated yet, but one that is away does not come back in this microbatch."""
    windows = [[batch for window in WINDOWS for batch in window]]
    trial, profile = admitted("in place", windows, **rules)
    with written_in(trial, 1):
        try:
            EXECUTORS[executor](trial, profile, windows)
        except StepDiffers as error:
            assert executor not in ("keep", "again")
            assert "buffer 'c.g' was written to after its shard had left" in str(error)
        else:
            assert executor not in ("alone", "queue")
            check_as_plain("in place", trial, windows, **rules)


def check_as_plain(what: str, trial: Trial, windows: SubEpoch = WINDOWS, **rules: object) -> None:
    """Compare every bit with plain training of a model that writes then, too."""
    recipe = made(hooked(WRITES[what][0]), **rules)()
    type(recipe.model).late = 2
    reference = PlainTrainer(recipe, plain.TRIAL_SEED, STEPS_PER_EPOCH)
    reference.train(windows)
    assert_same_state(trial.tensors(), reference)


@pytest.mark.parametrize("what", ["in place", "by numpy", "by assignment", "to its data"])
def test_what_writes_in_every_step_is_trained_in_one_shard(what: str) -> None:
    writes, tensor = WRITES[what]
    says = f"{tensor} was written to after the update of its shard"
    always = hooked(writes, hook=lambda self: writes(self))
    Cut(made(always), "modules", at=1, says=re.escape(says)).prove()


def test_a_hook_may_write_to_its_own_layer() -> None:
    class Own(Hooked):
        def add(self):
            super().add()
            self.c.register_full_backward_hook(lambda *_: by_assignment(self))

    Cut(made(Own), "modules", at=2).prove()


class Norms(zoo.Net):
    """Scales what its middle layer gives by the norm of the gradient of the microbatch before."""

    def add(self):
        self.b.register_buffer("norm", torch.ones(()))
        self.b.register_full_backward_hook(lambda b, _, out: b.norm.copy_(out[0].norm()) and None)

    def forward(self, x):
        return self.c((self.b(self.a(x).tanh()) / (1 + self.b.norm)).tanh())


@pytest.mark.parametrize("executor", EXECUTORS)
def test_what_a_hook_writes_to_its_own_layer_between_microbatches_stays(executor: str) -> None:
    make = made(Norms, accumulate=3, shards=["b", "c"])
    windows = [[batch for window in WINDOWS for batch in window]]
    trial = start(make(), windows)
    assert trial.cut_model.num_shards == 3, trial.admission.report.text()
    EXECUTORS[executor](trial, described(trial, windows), windows)
    reference = PlainTrainer(make(), plain.TRIAL_SEED, STEPS_PER_EPOCH)
    reference.train(windows)
    assert_same_state(trial.tensors(), reference)


def test_a_pipeline_refuses_a_model_whose_hook_writes() -> None:
    always = hooked(in_place, hook=in_place)
    windows = [[batch for window in WINDOWS for batch in window]]
    with pytest.raises(ConfigurationError, match="'gpipe', and the model's graph can't be cut"):
        start(made(always, schedule="gpipe", accumulate=3)(), windows)


def test_a_buffer_that_code_has_kept_is_no_way_to_what_was_published() -> None:
    """A thread may hold it long after its sub-epoch, when others fetch that memory."""
    kept: list[torch.Tensor] = []
    trial, _ = admitted("in place")
    handle = trial.recipe.model.c.register_forward_hook(lambda module, *_: kept.append(module.g))
    published: dict[int, bytes] = {}
    memory: dict[int, Any] = {}

    def publish(k: int, segments: HostSegments, cursor: object) -> None:
        published[k], memory[k] = segments["trainable"].tobytes(), segments["trainable"]

    try:
        Engine(trial.runtime()).train(WINDOWS, trial.step, trial.need, publish)
    finally:
        handle.remove()
    for each in kept:
        each.add_(1.0)
    assert {k: each.tobytes() for k, each in memory.items()} == published
