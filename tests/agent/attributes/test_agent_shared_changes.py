"""What a failed trial has changed of what trials share is given back, and no other trains on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cerebro_hydra.data.batches import Batch
from cerebro_hydra.errors import ConfigurationError, StepDiffers
from cerebro_hydra.plan.messages import events
from cerebro_hydra.plan.policy.audit_budget import AuditBudget
from cerebro_hydra.recipe import Columns, Recipe, build_recipe
from cerebro_hydra.shards.admission.effects.as_built import AsBuilt
from cerebro_hydra.shards.admission.effects.evaluation_effects import LateEvaluation
from cerebro_hydra.shards.admission.effects.late_effects import EarlierReadings, LateEffects
from cerebro_hydra.shards.admission.effects.shared_watch import SharedWatch
from tests.agent.late_events import HAPPENS, RARE, Event, made
from tests.agent.lone_agent import BATCH, Agent
from tests.shards import hopping


class Shared:
    scale = 1.0
    options: dict[str, float] = {"k": 1.0}  # noqa: RUF012

    def act(self, x: Tensor) -> Tensor:
        return x


FACTOR, TABLE, NUMBERS, SPACE = 1.0, {"w": 1.0}, [1.0], SimpleNamespace(scale=1.0)
TENSOR = torch.ones(16)
AUXILIARY: list[Tensor] = []


def helper(x: Tensor) -> Tensor:
    return x


def computed(x: Tensor) -> Tensor:
    """Compute with all that is shared."""
    more = 0.5 if "late" in TABLE or hasattr(SPACE, "late") or hasattr(Shared, "late") else 1.0
    x = helper(Shared().act(x)) * FACTOR * Shared.scale * Shared.options["k"] * more
    return x * TABLE["w"] * sum(NUMBERS) * SPACE.scale


def sets_a_global(*_: Any) -> None:
    global FACTOR
    FACTOR = 0.5


def sets_a_function(*_: Any) -> None:
    global helper
    helper = torch.tanh


def sets_an_attribute(*_: Any) -> None:
    Shared.scale = 0.5


def sets_a_new_attribute(*_: Any) -> None:
    Shared.late = True  # type: ignore[attr-defined]


def sets_a_method(*_: Any) -> None:
    Shared.act = lambda self, x: x.tanh()  # type: ignore[method-assign]


def sets_an_option(*_: Any) -> None:
    Shared.options["k"] = 0.5


def sets_an_entry(*_: Any) -> None:
    TABLE["w"] = 0.5


def sets_a_new_entry(*_: Any) -> None:
    TABLE["late"] = 0.5


def sets_an_item(*_: Any) -> None:
    NUMBERS[0] = 0.5


def adds_an_item(*_: Any) -> None:
    NUMBERS.append(0.5)


def sets_of_an_object(*_: Any) -> None:
    SPACE.scale = 0.5


def sets_a_new_one_of_an_object(*_: Any) -> None:
    SPACE.late = 0.5


CHANGES = [
    sets_a_global, sets_a_function, sets_an_attribute, sets_a_new_attribute, sets_a_method,
    sets_an_option, sets_an_entry, sets_a_new_entry, sets_an_item, adds_an_item, sets_of_an_object,
    sets_a_new_one_of_an_object,
]  # fmt: skip
KIND = {"argvalues": CHANGES, "ids": [each.__name__ for each in CHANGES]}


def state() -> tuple[Any, ...]:
    of_class = {name: each for name, each in vars(Shared).items() if not name.startswith("__")}
    held = dict(TABLE), list(NUMBERS), dict(vars(SPACE)), dict(Shared.options)
    return FACTOR, helper, of_class, *held


@pytest.fixture(autouse=True)
def as_begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Let all be as in a process that has just begun; what is returned does so again."""
    for name, own in (("_given_back", []), ("_left", {})):
        monkeypatch.setattr(SharedWatch, name, own)
    factor, function, of_class, table, numbers, space, options = state()

    def restored() -> None:
        globals().update(FACTOR=factor, helper=function)
        for name in state()[2].keys() - of_class.keys():
            delattr(Shared, name)
        for name, each in of_class.items():
            setattr(Shared, name, each)
        for held, before in ((TABLE, table), (vars(SPACE), space), (Shared.options, options)):
            held.clear()
            held.update(before)
        NUMBERS[:] = numbers
        AUXILIARY.clear()
        TENSOR.fill_(1.0)

    yield restored
    restored()


class Writer(Event):
    def forward(self, x: Tensor) -> Tensor:
        return computed(super().forward(x))


class Reader(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return computed(x)


class Fails(Writer):
    """Fails by another error after it has changed something."""

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        if HAPPENS[0] and self.steps > RARE + 1:
            raise ValueError("no more")
        return found


@pytest.mark.parametrize("model", [Writer, Fails])
@pytest.mark.parametrize("change", **KIND)
def test_what_a_trial_changed_is_as_before_once_it_has_failed(
    start: Callable[..., Agent], change: Callable[..., None], model: type[Writer]
) -> None:
    before = state()
    agent = start(lambda: made(model(change), shards=2), share=0.0)
    agent.runs._looks.share = 0.01
    failed = agent.train()
    agent.settle()
    assert isinstance(failed, events.TaskFailed), failed
    assert ("training changed " if model is Writer else "no more") in failed.error
    assert state() == before


BATCHES = [
    [Batch((torch.randn(BATCH, 6),), (torch.randint(0, 3, (BATCH,)),), BATCH)] for _ in range(2)
]


def trial_of(middle: nn.Module) -> hopping.Trial:
    HAPPENS[0] = False
    return hopping.start(made(middle, shards=2), BATCHES)


def begun(
    trial: hopping.Trial,
    of: type[Any] = LateEffects,
    as_built: AsBuilt | None = None,
    looks: bool = True,
) -> Any:
    known = trial.admission.attributes, trial.admission.set_in_evaluation
    earlier = EarlierReadings(as_built=as_built or AsBuilt())
    effects = of(trial.runtime(), *known, AuditBudget(1.0), earlier)
    if looks or of is LateEffects:
        effects.begin(*(() if looks else (False,)))
    return effects


def as_built(trial: hopping.Trial) -> AsBuilt:
    admission = trial.admission
    return AsBuilt.now(trial.recipe, admission.attributes, admission.set_in_evaluation)


def ends(effects: LateEffects | LateEvaluation) -> None:
    with effects.ending():
        effects.check(*([()] if isinstance(effects, LateEffects) else [(), False]))


@pytest.fixture(scope="module")
def reader() -> hopping.Trial:
    return trial_of(Reader())


OF = pytest.mark.parametrize("of", [LateEffects, LateEvaluation])
HOW = pytest.mark.parametrize(
    ("of", "first"), [(LateEffects, True), (LateEffects, False), (LateEvaluation, False)]
)  # whether it begins first, too


@HOW
@pytest.mark.parametrize("change", **KIND)
def test_who_ends_while_another_trial_has_changed_something_does_not_finish(
    reader: hopping.Trial, change: Callable[..., None], of: type[Any], first: bool
) -> None:
    writes = begun(trial_of(Writer(change)))
    reads = begun(reader, of) if first else None
    change()
    reads = reads or begun(reader, of)
    with pytest.raises(StepDiffers, match="another trial of its process changed"):
        ends(reads)
    writes.abandon()


@HOW
@pytest.mark.parametrize("change", **KIND)
def test_who_computed_while_something_was_given_back_does_not_finish(
    reader: hopping.Trial, change: Callable[..., None], of: type[Any], first: bool
) -> None:
    writes = begun(trial_of(Writer(change)))
    reads = begun(reader, of) if first else None
    change()
    reads = reads or begun(reader, of)
    with pytest.raises(ConfigurationError):
        ends(writes)
    with pytest.raises(StepDiffers, match="another trial of its process changed"):
        ends(reads)
    ends(begun(reader, of))  # again, with what was given back


@pytest.mark.parametrize("change", **KIND)
def test_who_was_disturbed_leaves_it_to_the_other_to_give_it_back(
    reader: hopping.Trial, change: Callable[..., None]
) -> None:
    before, reads = state(), begun(reader)
    writes = begun(trial_of(Writer(change)))
    change()
    with pytest.raises(StepDiffers, match="another trial of its process changed"):
        ends(reads)
    with pytest.raises((ConfigurationError, StepDiffers)) as told:
        ends(writes)
    seen = change not in (sets_a_new_attribute, sets_a_new_one_of_an_object)
    assert isinstance(told.value, ConfigurationError) or not seen  # else no code tells whose it is
    assert state() == before
    ends(begun(reader))


@OF
def test_what_cannot_be_given_back_is_told_to_who_comes_next(of: type[Any]) -> None:
    class Computes(Reader):
        def forward(self, x: Tensor) -> Tensor:
            return x * TENSOR

    reader, writes = trial_of(Computes()), begun(trial_of(Computes()))
    TENSOR.mul_(0.5)
    with pytest.raises(ConfigurationError, match="training changed global variable 'TENSOR'"):
        ends(writes)
    with pytest.raises(ConfigurationError, match=r"'TENSOR'.*can't be given back"):
        begun(reader, of)


class SetsAnew(Reader):
    def forward(self, x: Tensor) -> Tensor:
        AUXILIARY.clear()
        AUXILIARY.append(x.pow(2).mean())
        return x * sum(AUXILIARY)


class LooksUp(Reader):
    tables: dict[int, Tensor] = {}  # noqa: RUF012

    def forward(self, x: Tensor) -> Tensor:
        return x * self.tables.setdefault(len(x), torch.ones(len(x), 1))


@OF
@pytest.mark.parametrize("model", [SetsAnew, LooksUp])
def test_what_each_step_sets_anew_and_caches_disturb_no_other_trial(
    model: type[Reader], of: type[Any]
) -> None:
    one, other = trial_of(model()), trial_of(model())
    first, second = begun(one), begun(other, of)
    one.recipe.model(torch.randn(BATCH - 1, 6))
    ends(second)
    ends(first)
    ends(begun(other, of))


def sets_an_auxiliary(*_: Any) -> None:
    AUXILIARY.clear()
    AUXILIARY.append(torch.ones(3))


class SetsEachTime(Reader):
    def __init__(self, change: Callable[[], None]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        self.change()
        return computed(x) * (1 + len(AUXILIARY))


class ReadsAll(Reader):
    def forward(self, x: Tensor) -> Tensor:
        return computed(x) * (1 + len(AUXILIARY))


ANEW = [
    sets_a_global, sets_a_function, sets_an_attribute, sets_a_new_attribute, sets_an_option,
    sets_an_entry, sets_a_new_entry, sets_an_item, sets_of_an_object, sets_a_new_one_of_an_object,
    sets_an_auxiliary,
]  # fmt: skip


@HOW
@pytest.mark.parametrize("looks", [True, False])  # or has no time for it
@pytest.mark.parametrize("change", ANEW)
def test_who_reads_what_another_one_sets_anew_finds_what_there_was_before(
    change: Callable[..., None],
    of: type[Any],
    first: bool,
    looks: bool,
    as_begun: Callable[[], None],
) -> None:
    read, written, x = trial_of(ReadsAll()), trial_of(SetsEachTime(change)), torch.randn(BATCH, 6)
    as_begun()  # agents admit nothing
    before, alone, kept = state(), computed(x), [as_built(written), as_built(read)]
    sets = begun(written, LateEffects, kept[0], looks)
    reads = begun(read, of, kept[1], looks) if first else None
    for _ in range(2):  # microbatches, by turns
        with sets.watched():
            written.recipe.model(x)
        assert state() != before or AUXILIARY
        reads = reads or begun(read, of, kept[1], looks)
        with reads.watched():
            assert state() == before and not AUXILIARY
            assert torch.equal(computed(x), alone)
    with sets.watched():
        written.recipe.model(x)
    ends(reads)
    ends(sets)


class SetsInEvaluation(SetsEachTime):
    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else super().forward(x)


@OF
@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("change", ANEW)
def test_who_reads_what_anothers_evaluations_set_finds_what_there_was_before(
    change: Callable[..., None], of: type[Any], looks: bool, as_begun: Callable[[], None]
) -> None:
    read, written = trial_of(ReadsAll()), trial_of(SetsInEvaluation(change))
    as_begun()
    before, kept, x = state(), [as_built(written), as_built(read)], torch.randn(BATCH, 6)
    sets, reads = begun(written, LateEvaluation, kept[0], looks), begun(read, of, kept[1], looks)
    for _ in range(2):
        with sets.watched():
            written.recipe.model.eval()(x)
        assert state() != before or AUXILIARY
        with reads.watched():
            assert state() == before and not AUXILIARY
    ends(reads)
    with sets.watched():
        written.recipe.model.eval()(x)
    ends(sets)


@OF
def test_who_sets_late_what_another_one_sets_anew_fails(
    of: type[Any], as_begun: Callable[[], None]
) -> None:
    late, written = trial_of(ReadsAll()), trial_of(SetsEachTime(sets_a_global))
    as_begun()
    kept = as_built(written), as_built(late)
    sets, sets_late = begun(written, as_built=kept[0]), begun(late, of, kept[1])
    for effects, does in (
        (sets, lambda: written.recipe.model(torch.randn(BATCH, 6))),
        (sets_late, sets_a_global),
    ):
        with effects.watched():
            does()
    with pytest.raises(ConfigurationError, match="changed global variable 'FACTOR'"):
        ends(sets_late)
    ends(sets)


def built(scale: float) -> tuple[hopping.Trial, AsBuilt]:
    """Build a trial whose factory sets what its forward reads, as code with a global CFG does."""
    global FACTOR
    FACTOR = Shared.scale = SPACE.scale = TABLE["w"] = Shared.options["k"] = NUMBERS[0] = scale
    trial = trial_of(Reader())
    return trial, AsBuilt.now(trial.recipe)


@OF
def test_each_trial_finds_what_its_own_factory_has_set(of: type[Any]) -> None:
    trials, x = {scale: built(scale) for scale in (0.5, 2.0, 0.25)}, torch.randn(BATCH, 6)
    visits = {scale: begun(trial, of, left) for scale, (trial, left) in trials.items()}
    for _ in range(2):
        for scale, effects in visits.items():
            with effects.watched():
                assert torch.equal(computed(x), x * scale**6)
    for effects in visits.values():
        ends(effects)
    late = begun(trials[0.5][0], of, trials[0.5][1])
    with late.watched():
        sets_an_attribute()  # to what it was for this one
        Shared.options["k"] = 3.0
    with pytest.raises(ConfigurationError, match=r"changed attribute 'options' of .* at \['k'\]"):
        ends(late)


def test_a_trial_finds_its_own_though_who_set_it_is_over_or_reads_none_of_it() -> None:
    trial, left = built(0.5)
    other = built(4.0)[1]
    del other  # it is over
    reads = begun(trial, as_built=left)
    with reads.watched():
        assert FACTOR == Shared.scale == SPACE.scale == 0.5
    for value in (2.0, 3.0):  # by trials whose code names none of it
        with AsBuilt.building():
            globals()["FACTOR"] = Shared.scale = value
    with reads.watched():
        assert FACTOR == Shared.scale == 0.5
    ends(reads)


class Slotted:
    __slots__ = ("scale",)


SLOTTED, WEIGHTS = Slotted(), np.ones(3, np.float32)


class ReadsInPlace(Reader):
    """Reads what a factory sets in slots, and within an array."""

    def forward(self, x: Tensor) -> Tensor:
        return x * SLOTTED.scale * torch.from_numpy(WEIGHTS).sum()


@OF
def test_a_trial_finds_its_own_in_slots_and_in_arrays(of: type[Any]) -> None:
    trials = {}
    for scale in (0.5, 2.0):
        SLOTTED.scale = WEIGHTS[1] = scale
        trial = trial_of(ReadsInPlace())
        trials[scale] = trial, AsBuilt.now(trial.recipe)
    visits = {scale: begun(trial, of, left) for scale, (trial, left) in trials.items()}
    for _ in range(2):
        for scale, effects in visits.items():
            with effects.watched():
                assert SLOTTED.scale == WEIGHTS[1] == scale
    for effects in visits.values():
        ends(effects)
    late = begun(trials[0.5][0], of, trials[0.5][1])
    with late.watched():
        WEIGHTS[1] = 3.0
    with pytest.raises(ConfigurationError, match="changed global variable 'WEIGHTS'"):
        ends(late)


class Keeps(Reader):
    """Has an object that all trials share as an attribute."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        return x * self.config.scale * self.config.nested["scale"]


def kept(scale: float) -> tuple[hopping.Trial, AsBuilt]:
    def factory(_: Any) -> None:
        SPACE.scale = scale
        SPACE.nested["scale"] = 2 * scale

    vars(SPACE).setdefault("nested", {})
    factory({})
    trial = trial_of(Keeps(SPACE))
    return trial, AsBuilt.now(trial.recipe, factory=factory)


@OF
def test_a_trial_finds_its_own_in_an_object_that_its_model_holds(of: type[Any]) -> None:
    trials, x = {scale: kept(scale) for scale in (0.5, 2.0)}, torch.randn(BATCH, 6)
    visits = {scale: begun(trial, of, left) for scale, (trial, left) in trials.items()}
    for _ in range(2):
        for scale, effects in visits.items():
            with effects.watched():
                (layer,) = (
                    each
                    for each in trials[scale][0].recipe.model.modules()
                    if isinstance(each, Keeps)
                )
                assert torch.equal(layer(x), x * scale * (2 * scale))
    for effects in visits.values():
        ends(effects)


@OF
def test_who_fails_gives_back_nothing_that_a_factory_has_set_for_another_one(of: type[Any]) -> None:
    one, left = built(0.5)
    fails = begun(one, of, left)
    with AsBuilt.building():
        other, others = built(2.0)
    reads = begun(other, of, others)
    fails.abandon()
    with reads.watched():
        assert FACTOR == Shared.scale == 2.0
    ends(reads)


@OF
def test_what_another_factory_sets_first_is_not_taken_away_by_who_fails(of: type[Any]) -> None:
    one, left = built(0.5)
    fails = begun(one, of, left)

    def factory(_: Any) -> Recipe:
        Shared.late = 3.0  # which no other one has set, nor any step
        return made(Reader())

    build_recipe(factory, {}, 0, Columns(("x",), ("y",)))
    fails.abandon()
    assert Shared.late == 3.0


BY_NUMBER = {1: 1.0}


class OfSettings(torch.optim.SGD):
    """Reads what a factory sets where a forward does not."""

    def step(self, closure: Any = None) -> Any:
        self.scale = BY_NUMBER[1] * float(os.environ["CEREBRO_HYDRA_TEST_SCALE"])
        return super().step(closure)


def test_an_optimizer_finds_what_its_factory_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    visits = {}
    for scale in (1.5, 2.5):
        BY_NUMBER[1] = scale
        monkeypatch.setenv("CEREBRO_HYDRA_TEST_SCALE", str(scale))
        recipe = made(Reader())
        recipe = replace(recipe, optimizer=OfSettings(recipe.model.parameters(), lr=0.1))
        visits[scale] = AsBuilt.now(recipe)
    trial = trial_of(Reader())
    effects = {scale: begun(trial, as_built=each) for scale, each in visits.items()}
    for scale, each in effects.items():
        with each.watched():
            found = BY_NUMBER[1], os.environ["CEREBRO_HYDRA_TEST_SCALE"]
            assert found == (scale, str(scale))


@OF
def test_a_factorys_own_value_comes_before_that_of_before_others_steps(
    of: type[Any], as_begun: Callable[[], None]
) -> None:
    global FACTOR
    read, written, x = trial_of(Reader()), trial_of(SetsEachTime(sets_a_global)), torch.ones(1, 6)
    as_begun()
    sets = begun(written, as_built=as_built(written))
    with sets.watched():
        written.recipe.model(x)
    assert FACTOR == 0.5
    with AsBuilt.building():
        assert FACTOR == 1.0
        FACTOR = 2.0
    reads = begun(read, of, AsBuilt.now(read.recipe))
    for _ in range(2):
        with sets.watched():
            written.recipe.model(x)
        with reads.watched():
            assert FACTOR == 2.0
    ends(reads)
    ends(sets)


class Names(Reader):
    def forward(self, x: Tensor) -> Tensor:
        return x if AUXILIARY is not None else 2 * x


@OF
def test_who_is_taken_back_while_another_one_sets_something_anew_takes_nothing_from_it(
    of: type[Any],
) -> None:
    setter, named = trial_of(SetsAnew()), trial_of(Names())
    sets, names = begun(setter), begun(named, of)
    setter.recipe.model(torch.randn(BATCH - 1, 6))
    left = list(AUXILIARY)
    names.abandon()
    assert list(AUXILIARY) == left
    ends(sets)
    ends(begun(named, of))


class Counted(Reader):
    """Counts its instances, as numbers of layers are given."""

    built = 0

    def __init__(self) -> None:
        super().__init__()
        Counted.built += 1

    def forward(self, x: Tensor) -> Tensor:
        return x if Counted.built else 2 * x


@OF
def test_what_is_built_while_trials_compute_disturbs_none_of_them(of: type[Any]) -> None:
    def factory(params: dict[str, Any]) -> Recipe:
        model = nn.Sequential(Counted(), nn.Linear(6, 3))
        return Recipe(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())

    first, second = begun(trial_of(Counted())), begun(trial_of(Counted()), of)
    build_recipe(factory, {}, 0, Columns(("x",), ("y",)))
    ends(second)
    ends(first)
