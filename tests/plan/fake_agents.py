"""Agents that train by writing their visit log; a state's content is the log that made it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf, nan
from random import Random

from cerebro_hydra.plan.messages import events as ev
from cerebro_hydra.plan.messages import instructions as ins
from cerebro_hydra.plan.seeds import seed_of

Content = tuple[tuple[int, int], ...]  # (epoch, partition) of every visit


class Laid(tuple):
    """A state's visit log, as a number of shards holds it."""

    shards: int


def laid(log: Iterable[tuple[int, int]], shards: int) -> Laid:
    content = Laid(log)
    content.shards = shards
    return content


SCORES = (nan, inf, 0.0, 0.25, 0.5, 0.75, 1.0)


def score(trial: int, epoch: int, seed: int) -> float:
    """Return the value that decides which epoch is best, whatever the order of its visits."""
    return Random(seed_of(seed, "score", trial, epoch)).choice(SCORES)


def val_loss(content: Content, partition: int) -> tuple[float, int]:
    """Return an evaluation's sum and rows, which depend on the state and on the partition."""
    return (sum((i + 1) * (10 * e + p) for i, (e, p) in enumerate(content)) + partition / 7, 3)


@dataclass
class FakeAgent:
    worker: int
    incarnation: str
    alive: bool = True
    inbox: deque[ins.Instruction] = field(default_factory=deque)
    outbox: deque[ev.Event] = field(default_factory=deque)
    held: dict[tuple[int, int], Content] = field(default_factory=dict)
    made_by: dict[tuple[int, int], int] = field(default_factory=dict)
    tasks: dict[int, ins.StartSubEpoch | ins.Evaluate] = field(default_factory=dict)
    ending: set[int] = field(default_factory=set)
    fetches: dict[tuple[int, int], ins.StateSource] = field(default_factory=dict)
    saves: deque[tuple[int, int]] = field(default_factory=deque)
    began: int | None = None  # the attempt that it has begun or computed last
    residents: int = 1
    half_saved: set[tuple[int, int]] = field(default_factory=set)  # objects are there, no document

    def obey(self, instruction: ins.Instruction) -> None:
        match instruction:
            case ins.StartSubEpoch() | ins.Evaluate():
                doing = [t for t in self.tasks.values()]
                full = f"{self.incarnation} has {doing} and gets {instruction}"
                assert len(doing) < self.residents, full
                if isinstance(instruction, ins.StartSubEpoch):
                    assert instruction.trial not in {task.trial for task in doing}, full
                self.tasks[instruction.attempt] = instruction
                self.began = instruction.attempt
                self.want(instruction.trial, instruction.source)
            case ins.FetchShards():
                self.want(instruction.trial, instruction.source)
            case ins.Cancel():
                self.tasks.pop(instruction.attempt, None)
                for key in [k for k, a in self.made_by.items() if a == instruction.attempt]:
                    self.held.pop(key, None)
            case ins.Drop():
                self.held.pop((instruction.trial, instruction.state), None)
                self.fetches.pop((instruction.trial, instruction.state), None)
            case ins.AdoptPartitions():
                self.outbox.append(ev.PartitionsAdopted(self.incarnation, instruction.partitions))
            case ins.Checkpoint():
                self.saves.append((instruction.trial, instruction.state))

    def want(self, trial: int, source: ins.StateSource) -> None:
        key = (trial, source.state)
        if key not in self.held:
            assert self.fetches.setdefault(key, source) == source, f"{key} has two sources"

    def receive(self, key: tuple[int, int], content: Content) -> None:
        del self.fetches[key]
        self.held[key] = content
        self.outbox.append(ev.StateReceived(*key, self.incarnation))

    def fail_fetch(self, key: tuple[int, int]) -> None:
        del self.fetches[key]
        for task in list(self.tasks.values()):
            if (task.trial, task.source.state) == key:
                del self.tasks[task.attempt]
                self.outbox.append(
                    ev.TransferFailed(task.attempt, self.incarnation, "owner is gone")
                )
