from __future__ import annotations

import logging
from itertools import pairwise
from typing import Any

import pytest

from cerebro_hydra.errors import StoreError
from cerebro_hydra.observe import (
    Decision,
    Observers,
    Progress,
    Record,
    RunEnded,
    RunView,
    records_of,
)
from cerebro_hydra.observe.text import winner_line
from cerebro_hydra.plan.messages import events as ev
from cerebro_hydra.plan.messages import instructions as ins
from cerebro_hydra.plan.messages.events import TrialStopped
from cerebro_hydra.plan.simulate.run import WorkerCrash
from tests.observe.conftest import CRASHES, begin, fold, written


def journal(event: Any, *instructions: Any) -> Decision:
    return Decision(0, 0.0, event, instructions)


QUIET = ev.TrialStopped(0, "")  # an event that the fold has no use for
JOIN = journal(ev.WorkerJoined(0, "a", (0,)))
STARTED = ins.StartSubEpoch(0, 0, 1, 0, (0,), 0, "a", ins.StateSource(0, None), {})


def ended(trial: int, epoch: int, **metrics: float) -> ins.EndEpoch:
    return ins.EndEpoch(trial, epoch, metrics)


@pytest.mark.parametrize("losses", [(), (WorkerCrash(1.5, 0, 0.5),), CRASHES])
def test_visit_logs_and_histories_are_those_of_the_state_machine(simulate, losses) -> None:
    simulation, records = simulate(4, losses)
    view = fold(records)
    assert [trial.visit_log for trial in view.trials.values()] == simulation.timeline.visit_logs
    for trial, truth in zip(view.trials.values(), simulation.state.trials.values(), strict=True):
        assert trial.status == truth.status
        assert [trial.epochs[e] for e in sorted(trial.epochs)] == truth.history
    assert view.seconds == simulation.timeline.makespan


def test_a_loss_makes_the_fold_forget_void_sub_epochs(simulate) -> None:
    """Guards the test above: the streams with losses do hold redone sub-epochs."""
    _, records = simulate(4, CRASHES)
    told = [type(i) for r in records if isinstance(r, Decision) for i in r.instructions]
    assert ins.Redo in told
    without = fold(r for r in records if not isinstance(r, Decision) or "Redo" not in str(r))
    surviving = [len(trial.visit_log) for trial in fold(records).trials.values()]
    assert told.count(ins.Commit) > sum(surviving)
    assert without.trials[0].over


def test_while_running_the_view_shows_who_trains_where(simulate) -> None:
    _, records = simulate(3)
    view = RunView()
    seen = set()
    for record in records:
        view.apply(record)
        busy = [t.worker for t in view.trials.values() if t.status == "training"]
        assert len(busy) == len(set(busy)), "two trials in one worker"
        seen.update((t.trial, t.partition) for t in view.trials.values() if t.status == "training")
    assert seen == {(trial, partition) for trial in range(3) for partition in range(2)}


def test_fold_of_a_run_folder_equals_the_fold_of_the_live_stream(simulate, tmp_path) -> None:
    _, records = simulate(3)
    told = [record for record in records if isinstance(record, Decision)]
    folder = written(tmp_path, records[:1] + begin(3)[1:], told[:7], told[7:])
    live, kept = fold(records), RunView.of_run(folder)
    assert kept.trials == live.trials
    assert kept.totals == live.totals
    assert list(records_of(folder))[:-1] == records[:-1]


def test_only_moves_between_workers_count_as_hops(simulate) -> None:
    """Each trial's first load comes from the store; then it moves once per change of worker."""
    simulation, records = simulate(3, validated=False)
    moves = sum(
        before[1] != after[1]
        for log in simulation.timeline.visit_logs
        for before, after in pairwise(log)
    )
    totals = fold(records).totals
    assert totals.hops == moves > 0
    assert totals.bytes_moved == moves * 1_000_000
    assert totals.seconds == pytest.approx(moves * 0.01)


def test_best_is_the_highest_accuracy_and_nan_never_wins() -> None:
    scores = [float("nan"), 0.5, 0.9, 0.9]
    view = fold([*begin(4, evaluation_metric="accuracy"), JOIN])
    for trial, score in enumerate(scores):
        view.apply(
            journal(
                ev.TrialStopped(trial, ""),
                ended(trial, 0, train_loss=1.0, val_loss=1.0, val_accuracy=1.0 - trial / 10),
                ended(trial, 1, train_loss=1.0, val_loss=1.0, val_accuracy=score),
                ins.FinishTrial(trial, "finished", "", 4),
            )
        )
    assert [t.trial for t in view.best_first()] == [2, 3, 1, 0]


LOSSES = {0: [0.5, 0.9, 0.8], 1: [0.7, 0.6, 0.4], 2: [float("nan"), 0.1, 0.2]}


@pytest.mark.parametrize(
    "losses", [(), (WorkerCrash(4.1, 1, 0.3), WorkerCrash(7.2, 0, 0.5), WorkerCrash(9.9, 1, 1.0))]
)
def test_a_trial_that_keeps_its_best_epoch_counts_by_it(simulate, losses) -> None:
    simulation, records = simulate(
        3, losses, patience=1, keep="best", loss=lambda t, e: LOSSES[t][e]
    )
    view = fold(records)
    assert [t.best_epoch for t in view.trials.values()] == [0, 2, None]
    assert [len(t.epochs) for t in view.trials.values()] == [2, 3, 1]
    assert [t.result_state for t in view.trials.values()] == [2, 6, 2]
    assert [t.result for t in simulation.state.trials.values()] == [2, 6, 2]
    assert [t.finished_early for t in view.trials.values()] == [True, False, True]
    assert [t.trial for t in view.best_first()] == [1, 0, 2]
    assert view.score(view.trials[0]) == 0.5


def test_the_best_epoch_counts_without_patience_too(simulate) -> None:
    view = fold(simulate(3, keep="best", loss=lambda t, e: LOSSES[t][e])[1])
    assert [t.result_state for t in view.trials.values()] == [2, 6, 4]
    assert [t.result_epoch for t in view.trials.values()] == [0, 2, 1]
    assert [t.finished_early for t in view.trials.values()] == [False] * 3
    assert view.winner is view.trials[2]


def test_the_last_epoch_counts_where_it_is_kept(simulate) -> None:
    view = fold(simulate(2, loss=lambda t, e: LOSSES[t][e])[1])
    assert [t.best_epoch for t in view.trials.values()] == [None, None]
    assert [t.result_state for t in view.trials.values()] == [6, 6]
    assert [view.score(t) for t in view.trials.values()] == [0.8, 0.4]


def test_best_by_loss_is_the_lowest_and_failed_trials_never_win() -> None:
    view = fold([*begin(3, validated=False), JOIN])
    for trial, (loss, status) in enumerate([(0.3, "finished"), (0.1, "failed"), (0.2, "finished")]):
        view.apply(
            journal(
                ev.TrialStopped(trial, ""),
                ended(trial, 0, train_loss=loss),
                ins.FinishTrial(trial, status, "why", 2),
            )
        )
    assert view.metric == "train_loss"
    assert [t.trial for t in view.best_first()] == [2, 0, 1]


def test_eta_is_remaining_sub_epochs_at_the_pace_seen_shared_by_the_trials() -> None:
    view = fold([*begin(2), JOIN])
    first, second = view.trials.values()
    assert view.eta(first) is None
    view.apply(journal(QUIET, STARTED))
    done = ev.SubEpochDone(0, "a", 10, 1.0, (("f", "t"),), 5, 1.5, ev.Hop(0, 0, 0.5))
    view.apply(journal(done, ins.Commit(0, 0, 1, 0, (0,))))
    # 3 epochs of 2 partitions at 2 s each; two trials share one worker.
    assert view.eta(first) == pytest.approx(5 * 2.0 * 2)
    assert view.eta(second) == pytest.approx(6 * 2.0 * 2)
    view.apply(journal(QUIET, ins.FinishTrial(1, "failed", "boom", 0)))
    assert view.eta(second) is None
    assert view.eta(first) == pytest.approx(5 * 2.0)


def test_before_any_trial_has_finished_the_best_so_far_leads() -> None:
    view = fold([*begin(4, validated=False), JOIN])
    for trial, loss in enumerate([0.1, 0.3, 0.2]):
        view.apply(journal(QUIET, ended(trial, 0, train_loss=loss)))
    view.apply(journal(QUIET, ins.FinishTrial(0, "failed", "why", 2)))
    assert [t.trial for t in view.best_first()] == [2, 1, 3, 0]
    assert (view.winner, view.leader) == (None, view.trials[2])
    view.apply(journal(QUIET, ins.FinishTrial(1, "finished", "", 2)))
    assert view.winner is view.leader is view.trials[1]


def test_eta_counts_live_workers_only() -> None:
    view = fold([*begin(1), JOIN])
    view.apply(journal(ev.WorkerLost("a", "killed")))
    assert view.workers == {}
    assert view.eta(view.trials[0]) is None


def test_a_lost_worker_leaves_its_trial_waiting() -> None:
    view = fold([*begin(1), JOIN])
    view.apply(journal(QUIET, STARTED))
    assert (view.trials[0].status, view.trials[0].worker) == ("training", 0)
    view.apply(journal(ev.WorkerLost("a", "killed")))
    assert (view.trials[0].status, view.trials[0].worker) == ("waiting", None)


def test_progress_of_a_worker_that_the_trial_has_left_is_ignored() -> None:
    view = fold([*begin(1), JOIN])
    view.apply(journal(QUIET, STARTED))
    for worker, loss in ((0, 0.5), (1, 9.0)):
        view.apply(Progress(worker, trial=0, epoch=0, partition=0, step=1, steps=4, loss=loss))
    assert view.trials[0].loss == 0.5


def test_of_equal_trials_the_better_loss_wins_then_the_earlier_epoch_then_the_first() -> None:
    """One suite says so of epochs and trials: tests/plan/hop/test_plan_ranking.py."""
    found = [(0.5, 0.9), (0.4, 0.9 - 1e-14), (0.4, 0.9), (0.4, 0.9)]
    for extra, expected in ((0, [1, 2, 3, 0]), (1, [2, 3, 1, 0])):
        view = fold([*begin(4, evaluation_metric="accuracy"), JOIN])
        for trial, (loss, accuracy) in enumerate(found):
            measured = {"train_loss": 1.0, "val_loss": loss, "val_accuracy": accuracy}
            epochs = 1 + extra * (trial == 1)
            ends = [ended(trial, epoch, **measured) for epoch in range(epochs)]
            finish = ins.FinishTrial(trial, "finished", "", 2 * epochs)
            view.apply(journal(ev.TrialStopped(trial, ""), *ends, finish))
        assert [t.trial for t in view.best_first()] == expected
        assert view.winner is view.trials[expected[0]]


def test_the_result_of_a_run_is_the_state_that_it_decided_for() -> None:
    """A run of another version may have kept another of two equal epochs."""
    view = fold([*begin(1, keep="best", evaluation_metric="accuracy"), JOIN])
    for epoch, loss in enumerate((0.5, 0.4)):
        measured = {"train_loss": 1.0, "val_loss": loss, "val_accuracy": 0.9}
        view.apply(journal(ev.TrialStopped(0, ""), ended(0, epoch, **measured)))
    view.apply(journal(ev.TrialStopped(0, ""), ins.FinishTrial(0, "finished", "", 2)))
    assert view.trials[0].result_epoch == 0 and view.trials[0].result_metrics["val_loss"] == 0.5


class Recorder:
    def __init__(self) -> None:
        self.records: list[Record] = []

    def on_record(self, record: Record) -> None:
        self.records.append(record)


class Broken(Recorder):
    def on_record(self, record: Record) -> None:
        super().on_record(record)
        raise RuntimeError("no room on the screen")


def test_observer_that_raises_is_logged_once_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    before, broken, after = Recorder(), Broken(), Recorder()
    observers = Observers([before, broken, after])
    decision = Decision(0, 1.0, TrialStopped(0, "enough"), ())
    records: list[Record] = [*begin(1), decision, RunEnded(1.0)]
    with caplog.at_level(logging.ERROR):
        for record in records:
            observers.on_record(record)
    assert before.records == after.records == records
    assert broken.records == records[:1]
    assert len(caplog.records) == 1
    assert "Broken failed on a RunStarted record" in caplog.text
    assert "no room on the screen" in caplog.text and "Traceback" in caplog.text


class Refused(Recorder):
    def on_record(self, record: Record) -> None:
        raise StoreError("can't write 'report.html': Is a directory")


def test_an_observer_that_says_what_it_lacks_is_logged_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        Observers([Refused()]).on_record(RunEnded(1.0))
    assert "Refused failed on a RunEnded record" in caplog.text
    assert "which goes on: can't write 'report.html': Is a directory" in caplog.text
    assert "Traceback" not in caplog.text


def test_a_trial_rests_at_its_rung_and_keeps_it_when_it_goes_on() -> None:
    view = fold([*begin(3), JOIN, journal(QUIET, STARTED)])
    assert not view.has_rungs
    view.apply(journal(ev.TrialPaused(0, 1), ended(0, 0, train_loss=0.5, val_loss=0.5)))
    view.apply(journal(ev.TrialPaused(1)))
    states = [(trial.status, trial.rung) for trial in view.trials.values()]
    assert states[1:] == [("paused", None), ("waiting", None)]
    assert view.has_rungs
    view.apply(journal(ev.TrialPaused(0, 2)))
    assert (view.trials[0].status, view.trials[0].rung) == ("paused", 2)
    view.apply(journal(ev.TrialPaused(0)))
    view.apply(journal(ev.TrialResumed(0)))
    view.apply(journal(ev.TrialResumed(2)))
    states = [(trial.status, trial.rung) for trial in view.trials.values()]
    assert states == [("waiting", 2), ("paused", None), ("waiting", None)]


def test_a_run_that_ends_for_now_before_any_epoch_says_that_a_resume_goes_on() -> None:
    view = fold([*begin(2), JOIN])
    assert winner_line(view) == "no trial is best: none finished with a number as val_loss"
    view.apply(journal(ev.RunSuspended("its time is spent")))
    assert winner_line(view).startswith("no trial is best yet: none has a number as val_loss; ")
    view.apply(journal(ev.RunResumed()))
    assert "yet" not in winner_line(view)


def test_stopped_trials_win_if_all_are_over_and_none_has_finished() -> None:
    view = fold([*begin(3), JOIN])
    for number, loss in enumerate((0.5, 0.25, 0.75)):
        view.apply(journal(QUIET, ended(number, 0, train_loss=loss, val_loss=loss)))
    for number, status in enumerate(("stopped", "stopped", "failed")):
        assert view.winner is None, "who still trains may win"
        view.apply(journal(QUIET, ins.FinishTrial(number, status, "", 2)))
    assert view.winner is view.trials[1]
    view.apply(journal(QUIET, ins.ReopenTrial(2)))
    view.apply(journal(QUIET, ins.FinishTrial(2, "finished", "", 2)))
    assert view.winner is view.trials[2], "who has finished comes first"
