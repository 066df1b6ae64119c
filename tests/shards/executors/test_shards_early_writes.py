"""What writes to a shard that is away is found in every executor, with the tensor's name."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cerebro_hydra.errors import StepDiffers
from cerebro_hydra.recipe import PlainTrainer
from cerebro_hydra.shards.admission.trial_profile import TrialProfile
from cerebro_hydra.shards.cut.values import StandIns
from cerebro_hydra.shards.engine.microbatch import LiveBytes
from cerebro_hydra.testing.model_case import assert_same_state
from tests.shards import plain, zoo
from tests.shards.executors.executor_case import Cut, described
from tests.shards.executors.test_shards_late_writes import EXECUTORS, WINDOWS, Shifts
from tests.shards.hopping import STEPS_PER_EPOCH, Trial, start
from tests.shards.trials import made

Write = Callable[[nn.Module], object]


class Foreseeing(zoo.Net, metaclass=zoo.Unseen):
    """A forward of its first layer may write to its last one, in `late` forwards less one."""

    writes: Write

    def add(self):
        self.c = Shifts(6, 3)
        self.a.register_forward_pre_hook(self.before)

    def before(self, module, args):
        self.hook()

    def hook(self):
        kind = type(self)  # an attribute of the model that changes late would be found before
        if self.training and kind.late > 0:
            kind.late -= 1
            if kind.late == 0:
                kind.writes(self.c)


def in_place(layer):
    layer.g.add_(0.5)


def by_data(layer):
    layer.g.data.mul_(0.5)


def by_numpy(layer):
    layer.g.detach().numpy()[0] += 0.5


def by_assignment(layer):
    layer.g = layer.g + 0.5


def anew(layer):
    layer.register_buffer("g", torch.full((3,), 0.5))


def to_a_weight(layer):
    with torch.no_grad():
        layer.weight.mul_(0.5)


def to_its_data(layer):
    layer.weight.data.mul_(0.5)


def to_an_element(layer):
    layer.bias.data[:1].add_(0.5)


def to_an_element_by_numpy(layer):
    layer.bias.detach().numpy()[0] += 0.5


def by_other_data(layer):
    layer.bias.data = torch.full((3,), 0.5)


def clamped(layer):
    layer.weight.data.clamp_(-0.01, 0.01)


def to_a_scalar(layer):
    with torch.no_grad():
        layer.scale.mul_(0.5)


def to_a_scalars_data(layer):
    layer.scale.data.mul_(0.5)


def caught(layer):
    """Write to what the code takes for read-only elsewhere."""
    with suppress(RuntimeError):
        layer.weight.data += 0.5


WRITES: dict[str, tuple[Write, str]] = {
    "in place": (in_place, "buffer 'c.g'"),
    "by data": (by_data, "buffer 'c.g'"),
    "by numpy": (by_numpy, "buffer 'c.g'"),
    "by assignment": (by_assignment, "buffer 'c.g'"),
    "anew": (anew, "buffer 'c.g'"),
    "to a weight": (to_a_weight, "parameter 'c.weight'"),
    "to its data": (to_its_data, "parameter 'c.weight'"),
    "to an element": (to_an_element, "parameter 'c.bias'"),
    "to an element by numpy": (to_an_element_by_numpy, "parameter 'c.bias'"),
    "by other data": (by_other_data, "parameter 'c.bias'"),
    "clamped": (clamped, "parameter 'c.weight'"),
    "to a scalar": (to_a_scalar, "parameter 'c.scale'"),
    "to a scalar's data": (to_a_scalars_data, "parameter 'c.scale'"),
    "caught": (caught, "parameter 'c.weight'"),
}


def foreseeing(writes: Write, **more: object) -> type[Foreseeing]:
    return type("Foreseeing", (Foreseeing,), {"writes": staticmethod(writes), **more})


_admitted: dict[str, tuple[Trial, TrialProfile]] = {}


def admitted(what: str) -> tuple[Trial, TrialProfile]:
    """Return a trial of two shards, whose first layer has written nothing yet."""
    if what not in _admitted:
        trial = start(made(foreseeing(WRITES[what][0]))(), WINDOWS)
        assert trial.cut_model.num_shards == 2, trial.admission.report.text()
        _admitted[what] = trial, described(trial, WINDOWS)
    return _admitted[what]


@contextmanager
def written_in(trial: Trial, forward: int) -> Iterator[None]:
    """Let the model of a trial write in one of the next forwards, and bring its state back."""
    before = trial.shards.copy(), trial.step
    type(trial.recipe.model).late = forward
    try:
        yield
    finally:
        type(trial.recipe.model).late = 0
        trial.shards, trial.step = before


def check_as_plain(what: str, trial: Trial, forward: int) -> None:
    """Compare every bit with plain training of a model that writes then, too."""
    recipe = made(foreseeing(WRITES[what][0]))()
    type(recipe.model).late = forward
    reference = PlainTrainer(recipe, plain.TRIAL_SEED, STEPS_PER_EPOCH)
    reference.train(WINDOWS)
    assert_same_state(trial.tensors(), reference)


@pytest.mark.parametrize("executor", [name for name in EXECUTORS if name != "kept"])
@pytest.mark.parametrize("what", WRITES)
def test_a_write_before_a_shard_has_come_is_found(what: str, executor: str) -> None:
    trial, profile = admitted(what)
    says = f"in step {trial.step}, {WRITES[what][1]} was written to before its shard had come"
    with written_in(trial, 1), pytest.raises(StepDiffers, match=re.escape(says)):
        EXECUTORS[executor](trial, profile)


@pytest.mark.parametrize("what", WRITES)
def test_a_write_to_a_shard_that_is_there_is_made_as_in_plain_training(what: str) -> None:
    trial, profile = admitted(what)
    with written_in(trial, 1):
        EXECUTORS["kept"](trial, profile)  # all shards come before the first task
        check_as_plain(what, trial, 1)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("what", ["by numpy", "by assignment", "to its data", "to a scalar's data"])
def test_one_in_a_later_step_is_found_or_made_as_in_plain_training(
    what: str, executor: str
) -> None:
    trial, profile = admitted(what)
    with written_in(trial, 2):
        if executor in ("keep", "again", "kept"):  # shards that are there stay there
            EXECUTORS[executor](trial, profile)
            check_as_plain(what, trial, 2)
        else:
            with pytest.raises(StepDiffers, match=rf"in step {trial.step + 1}, .* before its"):
                EXECUTORS[executor](trial, profile)


@pytest.mark.parametrize("what", ["in place", "by numpy", "anew", "to its data", "caught"])
def test_what_writes_in_every_step_is_trained_in_one_shard(what: str) -> None:
    writes, _ = WRITES[what]
    always = foreseeing(writes, hook=lambda self: writes(self.c) if self.training else None)
    Cut(
        made(always), "modules", at=1, says="written to before its shard|outside of its own"
    ).prove()


class Grows(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("g", torch.zeros(3))

    def forward(self, x):
        if self.training:
            self.g.add_(0.001)
        return super().forward(x) + self.g


class Traced(zoo.Net):
    """Its loss writes to it once it is told to, and the graph of the model has another copy."""

    writes: Write | None = None

    def add(self):
        self.c = Grows(6, 3)


def with_writes(model: Traced) -> Callable[..., Tensor]:
    def loss(outputs, labels):
        if model.writes is not None:
            model.writes(model.c)
        return nn.functional.cross_entropy(outputs, labels)

    return loss


def test_a_write_beside_the_graph_is_found_however_it_is_made() -> None:
    trial = start(made(Traced, with_writes, cut="export")(), WINDOWS)
    assert trial.admission.spec.mode == "export" and trial.cut_model.num_shards == 2
    profile, before = described(trial, WINDOWS), (trial.shards.copy(), trial.step)
    kinds = ("by data", "by numpy", "by assignment", "to its data", "to an element", "clamped")
    for what, executor in itertools.product(kinds, EXECUTORS):
        writes, tensor = WRITES[what]
        trial.recipe.model.writes = writes
        with pytest.raises(StepDiffers, match=rf"{tensor} was written to by code beside"):
            EXECUTORS[executor](trial, profile)
        trial.shards, trial.step = before[0].copy(), before[1]


class Wide(Shifts):
    """Has a vector that is too large for a stand-in of its size."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.vector = nn.Parameter(torch.zeros(1 << 15))

    def forward(self, x):
        return super().forward(x) + self.vector.sum()


class ForeseeingWide(Foreseeing):
    def add(self):
        super().add()
        self.c = Wide(6, 3)


def to_the_vector(layer):
    with torch.no_grad():
        layer.vector.add_(0.5)


@pytest.mark.parametrize("executor", ["keep", "again", "alone"])  # queues have room for both shards
def test_a_write_to_what_is_too_large_for_a_stand_in_is_found(executor: str) -> None:
    model = type("Writing", (ForeseeingWide,), {"writes": staticmethod(to_the_vector)})
    trial = start(made(model)(), WINDOWS)
    assert trial.cut_model.num_shards == 2, trial.admission.report.text()
    profile = described(trial, WINDOWS)
    says = (
        r"a large tensor was written to while its shard was away, .*: layer\.vector\.add_\(0\.5\)"
    )
    with written_in(trial, 1), pytest.raises(StepDiffers, match=says):
        EXECUTORS[executor](trial, profile)


MIB = 1 << 20


@pytest.mark.parametrize(
    ("sizes", "single", "most"),
    [
        ([*[(4096, 4096)] * 16, *[(4096,)] * 16], 0, 2 * MIB),  # a GiB
        ([(MIB, 64), (8 * MIB, 8), (64 * MIB,), (8, 8), (64,)], 2, 32 * MIB),
        ([(64, 64)] * 16, 0, MIB // 8),
    ],
    ids=["matrices", "narrow", "small"],
)
def test_stand_ins_take_a_small_part_of_what_they_stand_for(
    sizes: list[tuple[int, ...]], single: int, most: int
) -> None:
    like = {number: torch.zeros(()).expand(size) for number, size in enumerate(sizes)}
    with LiveBytes() as live:
        stand_ins = StandIns(like)
        assert live.peak <= most
    shown = stand_ins.tensors.values()
    assert [each.shape for each in shown] == sizes
    assert sum(each.stride(0) == 0 for each in shown) == single
    assert all(each.isnan().any() for each in shown if each.numel() <= MIB)
    assert stand_ins.written() is None
    for number, each in stand_ins.tensors.items():
        if each.stride(0) == 0:
            with pytest.raises(RuntimeError, match="single memory location"):
                each.add_(0.5)
            each.numpy()[-1:] = 0.5
            assert stand_ins.written() == number
            break


WAYS: dict[str, Callable[[Tensor], object]] = {
    "add": lambda t: t.add_(0.05),
    "times": lambda t: t.mul_(0.99),
    "times one": lambda t: t.mul_(1.0),
    "sign": lambda t: t.neg_(),
    "set": lambda t: t.fill_(0.3),
    "drawn": lambda t: t.normal_(),
    "one element": lambda t: t.reshape(-1)[:1].add_(0.05) if t.dim() < 2 else t[0, :1].add_(0.05),
    "several at once": lambda t: torch._foreach_mul_([t], 0.99),
    "half of the way": lambda t: t.lerp_(torch.ones_like(t), 0.5),
}
FLOATING = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (3, 4), (2, 3, 3, 3)], ids=str)
def test_a_stand_in_is_poison_and_shows_each_write(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    like = {"before": torch.zeros(5, dtype=dtype), "it": torch.zeros(shape, dtype=dtype)}
    ways = WAYS | ({"clamp": lambda t: t.clamp_(-0.1, 0.1)} if like["it"].numel() > 1 else {})
    for name, write in ways.items():
        stand_ins = StandIns({**like, "none": torch.zeros(0), "after": torch.zeros(7)})
        it = stand_ins.tensors["it"]
        assert it.shape == shape and it.dtype == dtype
        assert it.sum().isnan() and stand_ins.written() is None
        write(it.data)
        assert stand_ins.written() == "it", name
    if dtype != torch.bfloat16:
        stand_ins = StandIns(like)
        with np.errstate(invalid="ignore"):
            stand_ins.tensors["it"].numpy()[...] *= 0.5
        assert stand_ins.written() == "it"


def test_stand_ins_of_other_types_show_writes() -> None:
    like = {"int": torch.zeros(3, dtype=torch.int64), "complex": torch.zeros(2, 2).cfloat()}
    for key in like:
        stand_ins = StandIns(like)
        stand_ins.tensors[key].data.mul_(2)
        assert stand_ins.written() == key
    assert StandIns({}).written() is None
