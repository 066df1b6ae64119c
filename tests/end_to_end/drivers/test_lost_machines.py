"""Machines that fall silent, stay away or can't be reached end no run, and cost no bit."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra.agent.device.watchdog import DRIVER_LOST
from cerebro_hydra.hopper.backend import Factory, OnExit
from cerebro_hydra.hopper.protocol.agent_spec import AgentSpec, AgentStart, LossLimits
from cerebro_hydra.observe import AgentStarted, Decision, Record
from cerebro_hydra.plan.messages.events import TransferFailed, WorkerGivenUp, WorkerLost
from cerebro_hydra.plan.messages.instructions import Checkpoint, Commit
from cerebro_hydra.storage import LocalStore
from cerebro_hydra.testing.local_backend import LocalBackend, LocalLauncher
from cerebro_hydra.tune import GridSearch, hp_choice
from tests.end_to_end.test_runs import classes
from tests.end_to_end.trials.lethal_models import deaf
from tests.end_to_end.trials.test_lethal_trials import assert_equal_bits

pytestmark = pytest.mark.slow

# An agent takes some seconds to start on a busy machine.
IMPATIENT = LossLimits(join_timeout=12.0, heartbeat_interval=0.1, missed_heartbeats=20)


class Tape:
    """Keeps every decision, and acts on those that `act` looks for."""

    def __init__(self) -> None:
        self.decisions: list[Decision] = []
        self.pids: dict[int, list[int]] = {}  # of each worker's agents, by worker
        self.commits = 0

    def on_record(self, record: Record) -> None:
        if isinstance(record, AgentStarted):
            self.pids.setdefault(record.worker, []).append(record.pid)
        if isinstance(record, Decision):
            self.decisions.append(record)
            self.commits += len(self.of(Commit, [record]))
            self.act()

    def act(self) -> None:
        pass

    def of(self, kind: type, decisions: list[Decision] | None = None) -> list[Any]:
        seen = self.decisions if decisions is None else decisions
        each = (each for decision in seen for each in (decision.event, *decision.instructions))
        return [one for one in each if isinstance(one, kind)]


def run(path: Path, backend: LocalBackend, tape: Tape, epochs: int = 1) -> Any:
    path.mkdir(exist_ok=True)
    marker = path / "deaf"
    space = {"lr": [0.01, 0.001], "driver": [os.getpid()], "marker": [str(marker)]}
    if not isinstance(tape, Deaf):
        marker.touch()
    return GridSearch(
        backend=backend,
        store=LocalStore(str(path)),
        estimator_gen_fn=deaf,
        search_space={name: hp_choice(values) for name, values in space.items()},
        order="seeded",
        num_epochs=epochs,
        evaluation_metric="accuracy",
        verbose=0,
        observers=[tape],
    ).fit(classes())


class Deaf(Tape):
    """Watches a run in which the first agent serves no shards."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(tmp_path_factory.mktemp("undisturbed"), LocalBackend(2), Tape())


def check(result: Any, undisturbed: Any) -> None:
    assert [trial.status for trial in result.trials] == ["finished"] * 2
    for trial in range(2):
        assert_equal_bits(result, undisturbed, trial)


@pytest.mark.long
def test_trials_leave_an_agent_whose_shards_nobody_can_fetch_by_way_of_the_store(
    tmp_path: Path, undisturbed: Any
) -> None:
    tape = Deaf()
    check(run(tmp_path, LocalBackend(2), tape), undisturbed)
    failed = tape.of(TransferFailed)
    assert len(failed) >= 3 and "refused" in failed[0].error.lower()
    assert tape.of(Checkpoint)[0].incarnation != failed[0].incarnation
    assert not tape.of(WorkerLost)


class LonelyLauncher(LocalLauncher):
    """Starts nothing in place of worker 1 once it is lost: its machine is gone."""

    def _keep_up(
        self, worker: int, spec: AgentSpec, scratch: str, factory: Factory, on_exit: OnExit
    ) -> None:
        if worker != 1:
            return super()._keep_up(worker, spec, scratch, factory, on_exit)
        process = self._start_process(AgentStart(worker, 0, scratch), spec, factory)
        process.join()
        self._stopping.wait()
        return self._leave(None, on_exit)


class Killer(Tape):
    """Kills worker 1 after the first sub-epoch."""

    killed = False

    def act(self) -> None:
        if self.commits and 1 in self.pids and not self.killed:
            self.killed = True
            os.kill(self.pids[1][0], signal.SIGKILL)


class BackendOf(LocalBackend):
    """Starts agents by a launcher of the given class."""

    def __init__(self, kind: type[LocalLauncher]) -> None:
        self._kind = kind
        super().__init__(2)

    def launcher(self) -> LocalLauncher:
        self.agents = self._kind(2, limits=IMPATIENT)
        return self.agents


def test_a_run_with_one_worker_left_goes_on(tmp_path: Path, undisturbed: Any) -> None:
    tape = Killer()
    check(run(tmp_path, BackendOf(LonelyLauncher), tape), undisturbed)
    assert [each.worker for each in tape.of(WorkerGivenUp)] == [1]
    assert len(tape.pids[1]) == 1


class FrozenMachine(LocalLauncher):
    """Can't end worker 0's first agent, as if its machine were frozen, and starts another one."""

    def start(self, spec: AgentSpec, factory: Factory, on_exit: OnExit) -> None:
        self.told = spec, factory
        super().start(spec, factory, on_exit)

    def replace(self, worker: int, start: int) -> None:
        if (worker, start) != (0, 0):
            return super().replace(worker, start)
        self.frozen = self._processes[0]
        assert self._scratch is not None
        self._start_process(AgentStart(0, 1, self._scratch.name), *self.told)
        return None


class Freezer(Tape):
    """Freezes worker 0 in the first epoch, and lets it go on when its successor has trained."""

    def __init__(self) -> None:
        super().__init__()
        self.launcher: Any = None
        self.frozen_at: int | None = None
        self.woken = threading.Event()

    def act(self) -> None:
        if self.frozen_at is None and self.commits and 0 in self.pids:
            self.frozen_at = self.commits
            os.kill(self.pids[0][0], signal.SIGSTOP)
        done = self.of(Commit)
        if not self.woken.is_set() and len(self.pids.get(0, ())) == 2 and len(done) > 3:
            self.woken.set()
            self.launcher()._stopping.set()  # the thread of the frozen one starts nothing more
            os.kill(self.pids[0][0], signal.SIGCONT)


@pytest.mark.long
def test_a_frozen_agent_is_replaced_and_ends_itself_when_it_wakes_up(
    tmp_path: Path, undisturbed: Any
) -> None:
    tape, backend = Freezer(), BackendOf(FrozenMachine)
    tape.launcher = lambda: backend.agents
    calm = run(tmp_path / "calm", LocalBackend(2), Tape(), epochs=4)
    check(run(tmp_path / "frozen", backend, tape, epochs=4), calm)
    assert tape.woken.is_set()
    (lost,) = tape.of(WorkerLost)
    assert "no heartbeat for 2.0 s" in lost.reason
    assert backend.agents.frozen.exitcode == DRIVER_LOST
