"""Who has joined: agents by incarnation, with the addresses where they serve shards."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.plan.events import WorkerJoined


@dataclass(frozen=True)
class Member:
    """One live agent as it introduced itself."""

    worker: int
    incarnation: str
    uri: str
    host: str
    partitions: tuple[int, ...]
    task: int | None = None

    @classmethod
    def of_hello(cls, hello: Mapping[str, Any], num_workers: int) -> Member:
        """Return the agent that introduces itself.

        Raises:
            ConfigurationError: the hello lacks a field, or one of them can't be used.
        """
        try:
            member = cls(
                worker=int(hello["worker"]),
                incarnation=str(hello["incarnation"]),
                uri=str(hello["uri"]),
                host=str(hello["host"]),
                partitions=tuple(int(p) for p in hello["partitions"]),
                task=hello.get("task"),
            )
        except KeyError as error:
            raise ConfigurationError(
                f"the agent's hello has no {error}; run the same version on driver and workers"
            ) from error
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"the agent's hello can't be used: {error}") from error
        if not 0 <= member.worker < num_workers:
            raise ConfigurationError(f"worker {member.worker} is not one of 0..{num_workers - 1}")
        return member

    @property
    def joined(self) -> WorkerJoined:
        return WorkerJoined(self.worker, self.incarnation, self.partitions)


class Roster:
    """Every agent that ever joined; addresses of the dead stay, for messages under way."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._members: dict[str, Member] = {}
        self._live: dict[int, str] = {}
        self._losses: dict[int, int] = {}

    def admit(self, member: Member) -> None:
        """Take in an agent; a newer incarnation of a worker replaces the older one."""
        self._members[member.incarnation] = member
        self._live[member.worker] = member.incarnation

    def leave(self, incarnation: str) -> None:
        """Note that an agent is gone, unless a newer one has its place already."""
        member = self._members.get(incarnation)
        if member is not None and self._live.get(member.worker) == incarnation:
            del self._live[member.worker]
            self._losses[member.worker] = self.losses(member.worker) + 1

    def worked(self, incarnation: str) -> None:
        """Note that an agent finished a task."""
        member = self._members.get(incarnation)
        if member is not None:
            self._losses.pop(member.worker, None)

    def losses(self, worker: int) -> int:
        """How many agents of a worker were lost, one after the other, without finishing a task."""
        return self._losses.get(worker, 0)

    def uri(self, incarnation: str | None) -> str | None:
        """Where an agent serves shards; None for the store."""
        return None if incarnation is None else self._members[incarnation].uri

    def member(self, incarnation: str) -> Member:
        return self._members[incarnation]

    @property
    def live(self) -> Collection[str]:
        return self._live.values()

    @property
    def missing(self) -> list[int]:
        """Workers without a live agent."""
        return [worker for worker in range(self.num_workers) if worker not in self._live]
