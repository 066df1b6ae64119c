"""Trials that end, lock or hang their agents fail alone, and others keep every bit."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra.errors import Interrupted
from cerebro_hydra.hopper import coordinator
from cerebro_hydra.observe import AgentStarted, Record, SlowBatch
from cerebro_hydra.storage import LocalStore
from cerebro_hydra.testing.local_backend import LocalBackend
from cerebro_hydra.tune import GridSearch, SearchResult, hp_choice
from cerebro_hydra.wire.control import ControlServer
from tests.end_to_end.test_runs import classes
from tests.end_to_end.trials.lethal_models import Interrupter, lethal

pytestmark = pytest.mark.slow


def run(
    path: Path,
    faults: list[str],
    workers: int = 2,
    batch: int = 3,
    pause: float = 0.0,
    residents: int = 1,
    devices: int | None = None,
    **options: Any,
) -> Any:
    space = {"fault": faults, "driver": [os.getpid()], "batch": [batch], "pause": [pause]}
    return GridSearch(
        backend=LocalBackend(workers, residents=residents, devices_per_worker=devices),
        store=LocalStore(str(path)),
        estimator_gen_fn=lethal,
        search_space={name: hp_choice(values) for name, values in space.items()},
        order="seeded",
        **{"num_epochs": 1, "evaluation_metric": "accuracy", "verbose": 0, **options},
    ).fit(classes())


def assert_equal_bits(mine: Any, other: Any, trial: int) -> None:
    a, b = mine.trials[trial], other.trials[trial]
    assert (a.visit_log, a.history) == (b.visit_log, b.history)
    states = [result.torch(each.trial_id).state_dict() for result, each in ((mine, a), (other, b))]
    assert states[0].keys() == states[1].keys()
    for name in states[0]:
        assert states[0][name].numpy().tobytes() == states[1][name].numpy().tobytes()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(tmp_path_factory.mktemp("undisturbed"), ["none", "none", "none"])


def check_fails_alone(result: Any, undisturbed: Any) -> None:
    killer = result.trials[1]
    assert [t.status for t in result.trials] == ["finished", "failed", "finished"]
    assert "3 agents in a row were lost while trial 1 ran on them" in killer.error
    assert "os._exit" in killer.error and killer.error.count("training of epoch 1") == 3
    for trial in (0, 2):
        assert_equal_bits(result, undisturbed, trial)


def test_a_trial_that_exits_fails_alone(
    tmp_path: Path, undisturbed: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    result = run(tmp_path, ["none", "exits", "none"], verbose=1)
    check_fails_alone(result, undisturbed)
    out = capfd.readouterr().out
    assert "trial-001 failed: 3 agents in a row were lost while trial 1 ran on them" in out
    assert "3 agents in a row were lost" in (Path(result.run_path) / "report.html").read_text()


def test_a_trial_that_installs_a_signal_handler_trains(tmp_path: Path, undisturbed: Any) -> None:
    result = run(tmp_path, ["none", "handles a signal", "none"])
    assert [t.status for t in result.trials] == ["finished"] * 3, result.trials[1].error
    for trial in range(3):
        assert_equal_bits(result, undisturbed, trial)


class Starts:
    """Counts the agents that were started, by worker."""

    def __init__(self) -> None:
        self.of: Counter[int] = Counter()

    def on_record(self, record: Record) -> None:
        if isinstance(record, AgentStarted):
            self.of[record.worker] += 1


@pytest.mark.parametrize(
    ("fault", "amount"),
    [
        ("fills memory", "1,048,576.00 GiB more"),
        pytest.param("fills numpy's memory", "32,768.00 GiB more", marks=pytest.mark.long),
    ],
)
def test_a_trial_that_runs_out_of_memory_fails_alone_and_its_agents_stay(
    tmp_path: Path, undisturbed: Any, fault: str, amount: str
) -> None:
    starts = Starts()
    result = run(tmp_path, ["none", fault, "none"], observers=[starts])
    assert [t.status for t in result.trials] == ["finished", "failed", "finished"]
    first, rest = result.trials[1].error.split("\n", 1)
    where = r"training of epoch 1 on partition \d \(worker \d\)"
    assert re.fullmatch(
        rf"trial 1 ran out of memory in {where}: the machine has no room for {amount}; use a "
        "smaller batch_size, .* or run fewer agents on a machine",
        first,
    )
    assert rest.startswith("Traceback")
    assert starts.of == {0: 1, 1: 1}
    for trial in (0, 2):
        assert_equal_bits(result, undisturbed, trial)


@pytest.mark.long
@pytest.mark.parametrize("fault", ["is killed", "crashes", "locks Python"])
def test_a_trial_that_loses_its_agents_fails_alone(
    tmp_path: Path, undisturbed: Any, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient = partial(ControlServer, silence_seconds=3.0)
    monkeypatch.setattr(coordinator, "ControlServer", impatient)
    check_fails_alone(run(tmp_path, ["none", fault, "none"]), undisturbed)


@pytest.mark.long
def test_a_resident_that_exits_beside_others_fails_alone(tmp_path: Path, undisturbed: Any) -> None:
    result = run(tmp_path, ["none", "exits", "none"], residents=3)
    check_fails_alone(result, undisturbed)


@pytest.mark.long
def test_four_lethal_trials_on_one_worker_end_no_run(tmp_path: Path) -> None:
    faults = ["exits", "none", "exits", "is killed", "crashes", "none"]
    result = run(tmp_path, faults, workers=1, batch=1)
    calm = run(tmp_path / "calm", ["none"] * 6, workers=1)
    for trial, fault in enumerate(faults):
        assert result.trials[trial].status == ("finished" if fault == "none" else "failed")
        if fault == "none":
            assert_equal_bits(result, calm, trial)


@pytest.mark.parametrize(
    "limit", ["batch_seconds", pytest.param("sub_epoch_seconds", marks=pytest.mark.long)]
)
def test_a_trial_that_hangs_is_ended_by_its_limit(
    tmp_path: Path, undisturbed: Any, limit: str
) -> None:
    result = run(tmp_path, ["none", "hangs", "none"], **{limit: 2.0})
    assert [t.status for t in result.trials] == ["finished", "failed", "finished"]
    error = result.trials[1].error
    assert f"s, longer than {limit}=2, in training of epoch 1 on partition" in error
    assert "time.sleep(60)" in error  # where it hangs
    for trial in (0, 2):
        assert_equal_bits(result, undisturbed, trial)


class SlowBatches:
    """Keeps the records of slow batches."""

    def __init__(self) -> None:
        self.seen: list[SlowBatch] = []

    def on_record(self, record: Record) -> None:
        if isinstance(record, SlowBatch):
            self.seen.append(record)


@pytest.mark.long
def test_a_batch_that_takes_long_is_told_of_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    watcher = SlowBatches()
    result = run(tmp_path, ["is slow", "none"], observers=[watcher], verbose=1)
    assert [t.status for t in result.trials] == ["finished", "finished"]
    for slow in watcher.seen:
        assert (slow.trial, slow.epoch) == (0, 0)
        assert slow.seconds >= 5.0 > 20 * slow.median
    assert len({slow.partition for slow in watcher.seen}) == len(watcher.seen) == 2
    out = capfd.readouterr().out
    assert out.count("batch_seconds= would fail the trial") == 2


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Let Ctrl-C interrupt, also where the tests run in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize(
    ("fault", "number", "devices"),
    [
        ("hangs", signal.SIGTERM, None),
        pytest.param("hangs", signal.SIGINT, None, marks=pytest.mark.long),
        pytest.param("locks Python", signal.SIGINT, None, marks=pytest.mark.long),
        pytest.param("locks Python", signal.SIGTERM, 2, marks=pytest.mark.long),
    ],
)
def test_an_interrupt_of_a_hung_run_takes_ten_seconds_at_most(
    tmp_path: Path, fault: str, number: int, devices: int | None
) -> None:
    watcher = Interrupter(number)
    with pytest.raises(Interrupted, match=r"SearchResult.* is in search\.result") as caught:
        run(tmp_path, ["none", fault], pause=1.0, devices=devices, observers=[watcher])
    assert watcher.interrupted is not None
    assert time.monotonic() - watcher.interrupted < 10.0
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert len(watcher.pids) == 2
    for pid in watcher.pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    result = caught.value.result
    assert [trial.params["fault"] for trial in result.trials] == ["none", fault]
    assert result.trials[1].status not in ("finished", "failed")
    assert SearchResult.open(result.run_path).to_pandas().equals(result.to_pandas())
