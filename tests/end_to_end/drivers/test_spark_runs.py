"""Whole runs on local Spark: agents as tasks, killed ones too, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cerebro_hydra
from cerebro_hydra import GridSearch, LocalStore, SparkBackend, hp_choice
from cerebro_hydra.errors import JobStopped
from cerebro_hydra.observe import AgentStarted, Decision
from cerebro_hydra.plan.messages.instructions import Commit
from tests.end_to_end import models
from tests.end_to_end.trials.lethal_models import Interrupter, lethal

pytestmark = [pytest.mark.slow, pytest.mark.spark(group=1)]

HERE = Path(__file__).resolve().parent


def labelled_rows(spark: Any, rows: int) -> Any:
    """A DataFrame of 16 features and a label of four, which they tell."""
    random = np.random.default_rng(3)
    labels = random.integers(0, 4, rows)
    features = random.normal(size=(rows, 16)) + labels[:, None] / 2
    pairs = [(f.tolist(), int(y)) for f, y in zip(features, labels, strict=True)]
    return spark.createDataFrame(pairs, "features array<double>, label long").cache()


@pytest.fixture(scope="module")
def df(spark: Any) -> Any:
    return labelled_rows(spark, 160)


def search(
    spark: Any,
    path: Path,
    factory: Any,
    space: dict[str, list[Any]],
    tls: bool = False,
    **options: Any,
) -> Any:
    return GridSearch(
        backend=SparkBackend(spark_context=spark.sparkContext, num_workers=3, tls=tls),
        store=LocalStore(prefix_path=str(path)),
        estimator_gen_fn=factory,
        search_space={name: hp_choice(values) for name, values in space.items()},
        **{"num_epochs": 2, "evaluation_metric": "accuracy", "verbose": 0, **options},
    )


def test_a_grid_on_spark_replays_and_transforms(spark: Any, df: Any, tmp_path: Path) -> None:
    space = {"lr": [0.01, 0.001], "dropout": [0.0, 0.2]}
    result = search(spark, tmp_path, models.feed_forward, space).fit(df)
    assert [trial.status for trial in result.trials] == ["finished"] * 4
    for trial in result.trials:
        report = cerebro_hydra.replay(result.run_path, trial.trial_id)
        assert report.identical, str(report)
    out = result.set_output_columns(["prediction"]).transform(df).toPandas()
    model = result.torch()
    import torch

    features = torch.tensor(np.stack(out.features).astype(np.float32))
    with torch.no_grad():
        expected = model(features)
    assert np.allclose(np.stack(out.prediction), expected.numpy(), atol=1e-5)
    sent = result._transforming._inference._broadcast
    renamed = result.set_output_columns(["other"]).transform(df)
    assert renamed.columns[-1] == "other"
    assert result._transforming._inference._broadcast is sent, "the weights were sent again"
    best = max(trial.result_metrics["val_accuracy"] for trial in result.trials)
    assert max(result.get_best_model_history()["val_accuracy"]) == best


class KillsOnce:
    """Kills one agent with SIGKILL when a given number of sub-epochs is committed."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.pids: dict[str, int] = {}
        self.killed: str | None = None
        self.commits = 0

    def on_record(self, record: Any) -> None:
        if isinstance(record, AgentStarted):
            self.pids[record.incarnation] = record.pid
        if not isinstance(record, Decision):
            return
        self.commits += sum(isinstance(each, Commit) for each in record.instructions)
        incarnation = getattr(record.event, "incarnation", None)
        if self.commits >= self.after and self.killed is None and incarnation in self.pids:
            self.killed = incarnation
            os.kill(self.pids[incarnation], signal.SIGKILL)


@pytest.mark.parametrize("after", [1, 4, 9])
def test_a_killed_agent_costs_sub_epochs_but_no_trial(
    spark: Any, df: Any, tmp_path: Path, after: int
) -> None:
    killer = KillsOnce(after)
    space = {"lr": [0.01, 0.001], "dropout": [0.2]}
    tls = after == 4  # new agents get the run's certificate too
    grid = search(spark, tmp_path, models.feed_forward, space, tls=tls)
    grid.observers = (killer,)
    result = grid.fit(df)
    assert killer.killed is not None
    for trial in result.trials:
        assert trial.status == "finished"
        assert len(trial.visit_log) == 6
        report = cerebro_hydra.replay(result.run_path, trial.trial_id)
        assert report.identical, str(report)


class Calamity:
    """Sends an agent a signal whenever so many sub-epochs were committed since the last time."""

    def __init__(self, number: int, every: int, times: int) -> None:
        self.number, self.every, self.left = number, every, times
        self.pids: dict[str, int] = {}
        self.commits = self.commits_before = 0
        self.struck: list[str] = []

    def on_record(self, record: Any) -> None:
        if isinstance(record, AgentStarted):
            self.pids[record.incarnation] = record.pid
        if not isinstance(record, Decision):
            return
        done = [each for each in record.instructions if isinstance(each, Commit)]
        self.commits += len(done)
        if not done or not self.left or self.commits - self.commits_before < self.every:
            return
        incarnation = record.event.incarnation
        if incarnation in self.pids:
            self.left, self.commits_before = self.left - 1, self.commits
            self.struck.append(incarnation)
            os.kill(self.pids[incarnation], self.number)


def assert_same(result: Any, calm: Any) -> None:
    for mine, other in zip(result.trials, calm.trials, strict=True):
        assert (mine.status, mine.visit_log) == ("finished", other.visit_log)
        assert mine.history == other.history
        states = [each.torch(mine.trial_id).state_dict() for each in (result, calm)]
        for key, value in states[0].items():
            assert value.numpy().tobytes() == states[1][key].numpy().tobytes()


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "every", "times"), [(signal.SIGKILL, 4, 15), (signal.SIGSTOP, 10, 2)]
)
def test_many_losses_with_work_between_end_no_run_and_change_no_bit(
    spark: Any, df: Any, tmp_path: Path, number: int, every: int, times: int
) -> None:
    space = {"lr": [0.01, 0.001], "dropout": [0.2]}
    options = {"order": "seeded", "num_epochs": 12}
    calm = search(spark, tmp_path / "calm", models.feed_forward, space, **options).fit(df)
    watcher = Calamity(number, every, times)
    options["observers"] = [watcher]
    result = search(spark, tmp_path, models.feed_forward, space, **options).fit(df)
    assert len(watcher.struck) == times
    assert_same(result, calm)


def test_a_cancelled_job_ends_the_run_with_one_sentence(
    spark: Any, df: Any, tmp_path: Path
) -> None:
    class Canceller:
        def on_record(self, record: Any) -> None:
            if isinstance(record, Decision) and record.seq == 30:
                threading.Thread(target=spark.sparkContext.cancelAllJobs).start()

    space, options = {"lr": [0.01]}, {"num_epochs": 1000, "observers": [Canceller()]}
    with pytest.raises(JobStopped) as caught:
        search(spark, tmp_path, models.feed_forward, space, **options).fit(df)
    (run,) = (tmp_path / "runs").iterdir()
    said = str(caught.value)
    assert said.startswith("somebody cancelled the agents' Spark job (Job ")
    assert said.endswith(f" before the run ended; `cerebro-hydra resume {run}` goes on")
    assert caught.value.__cause__ is None and "\n" not in said
    assert spark.range(100).count() == 100


@pytest.mark.long
def test_a_stopped_spark_context_ends_the_run_with_one_sentence(tmp_path: Path) -> None:
    driver = subprocess.run(
        [sys.executable, str(HERE / "stopping_driver.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[2]), *sys.path])},
    )
    (run,) = (tmp_path / "runs").iterdir()
    told = json.loads(driver.stdout.splitlines()[-1])
    assert told["error"] == (
        "JobStopped: somebody stopped the SparkContext before the run ended; "
        f"`cerebro-hydra resume {run}` goes on"
    )
    assert told["seconds"] < 10.0
    assert "Traceback" not in driver.stdout + driver.stderr and "py4j" not in driver.stderr


@pytest.mark.long
def test_four_lethal_trials_fail_alone_and_cost_the_others_no_bit(
    spark: Any, df: Any, tmp_path: Path
) -> None:
    faults = ["exits", "none", "is killed", "exits", "crashes", "none"]
    results = []
    for name, each in (("lethal", faults), ("calm", ["none"] * len(faults))):
        space = {"fault": each, "driver": [os.getpid()], "batch": [1]}
        searching = search(spark, tmp_path / name, lethal, space, order="seeded", num_epochs=1)
        results.append(searching.fit(df))
    for trial, fault in enumerate(faults):
        mine, other = (result.trials[trial] for result in results)
        if fault != "none":
            assert mine.status == "failed"
            assert f"3 agents in a row were lost while trial {trial} ran on them" in mine.error
            continue
        assert (mine.status, mine.visit_log) == ("finished", other.visit_log)
        assert mine.history == other.history
        states = [result.torch(mine.trial_id).state_dict() for result in results]
        for key, value in states[0].items():
            assert value.numpy().tobytes() == states[1][key].numpy().tobytes()


@pytest.mark.long
@pytest.mark.parametrize("fault", ["hangs", "locks Python"])
def test_an_interrupt_of_a_hung_run_takes_ten_seconds_at_most_on_spark(
    spark: Any, df: Any, tmp_path: Path, fault: str
) -> None:
    watcher = Interrupter()
    space = {"fault": [fault], "driver": [os.getpid()], "batch": [1], "pause": [1.0]}
    with pytest.raises(KeyboardInterrupt):
        search(spark, tmp_path, lethal, space, observers=[watcher]).fit(df)
    assert watcher.interrupted is not None
    assert len(watcher.pids) == 3  # Spark keeps the processes of those that ended by themselves
    assert watcher.hung is not None
    left = watcher.interrupted + 10.0 - time.monotonic()
    assert left > 0 and _gone(watcher.hung).wait(left), "an agent outlived the interrupt"
    assert spark.range(100).count() == 100


def test_what_a_trial_prints_and_logs_reaches_the_driver(
    spark: Any, df: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    search(spark, tmp_path, models.quarrelsome, {"fault": ["none"]}, verbose=1).fit(df)
    out = capfd.readouterr().out
    assert "[trial-000] hello from the loss" in out
    assert "a warning from the loss" in out


def test_a_killed_driver_leaves_no_agent_and_no_scratch_behind(tmp_path: Path) -> None:
    local = tmp_path / "local"
    driver = subprocess.Popen(
        [sys.executable, str(HERE / "doomed_driver.py"), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE.parents[2]), *sys.path]),
            "SPARK_LOCAL_DIRS": str(local),
        },
    )
    try:
        line = driver.stdout.readline()
        agents = json.loads(line)
        assert len(agents) == 2
        assert len(list(local.rglob("worker-*"))) == 2
        watched = [_gone(pid) for pid in agents]
        # The JVM holds the pipe too: it is read to the end only when Java has gone.
        draining = threading.Thread(target=driver.stderr.read, daemon=True)
        draining.start()
        driver.kill()
        for ended in watched:
            assert ended.wait(60), "an agent outlived its driver"
        draining.join(60)
        assert not draining.is_alive(), "Java outlived its driver"
        assert not list(local.rglob("worker-*"))
    finally:
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()


def _gone(pid: int) -> threading.Event:
    """Set when a process that is no child of ours has ended."""
    ended = threading.Event()
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        ended.set()
        return ended

    def watch() -> None:
        import select

        select.select([descriptor], [], [])
        os.close(descriptor)
        ended.set()

    threading.Thread(target=watch, daemon=True).start()
    return ended
