"""Simulates the devices of one worker in a run: the residents' shard tasks on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cerebro_hydra.plan.actions import Action
from cerebro_hydra.plan.move_rates import FREE_MOVES, MoveRates
from cerebro_hydra.plan.progress import TaskKind
from cerebro_hydra.plan.run_progress import RunSpec
from cerebro_hydra.plan.schedules.candidate import Rule
from cerebro_hydra.plan.schedules.sharp import sharp
from cerebro_hydra.plan.simulate_worker import WorkerSimulation
from cerebro_hydra.plan.worker_events import RunAdded, RunCancelled, RunEnded, RunReleased


@dataclass(frozen=True, slots=True)
class SimulatedDevices:
    """Describes the devices of a worker and what its residents do there.

    Args:
        budgets: the bytes of each device; None means no limit.
        residents: how many sub-epochs and evaluations the worker holds at once.
        run: describes a task by its kind, trial and partition, and by the number that its run has.
        host_budget: the bytes of DRAM; None means no limit.
        rates: how long moves take.
        rule: picks a run for a free device.
    """

    budgets: tuple[int | None, ...]
    residents: int
    run: Callable[[TaskKind, int, int, int], RunSpec]
    host_budget: int | None = None
    rates: MoveRates = FREE_MOVES
    rule: Rule = sharp


@dataclass(frozen=True, slots=True)
class EndedRun:
    """Tells how long a run took, and how long devices computed for it."""

    run: int
    seconds: float
    device_seconds: float


class DeviceClock:
    """Takes the steps of one worker's devices; a run has the number of its attempt."""

    def __init__(self, devices: SimulatedDevices) -> None:
        self._devices = devices
        self._specs: dict[int, RunSpec] = {}
        self._began: dict[int, float] = {}
        self._computed: dict[int, float] = {}
        self._announced: set[int] = set()
        self._counted = 0  # of the actions that were done
        self._simulation = WorkerSimulation(
            [], devices.budgets, devices.host_budget, devices.rule, self._seconds
        )

    @property
    def next_moment(self) -> float:
        """Return when the next thing happens; infinity if nothing is left to happen."""
        return self._simulation.next_moment

    def start(self, now: float, kind: TaskKind, trial: int, partition: int, run: int) -> None:
        """Let the worker accept a task."""
        self._specs[run] = self._devices.run(kind, trial, partition, run)
        self._began[run], self._computed[run] = now, 0.0
        self._simulation.add(now, RunAdded(self._specs[run]))

    def cancel(self, now: float, run: int) -> None:
        """Let the worker give up a task that has not ended."""
        self._simulation.add(now, RunCancelled(run))

    def release(self, now: float, run: int) -> None:
        """Let the worker forget what an ended task has made."""
        self._simulation.add(now, RunReleased(run))

    def step(self) -> tuple[list[int], list[EndedRun]]:
        """Let the next moment happen; return the runs that begin to end, and those that ended.

        Raises:
            RuntimeError: the devices can't hold a run.
        """
        now = self.next_moment
        answers = self._simulation.step()
        done = self._simulation.timeline.done
        for each in done[self._counted :]:
            if each.action.kind.computes:
                self._computed[each.action.trial] += each.end - each.begin
        self._counted = len(done)
        ending = [
            number
            for number, run in self._simulation.state.runs.items()
            if run.status == "open" and run.spec.graph.training and run.is_in_last_window
        ]
        ending = [number for number in ending if number not in self._announced]
        self._announced.update(ending)
        ended = []
        for answer in answers:
            if isinstance(answer, RunEnded) and answer.outcome == "refused":
                raise RuntimeError(f"run {answer.run} was refused: {answer.reason}")
            if isinstance(answer, RunEnded) and answer.outcome == "finished":
                began, computed = self._began[answer.run], self._computed[answer.run]
                ended.append(EndedRun(answer.run, now - began, computed))
        return ending, ended

    def _seconds(self, action: Action) -> float:
        shard = self._specs[action.trial].shards[action.shard]
        return self._devices.rates.seconds(action, shard)
