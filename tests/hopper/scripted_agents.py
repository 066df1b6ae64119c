"""Agents that speak the real protocol over real sockets but pretend to train."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import uuid
from collections.abc import Callable
from typing import Any

from cerebro_hydra.hopper.protocol.agent_spec import (
    DEFAULT_LIMITS,
    AgentInfo,
    AgentSpec,
    LossLimits,
)
from cerebro_hydra.plan.messages import events
from cerebro_hydra.plan.messages.codec import from_json, to_json
from cerebro_hydra.plan.messages.instructions import (
    AdoptPartitions,
    Checkpoint,
    Evaluate,
    StartSubEpoch,
)
from cerebro_hydra.storage.digest import digest
from cerebro_hydra.wire.control import ControlClient
from cerebro_hydra.wire.credentials import TLS
from cerebro_hydra.wire.messages import ControlFailed


def named(*what: object) -> str:
    """Return a digest for content that is never there."""
    return digest(repr(what).encode())


class ScriptedAgent:
    """Answers every task at once; `script(instruction)` may answer with another event.

    With "die" the agent ends before it has begun the task, with "perish" when it has. `hear` is
    told of each message, and may answer with "die", too.
    """

    def __init__(
        self,
        worker: int,
        start: int,
        spec: AgentSpec,
        script: Callable[[Any, str], Any] | None = None,
        hear: Callable[[str, dict[str, Any]], object] = lambda incarnation, message: None,
    ) -> None:
        self.incarnation = uuid.uuid4().hex
        self._script = script
        self._hear = hear
        self._inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        uri = f"tcp://127.0.0.1:{worker + 1}"
        info = AgentInfo(self.incarnation, worker, start, uri, "here", 7, (str(worker),), {})
        self._control = ControlClient(
            spec.control,
            spec.credentials,
            info.to_json(),
            self._inbox.put,
            lambda reason: self.stop(),
            heartbeat_seconds=spec.limits.heartbeat_interval,
            silence_seconds=spec.limits.silence_seconds,
        )
        joined = events.WorkerJoined(worker, self.incarnation, tuple(spec.partitions(worker)))
        self._control.send({"event": to_json(joined)})

    def stop(self) -> None:
        self._inbox.put({"do": "stop"})

    def run(self) -> bool:
        """Work until told to stop; False if the script let it die before."""
        stopped = True
        while (message := self._inbox.get())["do"] != "stop":
            if self._hear(self.incarnation, message) == "die":
                stopped = False
                break
            if message["do"] in ("forget", "expect"):
                continue
            instruction = from_json(message["do"])
            answer = self._script(instruction, self.incarnation) if self._script else None
            if answer == "die":
                stopped = False
                break
            if isinstance(instruction, StartSubEpoch | Evaluate):
                self._control.send({"began": instruction.attempt})
            if answer == "perish":
                stopped = False
                break
            for event in [answer] if answer is not None else self._answers(instruction):
                self._control.send({"event": to_json(event)})
        self._control.close()
        return stopped

    def _answers(self, instruction: Any) -> list[events.Event]:
        me = self.incarnation
        match instruction:
            case StartSubEpoch(attempt, trial, state, _, (partition,)):
                digests = ((named("frozen", trial), named("trained", trial, state)),)
                hop = events.Hop(10, 20, 0.001)
                return [
                    events.StateReceived(trial, state - 1, me),
                    events.SubEpochEnding(attempt, me),
                    events.SubEpochDone(attempt, me, 5, 0.5 + partition, digests, 30, 0.01, hop),
                ]
            case Evaluate(attempt, trial, _, state, (partition,)):
                sums = {"loss": (2.0, 4), "accuracy": (float(trial), 4)}
                return [
                    events.StateReceived(trial, state, me),
                    events.EvaluationDone(
                        attempt, me, sums, 0.01, events.Hop(10, 20, 0.001), {"seen": [partition]}
                    ),
                ]
            case AdoptPartitions(partitions=partitions):
                return [events.PartitionsAdopted(me, partitions)]
            case Checkpoint(trial, state):
                return [events.Checkpointed(trial, state, me)]
        return []


class DiesOnce:
    """Is a script by which the first agent that begins the second epoch dies."""

    def __init__(self) -> None:
        self.died: list[str] = []

    def __call__(self, instruction: Any, incarnation: str) -> Any:
        if isinstance(instruction, StartSubEpoch) and instruction.epoch == 1 and not self.died:
            self.died.append(incarnation)
            return "die"
        return None


class ScriptedLauncher:
    """Runs scripted agents on threads, and a dead one again."""

    def __init__(
        self,
        num_workers: int,
        present: int | None = None,
        script: Callable[[Any, str], Any] | None = None,
        tls: bool = False,
        limits: LossLimits = DEFAULT_LIMITS,
    ) -> None:
        self.num_workers = num_workers
        self.host = "127.0.0.1"
        self.tls: bool | TLS = tls
        self.limits = limits
        self.given_up: list[tuple[int, int]] = []
        self.spec: AgentSpec | None = None
        self._present = num_workers if present is None else present
        self._script = script
        self._threads: list[threading.Thread] = []

    def hear(self, incarnation: str, message: dict[str, Any]) -> object:
        """Be told of each message that an agent gets; the agent ends for an answer of "die"."""

    def start(self, spec: AgentSpec, factory: Any, on_exit: Any) -> None:
        self.spec = spec

        def keep_up(worker: int) -> None:
            with contextlib.suppress(ControlFailed):  # the driver gave up
                for start in itertools.count(10 * worker):
                    if ScriptedAgent(worker, start, spec, self._script, self.hear).run():
                        break

        for worker in range(self._present):
            thread = threading.Thread(target=keep_up, args=(worker,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def replace(self, worker: int, start: int) -> None:
        self.given_up.append((worker, start))

    def stop(self, timeout: float) -> None:
        for thread in self._threads:
            thread.join(timeout)
