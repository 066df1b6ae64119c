"""A driver of a hop state, which hands in one event at a time, of a closed or an open search."""

from __future__ import annotations

from dataclasses import replace

from cerebro_hydra.plan.hop.trials import visit_order
from cerebro_hydra.plan.messages import events as ev
from cerebro_hydra.plan.messages.config import HopConfig, TrialConfig
from cerebro_hydra.plan.messages.instructions import Instruction
from cerebro_hydra.plan.policy.policy import Scheduler
from tests.plan.closed_search import ClosedSearch


def config(
    trials: int = 1,
    partitions: int = 2,
    epochs: int = 1,
    custom: tuple[str, ...] = (),
    patience: int | None = None,
    shards: int = 1,
    keep: str | None = None,
    finer: bool = False,
    **more,
) -> ClosedSearch:
    each = (
        TrialConfig(
            t,
            1.0,
            100,
            ((f"f{t}", f"t{t}"),) * shards,
            custom,
            patience,
            keep or ("last" if patience is None else "best"),
            finer,
        )
        for t in range(trials)
    )
    return ClosedSearch(HopConfig(partitions, **more), tuple(each), epochs)


def done(attempt: int, worker: str, loss: float = 1.0) -> ev.SubEpochDone:
    digests = (("f0", f"t/{attempt}"),)
    return ev.SubEpochDone(attempt, worker, 4, loss, digests, 100, 1.0, ev.Hop(0, 0, 0.0))


class Driver:
    """A state with workers "a", "b", ... on partitions 0, 1, ...; validates after every event.

    Args:
        closed: whether all trials are added at once, each with its whole budget.
        joins: whether the workers are there from the beginning.
    """

    def __init__(self, closed: bool = True, joins: bool = True, **more) -> None:
        search = config(**more)
        self.scheduler = Scheduler(search.config)
        self.state = self.scheduler.state
        self.told: list[Instruction] = []
        for event in search.events() if closed else ():
            self(event)
        for worker in range(self.state.config.partitions if joins else 0):
            self(ev.WorkerJoined(worker, "abcdef"[worker], (worker,)))

    def __call__(self, event: ev.Event) -> list[Instruction]:
        self.last = [each for _, told in self.scheduler.handle(event) for each in told]
        self.state.validate()
        self.told += self.last
        return self.last

    def train(self, worker: str, loss: float = 1.0) -> list[Instruction]:
        """Let the task of a worker end, of whose end was told before."""
        attempt = self._receive(worker)
        self(ev.SubEpochEnding(attempt, worker))
        return self(done(attempt, worker, loss))

    def train_one(self) -> list[Instruction]:
        """Let the only task that runs end, of whose end nobody was told."""
        worker = self.only
        return self(done(self._receive(worker), worker))

    def evaluate_one(self, loss: float = 1.0) -> list[Instruction]:
        """Let the only task that runs, an evaluation, end."""
        worker, hop = self.only, ev.Hop(0, 0, 0.0)
        return self(
            ev.EvaluationDone(self._receive(worker), worker, {"loss": (loss, 1)}, 1.0, hop, {})
        )

    def _receive(self, worker: str) -> int:
        begun = self.state.attempts[self.running[worker]]
        self(ev.StateReceived(begun.trial, begun.source.state, worker))
        return begun.number

    @property
    def only(self) -> str:
        """The only worker on which a task runs."""
        (worker,) = self.running
        return worker

    def epoch(self, workers: str, loss: float) -> None:
        """Let trial 0 train an epoch on these workers, in this order."""
        for worker in workers:
            self.train(worker, loss)

    @property
    def running(self) -> dict[str, int]:
        """The number of the running attempt by incarnation."""
        agents = self.state.workers
        return {a.incarnation: each.number for a in agents for each in a.started}

    def held(self, number: int) -> list[tuple[int, str]]:
        """Return (state, place) of every copy of the trial's states."""
        holders = self.state.holders
        return [(v, place) for v in holders.states(number) for place in holders.where(number, v)]


def open_search(partitions: int = 2, **more) -> Driver:
    """Return the driver of a search that is open, whose trials come by events."""
    given = {"evaluate": False, "checkpoint": "end", **more}
    return Driver(closed=False, partitions=partitions, **given)


def trial(number: int, **more) -> TrialConfig:
    """Return a trial of two shards."""
    shards = ((f"f{number}", f"t{number}"), (f"g{number}", f"u{number}"))
    return TrialConfig(number, 1.0, 100, shards, **more)


def fork_of(parent: int, number: int) -> TrialConfig:
    return replace(trial(number), initial_digests=trial(parent).initial_digests)


def of(kind: type, instructions: list[Instruction]) -> list:
    return [each for each in instructions if isinstance(each, kind)]


def in_order(*partitions: int, epochs: int = 1) -> int:
    """Return a seed for which the visits of trial 0 begin with these partitions."""
    each = max(partitions) + 1
    for seed in range(10_000):
        run = config(partitions=each, epochs=epochs, order="seeded", seed=seed)
        visits = [p for epoch in range(epochs) for p in visit_order(run.config, 0, epoch)]
        if visits[: len(partitions)] == list(partitions):
            return seed
    raise AssertionError(f"no seed visits {partitions}")
