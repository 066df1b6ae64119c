"""Measures plans on delay devices: queues, processes and memory are real, tasks and moves wait."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks.placement.every import plain_plan
from benchmarks.placement.plan import JointPlan, UncutTrial, planned_visits
from benchmarks.placement.run import clock, sharp_with_equal_cuts, trials_of, worker
from benchmarks.placement.search import chosen_plan, seconds_of_plan
from benchmarks.queue_worker import DelayMemory, DelayRun, DelaySpec, QueueWorker
from cerebro_hydra.agent.device.messages import VisitOrder
from cerebro_hydra.agent.device.process import DeviceProcess, DeviceSettings, fork_server
from cerebro_hydra.agent.memory.pool import Slabs
from cerebro_hydra.plan.messages.actions import Action
from cerebro_hydra.plan.queues.ledger import StateName
from cerebro_hydra.plan.queues.pick import PICKS
from cerebro_hydra.plan.queues.visit_spec import ShardSpec, VisitSpec
from cerebro_hydra.plan.queues.worker import WorkerState
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.sizing.bill import WorkerMemory
from cerebro_hydra.shards.admission.task_profiler import TrialProfile
from cerebro_hydra.shards.engine.layout import HostSegments, ShardBytes
from cerebro_hydra.storage.run_document import TrialSpec

TRIALS, DEVICES, MICROBATCHES, ROWS = 12, 4, 8, 4
TASK = 0.25  # seconds of a microbatch of the shortest trial
ROOM, PROMOTION = 0.9, 0.5
CASES = 3  # random models
PLANNING = 4.0  # seconds of CPU


@dataclass(frozen=True)
class PlannedTrials:
    """Opens visits whose tasks wait as long as a plan expects; makes the opener of a process."""

    visits: Mapping[int, VisitSpec]

    def __call__(self) -> PlannedTrials:
        return self

    def forget(self, trial: int) -> None:
        """Keep nothing of a trial."""

    def profile(self, trial: TrialSpec) -> TrialProfile:
        shards = self.visits[trial.trial].shards
        return TrialProfile(tuple(ShardBytes(0, s.state, 0, False) for s in shards), (), False)

    def open(self, order: VisitOrder) -> DelayRun:
        shards = self.visits[order.task.trial].shards

        def seconds(task: Action) -> float:
            return shards[task.shard].seconds(task.kind)

        return DelayRun(order, seconds, ROWS)

    def initial(self, trial: int) -> list[HostSegments]:
        return [
            {"frozen": np.zeros(0, np.uint8), "trainable": np.zeros(shard.state, np.uint8)}
            for shard in self.visits[trial].shards
        ]


def measure(plan: JointPlan, trials: Sequence[UncutTrial], memory: WorkerMemory) -> float:
    """Return the seconds from the first task that is given to the last report."""
    visits = dict(enumerate(planned_visits(plan, trials)))
    warm_up = ShardSpec(1, forward=0.002, backward=0.002)
    warm = {
        len(trials) + device: VisitSpec(
            0, TaskGraph(1, MICROBATCHES, MICROBATCHES), (warm_up,),
            by_modules=True, places=(device,),
        )
        for device in range(DEVICES)
    }  # fmt: skip
    opener = PlannedTrials(visits | warm)
    settings = DeviceSettings(
        fork_server(), opener, True, partial(DelayMemory, memory.rates.device)
    )

    def start(slabs: Slabs, on_answer: Any, on_gone: Any) -> DeviceProcess:
        return DeviceProcess(settings, slabs, print, on_answer, on_gone)

    state = WorkerState(memory.devices, None, PICKS[plan.pick])
    made = QueueWorker(
        start, state, memory.devices[0], rows=MICROBATCHES * ROWS,
        spec_of=lambda trial: DelaySpec(
            trial, (None,) * len(opener.visits[trial].shards), ROWS, MICROBATCHES, None
        ),
    )  # fmt: skip

    def visit_spec(number: int, task: Any, profile: TrialProfile) -> VisitSpec:
        source = StateName(task.trial, task.source.state)
        return replace(opener.visits[task.trial], visit=number, source=source)

    made.planner.visit_spec = visit_spec  # type: ignore[method-assign]
    try:
        for trial in opener.visits:
            made.put(trial, 0, opener.initial(trial))
        made.train_all(sorted(warm))
        return made.train_all(plan.order)
    finally:
        made.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only see that it runs: short tasks")
    quick = parser.parse_args().quick
    print(
        "| models | SHARP, equal cuts: seconds | than simulated | no plan | than simulated "
        "| plan | than simulated | **SHARP over the plan** | load |"
    )
    print("| --- " * 9 + "|", flush=True)
    for seed in range(1 if quick else CASES):
        task = 0.01 if quick else TASK
        memory = worker(trials_of(TRIALS, (8, 16), True, seed), DEVICES, ROOM, PROMOTION)
        memory = replace(memory, rates=replace(memory.rates, device=memory.rates.device / task))
        trials = [_scaled(trial, task) for trial in trials_of(TRIALS, (8, 16), True, seed)]
        chosen = chosen_plan(trials, memory, seed, clock(0.5 if quick else PLANNING)).plan
        cells, found = [], []
        for plan in (sharp_with_equal_cuts(trials, memory), plain_plan(trials, memory), chosen):
            seconds = measure(plan, trials, memory)
            found.append(seconds)
            expected = seconds_of_plan(plan, trials, memory)
            cells += [f"{seconds:.1f}", f"{100 * (seconds / expected - 1):+.1f} %"]
        load = f"{os.getloadavg()[0]:.1f}"
        cells += [f"**{found[0] / found[2]:.2f}**", load]
        print(f"| {seed} | {' | '.join(cells)} |", flush=True)


def _scaled(trial: UncutTrial, seconds: float) -> UncutTrial:
    """Return the trial with shorter tasks, of which each microbatch stays on one device."""

    def scaled(units: Sequence[ShardSpec]) -> tuple[ShardSpec, ...]:
        return tuple(
            replace(u, forward=u.forward * seconds, backward=u.backward * seconds) for u in units
        )

    return replace(trial, recomputed=scaled(trial.recomputed), kept=scaled(trial.kept), moves=False)


if __name__ == "__main__":
    main()
