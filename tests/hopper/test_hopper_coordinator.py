"""The coordinator over real sockets: decisions are journalled, and every trial ends."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra.agent.main import run_agent
from cerebro_hydra.data.manifest import ColumnSpec, Manifest, PartitionInfo, partition_path
from cerebro_hydra.errors import ConfigurationError, SetupError
from cerebro_hydra.hopper import absences
from cerebro_hydra.hopper import journal as journal_module
from cerebro_hydra.hopper.agent_spec import AgentInfo, AgentSpec, AgentStart
from cerebro_hydra.hopper.coordinator import Coordinator
from cerebro_hydra.hopper.journal import Journal
from cerebro_hydra.hopper.loss_limits import LossLimits
from cerebro_hydra.hopper.run_config import hop_config
from cerebro_hydra.hopper.trial_source import GivenTrials, MergeStates
from cerebro_hydra.observe import (
    AgentStarted,
    Decision,
    Record,
    RunEnded,
    RunStarted,
    WorkersMissing,
)
from cerebro_hydra.plan import events
from cerebro_hydra.plan.codec import from_json
from cerebro_hydra.plan.events import WorkerGivenUp
from cerebro_hydra.plan.hop_config import HopConfig
from cerebro_hydra.plan.instructions import Cancel, FinishTrial, StartSubEpoch
from cerebro_hydra.plan.journal_fold import comparable, fold
from cerebro_hydra.replay.record import read_trial
from cerebro_hydra.storage import LocalStore
from cerebro_hydra.storage.run_document import WORKERS_FILE, RunDocument, TrialSpec
from cerebro_hydra.storage.run_folder import RunFolder
from cerebro_hydra.wire.control_client import ControlClient
from cerebro_hydra.wire.messages import ControlFailed
from tests.hopper.scripted_agents import ScriptedLauncher


def manifest(partitions: int) -> Manifest:
    infos = [
        PartitionInfo(split, index, 5, 0, f"attempt/{partition_path(split, index)}", digests=(7,))
        for split in ("train", "val")
        for index in range(partitions)
    ]
    return Manifest("f" * 32, (ColumnSpec("x", "float32", (2,)),), tuple(infos))


Described = tuple[RunDocument, list[TrialSpec]]


def described(
    trials: int, partitions: int, epochs: int, order: str = "dynamic", **of_trials: Any
) -> Described:
    """A run and its trials."""
    return document(partitions, epochs, order), [
        TrialSpec(
            trial=t,
            trial_id=f"trial-{t:03d}",
            params={},
            seed=t,
            cut={},
            template={},
            nbytes=30,
            batch_size=5,
            accumulate=1,
            steps=(1,) * partitions,
            shards=((f"{t:032x}", f"{t + 256:032x}"),),
            **of_trials,
        )
        for t in range(trials)
    ]


def document(partitions: int, epochs: int, order: str = "dynamic") -> RunDocument:
    return RunDocument(
        run_id="run",
        factory=None,
        seed=0,
        order=order,
        num_epochs=epochs,
        num_partitions=partitions,
        evaluation_metric="loss",
        metrics={"loss": "min"},
        feature_columns=("x",),
        label_columns=("y",),
        store={},
        fingerprint="f" * 32,
        validated=True,
        threads=1,
    )


class Tape:
    def __init__(self) -> None:
        self.records: list[Record] = []

    def on_record(self, record: Record) -> None:
        self.records.append(record)

    def instructions(self, kind: type) -> list[Any]:
        told = (
            each
            for record in self.records
            if isinstance(record, Decision)
            for each in record.instructions
        )
        return [each for each in told if isinstance(each, kind)]


def run(
    tmp_path: Any,
    launcher: ScriptedLauncher,
    of: Described,
    merge_metrics: MergeStates | None = None,
    **options: Any,
) -> tuple[RunFolder, Any, Tape]:
    doc, specs = of
    trials = GivenTrials(specs, doc.num_epochs, merge_metrics)
    folder = RunFolder(LocalStore(str(tmp_path)), doc.run_id)
    tape = Tape()
    data = manifest(doc.num_partitions)
    coordinator = Coordinator(
        folder, doc, trials, launcher, no_factory, manifest=data, observers=[tape], **options
    )
    return folder, coordinator.run(), tape


def no_factory(params: Any) -> Any:
    """Stand for the user's factory, which scripted agents never run."""


def journal(folder: RunFolder) -> tuple[HopConfig, list[dict[str, Any]]]:
    """The configuration and all records of a run."""
    first, *records = [line for segment in folder.read_segments() for line in segment]
    return from_json(first["config"]), records


def restored(folder: RunFolder) -> dict[str, Any]:
    return comparable(fold(*journal(folder)))


def test_every_trial_visits_every_partition_once_per_epoch(tmp_path: Any) -> None:
    folder, state, tape = run(tmp_path, ScriptedLauncher(3), described(5, 3, 2))
    for trial in range(5):
        record = read_trial(folder, trial)
        assert record.status == "finished"
        assert record.problem(3) is None
        assert len(record.visit_log) == 6
    state.validate()
    assert [type(r) for r in (tape.records[0], tape.records[-1])] == [RunStarted, RunEnded]
    started = [r for r in tape.records if isinstance(r, AgentStarted)]
    assert sorted((r.worker, r.host, r.pid, r.gpus) for r in started) == [
        (worker, "here", 7, (str(worker),)) for worker in range(3)
    ]


def test_the_fold_of_every_prefix_of_the_journal_is_the_state_at_that_time(tmp_path: Any) -> None:
    folder, state, _ = run(tmp_path, ScriptedLauncher(2), described(3, 2, 2))
    config, records = journal(folder)
    for length in range(len(records) + 1):
        fold(config, records[:length]).validate()
    assert restored(folder) == comparable(state)


def test_a_long_journal_is_merged_while_the_run_goes_on_and_folds_to_the_same_state(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "MERGED_SEGMENTS", 4)
    folder, state, tape = run(tmp_path, ScriptedLauncher(2), described(3, 2, 2))
    names = sorted(path.name for path in Path(folder.path, "journal").iterdir())
    assert len(names) > 2
    assert names[0] == "00000000-00000003.jsonl"
    assert all("-" in name for name in names[:-1])
    assert restored(folder) == comparable(state)
    told = [record for record in tape.records if isinstance(record, Decision)]
    assert [Decision.from_json(line) for line in journal(folder)[1]] == told


def test_only_decisions_to_carry_out_make_a_segment_and_the_others_wait_for_it(
    tmp_path: Any,
) -> None:
    folder = RunFolder(LocalStore(str(tmp_path)), "run")
    log = Journal.begin(folder, hop_config(document(1, 1)))
    quiet, start = events.StateReceived(0, 0, "a"), Cancel(0, "a")
    log.append(1.0, [(quiet, [])])
    assert log.waiting
    assert len(list(folder.read_segments())) == 1
    log.append(2.0, [(quiet, []), (quiet, [start])])
    assert not log.waiting
    assert [line["seq"] for line in list(folder.read_segments())[1]] == [0, 1, 2]
    log.append(3.0, [(quiet, [])])
    log.close()
    assert [line["seq"] for line in journal(folder)[1]] == [0, 1, 2, 3]
    assert len(list(folder.read_segments())) == 1


def test_a_trial_that_fails_fails_alone_with_its_traceback(tmp_path: Any) -> None:
    def script(instruction: Any, incarnation: str) -> Any:
        if isinstance(instruction, StartSubEpoch) and instruction.trial == 1:
            return events.TaskFailed(instruction.attempt, incarnation, "Traceback: boom")
        return None

    folder, _, _ = run(tmp_path, ScriptedLauncher(2, script=script), described(3, 2, 1))
    assert [read_trial(folder, t).status for t in range(3)] == ["finished", "failed", "finished"]


def test_an_agent_that_dies_is_replaced_and_its_work_done_again(tmp_path: Any) -> None:
    died: list[str] = []

    def script(instruction: Any, incarnation: str) -> Any:
        if isinstance(instruction, StartSubEpoch) and instruction.epoch == 1 and not died:
            died.append(incarnation)
            return "die"
        return None

    launcher = ScriptedLauncher(2, script=script)
    folder, _, _ = run(tmp_path, launcher, described(3, 2, 3))
    assert died
    assert launcher.given_up in ([(0, 0)], [(1, 10)])  # the start that was lost, and no other
    workers = folder.read_json(WORKERS_FILE)
    assert workers == {k: {"host": "here", "pid": 7, "gpus": [k]} for k in ("0", "1")}
    for trial in range(3):
        record = read_trial(folder, trial)
        assert (record.status, record.problem(2)) == ("finished", None)
        assert len(record.visit_log) == 6


def test_a_worker_whose_agents_are_lost_again_and_again_ends_the_run(tmp_path: Any) -> None:
    starts: list[str] = []

    def script(instruction: Any, incarnation: str) -> Any:
        if isinstance(instruction, StartSubEpoch):
            starts.append(incarnation)
            return None if len(starts) == 4 else "die"
        return None

    launcher = ScriptedLauncher(1, script=script)
    said = r"worker 0 on here lost 8 agents in a row, none of which began a task.*because: "
    with pytest.raises(SetupError, match=said):
        run(tmp_path, launcher, described(1, 1, 2))
    assert len(starts) >= 12  # one that finished a task came between
    assert len(launcher.given_up) == len(starts) - 2


def test_trials_that_kill_agents_fail_alone_and_their_losses_end_no_run(tmp_path: Any) -> None:
    lethal = {0, 1, 3, 4}

    def script(instruction: Any, incarnation: str) -> Any:
        trains = isinstance(instruction, StartSubEpoch) and instruction.trial in lethal
        return "perish" if trains else None

    launcher = ScriptedLauncher(1, script=script)
    folder, state, tape = run(tmp_path, launcher, described(6, 1, 2))
    assert len(launcher.given_up) == 12 > LossLimits().max_failures  # all of the same worker
    for trial in range(6):
        assert read_trial(folder, trial).status == ("failed" if trial in lethal else "finished")
    (reason,) = (each.reason for each in tape.instructions(FinishTrial) if each.trial == 3)
    assert "3 agents in a row were lost while trial 3 ran on them" in reason
    assert reason.count("worker 0 on here, training of epoch 1 on partition 0: ") == 3
    assert restored(folder) == comparable(state)


def test_seeded_orders_are_the_same_in_every_run(tmp_path: Any) -> None:
    logs = []
    for name in ("a", "b"):
        folder, _, _ = run(tmp_path / name, ScriptedLauncher(3), described(4, 3, 2, order="seeded"))
        logs.append([read_trial(folder, trial).visit_log for trial in range(4)])
    assert logs[0] == logs[1]


def test_a_trial_with_patience_stops_early_and_its_best_state_is_the_result(tmp_path: Any) -> None:
    folder, state, _ = run(
        tmp_path, ScriptedLauncher(2), described(3, 2, 9, patience=3, keep="best")
    )
    for trial in range(3):  # its metric never changes, so that the first epoch stays the best
        record = read_trial(folder, trial)
        assert (record.status, record.result_visit) == ("finished", 2)
        assert sorted(record.metrics) == [0, 1, 2, 3]
    assert restored(folder) == comparable(state)


@pytest.mark.parametrize(
    ("validated", "metric", "decides"),
    [(True, "accuracy", ("val_accuracy", "max")), (False, "loss", ("train_loss", "min"))],
)
def test_the_evaluation_metric_decides_which_epoch_is_best(
    validated: bool, metric: str, decides: tuple[str, str]
) -> None:
    metrics = {"loss": "min", "accuracy": "max"}
    changes: dict[str, Any] = {
        "validated": validated,
        "evaluation_metric": metric,
        "metrics": metrics,
    }
    config = hop_config(replace(document(2, 1), **changes))
    assert (config.metric, config.direction) == decides


def test_custom_metrics_are_measured_by_the_users_code_on_the_callers_thread(tmp_path: Any) -> None:
    threads = set()

    def merge_metrics(trial: int, states: list[dict[str, Any]]) -> dict[str, float]:
        threads.add(threading.current_thread())
        if trial == 1:
            raise RuntimeError("no such class")
        return {"seen": 10 * trial + sum(states[p]["seen"][0] * 2**p for p in range(2))}

    of = described(3, 2, 2, custom_metrics=("seen",))
    folder, state, _ = run(tmp_path, ScriptedLauncher(2), of, merge_metrics=merge_metrics)
    assert threads == {threading.current_thread()}
    assert [read_trial(folder, t).status for t in range(3)] == ["finished", "failed", "finished"]
    assert [m["val_seen"] for m in read_trial(folder, 2).metrics.values()] == [22.0, 22.0]
    assert restored(folder) == comparable(state)


def test_a_custom_metric_without_a_value_fails_its_trial_with_both_names(tmp_path: Any) -> None:
    of = described(1, 1, 1, custom_metrics=("auc",))
    _, _, tape = run(
        tmp_path, ScriptedLauncher(1), of, merge_metrics=lambda *_: {"auc": 1.0, "f1": 1.0}
    )
    (finish,) = tape.instructions(FinishTrial)
    assert "the custom metrics are ['auc'], but ['auc', 'f1'] were measured" in finish.reason


def test_custom_metrics_that_nothing_measures_are_refused(tmp_path: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"trial 0 has the custom metrics \['auc'\]"):
        run(tmp_path, ScriptedLauncher(1), described(1, 1, 1, custom_metrics=("auc",)))


def test_with_tls_the_run_is_the_same_and_neither_key_nor_secret_is_in_its_records(
    tmp_path: Any,
) -> None:
    launcher = ScriptedLauncher(2, tls=True)
    folder, state, tape = run(tmp_path, launcher, described(3, 2, 2))
    assert [trial.status for trial in state.trials.values()] == ["finished"] * 3
    assert launcher.spec is not None and launcher.spec.control.startswith("tls://")
    written = [path.read_text() for path in Path(folder.path).rglob("*") if path.is_file()]
    assert len(written) > 2
    for text in (*written, repr(tape.records)):
        assert launcher.spec.credentials.secret not in text
        assert "PRIVATE KEY" not in text


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"worker": None}, "worker None is not one of 0..1"),
        ({"worker": 7}, "worker 7 is not one of 0..1"),
        ({"gpus": 3}, "the agent's hello can't be read: 'int' object is not iterable"),
        ({"color": 3}, "the agent's hello can't be read: .*'color'"),
        ({"uri": ...}, "the agent's hello can't be read: .*'uri'"),
        ({"worker": ...}, "the agent's hello can't be read: .*'worker'"),
    ],
)
def test_a_hello_that_can_not_be_used_is_refused_in_words_and_the_run_goes_on(
    tmp_path: Any, changed: dict[str, Any], why: str
) -> None:
    refusals: list[str] = []

    def script(instruction: Any, incarnation: str) -> None:
        if not refusals:
            whole = AgentInfo("stranger", 0, 1, "tcp://127.0.0.1:1", "here", 7, (), {})
            changed_hello = {**whole.to_json(), **changed}
            hello = {name: value for name, value in changed_hello.items() if value is not ...}
            spec = launcher.spec
            assert spec is not None
            try:
                ControlClient(spec.control, spec.credentials, hello, print, print)
                refusals.append("was welcomed")
            except ControlFailed as error:
                refusals.append(str(error))

    launcher = ScriptedLauncher(2, script=script)
    _, state, _ = run(tmp_path, launcher, described(1, 2, 1))
    assert [trial.status for trial in state.trials.values()] == ["finished"]
    assert re.search(why, refusals[0])


def test_workers_that_never_come_are_named(tmp_path: Any) -> None:
    launcher = ScriptedLauncher(3, present=0, limits=LossLimits(join_timeout=1.0))
    said = r"none of 3 workers came within join_timeout=1 s: \[0, 1, 2\].*`cerebro-hydra doctor`"
    with pytest.raises(SetupError, match=said):
        run(tmp_path, launcher, described(1, 3, 1))


def test_one_worker_that_came_does_the_work_of_all_and_waits_are_told(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(absences, "TELL_SECONDS", 0.3)
    launcher = ScriptedLauncher(3, present=1, limits=LossLimits(join_timeout=1.0))
    _, state, tape = run(tmp_path, launcher, described(2, 3, 2))
    assert [trial.status for trial in state.trials.values()] == ["finished"] * 2
    waits = [record for record in tape.records if isinstance(record, WorkersMissing)]
    assert {(wait.workers, wait.limit) for wait in waits} == {((1, 2), 1.0)}
    assert len(waits) == 3


def test_a_worker_whose_agents_are_lost_again_and_again_is_given_up_and_the_others_go_on(
    tmp_path: Any,
) -> None:
    broken: set[str] = set()
    lost_thrice = threading.Event()

    def script(instruction: Any, incarnation: str) -> Any:
        dies = isinstance(instruction, StartSubEpoch) and instruction.worker == 1
        broken.update({incarnation} if dies else ())
        if len(broken) == 3:
            lost_thrice.set()
        elif not dies:
            assert lost_thrice.wait(60), "the other one would do all the work before"
        return "die" if dies else None

    launcher = ScriptedLauncher(2, script=script, limits=LossLimits(max_failures=3))
    _, state, tape = run(tmp_path, launcher, described(2, 2, 2))
    assert [trial.status for trial in state.trials.values()] == ["finished"] * 2
    assert len(broken) == 3
    (given_up,) = (
        each.event
        for each in tape.records
        if isinstance(each, Decision) and isinstance(each.event, WorkerGivenUp)
    )
    assert "worker 1 on here lost 3 agents in a row" in given_up.reason


class LateLauncher(ScriptedLauncher):
    """Starts a real agent, in place of a lost one, when the run is over already."""

    def stop(self, timeout: float) -> None:
        assert self.spec is not None
        before = set(threading.enumerate())
        run_agent(self.spec, AgentStart(1, 99, "/nowhere"), lambda params: None)
        self.threads_left = set(threading.enumerate()) - before
        super().stop(timeout)


def test_an_agent_that_comes_when_the_run_is_over_leaves_at_once_and_quietly(
    tmp_path: Any, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    launcher = LateLauncher(2)
    began = time.monotonic()
    doc, trials = described(2, 2, 1)
    doc = replace(doc, store=LocalStore(str(tmp_path)).to_dict())
    _, state, _ = run(tmp_path, launcher, (doc, trials))
    assert time.monotonic() - began < 10
    assert [trial.status for trial in state.trials.values()] == ["finished"] * 2
    for thread in launcher.threads_left:
        thread.join(5)
        assert not thread.is_alive(), thread
    assert capfd.readouterr() == ("", "") and not caplog.records


class RefusedLauncher(ScriptedLauncher):
    """Its agents' job ends before any of them has come."""

    def start(self, spec: AgentSpec, factory: Any, on_exit: Any) -> None:
        on_exit(RuntimeError("no control connection"))


def test_a_job_that_ends_without_some_workers_names_them_and_why(tmp_path: Any) -> None:
    said = r"workers \[0, 1\] are missing; run `cerebro-hydra doctor`.*no control connection"
    with pytest.raises(SetupError, match=said):
        run(tmp_path, RefusedLauncher(2), described(1, 2, 1))
