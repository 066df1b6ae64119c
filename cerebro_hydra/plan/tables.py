"""Holds everything that is known about a run, with the indexes over it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from random import Random

from cerebro_hydra.plan.bits import mask_of, members
from cerebro_hydra.plan.estimates import Estimates
from cerebro_hydra.plan.events import TrialProposed
from cerebro_hydra.plan.holders import Holders
from cerebro_hydra.plan.hop_config import HopConfig, TrialConfig
from cerebro_hydra.plan.instructions import Instruction
from cerebro_hydra.plan.open_tasks import OpenTasks, Turn
from cerebro_hydra.plan.progress import (
    OVER,
    Attempt,
    TaskKind,
    TrialProgress,
    TrialStatus,
    next_partition,
)
from cerebro_hydra.plan.seeds import seed_of
from cerebro_hydra.plan.trial_end import outcome
from cerebro_hydra.plan.visit_log import VisitLog
from cerebro_hydra.plan.workers import Workers


class RunTables:
    """Holds the tables of one run; ``plan/hop_state.py`` and ``plan/attempts.py`` change them."""

    def __init__(self, config: HopConfig) -> None:
        self.config = config
        self.trials: dict[int, TrialProgress] = {}
        self.attempts: dict[int, Attempt] = {}  # live ones, by number
        self.workers = Workers()
        self.holders = Holders()
        self.estimates = Estimates(config.partitions)
        self.open_tasks = OpenTasks(config.partitions)
        self.forks: dict[int, list[int]] = {}  # by parent, those whose states are not stored yet
        self.candidates: dict[int, TrialProposed] = {}  # neither admitted nor refused yet
        self.refused: set[int] = set()  # the candidates that can't be trials
        self.recutting: set[int] = set()  # the trials of a ``CutFiner`` without an answer
        self.search_closed = False  # whether nothing is proposed and no budget extended any more
        self.events = 0
        self.instructions: list[Instruction] = []  # what the present event leads to
        self.in_training = 0
        """The trials that may go on now, as a mask."""
        self._next_attempt = 0
        self._statuses: dict[TrialStatus, int] = {}  # the trials of each status, as masks
        self._all_partitions = mask_of(range(config.partitions))

    @property
    def next_attempt(self) -> int:
        """Return the number that the next attempt will have."""
        return self._next_attempt

    def take_number(self) -> int:
        """Return a number that no attempt has had."""
        self._next_attempt += 1
        return self._next_attempt - 1

    def log(self, trial: int, line: str) -> None:
        """Add a line to a trial's story."""
        self.trials[trial].tell(f"[{self.events}] {line}")

    # ------------------------------------------------------------------ trials

    def add_trial(self, config: TrialConfig, budget: int) -> TrialProgress:
        """Take in a trial that waits for its first task."""
        tie_break = Random(seed_of(self.config.seed, "turn", config.trial)).random()
        trial = TrialProgress(config, budget, tie_break, VisitLog(self.config.partitions))
        self.trials[config.trial] = trial
        self._statuses["waiting"] = self.with_status("waiting") | 1 << config.trial
        self.estimates.add(config.trial, config.cost)
        return trial

    def with_status(self, *statuses: TrialStatus) -> int:
        """Return the trials with one of these statuses, as a mask."""
        found = 0
        for status in statuses:
            found |= self._statuses.get(status, 0)
        return found

    def set_status(self, number: int, status: TrialStatus) -> None:
        """Change the status of a trial."""
        trial, bit = self.trials[number], 1 << number
        self._statuses[trial.status] ^= bit
        self._statuses[status] = self._statuses.get(status, 0) | bit
        trial.status = status

    @property
    def all_over(self) -> bool:
        """Return whether every trial has ended, and no candidate may become one."""
        ended = self.with_status(*OVER).bit_count() == len(self.trials)
        return ended and not self.candidates

    def may_train(self, trial: TrialProgress) -> bool:
        """Return whether the trial may go on now.

        It has budget left, is not at its end, and its newest state can be fetched from somewhere.
        """
        return (
            trial.status in ("waiting", "running")
            and trial.awaits is None
            and not trial.restarting
            and trial.lacking is None
            and len(trial.history) < trial.budget
            and outcome(self.config, trial, self.search_closed) is None
            and any(self.sources(trial))
        )

    # ------------------------------------------------------------------ open tasks

    def phase(self, trial: TrialProgress) -> TaskKind:
        """Return which kind of task the trial does now."""
        return "evaluate" if trial.epoch_trained(self.config.partitions) else "train"

    def work_left(self, number: int) -> float:
        """Return the work that is not assigned yet, in units of cost.

        The evaluations of an epoch count once, because they can run side by side.
        """
        trial, partitions = self.trials[number], self.config.partitions
        later_epochs = trial.budget - len(trial.history) - 1
        sub_epochs = later_epochs * partitions
        if self.phase(trial) == "train":
            sub_epochs += partitions - trial.visited().bit_count()
        work = sub_epochs * self.estimates.cost("train", number)
        if self.config.evaluate:
            work += (later_epochs + 1) * self.estimates.cost("evaluate", number)
        return work

    def open_partitions(self, number: int) -> int:
        """Return the partitions of the tasks of the present phase that no attempt has, as a mask.

        When the visits of an epoch are in seeded order, only the next one is among them.
        """
        trial = self.trials[number]
        if not self.may_train(trial):
            return 0
        if self.phase(trial) == "evaluate":
            return self._all_partitions & ~trial.evaluation_begun()
        visited = trial.visited()
        if self.config.order == "seeded" and visited != self._all_partitions:
            return 1 << next_partition(self.config, number, trial)
        return self._all_partitions & ~visited

    def sources(self, trial: TrialProgress) -> Iterator[str]:
        """Yield the places from which the state that the trial's next task needs can be fetched.

        A sub-epoch that is ending is one such place: its agent publishes the state soon.
        """
        visit = trial.newest
        places: Iterable[str] = self.holders.where(trial.config.trial, visit)
        if trial.pending_visits:
            visit, places = visit + 1, (trial.pending_visits[0].incarnation,)
        return (place for place in places if trial.is_source(visit, place))

    def turn(self, number: int) -> Turn | None:
        """Return the turn of a trial that can begin a task now, else None."""
        trial = self.trials[number]
        if not self.may_train(trial):
            return None
        if trial.lost_agents and (trial.pending_visits or trial.evaluations):
            return None  # one agent at a time, while it may be lethal
        pending = trial.pending_visits
        if len(pending) > 1 or (pending and pending[0].status != "ending"):
            return None
        return Turn(-self.work_left(number), trial.tie_break, number)

    def refresh(self, number: int) -> None:
        """Bring the index of open tasks up to date with a trial that has changed."""
        self.open_tasks.put(number, self.open_partitions(number), self.turn(number))
        if self.may_train(self.trials[number]):
            self.in_training |= 1 << number
        else:
            self.in_training &= ~(1 << number)

    def check_indexes(self) -> None:
        """Raise AssertionError if an index is not what it is recomputed as."""
        self.workers.check()
        saving = ((n, *trial.saving) for n, trial in self.trials.items() if trial.saving)
        self.holders.check(saving)
        self.open_tasks.check({n: (self.open_partitions(n), self.turn(n)) for n in self.trials})
        for status, mask in self._statuses.items():
            there = {n for n, trial in self.trials.items() if trial.status == status}
            assert set(members(mask)) == there, f"the trials {there} are {status}"
        training = mask_of(n for n, trial in self.trials.items() if self.may_train(trial))
        assert self.in_training == training, f"{training:b} may train, not {self.in_training:b}"
        for number, trial in self.trials.items():
            trial.evaluation.check()
            assert (trial.recutting is not None) == (number in self.recutting), f"trial {number}"
            assert trial.evaluating == mask_of(trial.evaluations), f"trial {number}: {trial}"
            begun = len(trial.history) * self.config.partitions
            assert trial.trained == mask_of(trial.visits.partitions_from(begun)), (
                f"trial {number} has trained on other partitions than {trial.trained:b}"
            )
