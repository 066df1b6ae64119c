"""Trials of an earlier run are planned by what its folder says, without Spark and without rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cerebro_hydra import cli
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.hopper.protocol.resources import WorkerResources
from cerebro_hydra.hopper.run_config import hop_config, trial_config
from cerebro_hydra.observe.records import Decision
from cerebro_hydra.observe.timeline import fold
from cerebro_hydra.plan.costs.moves import FREE_MOVES
from cerebro_hydra.plan.messages.events import EvaluationDone, Hop, SubEpochDone, TrialAdded
from cerebro_hydra.plan.queues.visit_spec import ShardSpec
from cerebro_hydra.plan.simulate.run import Overheads, Simulation
from cerebro_hydra.planning import simulated_search
from cerebro_hydra.planning.earlier_run import EarlierRun
from cerebro_hydra.planning.plan import Plan, Question, plan_again
from cerebro_hydra.planning.planned_trials import as_measured
from cerebro_hydra.shards.admission.trial_profile import TaskProfile, TrialProfile
from cerebro_hydra.shards.engine.layout import ShardBytes
from cerebro_hydra.storage import LocalStore, RunFolder
from cerebro_hydra.storage.run_document import RunDocument, TrialSpec
from tests.plan.closed_search import ClosedSearch

TRIALS, WORKERS, EPOCHS = 6, 2, 3
SUB_EPOCH, EVALUATION, START = 4.0, 0.5, 7.0
FROZEN, TRAINABLE = 600, 400
NEEDS = (ShardSpec(0, 100, 10, 0.5, 1.0, 0.1),) * 2


def spec_of(trial: int, by_shard: bool) -> TrialSpec:
    tasks = TaskProfile(NEEDS, NEEDS, NEEDS, (), 8) if by_shard else None
    profile = TrialProfile((ShardBytes(FROZEN, TRAINABLE, 200, False),) * 2, (), False, tasks)
    return TrialSpec(
        trial=trial, trial_id=f"trial-{trial:03d}", seed=trial, cut={"mode": "modules"},
        template={}, params={"lr": 0.1}, nbytes=2 * (FROZEN + TRAINABLE), batch_size=1,
        accumulate=1, steps=(1, 1), shards=(("f" * 32, f"{trial:032x}"),) * 2,
        **json.loads(json.dumps(as_measured(profile))),
    )  # fmt: skip


def document() -> RunDocument:
    return RunDocument(
        run_id="20260101-000000-abcdef", factory=None, seed=0, order="dynamic",
        num_epochs=EPOCHS, num_partitions=WORKERS, evaluation_metric="loss",
        metrics={"loss": "min"}, feature_columns=("features",), label_columns=("label",),
        store={}, fingerprint="f" * 32, validated=True, threads=1,
    )  # fmt: skip


def folder_of(path: Path, by_shard: bool = False) -> RunFolder:
    """The folder of a run whose tasks took what the constants say."""
    folder = RunFolder(LocalStore(str(path)), document().run_id)
    specs = [spec_of(trial, by_shard) for trial in range(TRIALS)]
    folder.write_json("run.json", document().to_json())
    for spec in specs:
        folder.write_trial(spec)
    simulation = Simulation(
        ClosedSearch(hop_config(document()), tuple(map(trial_config, specs)), EPOCHS),
        [(worker,) for worker in range(WORKERS)],
        lambda kind, trial, partition: SUB_EPOCH if kind == "train" else EVALUATION,
        overheads=Overheads(
            hop=lambda trial, first: Hop(2 * TRAINABLE, 2 * FROZEN, 0.2),
            wait=lambda first: 0.25,
            join=lambda worker: START,
        ),
    )
    timeline = simulation.run()
    decided = zip(timeline.moments, timeline.records, strict=True)
    lines = [
        Decision(seq, 1e9 + moment, event, tuple(told)).to_json()
        for seq, (moment, (event, told)) in enumerate(decided)
    ]
    folder.write_segment(0, [{"run_id": folder.run_id, "config": {}}, *lines])
    return folder


def planned(folder: RunFolder, **asked: object) -> Plan:
    run = EarlierRun(folder, FREE_MOVES)
    names = ("workers", "devices", "device_memory", "price_per_hour")
    given = (asked.get(name) for name in names)
    return plan_again(run, Question.checked(run.resources, run.workers, *given))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return folder_of(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return folder_of(tmp_path_factory.mktemp("store"), by_shard=True)


def test_a_run_is_predicted_by_its_own_events(folder: RunFolder) -> None:
    run = EarlierRun(folder, FREE_MOVES)
    (row,) = plan_again(run, Question.checked(run.resources, run.workers, *[None] * 4)).rows
    assert row.outcome is not None
    assert row.outcome.seconds == pytest.approx(run.seconds, rel=0.01)
    assert run.costs().lag == pytest.approx(1.0, rel=0.01)
    assert row.outcome.bound <= row.outcome.seconds
    events = [event for event, _ in row.outcome.timeline.records]
    hops = [e.hop for e in events if isinstance(e, SubEpochDone | EvaluationDone)]
    assert {hop.bytes_moved for hop in hops} == {0, 2 * TRAINABLE, 2 * (FROZEN + TRAINABLE)}
    # How long it took to measure a trial anew says nothing of the earlier run.
    anew = {trial.structure: replace(trial, admission=100.0) for trial in run.trials.values()}
    assert run.costs(anew).lag == run.costs().lag


def test_other_workers_are_compared_in_a_table(folder: RunFolder) -> None:
    plan = planned(folder, workers=[1, 2], price_per_hour=36)
    seconds = [row.outcome.seconds for row in plan.rows if row.outcome is not None]
    assert seconds[0] > 1.5 * seconds[1]  # there are two rows for training
    assert [row.cost for row in plan.rows] == [
        pytest.approx(0.01 * workers * each) for workers, each in zip((1, 2), seconds, strict=True)
    ]
    head, *rows = str(plan).splitlines()
    assert head.split()[:2] == ["workers", "devices"] and len(rows) == 3
    assert json.loads(json.dumps(plan.to_json()))["rows"][0]["workers"] == 1


def test_devices_need_tasks_that_were_measured(folder: RunFolder, measured: RunFolder) -> None:
    with pytest.raises(ConfigurationError, match="were not measured by shard"):
        planned(folder, devices=2)
    one, two = (row.outcome for row in planned(measured, devices=[1, 2], workers=1).rows)
    assert one is not None and two is not None
    assert one.seconds - one.start > 1.6 * (two.seconds - two.start)


def test_what_does_not_fit_is_said_with_its_numbers(measured: RunFolder) -> None:
    (row,) = (plan := planned(measured, device_memory=700)).rows
    assert row.outcome is None
    assert "does not fit" in str(plan) and "700" in str(plan)


def test_the_page_of_a_row_has_the_timeline_of_a_run(folder: RunFolder) -> None:
    plan = planned(folder)
    _, timeline = fold(plan.rows[0].records())
    assert len(timeline.tasks) == TRIALS * WORKERS * EPOCHS * 2
    assert timeline.end == pytest.approx(plan.rows[0].outcome.seconds)  # type: ignore[union-attr]
    page = plan.page()
    assert "nothing was trained" in page and str(plan).splitlines()[-1] in page
    with pytest.raises(ConfigurationError, match="row is 1"):
        plan.page(1)


def test_the_command_prints_the_table(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "plan.html"
    asked = ["plan", "--from", folder.path, "--workers", "1,2", "--price-per-hour", "2.5"]
    assert cli.main([*asked, "--report", str(page)]) == 0
    printed = capsys.readouterr().out
    assert f"By run {folder.run_id}" in printed and str(page) in printed
    assert page.read_text().startswith("<!doctype html>")


def test_a_run_that_went_through_no_epoch_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(LocalStore(str(tmp_path)), document().run_id)
    folder.write_json("run.json", document().to_json())
    folder.write_trial(spec := spec_of(0, by_shard=False))
    lines = [Decision(0, 1.0, TrialAdded(trial_config(spec), 1), ()).to_json()]
    folder.write_segment(0, [{"run_id": folder.run_id, "config": {}}, *lines])
    with pytest.raises(ConfigurationError, match="has not gone through all of its partitions"):
        EarlierRun(folder, FREE_MOVES)


CPU = WorkerResources()
GPUS = WorkerResources(devices=2, device_memory=1 << 30, device_kind="cuda")


@pytest.mark.parametrize(
    ("backend", "asked", "said"),
    [
        (CPU, ("two", None, None, None), "workers is 'two'; give whole numbers from 1"),
        (CPU, ([2, 0], None, None, None), r"workers is \[2, 0\]; give whole numbers"),
        (CPU, ([], None, None, None), r"workers is \[\]; give whole numbers"),
        (CPU, (None, [True], None, None), r"devices is \[True\]; give whole numbers"),
        (CPU, ([2, 10_001], None, None, None), "workers has 10001, .* for 10000 at most"),
        (CPU, (None, 10**20, None, None), r"devices has 10{20}, .* for 256 at most"),
        (CPU, (None, None, "much", None), "device_memory is 'much'; give a number of bytes"),
        (CPU, (None, None, None, "dear"), "price_per_hour is 'dear'; give what an hour"),
        (CPU, (None, None, None, float("nan")), "price_per_hour is nan; give what an hour"),
        (CPU, (None, None, None, -1), "price_per_hour is -1; give what an hour"),
        (GPUS, (None, 4, None, None), r"devices has 4, and each worker .* has 2 GPU"),
        (GPUS, (None, None, "2GiB", None), "device_memory is 2.00 GiB, and the backend's GPUs"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(
    backend: WorkerResources, asked: tuple[object, ...], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Question.checked(backend, 2, *asked)


def test_a_large_search_is_planned_by_a_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulated_search, "MOST_SUB_EPOCHS", 1000)
    run = EarlierRun(folder_of(tmp_path), FREE_MOVES)
    costs = run.costs()
    monkeypatch.setattr(run, "costs", lambda: costs)  # those of the run as it was
    many = {number: run.trials[0].numbered(number) for number in range(100)}
    run.trials, run.epochs = many, dict.fromkeys(many, 2)
    run.rows = 2000, 200
    (row,) = plan_again(run, Question.checked(run.resources, 20, *[None] * 4)).rows
    assert row.outcome is not None and row.outcome.part > 1
    busy = 100 * 2 * (100 * SUB_EPOCH + 10 * EVALUATION)
    assert row.outcome.seconds - row.outcome.start == pytest.approx(busy, rel=0.05)
    assert row.outcome.bound <= row.outcome.seconds
