"""Hands the partitions of workers that were given up to those that are there."""

from __future__ import annotations

from cerebro_hydra.plan.hop.tables import LiveAgent, RunTables
from cerebro_hydra.plan.messages.events import PartitionsAdopted, WorkerGivenUp
from cerebro_hydra.plan.messages.instructions import AdoptPartitions, Instructions


class Adoptions:
    """Notes which workers were given up, and who takes their partitions over.

    A worker that comes back has its own partitions back at once. If the one that took them over is
    lost, another one takes them.
    """

    def __init__(self, tables: RunTables) -> None:
        self._tables = tables
        self._given_up: dict[int, tuple[int, ...]] = {}  # the partitions of each, by worker
        self._promised: dict[int, str] = {}  # who decodes a partition, by partition

    def give_up(self, event: WorkerGivenUp) -> Instructions:
        """Let the others take over the partitions of a worker, unless it is there again."""
        if event.worker in self._tables.workers.by_worker:
            return []
        self._given_up[event.worker] = event.partitions
        return self._hand_out()

    def join(self, worker: int) -> Instructions:
        """Leave its own partitions to a worker that is there, and ask it for those of others."""
        for partition in self._given_up.pop(worker, ()):
            self._promised.pop(partition, None)
        return self._hand_out()

    def lose(self, incarnation: str) -> Instructions:
        """Let others take over what a lost agent had taken over, or was about to."""
        self._promised = {p: name for p, name in self._promised.items() if name != incarnation}
        return self._hand_out()

    def adopt(self, event: PartitionsAdopted) -> None:
        """Note that an agent has decoded partitions of other workers."""
        agent = self._tables.workers.get(event.incarnation)
        mine = [p for p in event.partitions if self._promised.get(p) == event.incarnation]
        for partition in mine:
            del self._promised[partition]
        if agent is not None:
            free = (p for p in mine if self._tables.workers.of_partition(p) is None)
            self._tables.workers.adopt(agent, tuple(free))

    def _hand_out(self) -> Instructions:
        told: Instructions = []
        workers = self._tables.workers
        for partition in (p for partitions in self._given_up.values() for p in partitions):
            taken = partition in self._promised or workers.of_partition(partition)
            if not taken and (agent := self._least_burdened()) is not None:
                self._promised[partition] = agent.incarnation
                told.append(AdoptPartitions(agent.worker, agent.incarnation, (partition,)))
        return told

    def _least_burdened(self) -> LiveAgent | None:
        """Return the agent that has, or was promised, the fewest partitions."""
        promised = list(self._promised.values())
        return min(
            self._tables.workers,
            key=lambda agent: len(agent.partitions) + promised.count(agent.incarnation),
            default=None,
        )
