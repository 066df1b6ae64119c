"""A model with torch.cond trains as plainly, in shards and where the memory of tasks counts."""

from __future__ import annotations

import pytest
import torch

from cerebro_hydra.errors import ConfigurationError, NonFiniteLoss
from cerebro_hydra.recipe import PlainTrainer
from cerebro_hydra.shards.admission.admit import admit
from cerebro_hydra.shards.admission.task_profiler import TaskProfiler
from cerebro_hydra.shards.admission.trial_profile import UNWATCHED
from cerebro_hydra.testing.model_case import assert_same_state
from tests.shards import plain, zoo
from tests.shards.executors.executor_case import assert_equal_to_plain
from tests.shards.executors.test_shards_late_writes import EXECUTORS
from tests.shards.hopping import STEPS_PER_EPOCH, start
from tests.shards.trials import made

WINDOWS = zoo.singly(zoo.vectors(8, 5))
EXAMPLES = [(batch.features, batch.labels) for window in WINDOWS for batch in window]


class Chooses(zoo.Net):
    def forward(self, x):
        x = self.a(x)
        x = torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,))
        return self.c(self.b(x).tanh())


class ChoosesModules(zoo.Net):
    def forward(self, x):
        x = self.a(x)
        x = torch.cond(x.sum() > 0, lambda y: self.b(y), lambda y: self.b(y).cos(), (x,))
        return self.c(x.tanh())


class Fails(zoo.Net):
    def forward(self, x):
        return self.c(torch.cond(x.sum() > 0, lambda y: y @ y, lambda y: y, (self.a(x),)))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(("model", "cut"), [(Chooses, "modules"), (ChoosesModules, "export")])
def test_it_trains_as_plainly_in_shards(model, cut: str, executor: str) -> None:
    make = made(model, shards=3, cut=cut)
    trial = start(make(), WINDOWS)
    assert trial.cut_model.num_shards == (3 if model is Chooses else 2)
    profile = admit(make(), EXAMPLES, 1, profiler=TaskProfiler(None)).profile
    EXECUTORS[executor](trial, profile, WINDOWS)
    reference = PlainTrainer(make(), plain.TRIAL_SEED, STEPS_PER_EPOCH)
    reference.train(WINDOWS)
    assert_same_state(trial.tensors(), reference)


@pytest.mark.parametrize("model", [Chooses, ChoosesModules])
def test_it_trains_as_plainly_in_one_shard(model) -> None:
    assert_equal_to_plain(made(model, shards=1), [WINDOWS], "modules")


class Widens(zoo.Net):
    """Has a branch that needs much more memory, and is taken by none of the first batches."""

    often = 1 << 10

    def forward(self, x):
        x = self.a(x)
        wide = torch.cond(
            x.sum() > 1e6, lambda y: y.repeat(self.often, 1).tanh().mean(0, keepdim=True) + y,
            lambda y: y.cos(), (x,),
        )  # fmt: skip
        return self.c(self.b(wide).tanh())


@pytest.mark.parametrize(
    ("shards", "budget", "found"), [(1, None, 1), (3, None, 3), ("auto", 1 << 20, 1)]
)
def test_the_memory_of_its_tasks_is_measured(shards, budget: int | None, found: int) -> None:
    recipe = made(Chooses, shards=shards)()
    admission = admit(recipe, EXAMPLES, 1, profiler=TaskProfiler(budget))
    assert len(admission.report.shards) == found
    assert admission.profile is not None and admission.profile.tasks is not None


def test_a_device_has_room_for_the_branch_that_needs_more() -> None:
    admission = admit(made(Widens, shards=1)(), EXAMPLES, 1, profiler=TaskProfiler(None))
    needs = admission.profile.training(0, 1, 1, recompute=False)
    (shard,) = needs.shards
    rows, width = 8, 6
    assert shard.activations >= Widens.often * rows * width * 4


def test_in_the_queues_of_a_small_device_it_trains_as_plainly() -> None:
    trial = start(made(Chooses, shards=1)(), WINDOWS)
    profile = admit(made(Chooses, shards=1)(), EXAMPLES, 1, profiler=TaskProfiler(None)).profile
    EXECUTORS["queue"](trial, profile, WINDOWS)
    reference = PlainTrainer(made(Chooses, shards=1)(), plain.TRIAL_SEED, STEPS_PER_EPOCH)
    reference.train(WINDOWS)
    assert_same_state(trial.tensors(), reference)


class Imports(zoo.Net):
    """Calls torch.cond by a name of its own, which nobody can replace."""

    cond = staticmethod(torch.cond)

    def forward(self, x):
        x = self.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (self.a(x),))
        return self.c(self.b(x).tanh())


def test_one_that_can_not_be_measured_is_refused_and_trains_elsewhere_afterwards() -> None:
    with pytest.raises(
        ConfigurationError, match=r"failed while its memory was measured .*call it as torch\.cond"
    ):
        admit(made(Imports, shards=1)(), EXAMPLES, 1, profiler=TaskProfiler(None))
    start(made(Imports, shards=1)(), WINDOWS).train(WINDOWS)


class ChoosesInEvaluation(zoo.Net):
    def forward(self, x):
        x = self.a(x)
        if not self.training:
            x = torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,))
        return self.c(self.b(x).tanh())


def test_branches_of_an_evaluation_are_measured_too() -> None:
    """Without a backward, torch.cond raises nothing where it is watched."""
    admission = admit(made(ChoosesInEvaluation)(), EXAMPLES, 1, profiler=TaskProfiler(None))
    assert len(admission.report.shards) == 2
    assert admission.profile.tasks.batch == UNWATCHED
    start(made(Chooses, shards=1)(), WINDOWS).train(WINDOWS)


class ChoosesLate(zoo.Net):
    """Has shards, because its branches come only later, and a loss that is nan then."""

    late = False  # of the class, because an attribute of a module must not change late

    def forward(self, x):
        x = self.a(x)
        if ChoosesLate.late:
            x = torch.cond(x.sum() > 0, lambda y: y * torch.nan, lambda y: y / 0 * 0, (x,))
        return self.c(self.b(x).tanh())


def test_looking_for_a_parameter_that_was_read_elsewhere_spoils_no_other_branches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A loss that is nan is looked into by running the forward again, which torch.cond can't."""
    trial = start(made(ChoosesLate)(), WINDOWS)
    assert trial.cut_model.num_shards == 2
    monkeypatch.setattr(ChoosesLate, "late", True)
    with pytest.raises(NonFiniteLoss, match="the loss is nan at step 0"):
        trial.train(WINDOWS)
    start(made(Chooses, shards=1)(), WINDOWS).train(WINDOWS)
    assert_equal_to_plain(made(Chooses, shards=1), [WINDOWS], "modules")


def test_a_branch_that_fails_is_told_and_others_compile_afterwards() -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)the forward failed .* same reduction dim"):
        start(made(Fails, shards=1)(), WINDOWS)
    start(made(Chooses, shards=1)(), WINDOWS).train(WINDOWS)
