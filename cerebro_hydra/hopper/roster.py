"""Keeps the agents that have joined: all by incarnation, and the live one of each worker."""

from __future__ import annotations

from collections.abc import Collection

from cerebro_hydra.hopper.agent_spec import AgentInfo


class Roster:
    """Keeps every agent that ever joined; messages under way may need addresses of the dead."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._agents: dict[str, AgentInfo] = {}
        self._live: dict[int, str] = {}
        self._losses: dict[int, int] = {}
        self._attempts: dict[str, int] = {}
        self.refused: set[int] = set()
        """Workers that lost too many agents in a row and get no more."""

    def admit(self, agent: AgentInfo) -> None:
        """Take in an agent; a newer incarnation of a worker replaces the older one."""
        self._agents[agent.incarnation] = agent
        self._live[agent.worker] = agent.incarnation

    def leave(self, incarnation: str) -> AgentInfo:
        """Note that an agent is gone, unless a newer one has its place already; return it."""
        agent = self._agents[incarnation]
        if self._live.get(agent.worker) == incarnation:
            del self._live[agent.worker]
            self._losses[agent.worker] = self.losses(agent.worker) + 1
        return agent

    def began(self, incarnation: str, attempt: int) -> None:
        """Note that an agent began a task: if it is lost now, this speaks against the trial."""
        self._attempts[incarnation] = attempt
        self._losses.pop(self._agents[incarnation].worker, None)

    def attempt(self, incarnation: str) -> int | None:
        """Return the task that an agent began last."""
        return self._attempts.get(incarnation)

    def losses(self, worker: int) -> int:
        """Return how many agents of a worker were lost since one began a task."""
        return self._losses.get(worker, 0)

    def uri(self, incarnation: str | None) -> str | None:
        """Return where an agent serves shards; None for the store."""
        return None if incarnation is None else self._agents[incarnation].uri

    def agent(self, incarnation: str) -> AgentInfo:
        """Return an agent, also one that is gone."""
        return self._agents[incarnation]

    @property
    def live(self) -> Collection[str]:
        """Return the incarnations of the live agents."""
        return self._live.values()

    @property
    def missing(self) -> list[int]:
        """Return the workers without a live agent."""
        return [worker for worker in range(self.num_workers) if worker not in self._live]
