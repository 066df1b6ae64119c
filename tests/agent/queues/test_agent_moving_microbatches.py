"""Microbatches of graph cuts go from one device's process to another's, and no bit is other."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.queue_worker import ME
from cerebro_hydra.agent.device.visits import open_trials
from cerebro_hydra.agent.visit import VisitBoundary
from cerebro_hydra.data.preparation.prepared import find_prepared
from cerebro_hydra.hopper.protocol.agent_spec import LossLimits
from cerebro_hydra.plan.messages import events
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.messages.instructions import StartSubEpoch, StateSource
from cerebro_hydra.plan.queues.events import VisitRestarted
from cerebro_hydra.plan.queues.pick import Ahead, Candidate
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.sizing.pipeline import Pipeline
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.admission.task_profiler import profile
from cerebro_hydra.shards.admission.trial_profile import TrialProfile
from cerebro_hydra.shards.engine.graph_passes import PassRecord
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.storage.run_folder import read_document
from tests.agent.lone_agent import ROWS, WIDTH, Agent, trained_many
from tests.agent.queues.queue_bench import QueueBench, bench
from tests.agent.standins import SECONDS

TRIALS, DEVICES = 3, 2


class Copies:
    """Trains copies of one trial, which is cut as a graph, on devices that hold two shards each."""

    def __init__(
        self,
        everything: bool,
        scratch: str,
        room: float = 1.0,
        schedule: str = "sequential",
        recompute: bool = True,
    ) -> None:
        folder, factory = trained_many("export", everything, WIDTH)
        self.agent = Agent(folder, Path(scratch), 0.0, factory)
        built = self.agent.builder.get(0)
        runtime = built.runtime
        batch = next(iter(self.agent.builder.windows(0, 0, 0)))[0]
        example = (batch.features, batch.labels)
        tasks = profile(factory(), runtime.cut_model, runtime.layout, example, keep=not recompute)
        assert tasks.moving is not None
        tasks = replace(tasks, moving=tuple(int(each * room) for each in tasks.moving))
        described = TrialProfile.of(runtime.recipe, runtime.cut_model, runtime.layout, tasks)
        window = built.spec.accumulate
        visit = described.training(0, window, window, recompute, Pipeline(schedule, DEVICES))
        self.budget = visit.buffered_need(2)
        self.spec = replace(
            built.spec, tasks=tasks.to_json(), recompute=recompute, schedule=schedule
        )
        document = read_document(folder)
        manifest = find_prepared(folder.store, document.fingerprint)
        own = [info.index for info in manifest.partitions]
        self.opener = partial(
            open_trials, document, manifest, own, scratch, partial(made_by, factory)
        )
        self.folder = folder

    def failing_once(self, marker: Path, fail: Callable[[], object]) -> Copies:
        """Let the first loss that finds a file take it away, and fail like this."""
        *rest, factory = self.opener.args
        self.opener = partial(open_trials, *rest, partial(made_to_fail, factory, marker, fail))
        return self

    @contextmanager
    def bench(self, budgets: Sequence[int | None], **options: Any) -> Iterator[QueueBench]:
        """Let every copy train its first sub-epoch."""
        spec = lambda trial: replace(self.spec, trial=trial)  # noqa: E731
        with bench(self.opener, budgets, spec=spec, rows=ROWS, **options) as made:
            for trial in range(TRIALS):
                made.put(trial, 0, state(self.folder))
                place, source = self.agent.order[0], StateSource(0, ME)
                made.perform(StartSubEpoch(trial, trial, 1, 0, (place,), 0, ME, source, {}))
            yield made


def state(folder: RunFolder) -> list[dict[str, np.ndarray]]:
    """Return the first state of a trial."""
    shards = folder.read_state(0, 0)["shards"]
    names = ("frozen", "trainable")
    return [{n: np.frombuffer(folder.read_object(s[n]), np.uint8) for n in names} for s in shards]


def made_by(factory: Callable[[], Recipe], params: object) -> Recipe:
    return factory()


def made_to_fail(
    make: Callable[[object], Recipe], marker: Path, fail: Callable[[], object], params: object
) -> Recipe:
    recipe = make(params)
    plain: Any = recipe.loss

    def loss(*given: Any) -> Any:
        with suppress(FileNotFoundError):
            marker.unlink()
            fail()
        return plain(*given)

    return replace(recipe, loss=loss)


def hang() -> None:
    time.sleep(10 * SECONDS)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def moved(made: QueueBench) -> int:
    """Return how many microbatches were on several devices."""
    places = defaultdict(set)
    for action in made.state.given:
        if isinstance(action, Action) and action.kind.computes:
            places[action.trial, action.microbatch].add(action.device)
    return sum(len(devices) > 1 for devices in places.values())


def longest_waiting(candidates: Sequence[Candidate], ahead: Ahead) -> Candidate:
    """Pick the visit whose last unit ended first, so that no visit stays on its device."""
    return min(candidates, key=lambda each: each.waiting_since)


def trained(copies: Copies, kill: bool = False, audits: bool = False) -> None:
    """Train the copies, whose visits take turns on the devices, and compare every digest."""
    options = {"audit_share": 0.01 if audits else 0.0, "trained": 1e6, "double_buffering": False}
    with copies.bench([copies.budget] * DEVICES, rule=longest_waiting, **options) as made:
        if kill:
            made.state.wait_for_tasks(100)
            made.devices[0].close()
        results = [made.result() for _ in range(TRIALS)]
        assert moved(made)
        assert (len(made.devices) > DEVICES) is kill
    for result in results:
        assert isinstance(result, events.SubEpochDone), result
        assert result.digests == copies.agent.known(1)
        assert (result.audit_seconds > 0) is audits


def test_a_pipeline_of_processes_of_which_one_is_killed_has_the_bits_of_one_device(
    tmp_path: Path,
) -> None:
    trained(Copies(True, str(tmp_path), schedule="gpipe", recompute=False), kill=True)


def test_microbatches_move_among_processes_and_no_bit_is_other(tmp_path: Path) -> None:
    trained(Copies(True, str(tmp_path)))


@pytest.mark.long
def test_a_process_that_is_killed_while_microbatches_move_changes_no_bit(tmp_path: Path) -> None:
    trained(Copies(True, str(tmp_path)), kill=True)


@pytest.mark.long
def test_audits_agree_where_microbatches_move(tmp_path: Path) -> None:
    trained(Copies(True, str(tmp_path), schedule="gpipe"), audits=True)


@pytest.mark.long
def test_a_batch_that_leaves_too_much_fails_its_trial_with_the_numbers(tmp_path: Path) -> None:
    copies = Copies(False, str(tmp_path), room=0.5)
    with copies.bench([None] * DEVICES) as made:
        results = [made.result() for _ in range(TRIALS)]
    assert all(isinstance(each, events.TaskFailed) for each in results), results
    told = r"ran out of memory in .*: a batch of shape \[.*\] leaves .* between its shards"
    assert re.search(told, results[0].error)


def placed(shard: int, kind: ActionKind) -> Action:
    """Return a task of the one microbatch, on the device of its shard."""
    return Action(0, shard, kind, 0, device=shard)


def test_an_update_that_comes_alone_after_its_unit_was_lost_changes_no_record() -> None:
    f, b, u = ActionKind.F, ActionKind.B, ActionKind.U
    boundary = VisitBoundary([np.zeros(0, np.uint8)], TaskGraph(2, 1, barrier=True))
    for nbytes, each in enumerate((placed(0, f), placed(1, f)), start=1):
        boundary.order([each])
        boundary.note(each, PassRecord(nbytes))
    boundary.order([placed(1, b), placed(1, u)])  # the device dies, and another loss parts the two
    for left, each in ((3, placed(1, b)), (0, placed(1, u))):
        boundary.order([each])
        boundary.note(each, PassRecord(left))
    record = boundary.order([placed(0, b)]).record
    assert record is not None and record.nbytes == 3, "what B of shard 1 has left"


@pytest.mark.long
def test_of_the_devices_of_a_pipeline_only_the_one_that_hangs_is_ended(tmp_path: Path) -> None:
    marker = tmp_path / "hang"
    copies = Copies(True, str(tmp_path), schedule="gpipe").failing_once(marker, hang)
    marker.touch()
    with copies.bench([copies.budget] * DEVICES, batch_seconds=1.0) as made:
        results = [made.result() for _ in range(TRIALS)]
        assert len(made.devices) == DEVICES + 1
        assert made.devices[0].ending == "", "the first device has the first shards, and no loss"
    failed = [each for each in results if isinstance(each, events.TaskFailed)]
    assert len(failed) == 1 and "longer than batch_seconds=1" in failed[0].error
    for result in results:
        if result not in failed:
            assert result.digests == copies.agent.known(1)


@pytest.mark.long
def test_a_device_of_a_pipeline_that_stops_for_longer_than_its_batches_may_take_fails_no_trial(
    tmp_path: Path,
) -> None:
    """Its microbatch goes on with the task that was lost, and has the time of that again."""
    marker = tmp_path / "stop"
    copies = Copies(True, str(tmp_path), schedule="gpipe").failing_once(marker, stop)
    marker.touch()
    limits = LossLimits(heartbeat_interval=0.1, missed_heartbeats=70)  # five batches may take 5 s
    with copies.bench([copies.budget] * DEVICES, batch_seconds=1.0, limits=limits) as made:
        results = [made.result() for _ in range(TRIALS)]
        assert len(made.devices) == DEVICES + 1
        assert not any(isinstance(each, VisitRestarted) for each in made.state.given)
    for result in results:
        assert isinstance(result, events.SubEpochDone), result
        assert result.digests == copies.agent.known(1)
