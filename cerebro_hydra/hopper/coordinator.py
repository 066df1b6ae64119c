"""The shell around `plan.hop_state`: turns messages into events and instructions into messages."""

from __future__ import annotations

import queue
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cerebro_hydra.data.manifest import Manifest
from cerebro_hydra.errors import (
    CerebroHydraError,
    ConfigurationError,
    DataError,
    SetupError,
    StoreError,
)
from cerebro_hydra.hopper.journal import Journal
from cerebro_hydra.hopper.launcher import Launcher
from cerebro_hydra.hopper.roster import Member, Roster
from cerebro_hydra.observe.observer import Observer, Observers
from cerebro_hydra.plan.codec import from_json, to_json
from cerebro_hydra.plan.events import (
    EvaluationDone,
    Event,
    MetricsMerged,
    MetricsMergeFailed,
    SubEpochDone,
    WorkerLost,
)
from cerebro_hydra.plan.hop_config import HopConfig, TrialConfig
from cerebro_hydra.plan.hop_state import HopState
from cerebro_hydra.plan.instructions import (
    Cancel,
    Checkpoint,
    Drop,
    Evaluate,
    FetchShards,
    FinishRun,
    Instruction,
    MergeMetrics,
    StartSubEpoch,
)
from cerebro_hydra.storage.run_document import NUMERIC_FILE, WORKERS_FILE, RunDocument
from cerebro_hydra.storage.run_folder import RunFolder
from cerebro_hydra.wire.control_server import ControlServer
from cerebro_hydra.wire.credentials import Credentials, new_credentials

FOR_AGENTS = (StartSubEpoch, FetchShards, Evaluate, Cancel, Checkpoint, Drop)

FATAL = {kind.__name__: kind for kind in (DataError, StoreError)}
"""What an agent may meet that every other agent in its place would meet too."""

MOST_LOSSES = 8
"""Agents of one worker that may be lost in a row; no launcher counts those that hang."""

STOP_SECONDS = 20.0
"""How long agents may take to end by themselves after the run is over."""


@dataclass(frozen=True)
class _Exit:
    """No agent will be started any more."""

    error: BaseException | None


MergeStates = Callable[[int, list[dict[str, Any]]], dict[str, float]]
"""Merges what a trial's custom metrics made of each validation partition, in partition order."""

_Item = Event | Member | dict[str, Any] | _Exit


class Coordinator:
    """Runs all trials of a document to their end.

    One thread, the caller's, takes every decision: callbacks of the wire only fill its queue. A
    decision is journalled before it is carried out.

    Args:
        folder: the run's files; its journal must not exist yet.
        document: what is to be run.
        launcher: starts the agents and replaces dead ones.
        factory: the user's `estimator_gen_fn`; travels once, inside the launcher's closure.
        manifest: the prepared data.
        observers: see every record, in order.
        join_timeout: seconds without any progress that missing workers may take to come.
        measure: called with a trial and the states of its custom metrics, by name, one dict per
            validation partition; returns a value per name. Runs on the caller's thread; what it
            raises fails the trial alone.

    Raises:
        ConfigurationError: a trial has custom metrics and there is no `measure`.
    """

    def __init__(
        self,
        folder: RunFolder,
        document: RunDocument,
        launcher: Launcher,
        factory: Callable[..., Any],
        *,
        manifest: Manifest,
        observers: Sequence[Observer] = (),
        join_timeout: float = 120.0,
        merge_metrics: MergeStates | None = None,
    ) -> None:
        self._folder = folder
        self._document = document
        self._launcher = launcher
        self._factory = factory
        self._manifest = manifest
        self._observers = Observers(observers)
        self._join_timeout = join_timeout
        self._config = hop_config(document, manifest)
        self._merge_metrics = _checked(merge_metrics, self._config)
        self._state = HopState(self._config)
        self._roster = Roster(launcher.num_workers)
        self._numeric: dict[str, Any] = {}
        self._workers: dict[str, Any] = {}
        self._inbox: queue.SimpleQueue[_Item] = queue.SimpleQueue()

    def run(self) -> HopState:
        """Train until every trial is over; return the final state.

        Raises:
            SetupError: workers are missing or are lost again and again, or no agent can be started
                any more.
            DataError: an agent can't read its rows as they were prepared.
            StoreError: an agent can't write to the run folder.
        """
        begun = time.monotonic()
        credentials = new_credentials(self._launcher.tls)
        self._observers.on_record({"kind": "start", "document": self._document.to_json()})
        self._journal = Journal(self._folder, self._config)
        self._control = ControlServer(
            self._launcher.host, credentials, self._on_hello, self._on_message, self._on_closed
        )
        try:
            self._launcher.start(
                self._agent_spec(credentials),
                self._factory,
                lambda error: self._inbox.put(_Exit(error)),
            )
            self._decide_until_over()
        finally:
            # An interrupt ends here too: whatever happened, no agent is left behind.
            for incarnation in list(self._roster.live):
                self._control.send(incarnation, {"do": "stop"})
            self._control.close()
            self._launcher.stop(STOP_SECONDS)
            seconds = time.monotonic() - begun
            self._observers.on_record({"kind": "finish", "seconds": seconds})
        self._sweep()
        return self._state

    def _sweep(self) -> None:
        """Delete what was the best state of a trial until a better one came."""
        results = {
            number: {0, trial.result}
            for number, trial in enumerate(self._state.trials)
            if trial.config.patience is not None and trial.result
        }
        if results:
            self._folder.sweep(results)

    def _agent_spec(self, credentials: Credentials) -> dict[str, Any]:
        return {
            "control": self._control.uri,
            "credentials": credentials.to_json(),
            "num_workers": self._launcher.num_workers,
            "store": self._folder.store.to_dict(),
            "run_id": self._folder.run_id,
            "manifest": self._manifest.to_json(),
        }

    # ------------------------------------------------------------------ callbacks of the wire

    def _on_hello(self, hello: dict[str, Any]) -> dict[str, Any]:
        self._inbox.put(Member.of_hello(hello, self._roster.num_workers))
        return {"document": self._document.to_json()}

    def _on_message(self, incarnation: str, message: dict[str, Any]) -> None:
        if "event" in message:
            self._inbox.put(from_json(message["event"]))
        else:
            self._inbox.put({**message, "incarnation": incarnation})

    def _on_closed(self, incarnation: str, reason: str) -> None:
        self._inbox.put(WorkerLost(incarnation, reason))

    # ------------------------------------------------------------------ the loop

    def _decide_until_over(self) -> None:
        while not self._state.finished:
            events = self._next_events()
            decided = [(event, self._state.handle(event)) for event in events]
            records = [self._journal.record(time.time(), *decision) for decision in decided]
            if records:
                self._journal.append(records)
            for record, (_, instructions) in zip(records, decided, strict=True):
                self._carry_out(instructions)
                self._observers.on_record({"kind": "journal", **record})

    def _next_events(self) -> list[Event]:
        """Wait for something to happen, then take all that has happened."""
        try:
            timeout = self._join_timeout if self._roster.missing else None
            items = [self._inbox.get(timeout=timeout)]
        except queue.Empty:
            raise self._missing_workers() from None
        while not self._inbox.empty():
            items.append(self._inbox.get())
        return [event for item in items if (event := self._event_of(item)) is not None]

    def _event_of(self, item: _Item) -> Event | None:
        if isinstance(item, _Exit):
            raise SetupError(
                f"the agents' job ended before the run did: {item.error or 'no reason was given'}"
            ) from item.error
        if isinstance(item, WorkerLost):
            self._roster.leave(item.incarnation)
            lost = self._roster.member(item.incarnation)
            if self._roster.losses(lost.worker) >= MOST_LOSSES:
                raise SetupError(
                    f"worker {lost.worker} on {lost.host} lost {MOST_LOSSES} agents in a row, none "
                    f"of which finished a task, the last one because: {item.reason}; look for code "
                    "of yours that holds Python's lock for long, or for memory that runs out"
                )
            self._launcher.replace(lost.worker, lost.task)
            return item
        if isinstance(item, SubEpochDone | EvaluationDone):
            self._roster.worked(item.incarnation)
        if isinstance(item, Member):
            self._roster.admit(item)
            return None
        if not isinstance(item, dict):
            return item
        member = self._roster.member(item["incarnation"])
        self._observers.on_record({**item, "worker": member.worker})
        if item["kind"] == "fatal":
            kind = FATAL.get(item["type"], CerebroHydraError)
            raise kind(f"worker {member.worker} on {member.host}: {item['error']}")
        if item["kind"] == "agent":
            self._numeric[str(member.worker)] = item["numeric"]
            self._folder.write_json(NUMERIC_FILE, self._numeric)
            found = {"host": member.host, "pid": item.get("pid"), "gpus": item.get("gpus", [])}
            self._workers[str(member.worker)] = found
            self._folder.write_json(WORKERS_FILE, self._workers)
            return member.joined
        return None

    def _missing_workers(self) -> SetupError:
        missing = self._roster.missing
        return SetupError(
            f"{len(missing)} of {self._roster.num_workers} workers did not come within "
            f"{self._join_timeout:.0f} s: {missing}; the cluster has too few free slots for them, "
            "or their agents fail at start (see the executors' logs)"
        )

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, FOR_AGENTS):
                source = getattr(instruction, "source", None)
                uri = self._roster.uri(source.incarnation) if source is not None else None
                message = {"do": to_json(instruction), "uri": uri}
                self._control.send(instruction.incarnation, message)
            elif isinstance(instruction, MergeMetrics):
                self._inbox.put(self._merged_metrics(instruction))
            elif isinstance(instruction, FinishRun):
                return

    def _merged_metrics(self, task: MergeMetrics) -> MetricsMerged | MetricsMergeFailed:
        named = (task.attempt, task.trial, task.epoch)
        names = self._config.trials[task.trial].custom_metrics
        try:
            values = self._merge_metrics(task.trial, list(task.states))
            if values.keys() != set(names):
                raise ConfigurationError(
                    f"the custom metrics are {list(names)}, but {sorted(values)} were measured; "
                    "return one value for each"
                )
            return MetricsMerged(*named, {name: float(values[name]) for name in names})
        except Exception:
            return MetricsMergeFailed(*named, traceback.format_exc())


def _checked(merge_metrics: MergeStates | None, config: HopConfig) -> MergeStates:
    if merge_metrics is not None:
        return merge_metrics
    for trial in config.trials:
        if trial.custom_metrics:
            raise ConfigurationError(
                f"trial {trial.trial} has the custom metrics {list(trial.custom_metrics)}, and "
                "nothing measures them; pass measure= to the Coordinator"
            )
    return lambda trial, states: {}


def hop_config(document: RunDocument, manifest: Manifest) -> HopConfig:
    """The decisions' view of a run: the work of a sub-epoch is steps times the trial's bytes."""
    trials = tuple(
        TrialConfig(
            trial=spec.trial,
            cost=float(max(1, sum(spec.steps) * spec.batch_size * spec.accumulate * spec.nbytes)),
            nbytes=spec.nbytes,
            initial_digests=spec.shards,
            custom_metrics=spec.custom_metrics,
            patience=spec.patience,
        )
        for spec in document.trials
    )
    return HopConfig(
        trials=trials,
        partitions=manifest.num_partitions,
        epochs=document.num_epochs,
        order=document.order,
        seed=document.seed,
        evaluate=manifest.has_validation,
        metric=("val_" if manifest.has_validation else "train_") + document.evaluation_metric,
        direction=document.metrics[document.evaluation_metric],
    )
