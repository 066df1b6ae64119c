"""Which executor is proved with which trial: the bits are those of plain training."""

from __future__ import annotations

import functools
import gc
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from cerebro_hydra.agent.visit import VisitBoundary
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.queues.visit_spec import VisitSpec
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.schedules.registry import FLUSHED
from cerebro_hydra.plan.sizing.pipeline import Pipeline
from cerebro_hydra.recipe import Evaluation
from cerebro_hydra.shards.admission.task_profiler import TaskProfiler
from cerebro_hydra.shards.engine.barrier import GradientFacts
from cerebro_hydra.shards.engine.engine import Mode
from cerebro_hydra.shards.engine.evaluation import ShardEvaluation
from cerebro_hydra.shards.engine.graph_passes import PassRecord, StoredTensor
from cerebro_hydra.shards.engine.layout import aligned
from cerebro_hydra.shards.engine.microbatch import Execution
from cerebro_hydra.shards.engine.visit_run import VisitRun
from tests.examples import examples
from tests.shards.executors.alone import train_alone
from tests.shards.executors.executor_case import WAYS, ExecutorCase, Proof, proof
from tests.shards.executors.worker import Moving, Resident, Slot, Staying, Worker, shard_run
from tests.shards.hopping import train_uncut
from tests.shards.trials import TRIALS

DEVICES = 3

QUICK = """
                                      keep again alone queue kept eager moves uncut gpipe 1f1b inter
mlp, dropout                          me   me    m     m     m    e     e     m     e     .    .
mlp, in two                           m    e     .     .     .    .     .     .     .     .    .
mlp, in four                          e    m     .     .     .    .     .     .     .     .    .
mlp, groups, schedule                m    m     .     m     .    .     .     m     .     .    .
mlp, clipped                         m    m     m     .     .    .     .     .     .     .    .
mlp, never clipped                    m    .     .     .     .    .     .     .     .     .    .
mlp, values clipped, average         m    m     m     m     m    .     .     m     .     .    .
mlp, accumulated                     m    m     m     .     .    .     .     .     .     .    .
mlp, accumulated, clipped             me   me    me    .     .    .     .     m     .     e    .
mlp, accumulated, cosine             m    m     m     m     m    .     .     m     .     .    .
mlp, bfloat16                        m    m     m     .     .    .     .     m     .     .    .
mlp, float16, average                m    m     .     .     .    .     .     m     .     .    .
mlp, float16, accumulated, clipped    me   m     m     m     .    .     e     .     .     e    .
mlp, frozen first, clipped            me   me    .     m     m    .     e     .     .     .    .
mlp, frozen first, average           m    .     .     .     .    .     .     m     .     .    .
mlp, frozen middle                   .    m     .     .     .    .     .     .     .     .    .
mlp, augmented                       m    m     .     m     .    .     .     m     .     .    .
mlp, of lengths                       me   .     .     m     .    .     .     .     .     .    .
resnet                                me   me    m     m     m    e     e     me    .     .    .
resnet, in five                       e    me    .     .     .    .     .     .     .     .    .
resnet, accumulated                   me   me    .     .     .    .     .     .     e     .    e
resnet, bfloat16                     m    .     .     .     .    .     .     .     .     .    .
gpt2                                 m    .     .     .     .    .     .     m     .     .    .
gpt2, accumulated, clipped            me   me    m     m     m    .     .     .     .     .    .
tied, accumulated, clipped, average   me   me    .     m     .    .     e     .     e     e    e
encoder, bfloat16, accumulated        m    m     .     m     m    .     .     .     .     .    .
llama                                 m    m     .     m     m    .     .     .     .     .    .
bert, bfloat16                        .    m     .     .     .    .     .     .     .     .    .
layer thrice                          me   me    m     m     m    .     e     m     .     .    .
layer thrice, in three               m    m     .     .     .    .     .     .     .     .    .
layer thrice, in all                  me   me    .     .     .    .     .     .     .     .    .
counts                                me   me    m     m     m    e     e     m     .     .    e
norms, accumulated, clipped, average  m    m     m     m     .    .     .     m     .     .    .
"""
"""What `make test` runs (m: cut by modules, e: as a graph); `make test-long` runs others, in turns.

keep, again: the engine, which keeps activations, or computes them again in backward.
alone: each shard alone in memory, every microbatch in another visit, within the measured memory.
queue, kept: runs of two trials in the queues of a worker whose devices have little memory, again
    with recomputation and without.
eager: those of a graph cut whose shards run the model's own modules.
moves: microbatches that go from device to device.
gpipe, 1f1b, inter: the same in a pipeline of several microbatches; the second one with
    recomputation, the others without.
uncut: the plain trainer in the segments of the shards.
"""

QUICK_AT_HOME = {
    "mlp, accumulated, clipped": "m",
    "mlp, float16, accumulated, clipped": "m",
    "mlp, frozen first, average": "m",
    "resnet": "e",
    "gpt2, accumulated, clipped": "m",
    "layer thrice": "e",
}
"""As the table, for queues whose updates change optimizer state in DRAM."""

QUICK_MOVES_AT_HOME = {
    "mlp, dropout": "e",
    "mlp, frozen first, clipped": "e",
    "resnet": "e",
    "tied, accumulated, clipped, average": "e",
}
"""As the table, for the same where microbatches move."""


def column(name: str) -> dict[str, str]:
    header, *lines = (line for line in QUICK.splitlines() if line)
    names = header.split()
    cells = {line[:37].strip(): line[37:].split() for line in lines}
    assert cells.keys() == TRIALS.keys()
    return {trial: ways[names.index(name)] for trial, ways in cells.items()}


class TestKeep(ExecutorCase):
    quick = column("keep")
    mode: ClassVar[Mode] = "keep"

    def train(self, proofs: Sequence[Proof], number: int) -> list[float]:
        for each in proofs:
            each.trial.mode = self.mode
        return [each.trial.train(each.sub_epochs[number]).loss_sum for each in proofs]


class TestAgain(TestKeep):
    quick = column("again")
    mode = "recompute"


class InTurn(ExecutorCase):
    """Trains each trial in one way, of the two that the engine is proved with."""

    def takes(self, trial: int, way: int) -> bool:
        return (trial + way) % 2 == 0


class TestAlone(InTurn):
    quick = column("alone")

    def train(self, proofs: Sequence[Proof], number: int) -> list[float]:
        sums = []
        for each in proofs:
            windows = each.sub_epochs[number]
            shared = each.profile.tasks.shared
            most = spec_of(each, number).task_bytes if each.limited else None
            visits = [
                shard_run(each.trial, windows, each.make(), True, shared, most) for _ in range(2)
            ]
            sums.append(train_alone(each.trial, visits, windows))
        return sums


def spec_of(
    each: Proof,
    number: int,
    visit: int = 0,
    recompute: bool = True,
    devices: int = 1,
    schedule: str = "sequential",
    at_home: bool = False,
) -> VisitSpec:
    """Describe a trial's sub-epoch to the queues."""
    microbatches, window = sum(map(len, each.sub_epochs[number])), each.trial.recipe.accumulate
    profile = replace(each.profile, at_home=at_home)
    return profile.training(visit, microbatches, window, recompute, Pipeline(schedule, devices))


class TestQueue(InTurn):
    quick = column("queue")
    alone = False
    recompute: ClassVar[bool] = True
    share, devices, at_home = 1 / 8, 2, False

    def train(self, proofs: Sequence[Proof], number: int) -> list[float]:
        residents = []
        for which, each in enumerate(proofs):
            spec = spec_of(each, number, which, self.recompute, at_home=self.at_home)
            make = partial(
                shard_run, each.trial, each.sub_epochs[number], None, self.recompute,
                each.profile.tasks.shared,
            )  # fmt: skip
            residents.append(Resident(each.trial, spec, Staying(make)))
        return work(residents, number, self.share, self.devices)

    def evaluate(self, proofs: Sequence[Proof], batches: Sequence[list]) -> list[Evaluation]:
        residents = []
        for which, (each, given_batches) in enumerate(zip(proofs, batches, strict=True)):
            trial, found = each.trial, each.profile
            execution = Execution(shared=found.tasks.shared)
            make = partial(ShardEvaluation, trial.runtime(), given_batches, execution)
            spec = found.evaluation(which, len(given_batches))
            residents.append(Resident(trial, spec, Staying(make)))
        work(residents, 0, self.share, self.devices)
        return [resident.visit.result for resident in residents]

    @pytest.mark.parametrize("share", [1 / 8, 1 / 2])
    def test_many_trials_at_once(self, share: float) -> None:
        """Trials of many kinds have the devices of one worker."""
        self.share = share
        names = [name for name, ways in self.quick.items() if self.ways[0] in ways]
        self.prove([self.proof(name, WAYS[self.ways[0]]) for name in names])


def work(
    residents: Sequence[Resident], seed: int, share: float, devices: int, deaths: int = 0
) -> list[float]:
    """Let a worker train sub-epochs, and return their losses, summed over rows."""
    worker = Worker(residents, seed, share, devices, deaths)
    worker.run()
    if deaths:
        event(f"restarts: {worker.restarts}")
    for each in residents:
        each.trial.step += len({n // each.trial.recipe.accumulate for n in each.losses})
    return [each.loss_sum for each in residents]


class TestKept(TestQueue):
    quick = column("kept")
    recompute = False
    share, devices = 1 / 2, 1


class TestAtHome(TestQueue):
    quick = dict.fromkeys(TRIALS, "") | QUICK_AT_HOME
    share, at_home = 1 / 16, True

    def takes(self, trial: int, way: int) -> bool:
        """Leave each trial to one way, or to the executor whose microbatches move."""
        return trial % 3 == way


class TestEager(TestQueue):
    quick = column("eager")
    ways = "e"

    @staticmethod
    @functools.cache
    def proof(name: str, cut: str) -> Proof:
        """Return one whose graph is cut, and whose model's own modules are run."""
        found = Proof(TRIALS[name].recipe, TRIALS[name].sub_epochs, cut)
        found.trial.cut_model = found.trial.cut_model.eager(found.trial.recipe.model)
        return found


class TestMoves(ExecutorCase):
    quick = column("moves")
    ways = "e"
    alone = False
    schedule: ClassVar[str] = "sequential"
    recompute: ClassVar[bool] = True
    devices: ClassVar[int] = DEVICES
    share: ClassVar[float] = 0
    at_home: ClassVar[bool] = False
    seed = deaths = 0

    def train(self, proofs: Sequence[Proof], number: int) -> list[float]:
        self.residents = [
            moving(each, number, which, self.recompute, self.devices, self.schedule, self.at_home)
            for which, each in enumerate(proofs)
        ]
        return work(self.residents, self.seed + number, self.share, self.devices, self.deaths)

    def evaluate(self, proofs: Sequence[Proof], batches: Sequence[list]) -> list[Evaluation]:
        """Evaluate as the schedule of a trial does, over the devices of a pipeline."""
        if self.schedule == "sequential":
            return super().evaluate(proofs, batches)
        residents = []
        for which, (each, given_batches) in enumerate(zip(proofs, batches, strict=True)):
            pipeline = Pipeline(self.schedule, self.devices)
            spec = each.profile.evaluation(which, len(given_batches), pipeline)
            execution = Execution(moves=spec.moves, shared=each.profile.tasks.shared)
            make = partial(ShardEvaluation, each.trial.runtime(), given_batches, execution)
            visit = Moving(make, spec) if spec.moves else Staying(make)
            residents.append(Resident(each.trial, spec, visit))
        work(residents, self.seed, self.share, self.devices, self.deaths)
        return [resident.visit.result for resident in residents]


class TestMovesAtHome(TestMoves):
    quick = dict.fromkeys(TRIALS, "") | QUICK_MOVES_AT_HOME
    at_home = True

    def takes(self, trial: int, way: int) -> bool:
        """Take the trials that the executor whose microbatches stay leaves out."""
        return trial % 3 == 2


class TestGPipe(TestMoves):
    quick = column("gpipe")
    schedule, recompute, devices = "gpipe", False, 3
    turn = 0

    def takes(self, trial: int, way: int) -> bool:
        """Leave each trial to two of three schedules."""
        return trial % 3 != self.turn


class Test1F1B(TestGPipe):
    quick = column("1f1b")
    schedule, recompute, devices = "1f1b", True, 3
    turn = 1


class TestInterleaved(TestGPipe):
    quick = column("inter")
    schedule, recompute, devices = "interleaved", False, 2
    turn = 2


def moving(
    each: Proof,
    number: int,
    visit: int = 0,
    recompute: bool = True,
    devices: int = DEVICES,
    schedule: str = "sequential",
    at_home: bool = False,
) -> Resident:
    """Return a visit whose microbatches move."""
    spec = spec_of(each, number, visit, recompute, devices, schedule, at_home)
    assert spec.moves
    windows = each.sub_epochs[number]

    def make() -> VisitRun:
        shared, most = each.trial.cut_model.shared, spec.task_bytes if each.limited else None
        return shard_run(
            each.trial, windows, each.make(), recompute, shared, most, True, spec.crossings
        )

    return Resident(each.trial, spec, Moving(make, spec))


@pytest.mark.parametrize("schedule", FLUSHED)
def test_a_microbatch_has_several_devices(schedule: str) -> None:
    each = proof("mlp, frozen first, clipped", "export")
    each.begin()
    resident = moving(each, 0, schedule=schedule)
    work([resident], 0, 0, DEVICES)
    assert max(map(len, resident.visit.places.values())) > 1


@pytest.mark.parametrize("schedule", FLUSHED)
def test_units_that_are_given_while_the_one_before_is_under_way_change_no_bit(
    schedule: str,
) -> None:
    executor = TestMoves()
    executor.schedule, executor.devices = schedule, 2
    executor.share, executor.seed = 2, 1
    executor.prove([proof("mlp, frozen first, clipped", "export")])
    (resident,) = executor.residents
    assert resident.visit.ahead, "a device was given units that follow those that it had"


def test_a_unit_that_is_ordered_early_finds_on_its_device_what_the_one_before_it_left() -> None:
    boundary = VisitBoundary([aligned(1)], TaskGraph(2, 2))
    first, second = (Action(0, k, ActionKind.F, 0, device=0) for k in range(2))
    place = StoredTensor(0, torch.uint8, (1,), (1,), False)
    left = PassRecord(1, {("value", "x"): place})
    assert boundary.order([first]).record == boundary.order([second]).record == PassRecord()
    boundary.note(first, left)
    boundary.lose(0)  # which was doing the second
    assert boundary.order([replace(second, device=1)]).record == left


@pytest.mark.parametrize("schedule", [name for name in FLUSHED if name != "sequential"])
def test_a_pipeline_whose_devices_have_room_for_one_shard_changes_no_bit(schedule: str) -> None:
    """A shard leaves between its forward and its backward, and nothing of it stays."""
    executor = TestMoves()
    executor.schedule, executor.recompute, executor.devices = schedule, True, 2
    executor.prove([proof("resnet, in five", "export")])


def test_facts_of_a_unit_that_ends_later_do_not_take_the_place_of_newer_ones() -> None:
    tasks = [Action(0, k, ActionKind.B, 0, device=k) for k in range(2)]
    boundary = VisitBoundary([aligned(1)], TaskGraph(2, 1, barrier=True))
    boundary.note(tasks[1], PassRecord(facts={1: GradientFacts({"w": 1.0})}))
    slow = boundary.order(tasks[:1]).record
    assert slow is not None and slow.facts == {1: GradientFacts({"w": 1.0})}
    boundary.note(tasks[1], PassRecord(facts={1: GradientFacts({"w": 2.0})}))
    boundary.note(tasks[0], replace(slow, facts={**slow.facts, 0: GradientFacts({"v": 3.0})}))
    update = boundary.order([Action(0, 0, ActionKind.U, 0, device=0)]).record
    assert update is not None and update.facts == {
        0: GradientFacts({"v": 3.0}),
        1: GradientFacts({"w": 2.0}),
    }


def test_facts_of_a_backward_that_is_done_again_do_not_take_the_place_of_newer_ones() -> None:
    """An update that was held back begins meanwhile, and is clipped by those of its window."""
    boundary = VisitBoundary([aligned(1)], TaskGraph(2, 2, 2, barrier=True))
    first, second = (Action(0, 1, ActionKind.B, m, device=1) for m in range(2))
    boundary.note(first, PassRecord(facts={1: GradientFacts({"w": 1.0})}))
    boundary.note(second, PassRecord(facts={1: GradientFacts({"w": 2.0})}))
    boundary.note(first, PassRecord(facts={1: GradientFacts({"w": 1.0})}))
    update = boundary.order([Action(0, 0, ActionKind.U, 1, device=0)]).record
    assert update is not None and update.facts == {1: GradientFacts({"w": 2.0})}


def tensors_of_graphs() -> int:
    """Return how many tensors of this process belong to a graph of autograd."""
    gc.collect()
    tensors = (each for each in gc.get_objects() if type(each) is torch.Tensor)
    return sum(each.grad_fn is not None for each in tensors)


def test_a_forward_that_is_computed_again_leaves_no_graph_on_its_device() -> None:
    """Not even that of the last shard, unless its backward is of the same unit."""
    each = proof("mlp, frozen first, clipped", "export")
    each.begin()
    resident = moving(each, 0)
    resident.begin()
    before = tensors_of_graphs()
    for k in range(resident.spec.graph.shards):
        tasks, slot = [Action(0, k, ActionKind.F, 0, 0)], Slot.received(each.trial, k)
        resident.visit.compute(tasks, {k: slot}, resident.visit.order(tasks), {})
        assert tensors_of_graphs() == before


@settings(max_examples=examples(15), deadline=None)
@given(
    seed=st.integers(0, 10_000),
    deaths=st.integers(0, 6),
    schedule=st.sampled_from(list(FLUSHED)),
    devices=st.integers(2, DEVICES),
    at_home=st.booleans(),
)
def test_devices_that_die_change_no_bit(
    seed: int, deaths: int, schedule: str, devices: int, at_home: bool
) -> None:
    """Units are done again, or whole sub-epochs."""
    executor = TestMoves()
    executor.at_home = at_home
    executor.seed, executor.deaths, executor.share = seed, deaths, seed % 3
    recompute = schedule == "sequential" or seed % 2 == 0
    executor.schedule, executor.recompute, executor.devices = schedule, recompute, devices
    names = "mlp, frozen first, clipped", "tied, accumulated, clipped, average", "counts"
    executor.prove([proof(name, "export") for name in names])


class TestUncut(InTurn):
    quick = column("uncut")

    def train(self, proofs: Sequence[Proof], number: int) -> list[float]:
        """The second sub-epoch has a model that was just built, as an audit has."""
        sums = []
        for each in proofs:
            recipe = each.make() if number else each.trial.recipe
            sums.append(train_uncut(each.trial, each.sub_epochs[number], recipe))
        return sums


def test_a_microbatch_leaves_what_was_measured_and_one_that_leaves_more_is_an_error() -> None:
    each = proof("tied, accumulated, clipped, average", "export")
    each.begin()
    resident = moving(each, 0)
    work([resident], 3, 0, DEVICES)
    most = resident.spec.host_boundary_bytes
    assert 0.7 * most < resident.visit.left <= most
    each.begin()
    resident = moving(each, 0)
    first, *others = resident.spec.shards
    less = replace(resident.spec, shards=(replace(first, boundary=0), *others))
    resident.spec = resident.visit.spec = less
    told = r"a batch of shape \[.*\] leaves .* and with device_memory it may have .*, by"
    with pytest.raises(MemoryError, match=told):
        work([resident], 0, 0, DEVICES)


@pytest.mark.parametrize(
    ("name", "schedule", "least"),
    [
        ("tied, accumulated, clipped, average", "gpipe", 0.6),
        ("tied, accumulated, clipped, average", "interleaved", 1.0),
        ("resnet, in five", "1f1b", 0.3),
    ],
)
def test_dram_gets_what_another_device_reads_and_the_bill_has_just_that(
    name: str, schedule: str, least: float
) -> None:
    each = proof(name, "export")
    each.begin()
    resident = moving(each, 0, recompute=False, devices=2, schedule=schedule)
    work([resident], 3, 0, 2)
    spec, tasks = resident.spec, each.profile.tasks
    assert tasks is not None and tasks.moving is not None
    assert resident.visit.left == spec.boundary_bytes < least * sum(tasks.moving)


def test_a_trial_that_ran_out_of_memory_keeps_its_microbatches_on_one_device() -> None:
    each = proof("tied, accumulated, clipped, average", "export")
    assert not spec_of(each, 0, devices=DEVICES).stays
    assert spec_of(each, 0).stays
    roomy = TaskProfiler(1 << 30).with_all_room(each.profile, 2)
    assert roomy.training(0, 2, 2, True, Pipeline(devices=DEVICES)).stays
