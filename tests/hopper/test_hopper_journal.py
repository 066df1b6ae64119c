"""A journal that can't be merged is as whole, and says in a sentence which file is refused."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest

from cerebro_hydra.errors import JournalError, StoreError
from cerebro_hydra.hopper.journal import Journal, RunWriter
from cerebro_hydra.plan.hop.state import HopState
from cerebro_hydra.plan.messages.config import HopConfig
from cerebro_hydra.plan.messages.events import WorkerLost
from cerebro_hydra.plan.messages.instructions import FinishTrial
from cerebro_hydra.storage import LocalStore, RunFolder

CONFIG = HopConfig(partitions=1)


def begun(place: Path) -> tuple[RunFolder, Journal]:
    folder = RunFolder(LocalStore(str(place)), "run")
    return folder, Journal.begin(folder, CONFIG)


def end_of(trial: int) -> tuple[WorkerLost, list[FinishTrial]]:
    return WorkerLost("w0", "gone"), [FinishTrial(trial, "finished", "", 0)]


def test_a_journal_that_can_not_be_merged_is_whole_and_told_of_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, journal = begun(tmp_path)
    journal.append(1.0, [end_of(0)])
    (refused := Path(folder.path, "journal", "00000000-00000001.jsonl")).mkdir()
    journal.close()
    (said,) = caplog.records
    assert f"'{refused}'" in said.getMessage() and "delete it" in said.getMessage()
    assert said.exc_info is None
    refused.rmdir()
    assert [line["seq"] for line in folder.read_records()] == [0]


def test_what_another_program_keeps_from_the_journal_is_told_of_and_ends_no_trial(
    tmp_path: Path,
) -> None:
    folder, journal = begun(tmp_path)
    Path(folder.path, "journal", "00000001-00000002.jsonl").mkdir()  # as another program merges
    writer = RunWriter(folder, journal, lambda record: None)
    with pytest.raises(JournalError, match="written by another program"):
        writer.append([end_of(0), end_of(2)])
    assert writer.close() == (0, 2)
    with pytest.raises(StoreError, match=r"end of the journal is not written: .* another program"):
        writer.finish(HopState(CONFIG), untidy=False)


def test_a_clock_that_is_set_while_a_run_goes_on_changes_no_duration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, journal = begun(tmp_path)
    writer = RunWriter(folder, journal, lambda record: None)
    times = []
    for jump in (0.0, 86_400.0, -86_400.0):
        now = time.time() + jump
        monkeypatch.setattr("cerebro_hydra.hopper.journal.time.time", lambda now=now: now)
        times += [decision.time for decision in writer.append([end_of(0)])]
        monkeypatch.undo()
    writer.close()
    assert times == sorted(times)
    assert times[-1] - times[0] < 3600


@pytest.mark.parametrize("journal_too", [True, False])
def test_a_document_that_the_store_refused_is_written_once_it_is_well_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, journal_too: bool
) -> None:
    folder, journal = begun(tmp_path)
    told: list[str] = []
    writer = RunWriter(folder, journal, lambda record: told.append(record.what))
    (blocked := Path(folder.path, "numeric.json")).mkdir()
    place = Path(folder.path, "journal")
    if journal_too:
        place.rename(tmp_path / "away")
        place.write_text("no folder")
    writer.write_document("numeric.json", {"w0": "older"})
    writer.append([end_of(0)])
    writer.write_document("numeric.json", {"w0": "newer"})
    blocked.rmdir()
    if journal_too:
        place.unlink()
        (tmp_path / "away").rename(place)
        monkeypatch.setattr("cerebro_hydra.hopper.journal.monotonic", lambda: math.inf)
        writer.write()
        assert json.loads(blocked.read_text())["w0"] == "newer"
    writer.close()
    assert json.loads(blocked.read_text())["w0"] == "newer"
    assert set(told) == {"numeric.json", *(["the journal"] if journal_too else [])}
