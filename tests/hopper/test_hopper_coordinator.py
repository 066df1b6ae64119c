"""The coordinator over real sockets: decisions are journalled, and every trial ends."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra.hopper import journal as journal_module
from cerebro_hydra.hopper.journal import Journal
from cerebro_hydra.hopper.protocol.agent_spec import AgentInfo
from cerebro_hydra.hopper.run_config import hop_config
from cerebro_hydra.observe import (
    AgentStarted,
    Decision,
    RunEnded,
    RunStarted,
)
from cerebro_hydra.plan.hop.journal import fold
from cerebro_hydra.plan.messages import events
from cerebro_hydra.plan.messages.instructions import Cancel, FinishTrial
from cerebro_hydra.replay.record import read_trial
from cerebro_hydra.storage import LocalStore
from cerebro_hydra.storage.run_folder import RunFolder
from cerebro_hydra.wire.control import ControlClient
from cerebro_hydra.wire.messages import ControlFailed
from tests.hopper.scripted_agents import ScriptedLauncher
from tests.hopper.scripted_runs import described, document, journal, restored, run
from tests.journals import comparable


def test_every_trial_visits_every_partition_once_per_epoch(tmp_path: Any) -> None:
    folder, state, tape = run(tmp_path, ScriptedLauncher(3), described(5, 3, 2))
    for trial in range(5):
        record = read_trial(folder, trial)
        assert record.status == "finished"
        assert record.problem(3) is None
        assert len(record.visit_log) == 6
    state.validate()
    assert [type(r) for r in (tape.records[0], tape.records[-1])] == [RunStarted, RunEnded]
    assert sorted((r.worker, r.host, r.pid, r.gpus) for r in tape.of(AgentStarted)) == [
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
    assert [Decision.from_json(line) for line in journal(folder)[1]] == tape.of(Decision)


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


@pytest.mark.parametrize("error", [RuntimeError("no such class"), SystemExit(3), GeneratorExit()])
def test_custom_metrics_are_measured_by_the_users_code_on_the_callers_thread(
    tmp_path: Any, error: BaseException
) -> None:
    threads = set()

    def merge_metrics(trial: int, states: list[dict[str, Any]]) -> dict[str, float]:
        threads.add(threading.current_thread())
        if trial == 1:
            raise error
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
    (finish,) = tape.of(FinishTrial)
    assert "the custom metrics are ['auc'], but ['auc', 'f1'] were measured" in finish.reason


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


def test_a_hello_that_can_not_be_used_is_refused_in_words_and_the_run_goes_on(
    tmp_path: Any,
) -> None:
    refusals: list[str] = []

    def script(instruction: Any, incarnation: str) -> None:
        if not refusals:
            whole = AgentInfo("stranger", 0, 1, "tcp://127.0.0.1:1", "here", 7, (), {})
            spec = launcher.spec
            assert spec is not None
            try:
                hello = {**whole.to_json(), "worker": 7}
                ControlClient(spec.control, spec.credentials, hello, print, print)
                refusals.append("was welcomed")
            except ControlFailed as error:
                refusals.append(str(error))

    launcher = ScriptedLauncher(2, script=script)
    _, state, _ = run(tmp_path, launcher, described(1, 2, 1))
    assert [trial.status for trial in state.trials.values()] == ["finished"]
    assert "worker 7 is not one of 0..1" in refusals[0]
