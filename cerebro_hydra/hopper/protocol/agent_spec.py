"""Holds what an agent is told before it starts: by the coordinator, and by its launcher.

It is told for how long a run waits for agents that are silent or missing, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

from cerebro_hydra.data.manifest import Manifest
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.hopper.protocol.resources import DEFAULT_RESOURCES, WorkerResources
from cerebro_hydra.storage import RunFolder, Store
from cerebro_hydra.storage.run_document import RunDocument
from cerebro_hydra.wire.credentials import Credentials

_KINDS = {"incarnation": str, "start": int, "uri": str, "host": str, "pid": int, "numeric": dict}
"""The fields of a hello, and their types."""


@dataclass(frozen=True)
class LossLimits:
    """Holds what `SparkBackend` says of the losses that a run outlasts.

    Args:
        join_timeout: seconds that a worker may be missing before the others take over its
            partitions; without any other the run ends.
        heartbeat_interval: seconds between two heartbeats, which driver and agents send each other.
        missed_heartbeats: how many in a row may be missed; then an agent is given up and replaced.
        max_failures: how many agents of one worker may be lost in a row of which none began a task;
            then that worker gets no more.

    Raises:
        ConfigurationError: a number can't be used.
    """

    join_timeout: float = 300.0
    heartbeat_interval: float = 0.5
    missed_heartbeats: int = 20
    max_failures: int = 8

    def __post_init__(self) -> None:
        """Refuse numbers that no run can work with."""
        for name in ("join_timeout", "heartbeat_interval"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (number and 0 < value < inf):
                raise ConfigurationError(f"{name} is {value!r}; it is a number of seconds above 0")
        for name in ("missed_heartbeats", "max_failures"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigurationError(f"{name} is {value!r}; it is a whole number from 1")

    @property
    def silence_seconds(self) -> float:
        """Return how long an agent may be silent."""
        return self.heartbeat_interval * self.missed_heartbeats


DEFAULT_LIMITS = LossLimits()


@dataclass(frozen=True)
class AgentSpec:
    """Describes one run to each of its agents; the launcher brings it to every start.

    Args:
        control: where the coordinator listens.
        credentials: by which agents and coordinator know each other.
        num_workers: how many agents the run has.
        document: the run, with its store; what a trial is comes with its first instruction.
        manifest: the run's data.
        limits: how long the two ends of a connection may be silent.
    """

    control: str
    credentials: Credentials
    num_workers: int
    document: RunDocument
    manifest: Manifest
    limits: LossLimits = DEFAULT_LIMITS

    def partitions(self, worker: int) -> range:
        """Return the partitions that are one worker's own."""
        return range(worker, self.manifest.num_partitions, self.num_workers)

    def open_folder(self) -> RunFolder:
        """Open the run's folder."""
        return RunFolder(Store.from_dict(dict(self.document.store)), self.document.run_id)

    def to_json(self) -> dict[str, Any]:
        """Return a dict that `json` writes."""
        nested = {
            "credentials": self.credentials.to_json(),
            "document": self.document.to_json(),
            "manifest": self.manifest.to_json(),
            "limits": vars(self.limits),
        }
        return {**vars(self), **nested}

    @classmethod
    def from_json(cls, doc: Mapping[str, Any]) -> AgentSpec:
        """Return the spec that `to_json` described."""
        nested = {
            "credentials": Credentials.from_json(doc["credentials"]),
            "document": RunDocument.from_json(doc["document"]),
            "manifest": Manifest.from_json(doc["manifest"]),
            "limits": LossLimits(**doc["limits"]),
        }
        return cls(**{**doc, **nested})


@dataclass(frozen=True)
class AgentStart:
    """Describes one start of an agent, as its launcher knows it.

    Args:
        worker: which worker's agent it is.
        number: tells the starts of one worker apart; the launcher is asked to replace it by this.
        scratch: a folder on this machine that the launcher deletes.
        host: the address on which the agent shall listen; None for the one that leads to the
            coordinator.
        gpus: addresses of the GPUs that it was given.
        resources: what it may train with.
    """

    worker: int
    number: int
    scratch: str
    host: str | None = None
    gpus: tuple[str, ...] = ()
    resources: WorkerResources = DEFAULT_RESOURCES


@dataclass(frozen=True)
class AgentInfo:
    """Describes one agent, as it introduces itself to the coordinator.

    Args:
        incarnation: names this process; the worker's next agent has another one.
        worker: which worker's agent it is.
        start: the number of its `AgentStart`.
        uri: where it serves shards.
        host: name of its machine.
        pid: its process id.
        gpus: addresses of the GPUs that it was given.
        numeric: what its bits depend on.
    """

    incarnation: str
    worker: int
    start: int
    uri: str
    host: str
    pid: int
    gpus: tuple[str, ...]
    numeric: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return a dict that `json` writes."""
        return asdict(self)

    @classmethod
    def of_hello(cls, hello: Mapping[str, Any], num_workers: int) -> AgentInfo:
        """Return the agent that `to_json` described.

        Raises:
            ConfigurationError: the hello is not one of this version, or of no worker of this run.
        """
        try:
            info = cls(**{**hello, "gpus": tuple(hello["gpus"])})
        except (KeyError, TypeError) as error:
            raise ConfigurationError(
                f"the agent's hello can't be read: {error}; run the same version on driver and "
                "workers"
            ) from error
        for name, kind in _KINDS.items():
            if type(value := getattr(info, name)) is not kind:
                raise ConfigurationError(
                    f"the agent's hello can't be read: {name} is {value!r}; run the same version "
                    "on driver and workers"
                )
        if type(info.worker) is not int or info.worker not in range(num_workers):
            raise ConfigurationError(f"worker {info.worker} is not one of 0..{num_workers - 1}")
        return info
