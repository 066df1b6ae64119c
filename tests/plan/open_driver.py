"""Drives a search that is open: trials come and go while others train."""

from __future__ import annotations

from dataclasses import replace

from cerebro_hydra.plan.messages import events as ev
from cerebro_hydra.plan.messages import instructions as ins
from cerebro_hydra.plan.messages.config import HopConfig, TrialConfig
from cerebro_hydra.plan.policy.policy import Scheduler
from tests.plan.driver import done


def trial(number: int, **more) -> TrialConfig:
    shards = ((f"f{number}", f"t{number}"), (f"g{number}", f"u{number}"))
    return TrialConfig(number, 1.0, 100, shards, **more)


def fork_of(parent: int, number: int) -> TrialConfig:
    return replace(trial(number), initial_digests=trial(parent).initial_digests)


class OpenDriver:
    """A search that is open, with workers "a", "b", ... on partitions 0, 1, ..."""

    def __init__(self, partitions: int = 2, **more) -> None:
        self.scheduler = Scheduler(
            HopConfig(partitions, **{"evaluate": False, "checkpoint": "end", **more})
        )
        self.state = self.scheduler.state
        for worker in range(partitions):
            self(ev.WorkerJoined(worker, "abcdef"[worker], (worker,)))

    def __call__(self, event: ev.Event) -> list[ins.Instruction]:
        told = [each for _, given in self.scheduler.handle(event) for each in given]
        self.state.validate()
        return told

    @property
    def running(self) -> dict[str, int]:
        agents = self.state.workers
        return {a.incarnation: each.number for a in agents for each in a.started}

    def train(self) -> list[ins.Instruction]:
        """Let the task that runs end."""
        ((worker, attempt),) = self.running.items()
        task = self.state.attempts[attempt]
        self(ev.StateReceived(task.trial, task.source.visit, worker))
        return self(done(attempt, worker))

    def held(self, number: int) -> list[tuple[int, str]]:
        """Return (visit, place) of every copy of the trial's states."""
        holders = self.state.holders
        return [(v, place) for v in holders.visits(number) for place in holders.where(number, v)]
