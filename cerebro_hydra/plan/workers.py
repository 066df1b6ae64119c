"""Keeps the live agents: by worker, by incarnation and by partition, and which of them are open."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from cerebro_hydra.plan.bits import mask_of
from cerebro_hydra.plan.progress import Attempt


@dataclass(slots=True)
class LiveAgent:
    """Records one live incarnation of a worker, the task it runs and the task it will run next."""

    worker: int
    incarnation: str
    partitions: tuple[int, ...]
    adopted: set[int] = field(default_factory=set)
    """Those of its partitions that are another worker's, which is not there."""
    running: Attempt | None = None
    reserved: Attempt | None = None

    @property
    def open(self) -> bool:
        """Return whether it can be given a task: idle or ending one, with nothing reserved."""
        return self.reserved is None and (self.running is None or self.running.status == "ending")


class Workers:
    """Indexes the live agents; whoever changes an agent's tasks calls :meth:`refresh`."""

    def __init__(self) -> None:
        self.by_worker: dict[int, LiveAgent] = {}
        self.open_partitions = 0
        """The partitions of the agents that can be given a task, as a mask."""
        self._by_incarnation: dict[str, LiveAgent] = {}
        self._by_partition: dict[int, LiveAgent] = {}

    def __iter__(self) -> Iterator[LiveAgent]:
        """Iterate over the live agents in the order of their workers."""
        return (self.by_worker[worker] for worker in sorted(self.by_worker))

    def get(self, incarnation: str) -> LiveAgent | None:
        """Return the live agent with this incarnation."""
        return self._by_incarnation.get(incarnation)

    def of_partition(self, partition: int) -> LiveAgent | None:
        """Return the live agent that holds this partition."""
        return self._by_partition.get(partition)

    def add(self, agent: LiveAgent) -> None:
        """Take in an agent, to which its partitions go back that others have taken over.

        Raises:
            ValueError: another live agent holds one of its partitions as its own.
        """
        for partition in agent.partitions:
            if (other := self._by_partition.get(partition)) and partition in other.adopted:
                other.partitions = tuple(p for p in other.partitions if p != partition)
                other.adopted.discard(partition)
            elif other:
                shared = sorted(set(other.partitions) & set(agent.partitions))
                raise ValueError(
                    f"worker {agent.worker} joined with partitions {shared}, which the "
                    f"live worker {other.worker} holds; give each partition to one worker"
                )
        self.by_worker[agent.worker] = self._by_incarnation[agent.incarnation] = agent
        self._by_partition.update(dict.fromkeys(agent.partitions, agent))
        self.refresh(agent)

    def adopt(self, agent: LiveAgent, partitions: tuple[int, ...]) -> None:
        """Let an agent hold partitions of other workers, which no live agent holds."""
        agent.partitions += partitions
        agent.adopted.update(partitions)
        self._by_partition.update(dict.fromkeys(partitions, agent))
        self.refresh(agent)

    def remove(self, agent: LiveAgent) -> None:
        """Forget a lost agent."""
        del self.by_worker[agent.worker], self._by_incarnation[agent.incarnation]
        for partition in agent.partitions:
            del self._by_partition[partition]
        self.open_partitions &= ~mask_of(agent.partitions)

    def refresh(self, agent: LiveAgent) -> None:
        """Note anew whether the agent can be given a task."""
        if agent.open:
            self.open_partitions |= mask_of(agent.partitions)
        else:
            self.open_partitions &= ~mask_of(agent.partitions)

    def check(self) -> None:
        """Raise AssertionError if an index is not what the agents give."""
        agents = self.by_worker.values()
        by_incarnation = {agent.incarnation: agent for agent in agents}
        assert self._by_incarnation == by_incarnation, "an agent is not found by its incarnation"
        held = {partition: agent for agent in agents for partition in agent.partitions}
        assert self._by_partition == held, "an agent is not found by its partition"
        assert len(held) == sum(len(agent.partitions) for agent in agents), (
            "a partition has two workers"
        )
        is_open = mask_of(
            partition for agent in agents if agent.open for partition in agent.partitions
        )
        assert self.open_partitions == is_open, (
            f"{self.open_partitions:b} are open by the index, {is_open:b} by the agents"
        )
