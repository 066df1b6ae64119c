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
from cerebro_hydra.plan.messages.events import TransferFailed, WorkerGivenUp, WorkerLost
from cerebro_hydra.plan.messages.instructions import Checkpoint
from cerebro_hydra.testing.local_backend import LocalBackend, LocalLauncher
from tests.end_to_end.runs import Tape, assert_equal_bits, classes, grid
from tests.end_to_end.trials.lethal_models import deaf
from tests.processes import assert_gone, children_of, devices_of

pytestmark = [pytest.mark.slow, pytest.mark.long]

# An agent takes some seconds to start on a busy machine.
IMPATIENT = LossLimits(join_timeout=12.0, heartbeat_interval=0.1, missed_heartbeats=20)


def run(
    path: Path, backend: LocalBackend, tape: Tape, epochs: int = 1, is_deaf: bool = False
) -> Any:
    """Train two trials; the first agent serves no shards if it is to be deaf."""
    path.mkdir(exist_ok=True)
    marker = path / "deaf"
    space = {"lr": [0.01, 0.001], "driver": [os.getpid()], "marker": [str(marker)]}
    if not is_deaf:
        marker.touch()
    options = {"order": "seeded", "num_epochs": epochs, "observers": [tape]}
    return grid(backend, path, deaf, space, **options).fit(classes())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(tmp_path_factory.mktemp("undisturbed"), LocalBackend(2), Tape())


def check(result: Any, undisturbed: Any) -> None:
    for trial in range(2):
        assert_equal_bits(result, undisturbed, trial)


def test_trials_leave_an_agent_whose_shards_nobody_can_fetch_by_way_of_the_store(
    tmp_path: Path, undisturbed: Any
) -> None:
    tape = Tape()
    check(run(tmp_path, LocalBackend(2), tape, is_deaf=True), undisturbed)
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
        process, _ = self._start_process(AgentStart(worker, 0, scratch), spec, factory)
        process.join()
        self._stopping.wait()
        return self._leave(None, on_exit)


class BackendOf(LocalBackend):
    """Starts agents by a launcher of the given class."""

    def __init__(self, kind: type[LocalLauncher], **resources: Any) -> None:
        self._kind = kind
        super().__init__(2, **resources)

    def launcher(self) -> LocalLauncher:
        self.agents = self._kind(2, limits=IMPATIENT, resources=self.resources)
        return self.agents


def test_a_run_with_one_worker_left_goes_on(tmp_path: Path, undisturbed: Any) -> None:
    killed: list[int] = []

    def kill(tape: Tape) -> None:
        if tape.commits and 1 in tape.pids and not killed:
            killed.append(tape.pids[1][0])
            os.kill(killed[0], signal.SIGKILL)

    tape = Tape(kill)
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


def test_a_frozen_agent_is_replaced_and_ends_itself_when_it_wakes_up(
    tmp_path: Path, undisturbed: Any
) -> None:
    """It goes on when its successor has trained."""
    backend, happened = BackendOf(FrozenMachine), []

    def freeze(tape: Tape) -> None:
        pids = tape.pids.get(0, [])
        if not happened and tape.commits and pids:
            happened.append("frozen")
            os.kill(pids[0], signal.SIGSTOP)
        if happened == ["frozen"] and len(pids) == 2 and tape.commits > 3:
            happened.append("woken")
            backend.agents._stopping.set()  # the thread of the frozen one starts nothing more
            os.kill(pids[0], signal.SIGCONT)

    tape = Tape(freeze)
    calm = run(tmp_path / "calm", LocalBackend(2), Tape(), epochs=4)
    check(run(tmp_path / "frozen", backend, tape, epochs=4), calm)
    assert happened == ["frozen", "woken"]
    (lost,) = tape.of(WorkerLost)
    assert "no heartbeat for 2.0 s" in lost.reason
    assert backend.agents.frozen.exitcode == DRIVER_LOST


class SilentMachine(LocalLauncher):
    """Can't end worker 0's first agent, and starts another one only once that has ended itself."""

    def replace(self, worker: int, start: int) -> None:
        if (worker, start) != (0, 0):
            super().replace(worker, start)
        else:
            self.silent = self._processes[0]


def test_a_machine_that_is_silent_for_most_of_join_timeout_costs_no_worker_and_no_bit(
    tmp_path: Path, undisturbed: Any
) -> None:
    """Its agent and both devices stop for four fifths of it, as for 240 s of the default's 300."""
    backend = BackendOf(SilentMachine, devices_per_worker=2, device_memory=24_000)
    stopped: list[int] = []

    def wake_up() -> None:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)

    def silence(tape: Tape) -> None:
        if tape.commits and 0 in tape.pids and not stopped:
            agent = tape.pids[0][0]
            devices = devices_of(agent)
            if len(devices) < 2:
                return  # they still start
            stopped.extend([agent, *children_of(agent), *devices])
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            threading.Timer(0.8 * IMPATIENT.join_timeout, wake_up).start()

    tape = Tape(silence)
    check(run(tmp_path, backend, tape), undisturbed)
    first, *_ = tape.of(WorkerLost)  # on a machine with much else to do others may be silent, too
    assert "no heartbeat for 2.0 s" in first.reason
    assert not tape.of(WorkerGivenUp)
    assert len(tape.pids[0]) >= 2
    assert backend.agents.silent.exitcode == DRIVER_LOST
    assert len(stopped) >= 5, "an agent, its guard, a server of forks and two devices"
    assert_gone(stopped)
