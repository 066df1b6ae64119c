"""A search is planned before anything is trained; then it runs as it was planned."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra import LocalStore, PBTSearch, SuccessiveHalvingSearch, hp_choice
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.plan.messages.events import TrialAdded, TrialPaused
from cerebro_hydra.plan.messages.instructions import StartSubEpoch
from cerebro_hydra.testing.local_backend import LocalBackend
from tests.end_to_end.models import feed_forward
from tests.end_to_end.replicas.factories import normalized
from tests.end_to_end.runs import classes, grid
from tests.plan.driver import of
from tests.planning.test_planning_earlier_run import folder_of

ROWS = classes(400)
SPACE: dict[str, list[Any]] = {"lr": [0.1, 0.01, 0.001, 0.0001], "shards": [2]}


def rungs(store: Path, **options: Any) -> SuccessiveHalvingSearch:
    return SuccessiveHalvingSearch(
        backend=LocalBackend(2),
        store=LocalStore(str(store)),
        estimator_gen_fn=feed_forward,
        search_space={name: hp_choice(values) for name, values in SPACE.items()},
        num_models=4,
        num_epochs=4,
        eta=2,
        verbose=0,
        **options,
    )


def test_a_grid_is_planned_on_several_kinds_of_workers(tmp_path: Path) -> None:
    search = grid(LocalBackend(2), tmp_path, feed_forward, SPACE)
    plan = search.plan(ROWS, workers=[1, 2], devices=[1, 2], price_per_hour=1)
    seconds = [row.outcome.seconds for row in plan.rows if row.outcome is not None]
    assert len(seconds) == 4 and all(each > 0 for each in seconds)
    for row in plan.rows:
        assert row.outcome is not None and row.outcome.bound <= row.outcome.seconds
        assert len(row.outcome.trials) == 4
        logs = row.outcome.timeline.visit_logs
        assert [len(log) for log in logs] == [2 * row.workers] * 4  # two epochs
    assert "the start of workers is not counted" in str(plan)
    assert not list((tmp_path / "runs").glob("*")), "nothing is written of a plan"
    (row,) = search.plan(ROWS, device_memory=300).rows
    assert row.outcome is None and "a device needs" in row.refused[0]


def test_replicas_are_planned_with_what_they_exchange(tmp_path: Path) -> None:
    space = {"epochs": [2], "replicas": [2, "tail"]}
    plan = grid(LocalBackend(2), tmp_path, normalized, space).plan(ROWS, workers=[1, 2])
    one, two = (row.outcome for row in plan.rows)
    assert one is not None and two is not None
    assert "replicas is 2, and there are 1 partitions" in one.refused[0]
    starts = [each for _, told in two.timeline.records for each in of(StartSubEpoch, told)]
    assert {each.partitions for each in starts if each.trial == 0} == {(0, 1)}
    (exchange,) = {each for number, each in two.exchanges.items() if number == 0}
    assert exchange.replicas == 2 and exchange.nbytes > 4 * 24 * 24 and exchange.step > 0
    assert "2 workers: trial 0" in str(plan) and "2 replicas exchange" in str(plan)


def test_a_run_of_other_models_is_refused_by_name(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "other", by_shard=True)
    search = grid(LocalBackend(1), tmp_path, feed_forward, {"lr": [0.1], "shards": [1]})
    with pytest.raises(ConfigurationError, match=f"from_run is '{folder.run_id}', none of whose"):
        search.plan(ROWS, from_run=folder.path)


def test_rungs_let_as_many_go_on_as_the_search_says(tmp_path: Path) -> None:
    (row,) = rungs(tmp_path).plan(ROWS).rows
    assert row.outcome is not None
    events = [event for event, _ in row.outcome.timeline.records]
    assert sum(isinstance(event, TrialAdded) for event in events) == 4
    assert any(isinstance(event, TrialPaused) for event in events)
    # Of four trials after one epoch two go on for one more, and one of these for two more.
    assert sorted(len(log) // 2 for log in row.outcome.timeline.visit_logs) == [1, 1, 2, 4]
    best = rungs(tmp_path).plan(ROWS, metric=lambda trial, epoch: abs(trial - 2.2)).rows[0]
    assert best.outcome is not None
    logs = [len(log) // 2 for log in best.outcome.timeline.visit_logs]
    assert logs.index(4) == 2, "the metric that was given decides"


def test_a_population_is_refused_by_name(tmp_path: Path) -> None:
    search = PBTSearch(
        backend=LocalBackend(2),
        store=LocalStore(str(tmp_path)),
        estimator_gen_fn=feed_forward,
        search_space={"lr": hp_choice([0.1, 0.01]), "shards": hp_choice([1])},
        num_models=4,
        mutations=["lr"],
        perturbation_interval=1,
        num_epochs=4,
        verbose=0,
    )
    with pytest.raises(ConfigurationError, match="the search forks trials by what they measure"):
        search.plan(ROWS)


@pytest.mark.long
def test_a_search_that_was_planned_runs_and_is_planned_again_by_its_run(tmp_path: Path) -> None:
    search = grid(LocalBackend(2, devices_per_worker=2), tmp_path, feed_forward, SPACE)
    before = search.plan(ROWS).rows[0].outcome
    result = search.fit(ROWS)
    assert before is not None and len(before.trials) == len(result.trials)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        plan = search.plan(ROWS, workers=[2, 1], from_run=result.run_path)
    outcome = plan.rows[0].outcome
    assert outcome is not None and 0 < outcome.bound <= outcome.seconds
    assert outcome.start > 0, "a run says when its workers came"
    assert "Corrected by run" in str(plan)
