"""A worker's queues with real devices: what fails, fails alone, and no other byte changes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.queue_worker import train
from cerebro_hydra.agent.attempts import VisitPlanner
from cerebro_hydra.agent.device.worker_devices import Unit, UnitGate
from cerebro_hydra.agent.memory.shard_store import ShardHome
from cerebro_hydra.errors import SetupError
from cerebro_hydra.hopper.protocol.resources import WorkerResources
from cerebro_hydra.plan.messages import events
from cerebro_hydra.plan.messages.actions import HOST, Action, ActionKind
from cerebro_hydra.plan.queues.events import Answer
from cerebro_hydra.plan.queues.log import MOST_SPANS
from cerebro_hydra.plan.queues.visit_spec import ShardSpec
from cerebro_hydra.shards.admission.trial_profile import TaskProfile, TrialProfile
from cerebro_hydra.shards.engine.layout import ShardBytes
from cerebro_hydra.storage import LocalStore, RunFolder
from cerebro_hydra.storage.digest import digest
from tests.agent.byte_visits import ByteTrials, trained
from tests.agent.queues.queue_bench import MICROBATCHES, SIZES, bench, spec_of
from tests.agent.standins import SECONDS


def test_an_evaluation_is_summed_in_the_order_of_its_batches_on_whatever_devices() -> None:
    found = []
    for budgets in ([None], [4500, 4500]):
        with bench(ByteTrials(SIZES), budgets) as made:
            made.begin(2, evaluated=True)
            results = made.results(2)
            found.append([results[trial].sums for trial in range(2)])
    assert found[0] == found[1]


DIES = "ended the process of a device 3 times"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("dies: factory", DIES),
        ("dies: opened", DIES),
        ("dies: backward", DIES),
        ("raises", "the user's code is wrong"),
        ("hangs", "longer than batch_seconds=0.5"),
    ],
)
def test_code_that_fails_ends_its_trial_alone(fault: str, said: str) -> None:
    limit = 0.5 if fault == "hangs" else None
    with bench(ByteTrials(SIZES, faults={1: fault}), [4500, 4500], batch_seconds=limit) as made:
        made.begin(3)
        results = made.results(3)
        failed = results.pop(1)
        assert isinstance(failed, events.TaskFailed) and said in failed.error
        assert not made.store.knows(1, 1), "nobody waits for what it will not publish"
        for trial, result in results.items():
            made.check(trial, result)


def test_code_that_ends_the_process_at_the_end_of_an_evaluation_ends_its_trial_alone() -> None:
    with bench(ByteTrials(SIZES, faults={1: "dies: closed"}), [4500, 4500]) as made:
        made.begin(2, evaluated=True)
        results = made.results(2)
    assert isinstance(results[0], events.EvaluationDone)
    assert isinstance(results[1], events.TaskFailed) and DIES in results[1].error


def test_a_run_whose_activations_find_no_memory_is_done_again_without_them_once() -> None:
    trials = ByteTrials(SIZES, faults={0: "greedy", 1: "hungry"})
    with bench(trials) as made:
        made.begin(3)
        results = made.results(3)
        for trial in (0, 2):
            made.check(trial, results[trial])
        assert isinstance(results[1], events.TaskFailed)
        assert "there is no room" in results[1].error
        assert not results[1].memory, "without a budget a finer cut would need as much"
        made.perform(train(3, 0, 2))  # its next sub-epoch keeps no activations from the outset
        assert isinstance(made.result(), events.SubEpochDone)
        kept = [spec.keeps_all for spec in made.state.added]
        assert kept.count(False) == 3, "a visit of trial 0, one of trial 1, and the next of trial 0"
    with bench(trials, recompute=False) as made:
        made.begin(1)
        assert isinstance(made.result(), events.TaskFailed), "what was asked for stays"


def test_a_run_that_lacks_memory_without_kept_activations_says_that_a_finer_cut_may_help() -> None:
    trials = ByteTrials(SIZES, faults={0: "hungry", 1: "raises"})
    with bench(trials, [4500]) as made:
        made.begin(2)
        results = made.results(2)
        assert (results[0].memory, results[1].memory) == (True, False)
    with bench(trials, [9000], recompute=False) as made:
        made.begin(1)
        assert not made.result().memory, "its activations stay, however it is cut"


def test_a_run_that_is_overdue_after_it_began_again_fails_alone() -> None:
    calls: list[int] = []

    def hangs_when_sparing(trial: int) -> None:
        calls.append(trial)
        if len(calls) > 1:
            ended.wait(SECONDS)

    ended = threading.Event()
    trials = ByteTrials(SIZES, faults={0: "greedy"}, hooks={"backward": hangs_when_sparing})
    options: dict[str, Any] = {"batch_seconds": 0.5, "end_process": ended.set}
    with bench(trials, place="resident", **options) as made:
        made.begin(1)
        failed = made.result()
        assert isinstance(failed, events.TaskFailed)
        assert "longer than batch_seconds=0.5" in failed.error
        assert ended.wait(SECONDS)


def test_a_cancelled_attempt_reports_and_leaves_nothing() -> None:
    with bench(ByteTrials(SIZES, seconds=0.01), [4500, 4500]) as made:
        made.begin(2)
        made.state.wait_for_tasks(1)
        made.trainer.cancel(0)
        result = made.result()
        assert result.attempt == 1
        made.check(1, result)
        assert not made.store.knows(0, 1)
        made.fetches.drop(1, 1)
        made.state.wait_until(lambda: not made.state.visits)


def test_an_attempt_that_is_cancelled_while_its_trial_is_built_never_begins() -> None:
    def cancel(trial: int) -> None:
        if trial == 0:
            made.trainer.cancel(trial)
            made.settle()

    with bench(ByteTrials(SIZES, hooks={"factory": cancel}), place="resident") as made:
        made.begin(2)
        assert made.result().attempt == 1
        assert len(made.state.added) == 1 and made.reported.empty()


class SlowFolder:
    """Has the frozen bytes of trials, and reads them once it is let."""

    def __init__(self, trials: ByteTrials, path: Path) -> None:
        self._folder = RunFolder(LocalStore(str(path)), "run")
        for segments in trials.initial(0):
            self._folder.write_object(digest(segments["frozen"]), segments["frozen"].tobytes())
        self.asked, self.let = threading.Event(), threading.Event()

    def read_object(self, digest: str, allocate: Callable[[int], Any]) -> Any:
        self.asked.set()
        assert self.let.wait(SECONDS)
        return self._folder.read_object(digest, allocate)


@pytest.mark.parametrize("failed", [False, True])
def test_what_a_run_wrote_to_frozen_bytes_is_mended_before_another_one_reads_them(
    tmp_path: Path, failed: bool
) -> None:
    wrote, let_go = threading.Event(), threading.Event()
    read: set[bytes] = set()  # by the other trial

    def frozen() -> Any:
        """Return the frozen bytes of the shard with the loss, which both trials have."""
        return made.store.wait(1, 0, len(SIZES) - 1).segments["frozen"][1]

    def write(trial: int) -> None:
        if trial == 1:
            read.add(frozen().tobytes())
        elif not wrote.is_set():
            frozen()[:] = 99
            wrote.set()
            assert let_go.wait(SECONDS)

    faults = {0: "raises"} if failed else {}
    trials = ByteTrials(SIZES, hooks={"forward": write}, faults=faults)
    folder = SlowFolder(trials, tmp_path)
    with bench(trials, place="resident", folder=folder) as made:
        made.put(1, 0, trials.initial(1))
        before = frozen().tobytes()
        made.begin(2)
        assert wrote.wait(SECONDS)
        assert frozen().tobytes() != before
        if not failed:
            made.trainer.cancel(0)
        let_go.set()
        assert folder.asked.wait(SECONDS)
        made.state.wait_until(lambda: any(map(is_forward_of_the_other, made.state.given)))
        device: Any = made.trainer._devices[0]
        for put in (made.trainer._inbox.put, device._computing.put):
            idle = threading.Event()
            put(idle.set)
            assert idle.wait(SECONDS), "the loop or the device waits for the store"
        assert made.reported.empty(), "nothing is told before the bytes are as they were"
        folder.let.set()
        results = made.results(1 + failed)
        made.check(1, results[1])
        assert read == {before}
        assert not failed or "the user's code is wrong" in results[0].error


def is_forward_of_the_other(answer: Answer) -> bool:
    """Return whether the queues let the visit after the first one begin."""
    return isinstance(answer, Action) and (answer.kind, answer.trial) == (ActionKind.F, 1)


def test_a_run_whose_changes_find_no_room_in_dram_fails_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room_for, refused = ShardHome.room_for, 0

    def refuses(self: ShardHome, *asked: Any) -> Any:
        nonlocal refused
        refused += 1
        if refused == 4:
            raise MemoryError("no slab is left")
        return room_for(self, *asked)

    monkeypatch.setattr(ShardHome, "room_for", refuses)
    with bench(ByteTrials(SIZES), [4500]) as made:
        made.begin(2)
        results = made.results(2)
        (failed,) = (each for each in results.values() if isinstance(each, events.TaskFailed))
        assert "the machine has no room" in failed.error and "no slab is left" in failed.error
        made.check(1 - failed.attempt, results[1 - failed.attempt])
        made.perform(train(9, failed.attempt, 1))
        made.check(failed.attempt, made.result())


def test_what_a_device_says_of_a_cut_that_a_trial_has_no_more_is_not_taken() -> None:
    asked, goes_on, shards = threading.Event(), threading.Event(), [1]

    def profiling(trial: int) -> None:
        asked.set()
        assert goes_on.wait(SECONDS)

    trials = ByteTrials(SIZES, hooks={"factory": profiling})
    with bench(trials, place="thread", spec=lambda trial: spec_of(shards[0])(trial)) as made:
        made.perform(train(0, 0, 1))
        assert asked.wait(SECONDS)
        made.trainer.cancel(0)
        shards[0] = len(SIZES)
        made.put(0, 1, trials.initial(0))
        made.perform(train(1, 0, 2))
        goes_on.set()
        result = made.result()
        assert isinstance(result, events.SubEpochDone), result
        assert len(result.digests) == len(SIZES)


def test_a_run_that_no_device_can_hold_fails_with_the_numbers() -> None:
    with bench(ByteTrials(SIZES), [4000]) as made:
        made.begin(1)
        result = made.result()
        assert isinstance(result, events.TaskFailed)
        assert "needs 4500 bytes of a device" in result.error
        assert "4000" in result.error


def test_whoever_reads_a_slot_that_was_given_up_gets_other_bytes() -> None:
    trials = ByteTrials(SIZES, stale=True)
    with bench(trials, [4500], recompute=True) as made:
        made.begin(1)
        _, loss_sum = trained(trials, trials.initial(0), MICROBATCHES)
        assert made.result().loss_sum != loss_sum


def test_a_worker_tells_what_its_devices_did_within_their_budgets() -> None:
    with bench(ByteTrials(SIZES, seconds=0.002), [4500, 4500], 9000) as made:
        made.begin(3)
        results = made.end(3)
    assert len(made.worked) == 3
    work = [work for report in made.worked for work in report.devices]
    assert {each.device for each in work} == {0, 1, HOST}
    for each in work:
        assert each.peak <= (each.budget or 0)
        assert max(len(each.tasks), len(each.moves)) <= MOST_SPANS
    devices = [each for each in work if each.device != HOST]
    ran = {trial for each in devices for _, _, did in each.tasks for trial, _ in did}
    assert ran == {0, 1, 2}
    tasks = 3 * MICROBATCHES * 3 * len(SIZES)
    computing = sum(each.computing for each in devices)
    assert 0.002 * tasks < computing < 2 * sum(report.seconds for report in made.worked)
    alone = sum(result.work_seconds for result in results)  # without the wait for neighbours
    assert computing <= alone < sum(result.seconds for result in results)
    assert sum(each.promoted for each in devices) > 3 * MICROBATCHES * sum(SIZES)
    assert sum(each.spilled for each in devices) > 3 * sum(SIZES)
    dram = [each for each in work if each.device == HOST]
    assert sum(each.spilled for each in dram) > 0 == sum(each.computing for each in dram)


def refused() -> Any:
    raise OSError("CUDA is not there")


def test_a_device_that_can_not_be_started_ends_the_agent(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with (
        bench(ByteTrials(SIZES), prepare=refused) as made,
        pytest.raises(SetupError, match="device 0 could not be started 10 times in a row"),
    ):
        made.result()
    assert "CUDA is not there" in capsys.readouterr().out


def test_an_audit_is_described_as_one_which_comes_first() -> None:
    planner = VisitPlanner(lambda split, partition: 1, WorkerResources())
    profile = TrialProfile((ShardBytes(0, 4, 4, False),), (), False)
    audited = profile.training(0, 1, 1, True)
    assert not audited.audits and planner.audit_spec(1, audited, 0, profile).audits


@pytest.mark.parametrize("budget", [None, 1])
def test_an_audit_is_whole_where_nothing_limits_a_device_though_recomputing_alone_was_measured(
    budget: int | None,
) -> None:
    need = (ShardSpec(0, 1, 1, 1.0, 1.0, 1.0),) * 2
    tasks = TaskProfile(need, None, need, (), 8, (1, 1), (1, 1))
    profile = TrialProfile((ShardBytes(0, 4, 4, False),) * 2, (), False, tasks)
    planner = VisitPlanner(lambda split, partition: 1, WorkerResources(device_memory=budget))
    audit = planner.audit_spec(1, profile.training(0, 1, 1, True), 0, profile)
    assert (audit.whole, audit.recompute) == ((True, False) if budget is None else (False, True))


# ---------------------------------------------------------------------- what units wait for


def unit(visit: int, device: int = 0) -> Unit:
    return tuple(Action(visit, shard, ActionKind.F, 0, device=device) for shard in range(2))


def test_a_gate_holds_units_back_until_it_is_opened_as_often_as_it_was_shut() -> None:
    gate = UnitGate()
    assert not gate.holds(unit(0))
    for visit in (None, None, 1):
        gate.shut(visit)
    assert all(gate.holds(unit(visit, device=visit)) for visit in (0, 1, 2))
    assert gate.open(None) == []
    assert gate.open(None) == [unit(0, device=0), unit(2, device=2)]
    assert not gate.holds(unit(0)) and gate.holds(unit(1, device=1))
    assert gate.open(1) == [unit(1, device=1), unit(1, device=1)]
    assert not gate.holds(unit(1))


def test_a_unit_that_is_held_back_holds_back_those_behind_it_on_its_device() -> None:
    gate = UnitGate()
    gate.shut(0)
    assert gate.holds(unit(0)) and gate.holds(unit(1)) and not gate.holds(unit(1, device=1))
    assert gate.open(0) == [unit(0), unit(1)]


def test_a_gate_keeps_nothing_of_a_run_that_is_over_or_of_a_device_that_died() -> None:
    gate = UnitGate()
    gate.shut(None)
    gate.shut(0)
    for each in (unit(0), unit(1), unit(2, device=1)):
        assert gate.holds(each)
    assert gate.remove(0) == []
    gate.lose(1)
    assert gate.open(None) == [unit(0), unit(1)]
