"""The coordinator gives events to `HopState`, and its instructions to agents.

The name of a state is given here alone: segments are files by content, so whoever writes them late
does no harm, but after a redo a name is that of another state, and an agent that was frozen and
replaced may wake up in the middle of a write. Custom metrics are merged by the user's code, whose
errors become events.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from cerebro_hydra.data.manifest import Manifest
from cerebro_hydra.errors import (
    CerebroHydraError,
    ConfigurationError,
    DataError,
    JobStopped,
    SetupError,
    StoreError,
)
from cerebro_hydra.foreign_text import traceback_text
from cerebro_hydra.hopper.agents import Absences, Roster, WorkerDocuments, check_compilers
from cerebro_hydra.hopper.backend import Factory, Launcher
from cerebro_hydra.hopper.journal import Journal, RunWriter
from cerebro_hydra.hopper.protocol.agent_spec import AgentInfo, AgentSpec
from cerebro_hydra.hopper.resumed_run import ResumedRun
from cerebro_hydra.hopper.run_config import hop_config
from cerebro_hydra.hopper.trials import MergeStates, News, NewTrial, TrialSource, TrialSpecs
from cerebro_hydra.observe.records import (
    AgentStarted,
    Decision,
    NotSaved,
    Observer,
    Observers,
    OutputLine,
    Progress,
    RunEnded,
    RunStarted,
    SlowBatch,
    TrialAdmitted,
)
from cerebro_hydra.plan.hop.checkpoints import wait_after
from cerebro_hydra.plan.hop.journal import RemadeStates
from cerebro_hydra.plan.hop.state import HopState
from cerebro_hydra.plan.messages.codec import from_json, to_json
from cerebro_hydra.plan.messages.events import (
    Checkpointed,
    CheckpointFailed,
    Event,
    MetricsMerged,
    MetricsMergeFailed,
    RunResumed,
    TrialAdded,
    TrialForked,
    WorkerLost,
)
from cerebro_hydra.plan.messages.instructions import (
    AdoptPartitions,
    Cancel,
    ChangeCut,
    Checkpoint,
    Collect,
    CutFiner,
    Drop,
    Evaluate,
    FetchShards,
    FinishTrial,
    ForkState,
    Instruction,
    MergeMetrics,
    StartSubEpoch,
)
from cerebro_hydra.plan.policy.policy import Scheduler
from cerebro_hydra.storage.run_document import NUMERIC_FILE, RunDocument
from cerebro_hydra.storage.run_folder import RunFolder
from cerebro_hydra.threads import own_thread
from cerebro_hydra.wire.control import ControlServer
from cerebro_hydra.wire.credentials import new_credentials
from cerebro_hydra.wire.messages import RunOver

FATAL = {kind.__name__: kind for kind in (DataError, StoreError)}
"""Errors of an agent that any other agent in its place would meet too."""

JOURNAL_SECONDS = 0.5
"""How long events that led to no instruction may wait to be journalled with others."""

STOP_SECONDS = 20.0
"""How long agents may take to end by themselves after every trial is over."""

INTERRUPT_SECONDS = 4.0
"""How long they may take when the run ends before that; by then they end themselves by force."""


@dataclass(frozen=True)
class _JobEnded:
    """No agent will be started any more."""

    error: BaseException | None


@dataclass(frozen=True)
class _Message:
    """Holds what an agent sent that is no event."""

    incarnation: str
    content: dict[str, Any]


_Item = News | AgentInfo | _Message | _JobEnded


class Coordinator:
    """Runs all trials of a run to their end.

    The caller's thread takes every decision; callbacks of the wire only fill its queue. A decision
    is journalled before it is carried out.

    Args:
        folder: the run's files; its journal must not exist yet, unless the run is resumed.
        document: the run.
        trials: where trials come from, also while the run goes on.
        launcher: starts the agents and replaces dead ones.
        factory: the user's `estimator_gen_fn`; travels once, inside the launcher's closure.
        manifest: the run's data.
        observers: are given every record, in order.
        resumed: what the run was, if it goes on; its workers may be more or fewer now.
    """

    def __init__(
        self,
        folder: RunFolder,
        document: RunDocument,
        trials: TrialSource,
        launcher: Launcher,
        factory: Factory,
        *,
        manifest: Manifest,
        observers: Sequence[Observer] = (),
        resumed: ResumedRun | None = None,
    ) -> None:
        self._folder = folder
        self._document = document
        self._launcher = launcher
        self._factory = factory
        self._manifest = manifest
        self._observers = Observers(observers)
        self._trials = trials
        self._specs = TrialSpecs(folder)
        self._merger = MetricMerger(trials.merge_metrics)
        self._resumed = resumed
        config = hop_config(document)
        self._scheduler = Scheduler(config, resumed.state if resumed else None)
        self._state = self._scheduler.state
        self._remade = RemadeStates({}, ())
        self._untidy = resumed is not None  # files may be left that no trial names
        self._roster = Roster(launcher.num_workers)
        self._inbox: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._door = threading.Lock()
        self._greeted: list[str] = []
        self._over = False
        self._tasks_expected = True  # as every agent supposes that was not told

    def run(self) -> HopState:
        """Train until every trial is over; return the final state.

        Raises:
            SetupError: no worker comes, all are lost again and again, or no more can be started.
            DataError: an agent can't read its rows as they were prepared.
            StoreError: the end of the journal can't be written, so that the run must be resumed.
            JournalError: another program has resumed the same run.
            and whatever the source of the trials tells.
        """
        begun = time.monotonic()
        credentials = new_credentials(self._launcher.tls)
        if self._resumed is None:
            self._observers.on_record(RunStarted(self._document))
            journal = Journal.begin(self._folder, self._state.config)
        else:
            self._observers.on_record(RunStarted(self._document, self._resumed.records))
            journal = self._resumed.journal()
        self._writer = RunWriter(self._folder, journal, self._observers.on_record)
        numeric = {} if self._resumed is None else self._resumed.document(NUMERIC_FILE)
        self._documents = WorkerDocuments(self._writer, numeric)
        self._state_namer = StateNamer(self._folder, self._inbox.put)
        limits = self._launcher.limits
        self._control = ControlServer(
            self._launcher.host,
            credentials,
            self._on_hello,
            self._on_message,
            self._on_closed,
            heartbeat_seconds=limits.heartbeat_interval,
            silence_seconds=limits.silence_seconds,
        )
        try:
            spec = AgentSpec(
                self._control.uri,
                credentials,
                self._launcher.num_workers,
                self._document,
                self._manifest,
                limits,
            )
            self._absences = Absences(self._roster, spec, self._observers.on_record)
            self._launcher.start(spec, self._factory, self._on_exit)
            self._decide_until_over()
        finally:
            # An interrupt ends here too: whatever happened, no agent is left behind.
            self._dismiss()
            self._trials.close()
            self._launcher.stop(STOP_SECONDS if self._state.finished else INTERRUPT_SECONDS)
            self._control.close()  # until here, agents that come late are told that it is over
            self._state_namer.close()
            unwritten = self._writer.close()
            self._observers.on_record(RunEnded(time.monotonic() - begun, unwritten))
        self._writer.finish(self._state, self._untidy)
        return self._state

    def _dismiss(self) -> None:
        """Tell every agent to stop, and refuse those that come from now on."""
        with self._door:
            self._over = True
        for incarnation in self._greeted:
            self._control.send(incarnation, {"do": "stop"})

    # ------------------------------------------------------------------ callbacks

    def _on_exit(self, error: BaseException | None) -> None:
        self._inbox.put(_JobEnded(error))

    def _on_hello(self, hello: dict[str, Any]) -> None:
        agent = AgentInfo.of_hello(hello, self._roster.num_workers)
        with self._door:
            if self._over or agent.worker in self._roster.refused:
                raise RunOver
            self._greeted.append(agent.incarnation)
        self._inbox.put(agent)

    def _on_message(self, incarnation: str, message: dict[str, Any]) -> None:
        if "event" in message:
            self._inbox.put(from_json(message["event"]))
        else:
            self._inbox.put(_Message(incarnation, message))

    def _on_closed(self, incarnation: str, reason: str) -> None:
        self._inbox.put(WorkerLost(incarnation, reason))

    # ------------------------------------------------------------------ the loop

    def _decide_until_over(self) -> None:
        if self._resumed is not None:
            self._resumed.write_states()
            self._decide([RunResumed(self._resumed.missing)])
            self._remade = self._resumed.remade()
        self._decide(self._events_of(self._trials.start(self._inbox.put)))
        while not (self._state.finished or self._state.at_rest):
            self._decide(self._next_events())
        while self._state.tables.saving and not self._state.at_rest:
            self._decide(self._next_events())  # the newest states, from which trials are extended

    def _decide(self, events: Iterable[Event]) -> None:
        """Handle events, and then those that the search decides because of them, in this order."""
        waiting, decided = deque(events), list[tuple[Event, list[Instruction]]]()
        while waiting:
            for event, instructions in self._scheduler.handle(waiting.popleft()):
                decided.append((event, instructions))
                waiting += self._trials.follow(event, instructions)
        for decision in self._writer.append(decided):
            if isinstance(decision.event, TrialAdded | TrialForked):
                self._observers.on_record(TrialAdmitted(self._specs[decision.event.config.trial]))
            self._carry_out(decision)
            self._observers.on_record(decision)
            for difference in self._remade.compare(decision.event, decision.instructions):
                self._inbox.put(difference)
        if (expected := self._scheduler.tasks_expected) != self._tasks_expected:
            self._tasks_expected = expected
            self._tell_expected(self._roster.live)

    def _tell_expected(self, incarnations: Iterable[str]) -> None:
        for incarnation in incarnations:
            self._control.send(incarnation, {"do": "expect", "tasks": self._tasks_expected})

    def _next_events(self) -> list[Event]:
        """Wait for something to happen, then take all that has happened."""
        items = [] if (first := self._next_item()) is None else [first]
        while not self._inbox.empty():
            items.append(self._inbox.get())
        return [*self._events_of(items), *self._absences.due()]

    def _events_of(self, items: Iterable[_Item]) -> list[Event]:
        return [event for item in items if (event := self._event_of(item)) is not None]

    def _next_item(self) -> _Item | None:
        """Return what comes next; None if missing workers are to be seen to before."""
        while (seconds := self._absences.seconds) != 0.0:
            journals = self._writer.waiting
            if journals:
                seconds = JOURNAL_SECONDS if seconds is None else min(seconds, JOURNAL_SECONDS)
            with suppress(queue.Empty):
                return self._inbox.get(timeout=seconds)
            if not journals:
                return None
            self._writer.write()  # or try: a store may refuse it for long
        return None

    def _event_of(self, item: _Item) -> Event | None:
        match item:
            case BaseException():
                raise item
            case NewTrial(spec, event):
                check_compilers([spec], self._roster.agents)
                self._specs.add(spec)
                return event
            case NotSaved():
                self._observers.on_record(item)
                return None
            case _JobEnded(error):
                raise self._job_ended(error) from (None if isinstance(error, JobStopped) else error)
            case AgentInfo():
                self._admit(item)
                return None
            case _Message():
                self._take(item)
                return None
            case WorkerLost():
                return self._replace(item)
        return item

    def _admit(self, agent: AgentInfo) -> None:
        """Note where a new agent runs, and what its bits depend on."""
        check_compilers(self._specs.known, [agent])
        self._roster.admit(agent)
        if not self._tasks_expected:
            self._tell_expected([agent.incarnation])
        self._documents.note(agent)
        self._observers.on_record(
            AgentStarted(
                agent.worker, agent.incarnation, agent.host, agent.pid, agent.gpus, agent.numeric
            )
        )

    def _take(self, message: _Message) -> None:
        """Pass on what an agent says of its work, or end the run with its error."""
        agent = self._roster.agent(message.incarnation)
        match message.content:
            case {"began": attempt}:
                self._roster.began(message.incarnation, attempt)
            case {"written": state}:
                self._state_namer.name(message.incarnation, state)
            case {"slow": fields}:
                self._observers.on_record(SlowBatch(worker=agent.worker, **fields))
            case {"progress": fields}:
                self._observers.on_record(Progress(worker=agent.worker, **fields))
            case {"output": fields}:
                self._observers.on_record(OutputLine(worker=agent.worker, **fields))
            case {"fatal": {"type": kind, "error": error}}:
                raise FATAL.get(kind, CerebroHydraError)(
                    f"worker {agent.worker} on {agent.host}: {error}"
                )

    def _replace(self, lost: WorkerLost) -> WorkerLost:
        """Let the launcher start another agent for a lost one; add where that was, and in what.

        Agents that are lost while a trial runs on them speak against it (`plan/hop/trials.py`).
        Those that began no task speak against their worker, which in the end gets no more.

        Raises:
            SetupError: every worker has lost too many in a row.
        """
        self._untidy = True
        agent = self._roster.leave(lost.incarnation)
        if (losses := self._roster.losses(agent.worker)) >= self._launcher.limits.max_failures:
            self._inbox.put(self._absences.refuse(agent, losses, lost.reason))
        self._launcher.replace(agent.worker, agent.start)
        attempt = self._roster.attempt(lost.incarnation)
        return replace(lost, host=agent.host, attempt=attempt)

    def _job_ended(self, error: BaseException | None) -> SetupError:
        if isinstance(error, JobStopped):
            path = self._folder.path
            return JobStopped(
                f"{error} before the run ended; `cerebro-hydra resume {path}` goes on"
            )
        missing = self._roster.missing
        advice = f" (workers {missing} are missing; run `cerebro-hydra doctor`)" if missing else ""
        return SetupError(
            f"the agents' job ended before the run did{advice}: {error or 'no reason was given'}"
        )

    def _carry_out(self, decision: Decision) -> None:
        for instruction in decision.instructions:
            match instruction:
                case StartSubEpoch() | Evaluate() | FetchShards():
                    uri = self._roster.uri(instruction.source.incarnation)
                    spec = self._specs.untold(instruction.trial, instruction.incarnation)
                    message: dict[str, Any] = {"do": to_json(instruction), "uri": uri, "spec": spec}
                    if isinstance(instruction, StartSubEpoch) and instruction.replicas:
                        message["replicas"] = [self._roster.uri(i) for i in instruction.replicas]
                    self._control.send(instruction.incarnation, message)
                case Cancel() | Checkpoint() | Drop() | AdoptPartitions():
                    if isinstance(instruction, Checkpoint):
                        self._writer.prepare(instruction, self._state)
                    message = {"do": to_json(instruction), "uri": None, "spec": None}
                    self._control.send(instruction.incarnation, message)
                case FinishTrial(trial):
                    for incarnation in self._specs.end(trial):
                        self._control.send(incarnation, {"do": "forget", "trial": trial})
                case MergeMetrics(trial=trial):
                    names = self._state.trials[trial].config.custom_metrics
                    self._inbox.put(self._merger.merged(instruction, names))
                case Collect():
                    self._writer.collect(instruction)
                case CutFiner():
                    self._writer.keep_segments()
                case ChangeCut(trial):
                    self._specs.change(decision)
                    if refused := self._writer.change_cut(trial, decision):
                        self._inbox.put(refused)
                case ForkState():
                    if failed := self._writer.fork(instruction, self._document.num_partitions):
                        self._inbox.put(failed)


class StateNamer:
    """Writes the documents of states on a thread of its own, in the order in which they come.

    One that the store refuses is tried again, as `plan/hop/checkpoints.py` says, and those behind
    it wait: the last document of a name is that of the last agent that was told to write the state.

    Args:
        folder: the run's files.
        report: takes the answer to each document.
    """

    def __init__(
        self, folder: RunFolder, report: Callable[[Checkpointed | CheckpointFailed], object]
    ) -> None:
        self._folder = folder
        self._report = report
        self._closed = threading.Event()
        self._thread = own_thread("states")

    def name(self, incarnation: str, state: dict[str, Any]) -> None:
        """Write the document of a state soon, whose segments this agent has written."""
        self._thread.submit(self._write, incarnation, state)

    def close(self) -> None:
        """Finish the document under way, and try none again."""
        self._closed.set()
        self._thread.shutdown()

    def _write(self, incarnation: str, document: dict[str, Any]) -> None:
        trial, state = document["trial"], document["state"]
        for failures in count(1):
            try:
                self._folder.write_state(trial, state, document)
            except StoreError as error:
                wait = wait_after(failures)
                if wait is None or self._closed.wait(wait):
                    self._report(CheckpointFailed(trial, state, incarnation, str(error)))
                    return
            else:
                self._report(Checkpointed(trial, state, incarnation))
                return


class MetricMerger:
    """Carries out `MergeMetrics` with what `merge` gives."""

    def __init__(self, merge: MergeStates) -> None:
        self._merge = merge

    def merged(
        self, task: MergeMetrics, names: Iterable[str]
    ) -> MetricsMerged | MetricsMergeFailed:
        """Return the answer to a task, whose trial has custom metrics of these names."""
        named = (task.attempt, task.trial, task.epoch)
        try:
            values = self._merge(task.trial, list(task.states))
            if values.keys() != set(names):
                raise ConfigurationError(
                    f"the custom metrics are {list(names)}, but {sorted(values)} were measured; "
                    "return one value for each"
                )
            return MetricsMerged(*named, {name: float(values[name]) for name in names})
        except (Exception, SystemExit, GeneratorExit) as error:  # of the trial's code
            return MetricsMergeFailed(*named, traceback_text(error))
