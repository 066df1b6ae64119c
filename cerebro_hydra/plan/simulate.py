"""A run on a virtual clock: drives the real state machine with imagined agents.

Used by tests, and later by the planner: predicted and real timelines come from one machine.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cerebro_hydra.plan import events as ev
from cerebro_hydra.plan import instructions as ins
from cerebro_hydra.plan.hop_config import HopConfig
from cerebro_hydra.plan.hop_state import HopState
from cerebro_hydra.plan.visits import Kind

Seconds = Callable[[Kind, int, int], float]  # of a task: kind, trial, partition


@dataclass(frozen=True, slots=True)
class Loss:
    """A worker dies at ``at`` seconds and is back, empty, ``back_after`` seconds later."""

    at: float
    worker: int
    back_after: float


@dataclass(frozen=True, slots=True)
class TaskSpan:
    """One bar of the timeline; ``end`` is when it ended or was cut short."""

    worker: int
    trial: int
    kind: Kind
    partition: int
    start: float
    end: float


@dataclass(slots=True)
class SimulatedTimeline:
    """What a simulated run did, and when."""

    makespan: float = 0.0
    spans: list[TaskSpan] = field(default_factory=list)
    records: list[tuple[ev.Event, list[ins.Instruction]]] = field(default_factory=list)
    visit_logs: list[list[tuple[int, int]]] = field(default_factory=list)


_Task = ins.StartSubEpoch | ins.Evaluate
_State = tuple[str, int, int]  # incarnation, trial, visit


class Simulation:
    """One run of ``config`` on workers that hold these partitions.

    ``hop_seconds`` is what any fetch of a state takes; a sub-epoch says that it is ending when
    the share ``ending`` of its time is left. ``measure`` is what a trial's epoch measures, by every
    metric. ``after`` is called with the state after every event.
    """

    def __init__(
        self,
        config: HopConfig,
        workers: Sequence[tuple[int, ...]],
        seconds: Seconds,
        *,
        hop_seconds: float = 0.0,
        ending: float = 0.1,
        losses: Sequence[Loss] = (),
        measure: Callable[[int, int], float] = lambda trial, epoch: 1.0,
        after: Callable[[HopState], None] = lambda state: None,
    ) -> None:
        self.state = HopState(config)
        self.now = 0.0
        self.timeline = SimulatedTimeline()
        self._workers = workers
        self._seconds, self._hop_seconds, self._ending = seconds, hop_seconds, ending
        self._measure, self._after = measure, after
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._live: dict[int, str] = {}  # worker -> incarnation
        self._born = 0
        self._tasks: dict[int, _Task] = {}
        self._starts: dict[int, float] = {}  # attempts that compute
        self._held: set[_State] = set()
        self._fetches: dict[_State, str | None] = {}  # under way, and where from
        for worker in range(len(workers)):
            self._at(0.0, lambda worker=worker: self._join(worker))  # type: ignore[misc]
        for loss in losses:
            self._at(loss.at, lambda loss=loss: self._lose(loss))  # type: ignore[misc]

    def run(self) -> SimulatedTimeline:
        """Run to the end.

        Raises:
            RuntimeError: nothing is left to happen and the run is not over.
        """
        while self._heap and not self.state.finished:
            self.now, _, happen = heapq.heappop(self._heap)
            happen()
        if not self.state.finished:
            raise RuntimeError(f"the run stands still at {self.now:.3f} s")
        self.timeline.makespan = self.now
        self.timeline.visit_logs = [
            [(visit.epoch, visit.partition) for visit in trial.visits]
            for trial in self.state.trials
        ]
        return self.timeline

    # ------------------------------------------------------------------ what happens

    def _at(self, moment: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (moment, self._order, happen))
        self._order += 1

    def _tell(self, event: ev.Event) -> None:
        instructions = self.state.handle(event)
        self.timeline.records.append((event, instructions))
        self._after(self.state)
        for instruction in instructions:
            self._do(instruction)

    def _join(self, worker: int) -> None:
        self._live[worker] = f"worker-{worker}-{self._born}"
        self._born += 1
        self._tell(ev.WorkerJoined(worker, self._live[worker], self._workers[worker]))

    def _lose(self, loss: Loss) -> None:
        incarnation = self._live.pop(loss.worker, None)
        if incarnation is None:
            return
        for task in [t for t in self._tasks.values() if t.incarnation == incarnation]:
            self._finish(task.attempt)
        self._held = {state for state in self._held if state[0] != incarnation}
        self._fetches = {
            state: source
            for state, source in self._fetches.items()
            if incarnation not in (state[0], source)
        }
        self._tell(ev.WorkerLost(incarnation, "killed"))
        self._at(self.now + loss.back_after, lambda: self._join(loss.worker))

    def _do(self, instruction: ins.Instruction) -> None:
        match instruction:
            case ins.StartSubEpoch() | ins.Evaluate():
                self._tasks[instruction.attempt] = instruction
                self._fetch(instruction.incarnation, instruction.trial, instruction.source)
                self._begin(instruction)
            case ins.FetchShards():
                self._fetch(instruction.incarnation, instruction.trial, instruction.source)
            case ins.Cancel():
                self._finish(instruction.attempt)
            case ins.Drop():
                state = (instruction.incarnation, instruction.trial, instruction.visit)
                self._held.discard(state)
                self._fetches.pop(state, None)
            case ins.MergeMetrics():
                names = self.state.config.trials[instruction.trial].custom_metrics
                value = self._measure(instruction.trial, instruction.epoch)
                measured = ev.MetricsMerged(
                    instruction.attempt,
                    instruction.trial,
                    instruction.epoch,
                    dict.fromkeys(names, value),
                )
                self._at(self.now, lambda: self._tell(measured))
            case ins.Checkpoint():
                done = ev.Checkpointed(
                    instruction.trial, instruction.visit, instruction.incarnation
                )
                self._at(self.now, lambda: self._tell(done))

    # ------------------------------------------------------------------ the agents

    def _fetch(self, incarnation: str, trial: int, source: ins.StateSource) -> None:
        state = (incarnation, trial, source.visit)
        if state in self._held or state in self._fetches:
            return
        self._fetches[state] = source.incarnation
        self._pull(state)

    def _pull(self, state: _State) -> None:
        """Start the transfer if the owner has published the state."""
        owner = self._fetches.get(state)
        if owner is None or (owner, *state[1:]) in self._held:
            self._at(self.now + self._hop_seconds, lambda: self._arrive(state))

    def _arrive(self, state: _State) -> None:
        if state not in self._fetches:
            return
        del self._fetches[state]
        self._held.add(state)
        incarnation, trial, visit = state
        self._tell(ev.StateReceived(trial, visit, incarnation))
        for task in list(self._tasks.values()):
            if (task.incarnation, task.trial, task.source.visit) == state:
                self._begin(task)

    def _begin(self, task: _Task) -> None:
        state = (task.incarnation, task.trial, task.source.visit)
        if state not in self._held or task.attempt in self._starts:
            return
        self._starts[task.attempt] = self.now
        train = isinstance(task, ins.StartSubEpoch)
        seconds = self._seconds("train" if train else "evaluate", task.trial, task.partition)
        if train:
            self._at(self.now + seconds * (1 - self._ending), lambda: self._end_soon(task))
        self._at(self.now + seconds, lambda: self._complete(task, seconds))

    def _end_soon(self, task: _Task) -> None:
        if task.attempt in self._tasks:
            self._tell(ev.SubEpochEnding(task.attempt, task.incarnation))

    def _complete(self, task: _Task, seconds: float) -> None:
        if task.attempt not in self._tasks:
            return
        self._finish(task.attempt)
        value = self._measure(task.trial, task.epoch)
        if isinstance(task, ins.Evaluate):
            sums = {"loss": (value, 1)}
            hop = ev.Hop(0, 0, 0.0)
            names = self.state.config.trials[task.trial].custom_metrics
            states = dict.fromkeys(names)
            self._tell(
                ev.EvaluationDone(task.attempt, task.incarnation, sums, seconds, hop, states)
            )
            return
        made = (task.incarnation, task.trial, task.visit)
        self._held.add(made)
        digests = tuple(
            (frozen, f"{task.trial}/{task.visit}/{shard}")
            for shard, (frozen, _) in enumerate(
                self.state.config.trials[task.trial].initial_digests
            )
        )
        nbytes = self.state.config.trials[task.trial].nbytes
        hop = ev.Hop(nbytes, 0, self._hop_seconds)
        self._tell(
            ev.SubEpochDone(task.attempt, task.incarnation, 1, value, digests, nbytes, seconds, hop)
        )
        for state in [s for s, o in self._fetches.items() if (o, *s[1:]) == made]:
            self._pull(state)

    def _finish(self, attempt: int) -> None:
        task = self._tasks.pop(attempt, None)
        start = self._starts.pop(attempt, None)
        if task is not None and start is not None:
            kind: Kind = "train" if isinstance(task, ins.StartSubEpoch) else "evaluate"
            self.timeline.spans.append(
                TaskSpan(task.worker, task.trial, kind, task.partition, start, self.now)
            )
