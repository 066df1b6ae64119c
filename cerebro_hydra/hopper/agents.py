"""Keeps the agents that have joined, and decides how long missing workers are waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from cerebro_hydra.errors import SetupError
from cerebro_hydra.hopper.journal import RunWriter
from cerebro_hydra.hopper.protocol.agent_spec import AgentInfo, AgentSpec
from cerebro_hydra.observe.records import WorkersMissing
from cerebro_hydra.plan.messages.events import WorkerGivenUp
from cerebro_hydra.storage.run_document import NUMERIC_FILE, WORKERS_FILE, TrialSpec

TELL_SECONDS = 30.0
"""Seconds between two records of what is waited for."""


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
    def agents(self) -> Sequence[AgentInfo]:
        """Return the live agents."""
        return [self._agents[incarnation] for incarnation in self._live.values()]

    @property
    def live(self) -> Collection[str]:
        """Return the incarnations of the live agents."""
        return self._live.values()

    @property
    def missing(self) -> list[int]:
        """Return the workers without a live agent."""
        return [worker for worker in range(self.num_workers) if worker not in self._live]


def check_compilers(specs: Iterable[TrialSpec], agents: Iterable[AgentInfo]) -> None:
    """Check that agents can compile, if a trial needs it.

    Raises:
        SetupError: one can't.
    """
    compiling = next((spec.trial_id for spec in specs if spec.compiles), None)
    if compiling is None:
        return
    for agent in agents:
        if agent.numeric.get("compiler") is None:
            raise SetupError(
                f"{compiling} has compile=True, and worker {agent.worker} on {agent.host} can't "
                "compile: install g++ and the headers of Python there, unset what disables "
                "torch.compile, or leave compile out"
            )


class Absences:
    """Watches which workers are missing; `due` says what follows from it, `seconds` when to ask.

    Args:
        roster: who is there.
        spec: the run, which has each worker's partitions.
        tell: is given a record every half a minute, while workers are waited for.
        clock: seconds from any start.
    """

    def __init__(
        self,
        roster: Roster,
        spec: AgentSpec,
        tell: Callable[[WorkersMissing], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._roster, self._spec, self._tell, self._clock = roster, spec, tell, clock
        self._limit = spec.limits.join_timeout
        self._since: dict[int, float] = {}
        self._told = clock()
        self._given_up: set[int] = set()

    @property
    def seconds(self) -> float | None:
        """Return how long nothing is due at least; None if no worker is waited for."""
        waited = self._waited()
        if not waited:
            return None
        told = self._clock() - self._told
        longest = max(waited.values()) if self._roster.live else min(waited.values())
        return max(0.0, min(self._limit - longest, TELL_SECONDS - told))

    def due(self) -> list[WorkerGivenUp]:
        """Return the workers to give up now, and tell of those that are waited for.

        Raises:
            SetupError: no agent has been there for as long as workers are waited for.
        """
        waited = self._waited()
        late = {worker for worker, seconds in waited.items() if seconds >= self._limit}
        left = [worker for worker in waited if worker not in late]
        if left and self._clock() - self._told >= TELL_SECONDS:
            self._told = self._clock()
            longest = max(waited[worker] for worker in left)
            self._tell(WorkersMissing(tuple(left), longest, self._limit))
        if late and not self._roster.live:
            if not left:
                raise self._nobody()
            return []  # the others may still come, and can take over then
        why = f"it did not come within {self._limit:.0f} s"
        return [self._give_up(worker, why) for worker in sorted(late)]

    def refuse(self, agent: AgentInfo, losses: int, reason: str) -> WorkerGivenUp:
        """Give up a worker whose agents are lost again and again; no more of them may come.

        Raises:
            SetupError: no other worker is left.
        """
        why = (
            f"worker {agent.worker} on {agent.host} lost {losses} agents in a row, none of which "
            f"began a task, the last one because: {reason}; look at that machine's memory and at "
            "the executors' logs"
        )
        self._roster.refused.add(agent.worker)
        if len(self._roster.refused) == self._roster.num_workers:
            raise SetupError(why)
        return self._give_up(agent.worker, why)

    def _give_up(self, worker: int, why: str) -> WorkerGivenUp:
        self._given_up.add(worker)
        return WorkerGivenUp(worker, tuple(self._spec.partitions(worker)), why)

    def _waited(self) -> dict[int, float]:
        """Return for how long each worker has been missing that is not given up.

        While nobody is there to take partitions over, none counts as given up.
        """
        now, missing = self._clock(), self._roster.missing
        self._given_up &= set(missing)
        if not self._since:
            self._told = now
        self._since = {worker: self._since.get(worker, now) for worker in missing}
        ignored = self._given_up if self._roster.live else ()
        return {w: now - since for w, since in self._since.items() if w not in ignored}

    def _nobody(self) -> SetupError:
        missing = self._roster.missing
        return SetupError(
            f"none of {len(missing)} workers came within join_timeout={self._limit:.0f} s: "
            f"{missing}; run `cerebro-hydra doctor`, which says what keeps them away: the network, "
            "too few free slots, or agents that fail at start (see the executors' logs)"
        )


class WorkerDocuments:
    """Holds two documents of a run, by worker; both are written anew for each agent.

    Args:
        numeric: what the bits of each worker depended on before the run was resumed.
    """

    def __init__(self, writer: RunWriter, numeric: Mapping[str, Any]) -> None:
        self._writer = writer
        self._numeric = dict(numeric)
        self._places: dict[str, Any] = {}

    def note(self, agent: AgentInfo) -> None:
        """Write what an agent is that has come."""
        worker = str(agent.worker)
        self._numeric[worker] = agent.numeric
        self._places[worker] = {"host": agent.host, "pid": agent.pid, "gpus": list(agent.gpus)}
        self._writer.write_document(NUMERIC_FILE, self._numeric)
        self._writer.write_document(WORKERS_FILE, self._places)
