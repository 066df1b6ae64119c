"""Visits with replicas: one attempt of several workers, which ends for all of them alike."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.plan.hop.trials import replica_groups
from cerebro_hydra.plan.messages import events as ev
from cerebro_hydra.plan.messages import instructions as ins
from cerebro_hydra.plan.messages.config import HopConfig
from cerebro_hydra.plan.policy.view import View
from tests.plan.driver import Driver, done, fork_of, of, open_search, trial


def driver(replicas: int = 2, partitions: int = 2, **more) -> Driver:
    run = open_search(partitions, **more)
    run(ev.TrialAdded(trial(0, replicas=replicas), 1))
    run(ev.SearchClosed())
    return run


def report(attempt: int, worker: str, digest: str = "same") -> ev.SubEpochDone:
    return replace(done(attempt, worker), digests=(("f0", digest), ("g0", "u")))


def test_all_ranks_are_told_and_the_visit_counts_once_they_all_have_reported() -> None:
    run = driver()
    first, second = of(ins.StartSubEpoch, run.told)
    assert (first.partitions, first.replicas) == ((0, 1), ("a", "b"))
    assert [(each.worker, each.partition, each.rank) for each in (first, second)] == [
        (0, 0, 0), (1, 1, 1),
    ]  # fmt: skip
    assert first.state == 2, "states are numbered by partitions"
    assert not run(report(0, "b"))
    assert not run(report(0, "b")), "a duplicate is no second rank"
    (commit,) = of(ins.Commit, run(report(0, "a")))
    assert (commit.state, commit.partitions) == (2, (0, 1))
    assert [visit.partition for visit in run.state.trials[0].visits] == [0, 1]
    assert {place for state, place in run.held(0) if state == 2} == {"a", "b"}


def test_a_lost_rank_ends_the_attempt_for_all_and_it_begins_anew_when_it_is_back() -> None:
    run = driver()
    run(report(0, "a"))
    told = run(ev.WorkerLost("b", "killed"))
    assert of(ins.Cancel, told) == [ins.Cancel(0, "a")]
    assert not of(ins.StartSubEpoch, told)
    again = of(ins.StartSubEpoch, run(ev.WorkerJoined(1, "c", (1,))))
    assert [each.replicas for each in again] == [("a", "c")] * 2
    assert not run(report(0, "a")), "the attempt before is over"
    run(report(1, "a"))
    assert of(ins.Commit, run(report(1, "c")))


def test_a_failure_of_one_rank_is_that_of_the_trial_and_frees_all() -> None:
    run = driver()
    told = run(ev.TaskFailed(0, "b", "NaN"))
    assert of(ins.Cancel, told) == [ins.Cancel(0, "a"), ins.Cancel(0, "b")]
    assert run.state.trials[0].status == "failed"
    assert not run.running


def test_ranks_that_made_different_states_fail_the_trial() -> None:
    run = driver()
    run(report(0, "a"))
    (end,) = of(ins.FinishTrial, run(report(0, "b", "other")))
    assert "workers 0 and 1, replicas of each other, have made different states 2" in end.reason
    assert "shards [0] differ" in end.reason
    assert "numerics='portable'" in end.reason


def test_what_is_left_of_a_group_is_a_visit_of_its_own() -> None:
    run = driver(partitions=3)
    assert [each.partitions for each in of(ins.StartSubEpoch, run.told)] == [(0, 1)] * 2
    run(report(0, "a"))
    (alone,) = of(ins.StartSubEpoch, run(report(0, "b")))
    assert (alone.partitions, alone.replicas, alone.state) == ((2,), (), 3)


def test_partitions_of_one_worker_are_visited_one_after_the_other() -> None:
    run = driver()
    run(ev.WorkerLost("b", "gone"))
    run(ev.WorkerGivenUp(1, (1,), "gone"))
    (alone,) = of(ins.StartSubEpoch, run(ev.PartitionsAdopted("a", (1,))))
    assert (alone.partitions, alone.state) == ((0,), 1)


def test_a_trial_that_waits_for_a_worker_keeps_the_others_free() -> None:
    run = open_search(2)
    run(ev.TrialAdded(trial(1), 9))
    assert run.running.keys() <= {"a", "b"}
    run(ev.TrialAdded(trial(0, replicas=2), 20))
    run(ev.TrialAdded(trial(2), 9))
    assert len(run.running) == 1, "the other worker is kept for trial 0"
    (worker,) = run.running
    told = run(done(run.running[worker], worker))
    assert [each.trial for each in of(ins.StartSubEpoch, told)] == [0, 0]


def test_a_trial_that_is_left_over_takes_the_workers_that_have_none() -> None:
    run = open_search(3)
    run(ev.TrialAdded(trial(0, tail=True), 4))
    run(ev.TrialAdded(trial(1), 2))
    while not run.state.trials[0].history:
        train_one(run)
    assert run.state.trials[0].tail == {1: 1}, "more trials may still come"
    run(ev.SearchClosed())
    while run.running:
        train_one(run)
    state = run.state.trials[0]
    epochs = [[] for _ in state.history]
    for commit in (each for each in of(ins.Commit, run.told) if each.trial == 0):
        epochs[(commit.state - 1) // 3].append(commit.partitions)
    assert sorted(epochs[0]) == sorted(epochs[1]) == [(0,), (1,), (2,)]
    assert epochs[3] == [(0, 1, 2)]
    assert state.tail[3] == 3
    assert state.tail[4] == 1, "a resumed run may have fewer workers"
    assert "epoch 4 has 3 replicas: 3 workers for 1" in run.state.story(0)


def test_a_trial_that_is_cut_finer_comes_back_and_leaves_no_other_one_over() -> None:
    run = open_search(2)
    run(ev.TrialAdded(trial(0, tail=True), 3))
    run(ev.TrialAdded(trial(1, finer=True), 3))
    run(ev.SearchClosed())
    (lacking,) = (each for each in run.state.attempts.values() if each.trial == 1)
    told = run(ev.TaskFailed(lacking.number, lacking.incarnation, "MemoryError", memory=True))
    assert of(ins.CutFiner, told)
    while not run.state.trials[0].history:
        train_one(run)
    assert run.state.trials[0].tail == {1: 1}


def test_no_trial_is_left_over_because_its_run_is_suspended() -> None:
    run = open_search(2, evaluate=True)
    for number in range(2):
        run(ev.TrialAdded(trial(number, tail=True, custom_metrics=("auc",)), 3))
    run(ev.SearchClosed())
    while not (merges := of(ins.MergeMetrics, run.told)):
        worker, number = next(iter(run.running.items()))
        if run.state.attempts[number].kind == "train":
            run(done(number, worker))
        else:
            hop, sums = ev.Hop(0, 0, 0.0), {"loss": (1.0, 2)}
            run(ev.EvaluationDone(number, worker, sums, 1.0, hop, {"auc": 1}))
    run(ev.RunSuspended("enough"))
    run(ev.MetricsMerged(merges[0].attempt, merges[0].trial, 0, {"auc": 1.0}))
    assert run.state.trials[merges[0].trial].tail == {1: 1}, "the other one goes on with it"


def test_a_worker_without_a_partition_is_none_that_a_tail_could_take() -> None:
    """A run that is resumed may have more workers than partitions."""
    run = open_search(2)
    for worker in (2, 3):
        run(ev.WorkerJoined(worker, "abcd"[worker], ()))
    for number in range(2):
        run(ev.TrialAdded(trial(number, tail=True), 3))
    run(ev.SearchClosed())
    while not run.state.trials[0].history:
        train_one(run)
    assert run.state.trials[0].tail == {1: 1}, "two workers can train, and so many trials are left"


def test_a_trial_that_has_stopped_early_begins_no_tail() -> None:
    run = open_search(2, metric="train_loss")
    run(ev.TrialAdded(trial(0, tail=True, patience=1, keep="best"), 5))
    run(ev.SearchClosed())
    while run.running:
        train_one(run)
    state = run.state.trials[0]
    assert len(state.history) == 2 < state.budget, "the loss stayed as it was"
    assert state.tail == {1: 2, 2: 1}
    assert "epoch 3 has" not in run.state.story(0)


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_trial_that_an_audit_has_sent_back_has_no_tail(epoch: int) -> None:
    run = open_search(2)
    run(ev.TrialAdded(trial(0, tail=True), 3))
    run(ev.SearchClosed())
    while len(run.state.trials[0].history) < epoch:
        train_one(run)
    worker, attempt = next(iter(run.running.items()))
    run(ev.AuditFailed(attempt, worker, "at step 7"))
    before = len(run.told)
    while run.running:
        train_one(run)
    began = of(ins.StartSubEpoch, run.told[before:])
    assert {(each.uncut, each.replicas) for each in began} == {(True, ())}
    assert len(run.state.trials[0].history) == 3


def test_replicas_of_which_an_audit_differs_fail_with_what_differs() -> None:
    """A partition that is left over has no replicas, so its visit may be audited."""
    run = driver(partitions=3)
    train_one(run)
    told = run(ev.AuditFailed(run.running["c"], "c", "at step 7"))
    (end,) = of(ins.FinishTrial, told)
    assert end.status == "failed"
    assert "at step 7" in end.reason and "take shards=1, or leave replicas out" in end.reason
    assert not of(ins.TrainUncut, told)


def test_a_fork_with_replicas_of_a_trial_in_one_piece_fails_alone() -> None:
    run = open_search()
    run(ev.TrialAdded(trial(0), 1))
    run(ev.AuditFailed(*reversed(next(iter(run.running.items()))), "at step 7"))
    train_one(run)
    train_one(run)
    fork = replace(fork_of(0, 1), replicas=2)
    (write,) = of(ins.Checkpoint, run(ev.TrialForked(fork, 0, 2, 2)))
    (end,) = of(ins.FinishTrial, run(ev.Checkpointed(0, 2, write.incarnation)))
    assert (end.trial, end.status) == (1, "failed")
    assert "trial 0 is trained in one piece" in end.reason
    assert not run.running and not run.state.trials[0].over


def train_one(run: Driver) -> None:
    """End the task of one worker, and of those that do it together."""
    running = run.running
    attempt = next(iter(running.values()))
    for worker in [worker for worker, each in running.items() if each == attempt]:
        run(report(attempt, worker))


@pytest.mark.parametrize("order", ["dynamic", "seeded"])
def test_groups_are_of_neighbours_and_each_partition_is_in_one(order: str) -> None:
    run = driver(partitions=5, order=order, joins=False)
    state, seen = run.state.trials[0], []
    for _ in range(3):
        group = replica_groups(run.state.config, 0, state)[0]
        seen.append(group)
        for partition in group:
            state.trained |= 1 << partition
    assert sorted(seen) == [(0, 1), (2, 3), (4,)]
    assert replica_groups(run.state.config, 0, state) == []


def test_more_replicas_than_partitions_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="replicas=3 of trial 0 are more than the 2 part"):
        HopConfig(2, evaluate=False).check_trial(trial(0, replicas=3))
    with pytest.raises(ConfigurationError, match="replicas=0 of trial 0 must be at least 1"):
        trial(0, replicas=0)


def test_nothing_but_replicas_may_begin_what_they_are_to_train() -> None:
    run = driver(joins=False)
    run(ev.WorkerJoined(0, "a", (0,)))
    view = View(run.state.tables)
    assert not view.choices() and not view.replicas(0), "one of both workers is not there"
    assert not run.running
