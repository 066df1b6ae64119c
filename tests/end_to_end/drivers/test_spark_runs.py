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

from cerebro_hydra import SparkBackend
from cerebro_hydra.errors import JobStopped
from cerebro_hydra.plan.messages.instructions import Commit
from tests.end_to_end import models
from tests.end_to_end.runs import (
    Tape,
    after_decisions,
    assert_equal_bits,
    assert_replays,
    classes,
    frame_of,
    grid,
    statuses,
)
from tests.end_to_end.trials.lethal_models import Interrupter, lethal
from tests.recipe import gans

pytestmark = [pytest.mark.slow, pytest.mark.spark(group=1)]

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def df(spark: Any) -> Any:
    return frame_of(spark, classes(160)).cache()


def search(
    spark: Any, path: Path, space: dict[str, list[Any]], factory: Any = models.feed_forward,
    tls: bool = False, **options: Any,
) -> Any:  # fmt: skip
    backend = SparkBackend(spark_context=spark.sparkContext, num_workers=3, tls=tls)
    return grid(backend, path, factory, space, **options)


def test_a_grid_on_spark_replays_and_transforms(spark: Any, df: Any, tmp_path: Path) -> None:
    space = {"lr": [0.01, 0.001], "dropout": [0.0, 0.2]}
    result = search(spark, tmp_path, space).fit(df)
    assert statuses(result) == ["finished"] * 4
    assert_replays(result)
    out = result.set_output_columns(["prediction"]).transform(df).toPandas()
    model = result.torch()
    import torch

    features = torch.tensor(np.stack(out.features).astype(np.float32))
    with torch.no_grad():
        expected = model(features)
    assert np.allclose(np.stack(out.prediction), expected.numpy(), atol=1e-5)
    sent = result._transforming.inference._broadcast
    renamed = result.set_output_columns(["other"]).transform(df)
    assert renamed.columns[-1] == "other"
    assert result._transforming.inference._broadcast is sent, "the weights were sent again"
    best = max(trial.result_metrics["val_accuracy"] for trial in result.trials)
    assert max(result.get_best_model_history()["val_accuracy"]) == best


def strikes(number: int, every: int, times: int) -> Tape:
    """Return a tape that sends an agent a signal, whenever so many more sub-epochs were done."""
    struck: list[int] = []

    def act(tape: Tape) -> None:
        agent = getattr(getattr(tape.last, "event", None), "incarnation", None)
        due = len(struck) < times and tape.commits >= every * (len(struck) + 1)
        if due and tape.of(Commit, last=True) and agent in tape.agents:
            struck.append(tape.agents[agent])
            os.kill(struck[-1], number)

    return Tape(act)


def test_a_killed_agent_costs_sub_epochs_but_no_trial(spark: Any, df: Any, tmp_path: Path) -> None:
    tape, space = strikes(signal.SIGKILL, 4, 1), {"lr": [0.01, 0.001], "dropout": [0.2]}
    # Its successor gets the run's certificate, too.
    result = search(spark, tmp_path, space, tls=True, observers=[tape]).fit(df)
    assert len(tape.agents) == 4
    assert statuses(result) == ["finished"] * 2
    assert [len(trial.visit_log) for trial in result.trials] == [6, 6]
    assert_replays(result)


@pytest.mark.long
def test_many_losses_with_work_between_end_no_run_and_change_no_bit(
    spark: Any, df: Any, tmp_path: Path
) -> None:
    space = {"lr": [0.01, 0.001], "dropout": [0.2]}
    options = {"order": "seeded", "num_epochs": 8}
    calm = search(spark, tmp_path / "calm", space, **options).fit(df)
    for number, every, times in ((signal.SIGKILL, 4, 10), (signal.SIGSTOP, 10, 2)):
        tape = strikes(number, every, times)
        place = tmp_path / str(number)
        result = search(spark, place, space, observers=[tape], **options).fit(df)
        assert len(tape.agents) == 3 + times
        for trial in range(2):
            assert_equal_bits(result, calm, trial)


@pytest.mark.long
def test_gans_hop_on_spark_go_on_in_another_run_and_replay(
    spark: Any, df: Any, tmp_path: Path
) -> None:
    options = {"factory": gans.either, "evaluation_metric": "loss", "validation": 0.2}
    space = {"module": [False, True]}
    first = search(spark, tmp_path, space, num_epochs=1, **options).fit(df)
    result = search(spark, tmp_path, space, **options).fit(df, resume=first.run_path)
    assert statuses(result) == ["finished"] * 2
    assert [len(trial.visit_log) for trial in result.trials] == [6, 6]
    assert all(trial.history["val_loss"] for trial in result.trials)
    assert result.totals.bytes_moved > 0
    assert_replays(result)
    assert isinstance(result.torch("trial-001"), gans.Module)


def test_a_cancelled_job_ends_the_run_with_one_sentence_after_all_that_its_trial_said(
    spark: Any, df: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cancel = threading.Thread(target=spark.sparkContext.cancelAllJobs).start
    options = {"num_epochs": 1000, "observers": [after_decisions(30, cancel)], "verbose": 1}
    with pytest.raises(JobStopped) as caught:
        search(spark, tmp_path, {"fault": ["none"]}, models.quarrelsome, **options).fit(df)
    (run,) = (tmp_path / "runs").iterdir()
    said = str(caught.value)
    assert said.startswith("somebody cancelled the agents' Spark job (Job ")
    assert said.endswith(f" before the run ended; `cerebro-hydra resume {run}` goes on")
    assert caught.value.__cause__ is None and "\n" not in said
    assert spark.range(100).count() == 100
    out = capfd.readouterr().out
    assert "[trial-000] hello from the loss" in out
    assert "a warning from the loss" in out


def endless(path: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """Start a driver that trains on Spark for ever."""
    paths = os.pathsep.join([str(HERE.parents[2]), *sys.path])
    return subprocess.Popen(
        [sys.executable, str(HERE / "endless_driver.py"), str(path), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": paths, **variables},
    )


@pytest.mark.long
def test_a_stopped_spark_context_ends_the_run_with_one_sentence(tmp_path: Path) -> None:
    out, err = endless(tmp_path, "stop").communicate(timeout=300)
    (run,) = (tmp_path / "runs").iterdir()
    told = json.loads(out.splitlines()[-1])
    assert told["error"] == (
        "JobStopped: somebody stopped the SparkContext before the run ended; "
        f"`cerebro-hydra resume {run}` goes on"
    )
    assert told["seconds"] < 10.0
    assert "Traceback" not in out + err and "py4j" not in err


ENDINGS = {
    "exits": "it ended with exit code 1",
    "ends": "it ended with exit code 0",
    "is killed": "it was ended by SIGKILL",
    "crashes": "it was ended by SIGSEGV",
}


@pytest.mark.long
def test_lethal_trials_fail_alone_and_cost_the_others_no_bit(
    spark: Any, df: Any, tmp_path: Path
) -> None:
    """They lose more agents than Spark lets a task lose, and than the run lets a worker."""
    faults = ["exits", "none", "is killed", "ends", "crashes", "none"]
    results = []
    for name, each in (("lethal", faults), ("calm", ["none"] * len(faults))):
        space = {"fault": each, "driver": [os.getpid()], "batch": [1]}
        options = {"order": "seeded", "num_epochs": 1}
        results.append(search(spark, tmp_path / name, space, lethal, **options).fit(df))
    for trial, fault in enumerate(faults):
        if fault == "none":
            assert_equal_bits(*results, trial)
            continue
        mine = results[0].trials[trial]
        assert mine.status == "failed"
        assert f"3 agents in a row were lost while trial {trial} ran on them" in mine.error
        assert mine.error.count(ENDINGS[fault]) == 3


@pytest.mark.long
def test_an_interrupt_of_a_hung_run_takes_ten_seconds_at_most_on_spark(
    spark: Any, df: Any, tmp_path: Path
) -> None:
    watcher = Interrupter()
    space = {"fault": ["locks Python"], "driver": [os.getpid()], "batch": [1], "pause": [1.0]}
    with pytest.raises(KeyboardInterrupt):
        search(spark, tmp_path, space, lethal, observers=[watcher.tape]).fit(df)
    assert (
        len(watcher.tape.pids) == 3
    )  # Spark keeps the processes of those that ended by themselves
    left = watcher.interrupted + 10.0 - time.monotonic()
    assert left > 0 and _gone(watcher.hung).wait(left), "an agent outlived the interrupt"
    assert spark.range(100).count() == 100


@pytest.mark.long
def test_a_killed_driver_leaves_no_agent_and_no_scratch_behind(tmp_path: Path) -> None:
    local = tmp_path / "local"
    driver = endless(tmp_path, SPARK_LOCAL_DIRS=str(local))
    assert driver.stdout is not None and driver.stderr is not None
    try:
        agents = json.loads(driver.stdout.readline())
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
