"""Trials that end, lock or hang their agents, or set torch otherwise, fail alone.

Others keep every bit.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

import cerebro_hydra
from cerebro_hydra.errors import Interrupted
from cerebro_hydra.hopper import coordinator
from cerebro_hydra.hopper.protocol.agent_spec import LossLimits
from cerebro_hydra.observe import AgentStarted, SlowBatch
from cerebro_hydra.tune import SearchResult
from cerebro_hydra.wire.control import ControlServer
from tests.end_to_end.runs import Tape, assert_equal_bits, classes, search, statuses
from tests.end_to_end.trials.lethal_models import Interrupter, lethal, settings
from tests.end_to_end.trials.memory_groups import memory_group
from tests.processes import assert_gone

pytestmark = pytest.mark.slow


def run(path: Path, faults: list[str], pause: float = 0.0, **options: Any) -> Any:
    """Train trials with these faults; agents and trials have the given resources and options."""
    resources = {name: options.pop(name) for name in ("residents", "devices") if name in options}
    if "devices" in resources:
        resources["devices_per_worker"] = resources.pop("devices")
    space = {"fault": faults, "driver": [os.getpid()], "pause": [pause]}
    given = {"num_epochs": 1, "order": "seeded", **options}
    return search(path, lethal, space, classes(), resources=resources, **given)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(tmp_path_factory.mktemp("undisturbed"), ["none", "none", "none"])


def check_alone(result: Any, undisturbed: Any, error: str) -> str:
    """Check that trial 1 failed with this error and the others as if alone; return the error."""
    assert statuses(result) == ["finished", "failed", "finished"]
    for trial in (0, 2):
        assert_equal_bits(result, undisturbed, trial)
    assert error in result.trials[1].error
    return result.trials[1].error


LOST = "3 agents in a row were lost while trial 1 ran on them"
LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("fault", "residents"),
    [
        ("exits", 1),
        ("kills its parent", 1),
        pytest.param("ends", 1, marks=LONG),
        pytest.param("ends by another code", 1, marks=LONG),
        pytest.param("locks Python", 1, marks=LONG),
        pytest.param("exits", 3, marks=LONG),
    ],
)
def test_a_trial_that_loses_its_agents_fails_alone(
    tmp_path: Path,
    undisturbed: Any,
    fault: str,
    residents: int,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if fault == "locks Python":
        impatient = partial(ControlServer, silence_seconds=3.0)
        monkeypatch.setattr(coordinator, "ControlServer", impatient)
    result = run(tmp_path, ["none", fault, "none"], residents=residents, verbose=1)
    error = check_alone(result, undisturbed, LOST)
    assert "os._exit" in error and error.count("training of epoch 1") == 3
    assert f"trial-001 failed: {LOST}" in capfd.readouterr().out
    assert LOST in (Path(result.run_path) / "report.html").read_text()


def test_a_run_outlasts_the_server_that_its_agents_are_forked_from(
    tmp_path: Path, undisturbed: Any
) -> None:
    def kill(tape: Tape) -> None:
        if isinstance(tape.last, AgentStarted) and len(tape.of(AgentStarted)) == 2:
            os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)

    tape = Tape(kill)
    result = run(tmp_path, ["none", "none", "none"], observers=[tape])
    for trial in range(3):
        assert_equal_bits(result, undisturbed, trial)
    assert {worker: len(pids) for worker, pids in tape.pids.items()} == {0: 2, 1: 2}


def test_a_trial_that_installs_a_signal_handler_trains(tmp_path: Path, undisturbed: Any) -> None:
    result = run(tmp_path, ["none", "handles a signal", "none"])
    for trial in range(3):
        assert_equal_bits(result, undisturbed, trial)


def test_a_trial_that_runs_out_of_memory_fails_alone_and_its_agents_stay(
    tmp_path: Path, undisturbed: Any
) -> None:
    tape = Tape()
    result = run(tmp_path, ["none", "fills memory", "none"], observers=[tape])
    first, rest = check_alone(result, undisturbed, "ran out of memory").split("\n", 1)
    where = r"training of epoch 1 on partition \d \(worker \d\)"
    assert re.fullmatch(
        rf"trial 1 ran out of memory in {where}: the machine has no room for 1,048,576.00 GiB "
        "more; use a smaller batch_size, .* or run fewer agents on a machine",
        first,
    )
    assert rest.startswith("Traceback")
    assert {worker: len(pids) for worker, pids in tape.pids.items()} == {0: 1, 1: 1}


def test_a_trial_that_hangs_is_ended_by_its_limit(tmp_path: Path, undisturbed: Any) -> None:
    result = run(tmp_path, ["none", "hangs", "none"], batch_seconds=2.0)
    said = "s, longer than batch_seconds=2, in training of epoch 1 on partition"
    assert "time.sleep(60)" in check_alone(result, undisturbed, said)  # where it hangs


@pytest.mark.long
def test_a_batch_that_takes_long_is_told_of_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tape = Tape()
    result = run(tmp_path, ["is slow", "none"], observers=[tape], verbose=1)
    assert statuses(result) == ["finished", "finished"]
    told = tape.of(SlowBatch)
    for slow in told:
        assert (slow.trial, slow.epoch) == (0, 0)
        assert slow.seconds >= 5.0 > 20 * slow.median
    assert len({slow.partition for slow in told}) == len(told) == 2
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
        pytest.param("locks Python", signal.SIGINT, None, marks=LONG),
        pytest.param("locks Python", signal.SIGTERM, 2, marks=LONG),
    ],
)
def test_an_interrupt_of_a_hung_run_takes_ten_seconds_at_most(
    tmp_path: Path, fault: str, number: int, devices: int | None
) -> None:
    watcher = Interrupter(number)
    with pytest.raises(Interrupted, match=r"SearchResult.* is in search\.result") as caught:
        run(tmp_path, ["none", fault], pause=1.0, devices=devices, observers=[watcher.tape])
    assert time.monotonic() - watcher.interrupted < 10.0
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert len(watcher.tape.pids) == 2
    assert_gone(list(watcher.tape.agents.values()))
    result = caught.value.result
    assert [trial.params["fault"] for trial in result.trials] == ["none", fault]
    assert result.trials[1].status not in ("finished", "failed")
    assert SearchResult.open(result.run_path).to_pandas().equals(result.to_pandas())


# What is told of an agent that is lost, and of a device.
ENDINGS = {
    "exits": ("", "it ended with exit code 1"),
    "crashes": ("", "it was ended by SIGSEGV"),
    "stops itself": ("no heartbeat for 3.0 s", "it showed no life for 3 s"),
}


@pytest.mark.long
@pytest.mark.parametrize("devices", [None, 2])
def test_whatever_ends_or_stops_a_process_is_told_as_what_it_was_and_is_no_slow_batch(
    tmp_path: Path, devices: int | None
) -> None:
    faults = ["none", *ENDINGS, "none"]
    resources: dict[str, Any] = {
        "devices_per_worker": devices,
        "limits": LossLimits(heartbeat_interval=0.1, missed_heartbeats=30),
    }
    results = []
    for name, each in (("lethal", faults), ("calm", ["none"] * len(faults))):
        space = {"fault": each, "driver": [os.getpid()]}
        options = {"num_epochs": 1, "order": "seeded", "batch_seconds": 2.0}
        given = {"resources": resources, **options} if name == "lethal" else options
        results.append(search(tmp_path / name, lethal, space, classes(), **given))
    for number, fault in enumerate(faults):
        mine = results[0].trials[number]
        if fault == "none":
            assert_equal_bits(*results, number)
        elif devices is None:
            assert f"3 agents in a row were lost while trial {number} ran on them" in mine.error
            assert mine.error.count(ENDINGS[fault][0]) >= 3
        else:
            assert "its code ended the process of a device 3 times" in mine.error
            assert mine.error.count(ENDINGS[fault][1]) == 3
        assert "batch_seconds" not in (mine.error or "")


@pytest.mark.long
@pytest.mark.parametrize("devices", [None, 2])
def test_a_trial_that_the_kernel_ends_for_its_memory_is_told_so_and_fails_alone(
    tmp_path: Path, undisturbed: Any, devices: int | None
) -> None:
    with memory_group(200 << 20) as group:
        space = {"fault": ["none", "takes a GiB", "none"], "driver": [os.getpid()]}
        result = search(
            tmp_path, lethal, space | {"group": [str(group)]}, classes(), num_epochs=1,
            order="seeded", resources={"devices_per_worker": devices},
        )  # fmt: skip
    if devices is None:
        assert "memory runs out" in check_alone(result, undisturbed, LOST)
    else:
        said = "its code ended the process of a device 3 times"
        error = check_alone(result, undisturbed, said)
        assert error.count("ended by SIGKILL, as memory ran out, of which all processes here") == 3


CHANGES_OF_SETTINGS = {
    "factory": "estimator_gen_fn changes torch.set_default_dtype",
    "double": "code of the trial changes torch.set_default_dtype",
    "flushes": "code of the trial changes torch.set_flush_denormal",
    "evaluates": "code of the trial changes torch.set_default_dtype",
    "hooks": "code of the trial registers a forward hook for all modules of the process",
}


@pytest.mark.parametrize(
    "resources",
    [{}, pytest.param({"devices_per_worker": 2, "device_memory": 40_000}, marks=LONG)],
    ids=["alone", "small devices"],
)
def test_trials_beside_those_that_change_a_setting_train_as_alone(
    tmp_path: Path, resources: dict[str, int]
) -> None:
    what = ["nothing", *CHANGES_OF_SETTINGS, "nothing"]
    result = search(
        tmp_path, settings, {"what": what}, classes(), resources=resources, order="seeded",
        audit_share=0.0,
    )  # fmt: skip
    assert statuses(result) == ["finished", *["failed"] * len(CHANGES_OF_SETTINGS), "finished"]
    for trial, sentence in zip(result.trials[1:-1], CHANGES_OF_SETTINGS.values(), strict=True):
        assert sentence in trial.error
    for trial in (result.trials[0], result.trials[-1]):
        report = cerebro_hydra.replay(result.run_path, trial.trial_id)
        assert report.identical, str(report)
