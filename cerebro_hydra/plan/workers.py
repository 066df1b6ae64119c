"""Keeps the live agents: by worker, by incarnation and by partition, and which can take more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

from cerebro_hydra.plan.bits import mask_of
from cerebro_hydra.plan.progress import Attempt


@dataclass(slots=True)
class LiveAgent:
    """Records one live incarnation of a worker, its residents and those that come after them.

    It holds up to ``residents`` attempts at once, which share its ``devices``. More are reserved
    behind those that are ending.
    """

    worker: int
    incarnation: str
    partitions: tuple[int, ...]
    devices: int = 1
    residents: int = 1
    adopted: set[int] = field(default_factory=set)
    """Those of its partitions that are another worker's, which is not there."""
    started: list[Attempt] = field(default_factory=list)
    reserved: list[Attempt] = field(default_factory=list)
    mask: int = field(init=False)
    """The partitions as a mask."""

    def __post_init__(self) -> None:
        """Compute the mask once."""
        self.hold(self.partitions)

    def hold(self, partitions: Iterable[int]) -> None:
        """Hold these partitions from now on."""
        self.partitions = tuple(partitions)
        self.mask = mask_of(self.partitions)

    @property
    def attempts(self) -> list[Attempt]:
        """Return all its attempts in the order in which they were given."""
        return [*self.started, *self.reserved]

    @property
    def width(self) -> int:
        """Return how many of its residents can compute at once."""
        return min(self.devices, self.residents)

    @property
    def load(self) -> int:
        """Return how many attempts it has beside those that are ending."""
        load = len(self.reserved)
        for attempt in self.started:  # faster than a sum, and every event asks
            load += attempt.status != "ending"
        return load

    @property
    def open(self) -> bool:
        """Return whether it can be given a task."""
        return self.load < self.residents

    @property
    def level(self) -> int:
        """Return how many tasks each of its devices has; 0 if one has none."""
        return self.load // self.width


class Workers:
    """Indexes the live agents; whoever changes an agent's tasks calls :meth:`refresh`."""

    def __init__(self) -> None:
        self.by_worker: dict[int, LiveAgent] = {}
        self.open_levels: list[int] = [0]
        """The partitions of the agents that can be given a task, as a mask for each level."""
        self.residents = 0
        """How many attempts all live agents may hold at once."""
        self._by_incarnation: dict[str, LiveAgent] = {}
        self._by_partition: dict[int, LiveAgent] = {}

    def __iter__(self) -> Iterator[LiveAgent]:
        """Iterate over the live agents in the order of their workers."""
        return (self.by_worker[worker] for worker in sorted(self.by_worker))

    @property
    def open_partitions(self) -> int:
        """The partitions of the agents that can be given a task, as a mask."""
        return reduce(or_, self.open_levels)

    @property
    def num_held(self) -> int:
        """The number of partitions that live agents hold."""
        return len(self._by_partition)

    def get(self, incarnation: str) -> LiveAgent | None:
        """Return the live agent with this incarnation."""
        return self._by_incarnation.get(incarnation)

    def of_partition(self, partition: int) -> LiveAgent | None:
        """Return the live agent that holds this partition."""
        return self._by_partition.get(partition)

    def add(self, agent: LiveAgent) -> None:
        """Take in an agent, to which its partitions go back that others have taken over.

        Raises:
            ValueError: another live agent holds one of its partitions as its own, or it can't hold
                a task.
        """
        if agent.width < 1:
            raise ValueError(
                f"worker {agent.worker} joined with devices={agent.devices} and "
                f"residents={agent.residents}; both must be at least 1"
            )
        for partition in agent.partitions:
            if (other := self._by_partition.get(partition)) and partition in other.adopted:
                other.hold(p for p in other.partitions if p != partition)
                other.adopted.discard(partition)
                self.refresh(other)
            elif other:
                shared = sorted(set(other.partitions) & set(agent.partitions))
                raise ValueError(
                    f"worker {agent.worker} joined with partitions {shared}, which the "
                    f"live worker {other.worker} holds; give each partition to one worker"
                )
        self.by_worker[agent.worker] = self._by_incarnation[agent.incarnation] = agent
        self._by_partition.update(dict.fromkeys(agent.partitions, agent))
        self.residents += agent.residents
        self.refresh(agent)

    def adopt(self, agent: LiveAgent, partitions: tuple[int, ...]) -> None:
        """Let an agent hold partitions of other workers, which no live agent holds."""
        agent.hold((*agent.partitions, *partitions))
        agent.adopted.update(partitions)
        self._by_partition.update(dict.fromkeys(partitions, agent))
        self.refresh(agent)

    def remove(self, agent: LiveAgent) -> None:
        """Forget a lost agent."""
        del self.by_worker[agent.worker], self._by_incarnation[agent.incarnation]
        for partition in agent.partitions:
            del self._by_partition[partition]
        self.residents -= agent.residents
        self.open_levels = [partitions & ~agent.mask for partitions in self.open_levels]

    def refresh(self, agent: LiveAgent) -> None:
        """Note anew whether the agent can be given a task, and at which level."""
        load, mask = agent.load, agent.mask
        levels = self.open_levels = [partitions & ~mask for partitions in self.open_levels]
        if load < agent.residents:
            level = load // agent.width
            while level >= len(levels):
                levels.append(0)
            levels[level] |= mask

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
        assert self.residents == sum(agent.residents for agent in agents), "residents"
        for level, partitions in enumerate(self.open_levels):
            at_level = [agent for agent in agents if agent.open and agent.level == level]
            there = mask_of(partition for agent in at_level for partition in agent.partitions)
            assert partitions == there, (
                f"{partitions:b} are open at level {level} by the index, {there:b} by the agents"
            )
        levels = [agent.level for agent in agents if agent.open]
        assert max(levels, default=0) < len(self.open_levels), f"the levels are {levels}"
