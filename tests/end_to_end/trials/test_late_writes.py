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
from tests.end_to_end.trials.hooked_models import WRITES, foreseeing, hooked

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


def failed_transfers(result: Any) -> list[TransferFailed]:
    """Return what was not fetched although it was there: an abandoned state may be asked for."""
    records = records_of(RunFolder.open(result.run_path))
    events = (each.event for each in records if isinstance(each, Decision))
    failed = [event for event in events if isinstance(event, TransferFailed)]
    return [event for event in failed if not event.error.endswith(" was withdrawn here")]


@pytest.mark.parametrize(
    "resources",
    [
        {},
        pytest.param({"residents": 3}, marks=LONG),
        pytest.param({"devices_per_worker": 2, "device_memory": 28_000}, marks=LONG),
    ],
    ids=["alone", "residents", "small devices"],
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
    assert not failed_transfers(result)
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
    assert len(failed_transfers(result)) <= 9


@pytest.mark.parametrize(
    "resources",
    [
        {},
        pytest.param({"devices_per_worker": 2, "device_memory": 36_000}, marks=LONG),
    ],
    ids=["alone", "small devices"],
)
@pytest.mark.parametrize("from_the_start", [True, False], ids=["start", "late"])
def test_a_forward_that_writes_to_a_shard_that_has_not_come_is_trained_right(
    tmp_path: Path, from_the_start: bool, resources: dict[str, int]
) -> None:
    space = {"writes": list(WRITES), "from_the_start": [from_the_start]}
    result = search(
        tmp_path, foreseeing, space, classes(), resources=resources, order="seeded",
        audit_share=0.0,
    )  # fmt: skip
    check_trained_right(result, "was written to before its shard had come", from_the_start)


@LONG
def test_a_loss_that_writes_beside_the_graph_is_trained_right(tmp_path: Path) -> None:
    space = {"writes": list(WRITES), "from_the_start": [False], "cut": ["export"]}
    result = search(
        tmp_path, foreseeing, space, classes(), order="seeded", audit_share=0.0, num_epochs=3
    )
    check_trained_right(result, "was written to by code beside the model's graph", False)


def check_trained_right(result: Any, says: str, from_the_start: bool) -> None:
    """Check that admission or training has found each write, and the bits of plain training."""
    assert statuses(result) == ["finished"] * len(WRITES)
    view = RunView.of_run(RunFolder.open(result.run_path))
    for number, (writes, (_, tensor)) in enumerate(WRITES.items()):
        trial, seen = result.trials[number], view.trials[number]
        assert trial.params["writes"] == writes
        if from_the_start:
            assert seen.shards == 1, "admission found it"
        else:
            assert f"{tensor} {says}" in (seen.uncut_because or ""), writes
        report = cerebro_hydra.replay(result.run_path, trial.trial_id)
        assert report.identical, str(report)
