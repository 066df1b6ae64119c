"""A trial whose hook writes to a shard that is published trains right, and holds nobody up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import cerebro_hydra
from cerebro_hydra.observe import Decision, records_of
from cerebro_hydra.observe.view import RunView
from cerebro_hydra.plan.messages.events import TransferFailed
from cerebro_hydra.storage import RunFolder
from tests.end_to_end.runs import assert_equal_bits, classes, search, statuses
from tests.end_to_end.trials.hooked_models import hooked

pytestmark = pytest.mark.slow
LONG = pytest.mark.long


def run(path: Path, *writes: str, **resources: int) -> Any:
    return search(
        path, hooked, {"writes": writes}, classes(), resources=resources, order="seeded",
        audit_share=0.0, batch_seconds=20.0,
    )  # fmt: skip


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a run of the same trials whose code never writes."""
    return run(tmp_path_factory.mktemp("calm"), "never", "never", "never", "never")


def failed_transfers(result: Any) -> int:
    records = records_of(RunFolder.open(result.run_path))
    events = (each.event for each in records if isinstance(each, Decision))
    return sum(isinstance(event, TransferFailed) for event in events)


@pytest.mark.parametrize(
    "resources",
    [
        {},
        pytest.param({"residents": 3}, marks=LONG),
        pytest.param({"devices_per_worker": 2}, marks=LONG),
        pytest.param({"devices_per_worker": 2, "device_memory": 28_000}, marks=LONG),
    ],
    ids=["alone", "residents", "devices", "small devices"],
)
def test_a_hook_that_writes_to_a_later_shard_is_trained_right(
    tmp_path: Path, calm: Any, resources: dict[str, int]
) -> None:
    """Other workers would find its states damaged, and it would make them again for ever."""
    result = run(tmp_path, "never", "always", "later", "never", **resources)
    assert statuses(result) == ["finished"] * 4
    view = RunView.of_run(RunFolder.open(result.run_path))
    why = [view.trials[number].uncut_because or "" for number in range(4)]
    assert [bool(each) for each in why] == [False, False, True, False]
    assert "buffer '3.shift' was written to after the update of its shard" in why[2]
    assert view.trials[1].shards == 1, "admission found it"
    assert failed_transfers(result) == 0
    for trial in (0, 3):
        assert_equal_bits(result, calm, trial)
    for trial in result.trials[1:3]:
        report = cerebro_hydra.replay(result.run_path, trial.trial_id)
        assert report.identical, str(report)


def test_a_thread_that_writes_to_what_is_published_ends_its_trial_alone(
    tmp_path: Path, calm: Any
) -> None:
    result = run(tmp_path, "never", "from a thread", "never", "never")
    assert statuses(result) == ["finished", "failed", "finished", "finished"]
    for trial in (0, 2, 3):
        assert_equal_bits(result, calm, trial)
    assert "after they were published" in result.trials[1].error
    assert failed_transfers(result) <= 9
