"""Candidates are proposed before they are admitted, in any order, also after the search's end."""

from __future__ import annotations

from typing import Any

from cerebro_hydra.plan.hop.journal import comparable, fold, record
from cerebro_hydra.plan.messages import events as ev
from cerebro_hydra.plan.messages import instructions as ins
from cerebro_hydra.plan.messages.config import HopConfig
from cerebro_hydra.plan.policy.policy import Scheduler
from tests.plan.driver import Driver, of, open_search, trial


def closed(*numbers: int) -> Driver:
    """A search that has proposed these candidates and closed."""
    run = open_search(partitions=1)
    for number in numbers:
        run(ev.TrialProposed(number, {"lr": number}, 1))
    run(ev.SearchClosed())
    return run


def test_a_run_waits_for_candidates_that_were_proposed_before_its_search_closed() -> None:
    run = closed(0, 1)
    run(ev.TrialAdded(trial(1), 1))
    run.train_one()
    told = run(ev.Checkpointed(1, 1, "a"))
    assert of(ins.FinishTrial, told) and not run.state.finished
    run(ev.TrialAdded(trial(0), 1))
    run.train_one()
    told = run(ev.Checkpointed(0, 1, "a"))
    assert of(ins.FinishRun, told)


def test_a_refused_candidate_fails_with_its_traceback_and_may_be_the_last_to_end() -> None:
    run = closed(0)
    told = run(ev.TrialRefused(0, "ValueError: no layer"))
    assert told == [ins.FinishTrial(0, "failed", "ValueError: no layer", 0), ins.FinishRun()]
    assert run(ev.TrialRefused(0, "again")) == []
    assert not run.state.trials


def test_a_refused_candidate_that_is_proposed_once_more_keeps_no_run_from_its_end() -> None:
    run = open_search(partitions=1)
    run(ev.TrialProposed(0, {"lr": 0}, 1))
    run(ev.TrialRefused(0, "ValueError: no layer"))
    run(ev.TrialProposed(0, {"lr": 0}, 1))
    assert run(ev.SearchClosed()) == [ins.FinishRun()]


def test_nothing_is_added_after_the_end_of_the_search_that_was_not_proposed_before() -> None:
    run = closed(0)
    run(ev.TrialProposed(1, {}, 1))
    run(ev.TrialAdded(trial(1), 1))
    assert not run.state.trials and list(run.state.tables.candidates) == [0]
    run(ev.TrialAdded(trial(0), 1))
    run(ev.TrialAdded(trial(0), 5))
    assert run.state.trials[0].budget == 1 and not run.state.tables.candidates


def test_candidates_are_folded_at_every_prefix() -> None:
    scheduler = Scheduler(HopConfig(1, evaluate=False))
    records: list[dict[str, Any]] = []
    for event in (
        ev.TrialProposed(0, {"lr": 0.1}, 1),
        ev.TrialProposed(1, {"lr": [1, None]}, 1, parent=0, visit=1),
        ev.WorkerJoined(0, "a", (0,)),
        ev.TrialAdded(trial(0), 1),
        ev.SearchClosed(),
        ev.TrialRefused(1, "boom"),
    ):
        for decided, told in scheduler.handle(event):
            records.append(record(len(records), decided, told))
        assert comparable(fold(scheduler.state.config, records)) == comparable(scheduler.state)
