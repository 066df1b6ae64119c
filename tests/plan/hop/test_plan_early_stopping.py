"""Trials that compare their epochs: their ends, their results, what a lost worker costs them."""

from __future__ import annotations

from math import nan

from cerebro_hydra.plan.messages import events as ev
from cerebro_hydra.plan.messages import instructions as ins
from tests.plan.driver import Driver, in_order, of

EPOCHS = 4
SEED = in_order(0, 1, 0, 1, 0, 1, epochs=3)


def patient(patience: int = 2, epochs: int = EPOCHS, **more) -> Driver:
    """Make one trial that visits a, then b, in each of its first three epochs."""
    fixed = {"order": "seeded", "seed": SEED, "evaluate": False}
    return Driver(epochs=epochs, patience=patience, **fixed, **more)


def test_a_better_state_is_saved_while_training_goes_on() -> None:
    run = patient()
    run.epoch("ab", 1.0)
    assert of(ins.Checkpoint, run.last) == [ins.Checkpoint(0, 2, "b")]
    (start,) = of(ins.StartSubEpoch, run.last)
    assert (start.state, start.epoch) == (3, 1)


def test_a_trial_that_gets_no_better_ends_with_its_best_state() -> None:
    run = patient()
    for loss in (1.0, 2.0, nan):
        run.epoch("ab", loss)
    assert not of(ins.FinishTrial, run.told)
    why = "train_loss was best after epoch 1 (0.25) and not better for 2 epochs"
    run(ev.Checkpointed(0, 2, "b"))
    assert of(ins.FinishTrial, run.last) == [ins.FinishTrial(0, "finished", why, 2)]
    assert run.state.finished and not of(ins.Checkpoint, run.told)[1:]


def test_equal_is_not_better_and_higher_may_be() -> None:
    run = patient(patience=1, direction="max")
    run.epoch("ab", 1.0)
    run.epoch("ab", 2.0)
    run.epoch("ab", 2.0)
    run(ev.Checkpointed(0, 2, "b"))
    run(ev.Checkpointed(0, 4, of(ins.Checkpoint, run.last)[0].incarnation))
    (finish,) = of(ins.FinishTrial, run.last)
    assert finish.state == 4 and "best after epoch 2 (0.5)" in finish.reason


def test_a_trial_whose_metric_does_not_exist_fails_and_says_what_does() -> None:
    run = Driver(partitions=1, patience=1, metric="val_auc")
    run(ev.SubEpochDone(0, "a", 4, 1.0, (("f0", "t"),), 9, 1.0, ev.Hop(0, 0, 0.0)))
    run(ev.EvaluationDone(1, "a", {"loss": (1.0, 1)}, 1.0, ev.Hop(0, 0, 0.0), {}))
    (finish,) = of(ins.FinishTrial, run.last)
    assert finish.status == "failed"
    assert "needs 'val_auc', which no epoch has; choose one of ['train_loss'" in finish.reason


def test_a_best_state_that_was_lost_before_it_was_saved_is_made_again() -> None:
    run = patient()
    run.epoch("ab", 1.0)
    (redo,) = of(ins.Redo, run(ev.WorkerLost("b", "killed")))
    assert redo.visits == (2,) and run.state.trials[0].history == []


def test_a_best_state_that_exists_elsewhere_is_saved_there_and_nothing_is_redone() -> None:
    run = patient()
    run.epoch("ab", 1.0)
    run(ev.StateReceived(0, 2, "a"))
    run(ev.WorkerLost("b", "killed"))
    assert not of(ins.Redo, run.last) and of(ins.Checkpoint, run.last) == [
        ins.Checkpoint(0, 2, "a")
    ]


def test_a_lost_best_state_takes_newer_ones_with_it_wherever_they_are() -> None:
    run = patient()
    run.epoch("ab", 1.0)
    run.train("a", 2.0)
    run(ev.StateReceived(0, 3, "b"))
    run(ev.WorkerLost("a", "killed"))
    run(ev.WorkerJoined(0, "c", (0,)))
    run.train("b", 2.0)
    run(ev.StateReceived(0, 4, "c"))
    run(ev.WorkerLost("b", "killed"))
    (redo,) = of(ins.Redo, run.last)
    assert redo.visits == (1, 2, 3, 4)
    assert ins.Drop(0, 4, "c") in run.last
    assert run.state.trials[0].history == []


def test_what_came_after_the_best_state_is_not_made_again_once_it_is_over() -> None:
    run = patient(patience=1)
    run.epoch("ab", 1.0)
    run.epoch("ab", 2.0)
    assert run.state.trials[0].newest == 4
    run(ev.WorkerLost("b", "killed"))
    assert not of(ins.Redo, run.last)
    assert of(ins.Checkpoint, run.last) == [ins.Checkpoint(0, 2, "a")]


def superseded() -> Driver:
    """Make a run whose epoch 0 is being saved on b while a better epoch 1 is on b alone."""
    run = patient()
    run.epoch("ab", 2.0)
    run.epoch("ab", 1.0)
    return run


def test_the_best_state_before_is_kept_until_the_new_one_is_safe() -> None:
    run = superseded()
    (redo,) = of(ins.Redo, run(ev.WorkerLost("b", "killed")))
    assert redo.visits == (4,)  # and not state 3 as well, whose best one would be gone
    assert run.state.trials[0].history == [{"train_loss": 0.5}]


def test_a_better_state_waits_until_the_one_before_is_written_and_no_copy_is_dropped_early() -> (
    None
):
    run = superseded()
    run(ev.StateReceived(0, 4, "a"))
    assert ins.Drop(0, 2, "a") in run.told and ins.Drop(0, 2, "b") not in run.told
    assert of(ins.Checkpoint, run.told) == [ins.Checkpoint(0, 2, "b")]
    run(ev.Checkpointed(0, 2, "b"))
    assert ins.Drop(0, 2, "b") in run.last
    assert [checkpoint.state for checkpoint in of(ins.Checkpoint, run.last)] == [4]


def test_a_failed_trial_keeps_what_is_being_written_until_it_is() -> None:
    run = patient()
    run.epoch("ab", 1.0)
    run(ev.TaskFailed(run.running["a"], "a", "boom"))
    assert ins.FinishTrial(0, "failed", "boom", 0) in run.last
    assert ins.Drop(0, 2, "b") not in run.last
    assert ins.Drop(0, 2, "b") in run(ev.Checkpointed(0, 2, "b"))
