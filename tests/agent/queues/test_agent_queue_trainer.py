"""A worker's queues with real devices: whatever dies, the bytes are those of plain training."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra.agent.memory.shard_store import ShardHome
from cerebro_hydra.errors import SetupError
from cerebro_hydra.plan.messages import events
from cerebro_hydra.plan.messages.actions import HOST
from cerebro_hydra.plan.queues.log import MOST_SPANS
from cerebro_hydra.shards.engine.layout import HostSegments
from cerebro_hydra.testing.queue_worker import QueueWorker, evaluate, train
from tests.agent.byte_runs import ByteTrials, trained
from tests.agent.queues.queue_bench import QueueBench, bench
from tests.agent.standins import SECONDS

MICROBATCHES = 10
SIZES = (1000, 3000, 2000)


def assert_trained(
    made: QueueWorker, trials: ByteTrials, trial: int, result: Any, before: Sequence[HostSegments]
) -> None:
    expected, loss_sum = trained(trials, before, MICROBATCHES)
    assert isinstance(result, events.SubEpochDone), result
    assert result.loss_sum == loss_sum
    found = made.get(trial, 1, len(trials.sizes))
    for shard, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        for name in theirs:
            assert mine[name].tobytes() == theirs[name].tobytes(), f"{name} of shard {shard}"


def begin(made: QueueBench, trials: ByteTrials, number: int) -> None:
    for trial in range(number):
        made.put(trial, 0, trials.initial(trial))
        made.perform(train(trial, trial, 1))


def end(made: QueueBench, trials: ByteTrials, number: int) -> None:
    for _ in range(number):
        result = made.result()
        assert isinstance(result, events.SubEpochDone), result
        assert_trained(made, trials, result.attempt, result, trials.initial(result.attempt))


@pytest.mark.parametrize("seed", range(6))
def test_any_budgets_neighbours_and_killed_devices_leave_the_bytes_alone(seed: int) -> None:
    choice = random.Random(seed)
    sizes = tuple(choice.randrange(64, 5000) for _ in range(choice.randrange(1, 5)))
    trials = ByteTrials(sizes, choice.choice([1, 1, 3]), choice.choice([0, 0.002]))
    need = trials.profile(0).training(0, 1, trials.window, True).device_need
    budgets = [choice.choice([need, 2 * need, None]) for _ in range(choice.randrange(1, 4))]
    number = choice.randrange(1, 5)
    tasks = 2 * number * MICROBATCHES * len(sizes)
    kills = sorted(choice.randrange(tasks) for _ in range(choice.choice([0, 1, 2])))
    host = choice.choice([None, 2 * need, 4 * sum(sizes)])
    options = {"double_buffering": choice.random() < 0.7, "recompute": choice.choice([None, True])}
    with bench(trials, len(sizes), budgets, host, window=trials.window, **options) as made:
        begin(made, trials, number)
        for done in kills:
            made.state.wait_for_tasks(done)
            made.devices[-len(budgets)].close()  # one of the present ones
        end(made, trials, number)
        for trial in range(number):
            made.perform(evaluate(10 + trial, trial, 1))
        for _ in range(number):
            assert isinstance(made.result(), events.EvaluationDone)


def test_an_evaluation_is_summed_in_the_order_of_its_batches_on_whatever_devices() -> None:
    trials = ByteTrials(SIZES)
    found = []
    for budgets in ([None], [4500, 4500]):
        with bench(trials, len(SIZES), budgets) as made:
            for trial in range(2):
                made.put(trial, 0, trials.initial(trial))
                made.perform(evaluate(trial, trial, 0))
            results = sorted((made.result() for _ in range(2)), key=lambda r: r.attempt)
            found.append([result.sums for result in results])
    assert found[0] == found[1]


def test_code_that_ends_its_process_costs_a_device_and_changes_no_byte(tmp_path: Path) -> None:
    lethal = tmp_path / "now"
    trials = ByteTrials(SIZES, seconds=0.005, lethal=str(lethal))
    lethal.touch()
    with bench(trials, len(SIZES), [4500, 4500]) as made:
        begin(made, trials, 3)
        end(made, trials, 3)
        assert len(made.devices) == 3


@pytest.mark.parametrize("where", ["factory", "opened", "backward"])
def test_code_that_ends_every_process_ends_its_trial(where: str) -> None:
    trials = ByteTrials(SIZES, always_lethal={1: where})
    with bench(trials, len(SIZES), [None]) as made:
        begin(made, trials, 2)
        results = {result.attempt: result for result in (made.result(), made.result())}
        assert isinstance(results[1], events.TaskFailed)
        assert "ended the process of a device 3 times" in results[1].error
        assert not made.store.knows(1, 1), "nobody waits for what it will not publish"
        assert_trained(made, trials, 0, results[0], trials.initial(0))


def test_an_error_of_a_trials_code_ends_its_run_alone() -> None:
    trials = ByteTrials(SIZES, faulty=frozenset({0, 2}))
    with bench(trials, len(SIZES), [4500, 4500]) as made:
        begin(made, trials, 4)
        results = {result.attempt: result for result in (made.result() for _ in range(4))}
        for trial in (0, 2):
            assert isinstance(results[trial], events.TaskFailed)
            assert "the user's code is wrong" in results[trial].error
            assert not made.store.knows(trial, 1)
        for trial in (1, 3):
            assert_trained(made, trials, trial, results[trial], trials.initial(trial))


def test_a_run_whose_activations_find_no_memory_is_done_again_without_them_once() -> None:
    trials = ByteTrials(SIZES, greedy=frozenset({0}), hungry=frozenset({1}))
    with bench(trials, len(SIZES), [None]) as made:
        begin(made, trials, 3)
        results = {result.attempt: result for result in (made.result() for _ in range(3))}
        for trial in (0, 2):
            assert_trained(made, trials, trial, results[trial], trials.initial(trial))
        assert isinstance(results[1], events.TaskFailed)
        assert "there is no room" in results[1].error
        assert not results[1].memory, "without a budget a finer cut would need as much"
        made.perform(train(3, 0, 2))  # its next sub-epoch keeps no activations from the outset
        assert isinstance(made.result(), events.SubEpochDone)
        kept = [spec.keeps_all for spec in made.state.added]
        assert kept.count(False) == 3, "a run of trial 0, one of trial 1, and the next of trial 0"
    with bench(trials, len(SIZES), [None], recompute=False) as made:
        begin(made, trials, 1)
        assert isinstance(made.result(), events.TaskFailed), "what was asked for stays"


def test_a_run_that_lacks_memory_without_kept_activations_says_that_a_finer_cut_may_help() -> None:
    trials = ByteTrials(SIZES, hungry=frozenset({0}), faulty=frozenset({1}))
    with bench(trials, len(SIZES), [4500]) as made:
        begin(made, trials, 2)
        results = {result.attempt: result for result in (made.result() for _ in range(2))}
        assert (results[0].memory, results[1].memory) == (True, False)
    with bench(trials, len(SIZES), [9000], recompute=False) as made:
        begin(made, trials, 1)
        assert not made.result().memory, "its activations stay, however it is cut"


def test_a_cancelled_attempt_reports_and_leaves_nothing() -> None:
    trials = ByteTrials(SIZES, seconds=0.01)
    with bench(trials, len(SIZES), [4500, 4500]) as made:
        begin(made, trials, 2)
        made.state.wait_for_tasks(1)
        made.trainer.cancel(0)
        result = made.result()
        assert result.attempt == 1
        assert_trained(made, trials, 1, result, trials.initial(1))
        assert not made.store.knows(0, 1)
        made.trainer.drop(1, 1)
        made.state.wait_until(lambda: not made.state.runs)


def test_a_run_whose_changes_find_no_room_in_dram_fails_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room_for, refused = ShardHome.room_for, 0

    def refuses(self: ShardHome, sizes: Mapping[str, int]) -> Any:
        nonlocal refused
        refused += 1
        if refused == 4:
            raise MemoryError("no slab is left")
        return room_for(self, sizes)

    monkeypatch.setattr(ShardHome, "room_for", refuses)
    trials = ByteTrials(SIZES)
    with bench(trials, len(SIZES), [4500]) as made:
        begin(made, trials, 2)
        results = [made.result(), made.result()]
        (failed,) = (each for each in results if isinstance(each, events.TaskFailed))
        (done,) = (each for each in results if isinstance(each, events.SubEpochDone))
        assert "the machine has no room" in failed.error and "no slab is left" in failed.error
        assert_trained(made, trials, done.attempt, done, trials.initial(done.attempt))
        made.perform(train(9, failed.attempt, 1))
        again = made.result()
        assert_trained(made, trials, failed.attempt, again, trials.initial(failed.attempt))


def test_a_run_that_no_device_can_hold_fails_with_the_numbers() -> None:
    trials = ByteTrials(SIZES)
    with bench(trials, len(SIZES), [4000]) as made:
        begin(made, trials, 1)
        result = made.result()
        assert isinstance(result, events.TaskFailed)
        assert "needs 4500 bytes of a device" in result.error
        assert "4000" in result.error


def test_whoever_reads_a_slot_that_was_given_up_gets_other_bytes() -> None:
    trials = ByteTrials(SIZES, stale=True)
    with bench(trials, len(SIZES), [4500], recompute=True) as made:
        begin(made, trials, 1)
        _, loss_sum = trained(trials, trials.initial(0), MICROBATCHES)
        assert made.result().loss_sum != loss_sum


def test_a_device_ends_with_an_agent_that_is_killed() -> None:
    program = """
        import multiprocessing, sys
        from tests.agent.byte_runs import ByteTrials
        from cerebro_hydra.testing.queue_worker import train
        from tests.agent.queues.queue_bench import QueueBench

        trials = ByteTrials((1000, 3000), seconds=60)
        made = QueueBench(trials, 2, [None], context=multiprocessing.get_context("forkserver"))
        made.put(0, 0, trials.initial(0))
        made.perform(train(0, 0, 1))
        print(made.devices[0].pid, flush=True)
        sys.stdin.read()
    """
    agent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert agent.stdout is not None
    device = os.pidfd_open(int(agent.stdout.readline()))
    assert not select.select([device], [], [], 0)[0], "the device is there"
    agent.send_signal(signal.SIGKILL)
    agent.wait()
    assert select.select([device], [], [], SECONDS)[0], "the device is gone"
    os.close(device)


def test_a_task_that_hangs_ends_with_its_device() -> None:
    trials = ByteTrials(SIZES, hanging=frozenset({1}))
    with bench(trials, len(SIZES), [4500, 4500], batch_seconds=0.5) as made:
        begin(made, trials, 2)
        results = {result.attempt: result for result in (made.result(), made.result())}
        assert isinstance(results[1], events.TaskFailed)
        assert "longer than batch_seconds=0.5" in results[1].error
        assert_trained(made, trials, 0, results[0], trials.initial(0))


def test_a_worker_tells_what_its_devices_did_within_their_budgets() -> None:
    trials = ByteTrials(SIZES, seconds=0.002)
    with bench(trials, len(SIZES), [4500, 4500], 9000) as made:
        begin(made, trials, 3)
        results = [made.result() for _ in range(3)]
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
        bench(ByteTrials(SIZES), len(SIZES), prepare=refused) as made,
        pytest.raises(SetupError, match="device 0 could not be started 10 times in a row"),
    ):
        made.result()
    assert "CUDA is not there" in capsys.readouterr().out
