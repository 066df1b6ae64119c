"""Shows a policy what it chooses from: who is free, what is ready, and how long it takes."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cerebro_hydra.plan.bits import mask_of, members
from cerebro_hydra.plan.hop.tables import LiveAgent, RunTables
from cerebro_hydra.plan.hop.trial_status import AWAY
from cerebro_hydra.plan.hop.trials import Attempt, TaskKind, replica_groups, visit_order
from cerebro_hydra.plan.messages.events import Assignment

OVERDUE_SHARE = 0.05  # of a task's time is left of one that takes longer than expected


@dataclass(frozen=True, slots=True)
class TrialView:
    """Tells what a trial does now and what is left of that; times are by the estimates' clock."""

    kind: TaskKind
    epoch: int
    epochs: int  # up to which it may train
    unassigned: tuple[int, ...]  # partitions, in the seeded order of visits
    ready: float  # when its newest state is there
    evaluated: float  # when the last of its evaluations under way ends
    suspect: bool  # an agent was lost with it, so it has one task at a time


class View:
    """Reads a run's tables; it changes nothing."""

    def __init__(self, tables: RunTables) -> None:
        self._tables = tables
        self.partitions = tables.config.partitions
        self.evaluates = tables.config.evaluate
        self.seeded_order = tables.config.order == "seeded"
        self.kept_free = 0
        """The partitions of workers that nothing is given to, as a mask."""

    # ------------------------------------------------------------------ who is free

    @property
    def open_partitions(self) -> int:
        """The partitions of the workers that can be given a task, as a mask."""
        return self._tables.workers.open_partitions & ~self.kept_free

    @property
    def open_levels(self) -> list[int]:
        """The open partitions by the tasks that each device of their worker has, as masks."""
        levels = self._tables.workers.open_levels
        return [level & ~self.kept_free for level in levels] if self.kept_free else levels

    @property
    def holds_several(self) -> bool:
        """Return whether a worker may be given several tasks at one moment."""
        workers = self._tables.workers
        return workers.residents > len(workers.by_worker)

    @property
    def num_places(self) -> int:
        """The number of tasks that all workers can hold at once, those yet to join included."""
        workers = self._tables.workers
        return workers.residents + self.partitions - workers.num_held

    @property
    def usual_width(self) -> int:
        """The number of tasks that a worker which has yet to join is expected to compute at once.

        It is that of the widest live one.
        """
        return max((agent.width for agent in self._tables.workers), default=1)

    def worker(self, partition: int) -> int | None:
        """Return the live worker that holds a partition."""
        agent = self._tables.workers.of_partition(partition)
        return None if agent is None else agent.worker

    def partitions_beside(self, partition: int) -> int:
        """Return all partitions of the live worker that holds this one, as a mask."""
        agent = self._tables.workers.of_partition(partition)
        return 0 if agent is None else agent.mask

    def assignment(self, trial: int, partition: int, *others: int) -> Assignment:
        """Return the assignment of a trial's open task to the workers of its partitions."""
        worker = self.worker(partition)
        assert worker is not None, f"no worker holds partition {partition}"
        return Assignment(trial, partition, worker, others)

    @property
    def has_replicas(self) -> bool:
        """Return whether any trial trains with replicas, or has."""
        return bool(self._tables.replicated)

    # ------------------------------------------------------------------ what is ready

    def ready(self, free: int) -> Iterator[int]:
        """Iterate over ready trials with tasks on free partitions, the most work left first."""
        tasks = self._tables.open_tasks
        return tasks.in_turn(tasks.ready_for(free) & ~self._with_replicas())

    def ready_replicas(self) -> Iterator[int]:
        """Iterate over ready trials whose next sub-epoch may have replicas, in their order."""
        tasks = self._tables.open_tasks
        return tasks.in_turn(tasks.ready & self._with_replicas())

    def _with_replicas(self) -> int:
        """Return the trials that train with replicas now, as a mask."""
        trials = self._tables.trials
        several = (n for n in self._tables.replicated if trials[n].replicas > 1)
        return mask_of(n for n in several if self._tables.phase(trials[n]) == "train")

    def replicas(self, trial: int) -> list[tuple[int, ...]]:
        """Return the sub-epochs with replicas that a trial can begin next, by their partitions.

        Each has a live worker of its own for every partition. What workers have taken over of
        others may be two partitions of a group; then one of them is visited later.
        """
        progress = self._tables.trials[trial]
        if progress.pending_visits:
            return []
        found = []
        for group in replica_groups(self._tables.config, trial, progress):
            workers: dict[int | None, int] = {}
            for partition in group:
                workers.setdefault(self.worker(partition), partition)
            if None not in workers:
                found.append(tuple(workers.values()))
        return found

    def idle(self, partitions: Iterable[int]) -> bool:
        """Return whether the workers of these partitions do nothing, and nothing is reserved."""
        agents = map(self._tables.workers.of_partition, partitions)
        return not any(agent is None or agent.attempts for agent in agents)

    def choices(self) -> dict[int, int]:
        """Return the partitions of every task that an open worker could begin, by trial."""
        free, tasks = self.open_partitions, self._tables.open_tasks
        ready = tasks.ready & ~self._with_replicas()
        found = {trial: tasks.partitions(trial) & free for trial in members(ready)}
        return {trial: partitions for trial, partitions in found.items() if partitions}

    def tasks(self, trial: int) -> int:
        """Return the partitions of a trial's open tasks, as a mask."""
        return self._tables.open_tasks.partitions(trial)

    def one_at_a_time(self, trial: int) -> bool:
        """Return whether a trial may be given only one task: it trains, or it is a suspect."""
        progress = self._tables.trials[trial]
        return bool(progress.lost_agents) or self._tables.phase(progress) == "train"

    def backlog(self, partition: int) -> float:
        """Return how much work the present epochs of all trials leave on a partition."""
        waiting = self._tables.open_tasks.trials(partition).bit_count()
        return waiting * self._tables.estimates.pace("train", partition)

    def slack(self, partition: int) -> float:
        """Return the work that a worker of several tasks may be behind others and never idle."""
        agent = self._tables.workers.of_partition(partition)
        several = agent is not None and agent.residents > 1
        return self._tables.estimates.pace("train", partition) if several else 0.0

    def share_there(self, trial: int, partition: int) -> float:
        """Return the share of a trial's newest state that the partition's worker has already."""
        agent = self._tables.workers.of_partition(partition)
        newest = self._tables.trials[trial].newest
        there = "" if agent is None else agent.incarnation
        return self._tables.holders.share(trial, newest, there)

    # ------------------------------------------------------------------ what comes later

    @property
    def tasks_expected(self) -> bool:
        """Whether a worker may be given a task yet, or waits for a trial that another one has."""
        tables = self._tables
        if not tables.search_closed or tables.candidates or tables.with_status(*AWAY):
            return True
        return any(map(self._goes_on, members(tables.in_training)))

    def _goes_on(self, number: int) -> bool:
        """Return whether more follows in a trial than the tasks that workers do now."""
        tables, trial = self._tables, self._tables.trials[number]
        if len(trial.history) + 1 < trial.budget or len(trial.pending_visits) > 1:
            return True
        evaluates = tables.config.evaluate and tables.phase(trial) == "train"
        return evaluates or bool(tables.open_tasks.partitions(number))

    @property
    def now(self) -> float:
        """The moment by the clock of the estimates."""
        return self._tables.estimates.now

    def seconds(self, kind: TaskKind, trial: int, partition: int) -> float:
        """Return the expected duration of a task."""
        return self._tables.estimates.seconds(kind, trial, partition)

    def num_live(self) -> int:
        """Return how many trials have tasks left that they may begin now or later."""
        return self._tables.in_training.bit_count()

    def live(self) -> dict[int, TrialView]:
        """Return every trial that has tasks left, by number."""
        return {trial: self._trial(trial) for trial in members(self._tables.in_training)}

    def nbytes(self, trial: int) -> int:
        """Return the size of a trial's state."""
        return self._tables.trials[trial].config.nbytes

    def free_at(self) -> dict[int, list[float]]:
        """Return when each device of each live worker will have done what it was given."""
        return {agent.worker: self._ends(agent)[1] for agent in self._tables.workers}

    def _trial(self, number: int) -> TrialView:
        trial = self._tables.trials[number]
        kind, epoch = self._tables.phase(trial), len(trial.history)
        order: Sequence[int] = range(self.partitions)
        begun = trial.evaluation_begun()
        if kind == "train":
            order = visit_order(self._tables.config, number, epoch)
            begun = trial.visited()
        return TrialView(
            kind,
            epoch,
            trial.budget,
            tuple(partition for partition in order if not begun >> partition & 1),
            max((self._end(a) for a in trial.pending_visits if a.status != "done"), default=0.0),
            max(map(self._end, trial.evaluations.values()), default=0.0),
            bool(trial.lost_agents),
        )

    def visits_of(self, trial: int, epoch: int) -> list[int]:
        """Return the partitions of a later epoch in the seeded order of the trial's visits."""
        return list(visit_order(self._tables.config, trial, epoch))

    def _end(self, attempt: Attempt) -> float:
        """Return when an attempt ends that its agent runs, or will run next."""
        return self._ends(self._tables.workers.by_worker[attempt.worker])[0][attempt.number]

    def _ends(self, agent: LiveAgent) -> tuple[dict[int, float], list[float]]:
        """Return when the agent's attempts end, and when its devices are free, the first first.

        More residents than devices share them; what is reserved comes after all of them.
        """
        shared_by = max(1.0, len(agent.started) / agent.width)
        ends: dict[int, float] = {}
        for attempt in agent.started:
            ends[attempt.number] = self._end_from(attempt, attempt.started_at, shared_by)
        free = sorted([*[self.now] * agent.width, *ends.values()])[-agent.width :]
        for attempt in agent.reserved:
            ends[attempt.number] = self._end_from(attempt, free[0], 1.0)
            heapq.heapreplace(free, ends[attempt.number])
        return ends, free

    def _end_from(self, attempt: Attempt, start: float, shared_by: float) -> float:
        expected = self.seconds(attempt.kind, attempt.trial, attempt.partition) * shared_by
        # An overdue task is not over yet, and idle workers should not wait for it.
        left = 0.0 if attempt.status == "ending" else OVERDUE_SHARE * expected
        return max(self.now + left, start + expected)
