"""One behaviour of the hop state machine at a time, without agents."""

from __future__ import annotations

import json

import pytest

from cerebro_hydra.errors import JournalError
from cerebro_hydra.plan.hop.journal import fold, record
from cerebro_hydra.plan.hop.state import HopState
from cerebro_hydra.plan.hop.tables import LiveAgent
from cerebro_hydra.plan.hop.trials import visit_order
from cerebro_hydra.plan.messages import events as ev
from cerebro_hydra.plan.messages import instructions as ins
from cerebro_hydra.plan.messages.instructions import StateSource
from cerebro_hydra.plan.policy.lookahead import snapshot
from cerebro_hydra.plan.policy.policy import Scheduler
from cerebro_hydra.plan.policy.view import View
from cerebro_hydra.plan.simulate.run import Simulation
from tests.plan.driver import Driver, config, done, in_order, of


def evaluated(attempt: int, worker: str, loss: float, rows: int = 2) -> ev.EvaluationDone:
    sums = {"loss": (loss, rows), "accuracy": (1.0, rows)}
    return ev.EvaluationDone(attempt, worker, sums, 1.0, ev.Hop(0, 0, 0.0), {"seen": attempt})


def test_an_ending_sub_epoch_starts_the_next_one_on_an_idle_worker() -> None:
    run = Driver(evaluate=False)
    ((first, attempt),) = run.running.items()
    other = "b" if first == "a" else "a"
    (start,) = of(ins.StartSubEpoch, run(ev.SubEpochEnding(attempt, first)))
    assert (start.incarnation, start.source) == (other, StateSource(1, first))


def test_an_ending_sub_epoch_reserves_its_worker_for_another_trial() -> None:
    run = Driver(trials=2, partitions=2, evaluate=False)
    (a, b) = (run.running["a"], run.running["b"])
    assert not of(ins.FetchShards, run(ev.SubEpochEnding(a, "a")))  # nobody could come yet
    fetches = of(ins.FetchShards, run(ev.SubEpochEnding(b, "b")))
    assert {(f.incarnation, f.source) for f in fetches} == {
        ("a", StateSource(1, "b")),
        ("b", StateSource(1, "a")),
    }
    (start,) = of(ins.StartSubEpoch, run(done(a, "a")))
    assert start.incarnation == "a" and start.source == StateSource(1, "b")


def test_a_done_before_that_of_the_visit_before_it_is_held_back_not_lost() -> None:
    run = Driver(evaluate=False)
    ((first, attempt),) = run.running.items()
    (start,) = of(ins.StartSubEpoch, run(ev.SubEpochEnding(attempt, first)))
    run(ev.StateReceived(0, 1, start.incarnation))
    assert not of(ins.Commit, run(done(start.attempt, start.incarnation)))
    commits = of(ins.Commit, run(done(attempt, first)))
    assert [c.state for c in commits] == [1, 2]


def test_a_lost_worker_takes_back_only_what_it_alone_held() -> None:
    run = Driver(partitions=3, evaluate=False)
    run.train(run.only)
    run.train(w2 := run.only)
    ((w3, a3),) = run.running.items()
    redo = of(ins.Redo, run(ev.WorkerLost(w2, "killed")))
    assert [r.visits for r in redo] == [(2,)]  # state 1 is still whole at its first worker
    assert ins.Cancel(a3, w3) in run.last
    assert "killed" in run.state.story(0)


def test_a_state_that_arrived_elsewhere_outlives_its_worker() -> None:
    run = Driver(partitions=3, evaluate=False)
    run.train(w1 := run.only)
    ((w2, a2),) = run.running.items()
    run(ev.StateReceived(0, 1, w2))
    assert not of(ins.Redo, run(ev.WorkerLost(w1, "killed")))
    assert run.running == {w2: a2}


def test_a_state_is_dropped_once_newer_ones_outlive_any_one_worker() -> None:
    run = Driver(partitions=3, evaluate=False)
    run.train(w1 := run.only)
    ((w2, a2),) = run.running.items()
    assert ins.Drop(0, 1, w1) not in run.last
    run(ev.StateReceived(0, 1, w2))
    run(ev.SubEpochEnding(a2, w2))
    w3 = ({"a", "b", "c"} - {w1, w2}).pop()
    run(ev.StateReceived(0, 2, w3))
    drops = of(ins.Drop, run(done(a2, w2)))
    assert ins.Drop(0, 1, w1) in drops


def test_an_epoch_ends_with_numbers_merged_in_partition_order() -> None:
    run = Driver(partitions=2, epochs=2)
    run.train(run.only)
    run.train(run.only)
    evaluations = {a.partition: a for a in run.state.trials[0].evaluations.values()}
    assert sorted(evaluations) == [0, 1]  # in parallel on both workers
    assert not of(ins.EndEpoch, run(evaluated(evaluations[1].number, "b", 1e16)))
    (end,) = of(ins.EndEpoch, run(evaluated(evaluations[0].number, "a", 1.0)))
    expected = {"train_loss": 0.25, "val_loss": (0.0 + 1.0 + 1e16) / 4, "val_accuracy": 0.5}
    assert end == ins.EndEpoch(0, 0, expected)
    assert of(ins.StartSubEpoch, run.last)[0].epoch == 1


def test_the_first_visit_of_an_epoch_carries_the_metrics_of_the_one_before_also_again() -> None:
    seed = in_order(0, 1, 0, 1, epochs=2)
    run = Driver(partitions=2, epochs=2, evaluate=False, order="seeded", seed=seed)
    run.train("a")
    run.train("b")
    run(ev.StateReceived(0, 2, "a"))
    run(ev.WorkerLost("a", "killed"))
    run(ev.WorkerJoined(0, "again", (0,)))
    run.train("again")
    starts = [(start.state, start.metrics) for start in of(ins.StartSubEpoch, run.told)]
    before = {"train_loss": 0.25}
    assert starts == [(1, {}), (2, {}), (3, before), (3, before), (4, {})]


def evaluated_everywhere(**more) -> tuple[Driver, ins.MergeMetrics]:
    """Let trial 0, which has a custom metric, be trained on a and b and evaluated on both."""
    run = Driver(order="seeded", seed=in_order(0, 1), custom=("auc",), **more)
    run.train("a")
    run.train("b")
    run(evaluated(run.running["b"], "b", 5.0))
    (merge,) = of(ins.MergeMetrics, run(evaluated(run.running["a"], "a", 3.0)))
    return run, merge


def test_custom_metrics_are_merged_in_partition_order_before_the_epoch_ends() -> None:
    run, merge = evaluated_everywhere()
    on = {event.attempt: event.partitions[0] for event in of(ins.Evaluate, run.told)}
    assert [on[states["seen"]] for states in merge.states] == [0, 1]
    assert not of(ins.EndEpoch, run.told)
    merged = ev.MetricsMerged(merge.attempt, 0, 0, {"auc": 0.75})
    (end,) = of(ins.EndEpoch, run(merged))
    assert list(end.metrics.items()) == [
        ("train_loss", 0.25),
        ("val_loss", 2.0),
        ("val_accuracy", 0.5),
        ("val_auc", 0.75),
    ]
    assert not of(ins.EndEpoch, run(merged))


def test_a_trial_whose_custom_metric_fails_fails_with_its_traceback() -> None:
    run, merge = evaluated_everywhere()
    failed = ev.MetricsMergeFailed(merge.attempt, 0, 0, "Traceback: boom")
    (finish,) = of(ins.FinishTrial, run(failed))
    assert (finish.status, finish.reason) == ("failed", "Traceback: boom")


def test_merged_metrics_of_a_void_epoch_are_ignored_and_merged_again() -> None:
    run, void = evaluated_everywhere()
    run(ev.WorkerLost("a", "killed"))
    (redo,) = of(ins.Redo, run(ev.WorkerLost("b", "killed")))
    assert redo.visits == (1, 2)
    for worker, again in enumerate("cd"):
        run(ev.WorkerJoined(worker, again, (worker,)))
    for worker in "cd":
        run.train(worker)
    for worker in "cd":
        run(evaluated(run.running[worker], worker, 9.0))
    (merge,) = of(ins.MergeMetrics, run.last)
    assert not of(ins.EndEpoch, run(ev.MetricsMerged(void.attempt, 0, 0, {"auc": 0.1})))
    (end,) = of(ins.EndEpoch, run(ev.MetricsMerged(merge.attempt, 0, 0, {"auc": 0.9})))
    assert end.metrics["val_auc"] == 0.9


def test_a_metric_over_no_rows_is_nan_and_its_journal_folds() -> None:
    search = config(partitions=1)
    scheduler, journal = Scheduler(search.config), []
    state = scheduler.state

    def tell(event: ev.Event) -> None:
        for decided, told in scheduler.handle(event):
            journal.append(record(len(journal), decided, told))

    for event in search.events():
        tell(event)
    tell(ev.WorkerJoined(0, "a", (0,)))
    tell(done(0, "a"))
    tell(evaluated(1, "a", 0.0, rows=0))
    assert str(state.trials[0].history[0]["val_loss"]) == "nan"
    text = [json.loads(json.dumps(entry)) for entry in journal]
    assert not fold(state.config, text).trials[0].over


def test_a_trial_is_finished_once_its_last_state_is_in_the_store() -> None:
    run = Driver(partitions=1, evaluate=False)
    (checkpoint,) = of(ins.Checkpoint, run(done(0, "a")))
    assert checkpoint == ins.Checkpoint(0, 1, "a")
    run(ev.Checkpointed(0, 1, "a"))
    assert run.last == [ins.FinishTrial(0, "finished", "", 1), ins.Drop(0, 1, "a"), ins.FinishRun()]
    assert run(ev.Checkpointed(0, 1, "a")) == []


def test_a_stopped_trial_saves_its_last_state_and_ends() -> None:
    run = Driver(evaluate=False)
    run.train(w1 := run.only)
    ((w2, a2),) = run.running.items()
    run(ev.TrialStopped(0, "pruned"))
    assert ins.Cancel(a2, w2) in run.last and ins.Checkpoint(0, 1, w1) in run.last
    assert ins.FinishTrial(0, "stopped", "pruned", 1) in run(ev.Checkpointed(0, 1, w1))


def test_a_trial_fails_only_if_its_first_state_can_not_be_read_from_the_store() -> None:
    run = Driver(evaluate=False)
    for _ in range(3):
        ((worker, attempt),) = run.running.items()
        run(ev.TransferFailed(attempt, worker, "damaged"))
    (finish,) = of(ins.FinishTrial, run.last)
    assert finish.status == "failed"
    assert "its first state (0) can't be read from the store" in finish.reason
    assert "damaged" in finish.reason and run.state.story(0).count("damaged") == 3


def fail(run: Driver, times: int = 1) -> None:
    for _ in range(times):
        ((worker, attempt),) = run.running.items()
        run(ev.TransferFailed(attempt, worker, "reset"))


def test_an_agent_from_which_nobody_can_fetch_writes_its_state_to_the_store() -> None:
    run = Driver(partitions=2, evaluate=False, order="seeded", seed=in_order(0, 1))
    run.train("a")
    fail(run, 2)
    assert run.running and not of(ins.Checkpoint, run.told)
    fail(run)
    assert ins.Checkpoint(0, 1, "a") in run.last and not run.running
    assert "a is no source of state 1 any more" in run.state.story(0)
    (start,) = of(ins.StartSubEpoch, run(ev.Checkpointed(0, 1, "a")))
    assert (start.incarnation, start.source) == ("b", ins.StateSource(1, None))


def test_tasks_that_wait_for_one_transfer_do_not_hand_its_source_on_for_ever() -> None:
    run = Driver(joins=False, partitions=3, order="seeded", seed=in_order(0, 2, 1))
    run(ev.WorkerJoined(0, "a", (1,), 1, 3))
    run(ev.WorkerJoined(1, "b", (0, 2), 1, 3))
    for worker in ("b", "b", "a"):
        run.train(worker)
    run(ev.Checkpointed(0, 3, "a"))
    for _ in range(6):
        fetching = [e for e in run.state.trials[0].attempts if e.incarnation == "b"]
        if all(each.source == StateSource(3, None) for each in fetching):
            break
        assert len(fetching) == 2, "both evaluate what a has"
        assert len({each.source for each in fetching}) == 1, "a state is fetched from one place"
        run(ev.TransferFailed(fetching[0].number, "b", "reset"))
    else:
        raise AssertionError("b asks a again and again, though the store has the state")
    assert len(fetching) == 2


def test_after_a_failed_transfer_the_store_is_the_source_if_it_has_the_state() -> None:
    run = Driver(partitions=2, evaluate=False, order="seeded", seed=in_order(0, 1))
    run(ev.TrialPaused(0))
    run.train("a")
    run(ev.Checkpointed(0, 1, "a"))
    run(ev.TrialResumed(0))
    fail(run)
    (start,) = of(ins.StartSubEpoch, run.last)
    assert start.source == ins.StateSource(1, None)


def test_a_state_that_nobody_can_fetch_is_void_and_the_trial_goes_back_to_the_store() -> None:
    run = Driver(partitions=2, evaluate=False, order="seeded", seed=in_order(0, 1))
    run.train("a")
    fail(run, 3)
    run(ev.Checkpointed(0, 1, "a"))
    fail(run, 3)
    (redo,) = of(ins.Redo, run.last)
    assert redo.visits == (1,) and "can't be fetched from anywhere" in redo.reason
    (start,) = of(ins.StartSubEpoch, run.last)
    assert (start.incarnation, start.source) == ("a", ins.StateSource(0, None))
    run.train("a")
    assert run.running["b"] and not run.state.trials[0].over, "made anew, it has its sources again"


def test_a_new_incarnation_fences_the_old_one() -> None:
    run = Driver(evaluate=False)
    ((first, attempt),) = run.running.items()
    worker = "ab".index(first)
    run(ev.WorkerJoined(worker, "new", (worker,)))
    assert run(done(attempt, first)) == []
    assert run(ev.WorkerJoined(worker, first, (worker,))) == []
    assert run.state.workers.by_worker[worker].incarnation == "new"


def test_two_workers_with_one_partition_are_refused() -> None:
    run = Driver()
    with pytest.raises(ValueError, match=r"worker 7 joined with partitions \[1\]"):
        run(ev.WorkerJoined(7, "x", (1,)))


def test_a_late_receipt_of_a_fetch_that_was_given_up_is_not_believed() -> None:
    run = Driver(partitions=3, evaluate=False)
    run.train(w1 := run.only)
    ((w2, _),) = run.running.items()
    run(ev.WorkerLost(w1, "killed"))
    run(ev.StateReceived(0, 1, w2))
    assert not run.state.holders.holds(0, 1, w2)


def test_seeded_trials_start_on_different_partitions() -> None:
    run = config(trials=4, partitions=4, order="seeded", seed=3)
    square = [visit_order(run.config, trial, 0) for trial in range(4)]
    assert all(len(set(column)) == 4 for column in zip(*square, strict=True))


def test_the_journal_names_the_record_whose_decision_differs() -> None:
    run = config(trials=2)
    timeline = Simulation(run, [(0,), (1,)], lambda *_: 1.0).run()
    journal = [record(n, event, given) for n, (event, given) in enumerate(timeline.records)]
    fold(run.config, journal)
    at = next(n for n, entry in enumerate(journal) if len(entry["instructions"]) > 1)
    changed = json.loads(json.dumps(journal))
    changed[at]["instructions"].pop()
    with pytest.raises(JournalError, match=f"record {at} "):
        fold(run.config, changed)
    with pytest.raises(JournalError, match="record 4 stands where record 3 belongs"):
        fold(run.config, journal[:3] + journal[4:])


def test_a_late_receipt_is_not_taken_for_the_fetch_that_replaced_it() -> None:
    run = Driver(partitions=3, evaluate=False, order="seeded", seed=in_order(0, 1, 2))
    run.train("a")
    assert "b" in run.running  # fetches state 1 from a
    run(ev.WorkerLost("a", "killed"))
    run(ev.WorkerJoined(0, "again", (0,)))
    run.train("again")
    run(ev.StateReceived(0, 1, "b"))  # sent when state 1 was still the one from a
    assert not run.state.holders.holds(0, 1, "b")
    run(ev.SubEpochEnding(run.running["b"], "b"))  # this one can only speak of the new one
    assert run.state.holders.holds(0, 1, "b")


def test_the_kept_copy_is_never_on_the_worker_whose_loss_it_is_kept_for() -> None:
    seed = in_order(0, 1, 0, epochs=2)
    run = Driver(partitions=2, epochs=2, evaluate=False, order="seeded", seed=seed)
    for worker in ("a", "b", "a"):
        run.train(worker)
    (redo,) = of(ins.Redo, run(ev.WorkerLost("a", "killed")))
    assert redo.visits == (3,)


def test_evaluations_of_a_void_state_are_done_again() -> None:
    run = Driver(partitions=2, order="seeded", seed=in_order(0, 1))
    run.train("a")
    run.train("b")
    run(evaluated(run.running["b"], "b", 5.0))
    assert run.state.trials[0].evaluation.done == 1 << 1
    (redo,) = of(ins.Redo, run(ev.WorkerLost("b", "killed")))
    assert redo.visits == (2,)
    assert not run.state.trials[0].evaluation.done


def test_failed_transfers_count_only_in_a_row() -> None:
    run = Driver(partitions=3, evaluate=False)
    for _ in range(3):
        for _ in range(2):
            ((worker, attempt),) = run.running.items()
            run(ev.TransferFailed(attempt, worker, "reset"))
        run.train(worker := run.only)
    assert run.state.trials[0].newest == 3 and not run.state.trials[0].over


def test_an_event_of_another_incarnation_is_not_believed() -> None:
    run = Driver(evaluate=False)
    ((worker, attempt),) = run.running.items()
    other = "b" if worker == "a" else "a"
    assert run(done(attempt, other)) == []
    assert run.state.trials[0].newest == 0


def test_a_repeated_done_changes_nothing_while_the_first_is_held_back() -> None:
    run = Driver(evaluate=False)
    ((first, attempt),) = run.running.items()
    (start,) = of(ins.StartSubEpoch, run(ev.SubEpochEnding(attempt, first)))
    run(done(start.attempt, start.incarnation, loss=2.0))
    run(done(start.attempt, start.incarnation, loss=99.0))
    run(done(attempt, first))
    assert [visit.loss_sum for visit in run.state.trials[0].visits] == [1.0, 2.0]


def test_nobody_waits_for_an_agent_that_may_never_come() -> None:
    search = config(partitions=2, evaluate=False)
    state = HopState(search.config)
    for event in search.events():
        state.handle(event)
    state.workers.add(LiveAgent(0, "a", (0,)))
    prefers_1 = {0: [0.0, 9.0]}
    _, tasks = snapshot(View(state.tables)).rollout(prefers_1, max_wait=0.9, horizon=9)
    assert [task.partition for task in tasks] == [0, 1]
