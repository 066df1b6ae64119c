"""Coordinators that go on with a run, and stores that refuse what a run writes."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra.errors import JournalError, StoreError
from cerebro_hydra.hopper.coordinator import Coordinator
from cerebro_hydra.hopper.journal import Collector, Journal
from cerebro_hydra.hopper.protocol.agent_spec import AgentSpec, LossLimits
from cerebro_hydra.hopper.resumed_run import ResumedRun
from cerebro_hydra.hopper.run_config import hop_config
from cerebro_hydra.observe.records import Decision, NotSaved, records_of
from cerebro_hydra.observe.view import RunView
from cerebro_hydra.plan.messages.codec import from_json
from cerebro_hydra.plan.messages.events import (
    CheckpointFailed,
    RunResumed,
    SearchClosed,
    StateDiffers,
)
from cerebro_hydra.plan.messages.instructions import Checkpoint, Collect, StartSubEpoch
from cerebro_hydra.storage import LocalStore
from cerebro_hydra.storage.run_document import RUN_FILE
from cerebro_hydra.storage.run_folder import RunFolder
from tests.hopper.scripted_agents import ScriptedLauncher
from tests.hopper.scripted_runs import (
    GivenTrials,
    Tape,
    described,
    manifest,
    restored,
    run,
)
from tests.journals import comparable


def begun(tmp_path: Path, trials: int = 2, epochs: int = 2, **more: Any) -> tuple[RunFolder, Any]:
    """Run to the end, in a folder with all documents, and return it with what was run."""
    what = described(trials, 2, epochs, order="seeded", **more)
    folder, _, _ = run(tmp_path, ScriptedLauncher(2), what)
    folder.write_json(RUN_FILE, what[0].to_json())
    for spec in what[1]:
        folder.write_trial(spec)
    return folder, what


def cut_after(folder: RunFolder, segments: int, place: Path) -> RunFolder:
    """Copy a run as it was after so many segments of its journal."""
    copy = RunFolder(LocalStore(str(place)), folder.run_id)
    shutil.copytree(folder.path, copy.path)
    shutil.rmtree(f"{copy.path}/journal")
    lines = [line for lines in folder.read_segments() for line in lines]
    copy.write_segment(0, lines[:1])
    for number, line in enumerate(lines[1 : segments + 1], start=1):
        copy.write_segment(number, [line])
    return copy


class OtherTrials(GivenTrials):
    """Adds the trials that a journal lacks; what the others are is in the run's folder alone."""

    def __init__(self, what: Any, resumed: ResumedRun) -> None:
        document, specs = what
        super().__init__(specs, document.num_epochs)
        self._state = resumed.state

    def start(self, put: Any) -> Any:
        for news in super().start(put):
            if isinstance(news, SearchClosed):
                known = self._state.tables.search_closed
            else:
                known = news.spec.trial in self._state.trials
            if not known:
                yield news


def go_on(folder: RunFolder, what: Any, workers: int, script: Any = None) -> tuple[Any, Tape]:
    tape = Tape()
    launcher = ScriptedLauncher(workers, script=script)
    data = manifest(what[0].num_partitions)
    resumed = ResumedRun(folder)
    trials = OtherTrials(what, resumed)
    coordinator = Coordinator(
        folder, what[0], trials, launcher, None, manifest=data, observers=[tape], resumed=resumed
    )
    return coordinator.run(), tape


def test_a_run_goes_on_in_its_own_journal_on_another_number_of_workers(tmp_path: Path) -> None:
    whole, what = begun(tmp_path / "whole")
    calm = RunView.of_run(whole)
    length = len([line for lines in whole.read_segments() for line in lines])
    for number, workers in ((1, 1), (length // 2, 3), (length - 3, 2)):
        folder = cut_after(whole, number, tmp_path / str(number))
        state, tape = go_on(folder, what, workers)
        assert restored(folder) == comparable(state)
        told = RunView()
        for record in tape.records:
            told.apply(record)
        for view in (RunView.of_run(folder), told):
            assert {n: t.visit_log for n, t in view.trials.items()} == {
                n: t.visit_log for n, t in calm.trials.items()
            }
            assert [t.status for t in view.trials.values()] == ["finished"] * 2
            assert not view.differences


def test_a_state_that_is_made_again_with_other_bytes_is_told_and_the_run_goes_on(
    tmp_path: Path,
) -> None:
    whole, what = begun(tmp_path / "whole", trials=1)
    lines = [line for lines in whole.read_segments() for line in lines]
    # The second sub-epoch begins before the first is over, and may be told of as done before it.
    committed = next(
        n
        for n, each in enumerate(lines[1:])
        if any(made["type"] == "Commit" for made in each["instructions"])
    )
    folder = cut_after(whole, committed + 1, tmp_path / "cut")

    def altered(instruction: Any, me: str) -> Any:
        if isinstance(instruction, StartSubEpoch) and instruction.state == 1:
            before = from_json(lines[committed + 1]["event"])
            digests = ((before.digests[0][0], "other"),)
            return replace(before, attempt=instruction.attempt, incarnation=me, digests=digests)
        return None

    _, tape = go_on(folder, what, 2, altered)
    told = [r.event for r in tape.records if isinstance(r, Decision)]
    assert [each for each in told if isinstance(each, StateDiffers)] == [StateDiffers(0, 1, (0,))]


def test_only_one_of_two_programs_goes_on_with_a_run(tmp_path: Path) -> None:
    whole, _ = begun(tmp_path / "whole", trials=1, epochs=1)
    resumed = ResumedRun(whole)
    first, second = resumed.journal(), resumed.journal()
    decided = [(CheckpointFailed(0, 1, "a", "x"), [Checkpoint(0, 1, "a")])]
    first.append(1.0, decided)
    with pytest.raises(JournalError, match="written by another program"):
        second.append(1.0, [*decided, *decided])


def resumes(journal: Journal) -> None:
    """Write the segment that a driver which goes on with a run begins with."""
    journal.append(time.time(), [(RunResumed(), ())])
    journal.write()


@pytest.mark.parametrize("merges", [False, True])
def test_a_driver_that_wakes_up_after_its_run_was_read_ends_the_reader_and_spoils_nothing(
    tmp_path: Path, merges: bool
) -> None:
    """Who takes over compares all trials before it writes, and counted the records before that."""
    whole, _ = begun(tmp_path, trials=1, epochs=1)
    stopped, taking_over = ResumedRun(whole).journal(), ResumedRun(whole)
    told = [*taking_over.decisions()]
    resumes(stopped)
    if merges:
        resumes(stopped)
        stopped.close()
    assert [*taking_over.decisions()] == told
    with pytest.raises(JournalError, match="written by another program"):
        resumes(taking_over.journal())
    assert len([*ResumedRun(whole).decisions()]) == len(told) + 1 + merges


class Overtaken(RunFolder):
    """A folder in which another program writes just before the records are read."""

    other: Journal | None = None

    def read_records(self) -> Iterator[dict[str, Any]]:
        other, self.other = self.other, None
        if other is not None:
            resumes(other)
        return super().read_records()


def test_a_segment_that_comes_while_a_run_is_read_is_counted_and_ends_the_reader(
    tmp_path: Path,
) -> None:
    whole, _ = begun(tmp_path, trials=1, epochs=1)
    before = ResumedRun(whole)
    folder = Overtaken(whole.store, whole.run_id)
    folder.other = before.journal()
    taking_over = ResumedRun(folder)
    counted = len([*taking_over.decisions()])
    assert counted == len([*before.decisions()]) + 1
    with pytest.raises(JournalError, match="written by another program"):
        resumes(taking_over.journal())
    assert len([*ResumedRun(whole).decisions()]) == counted


class Refusing(LocalStore):
    """A store that refuses to write below some folders while `refused` names them."""

    refused: tuple[str, ...] = ()

    def create(self, path: str, data: Any) -> None:
        self._check(path)
        super().create(path, data)

    def write(self, path: str, data: Any) -> None:
        self._check(path)
        super().write(path, data)

    def delete_one(self, path: str) -> None:
        self._check(path)
        super().delete_one(path)

    def _check(self, path: str) -> None:
        if any(each in path for each in self.refused):
            raise StoreError(f"can't write {path!r}: the disk is full; free space")


def test_a_journal_that_is_refused_waits_in_order_until_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cerebro_hydra.hopper.journal.wait_after", lambda failures: 0.0)
    monkeypatch.setattr("cerebro_hydra.hopper.journal.LONGEST_WAIT", 0.0)
    store = Refusing(str(tmp_path))
    folder = RunFolder(store, "run")
    journal = Journal.begin(folder, hop_config(described(1, 1, 1)[0]))
    store.refused = ("/journal/",)
    for number in range(3):
        decided = [(CheckpointFailed(0, number, "a", "x"), [Checkpoint(0, number, "a")])]
        journal.append(1.0, decided)
    assert journal.waiting and "disk is full" in str(journal.error)
    assert len(list(folder.read_records())) == 0
    store.refused = ()
    journal.write()
    assert journal.error is None and not journal.waiting
    assert [line["event"]["state"] for line in folder.read_records()] == [0, 1, 2]


def test_a_run_whose_journal_is_refused_trains_on_and_says_so(tmp_path: Path) -> None:
    what = described(2, 2, 2)
    store = Refusing(str(tmp_path))
    folder, tape = RunFolder(store, what[0].run_id), Tape()
    for spec in what[1]:
        folder.write_trial(spec)
    begun = []

    def script(instruction: Any, me: str) -> None:
        begun.append(instruction)
        if len(begun) == 3:
            store.refused = ("/journal/",)

    coordinator = Coordinator(
        folder,
        what[0],
        GivenTrials(what[1], what[0].num_epochs),
        ScriptedLauncher(2, script=script),
        None,
        manifest=manifest(2),
        observers=[tape],
    )
    with pytest.raises(StoreError, match="the end of the journal is not written"):
        coordinator.run()
    assert [each.what for each in tape.of(NotSaved)] == ["the journal"]
    view = RunView()
    for record in tape.records:
        view.apply(record)
    store.refused = ()
    folder.write_json(RUN_FILE, what[0].to_json())
    in_folder = RunView.of_run(folder)
    for each in (view, in_folder):
        assert [trial.status for trial in each.trials.values()] == ["interrupted"] * 2
    state, _ = go_on(folder, what, 2)
    assert state.finished


def test_a_result_that_is_refused_for_long_fails_its_trial_and_is_saved_after_a_resume(
    tmp_path: Path,
) -> None:
    def script(instruction: Any, me: str) -> Any:
        if isinstance(instruction, Checkpoint) and instruction.trial == 0:
            return CheckpointFailed(0, instruction.state, me, "the disk is full")
        return None

    what = described(2, 2, 2)
    folder, state, tape = run(tmp_path, ScriptedLauncher(2, script=script), what)
    assert {n: t.status for n, t in state.trials.items()} == {0: "failed", 1: "finished"}
    assert state.unsaved == [0]
    view = RunView()
    for record in tape.records:
        view.apply(record)
    assert "the disk is full" in view.trials[0].reason and len(view.trials[0].epochs) == 2
    assert view.not_saved == {0: "the disk is full"}
    folder.write_json(RUN_FILE, what[0].to_json())
    for spec in what[1]:
        folder.write_trial(spec)
    state, _ = go_on(folder, what, 2)
    assert [trial.status for trial in state.trials.values()] == ["finished"] * 2
    assert [len(trial.history) for trial in state.trials.values()] == [2, 2]
    view = RunView.of_run(folder)
    assert [trial.status for trial in view.trials.values()] == ["finished"] * 2
    assert not view.not_saved


def test_what_is_about_to_be_written_is_not_deleted(tmp_path: Path) -> None:
    folder = RunFolder(LocalStore(str(tmp_path)), "run")
    for digest in ("a" * 32, "b" * 32):
        folder.write_object(digest, b"x")
    collector = Collector(folder)
    collector.hold(Collect(0, 1, ("a" * 32, "b" * 32)))
    collector.spare(1, 7, ("b" * 32,))
    collector.release()
    collector.close()
    assert not folder.has_object("a" * 32) and folder.has_object("b" * 32)


def test_what_can_not_be_deleted_is_swept_at_the_end(tmp_path: Path) -> None:
    store = Refusing(str(tmp_path))
    folder = RunFolder(store, "run")
    folder.write_object("a" * 32, b"x")
    store.refused = ("/objects/",)
    collector = Collector(folder)
    collector.hold(Collect(0, 1, ("a" * 32,)))
    collector.release()
    collector.close()
    assert not collector.complete and folder.has_object("a" * 32)
    store.refused = ()
    folder.sweep({})
    assert not folder.has_object("a" * 32)


def test_the_records_of_a_resumed_run_read_like_one_run(tmp_path: Path) -> None:
    whole, what = begun(tmp_path / "whole", trials=1)
    folder = cut_after(whole, 12, tmp_path / "cut")
    go_on(folder, what, 1)
    numbers = [r.seq for r in records_of(folder) if isinstance(r, Decision)]
    assert numbers == list(range(len(numbers)))


class LonelyLauncher(ScriptedLauncher):
    """Starts nobody, and lets the store refuse the journal from then on."""

    def __init__(self, store: Refusing) -> None:
        super().__init__(2, present=0, limits=LossLimits(join_timeout=1.0))
        self._store = store

    def start(self, spec: AgentSpec, factory: Any, on_exit: Any) -> None:
        self._store.refused = ("/journal/",)
        super().start(spec, factory, on_exit)


def test_a_run_whose_journal_is_refused_waits_for_workers_no_longer(tmp_path: Path) -> None:
    what = described(2, 2, 2)
    store, errors = Refusing(str(tmp_path)), list[Exception]()
    folder = RunFolder(store, what[0].run_id)
    for spec in what[1]:
        folder.write_trial(spec)
    trials = GivenTrials(what[1], what[0].num_epochs)
    launcher = LonelyLauncher(store)
    coordinator = Coordinator(folder, what[0], trials, launcher, None, manifest=manifest(2))

    def go() -> None:
        try:
            coordinator.run()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=go, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert "none of 2 workers came within join_timeout" in str(errors)
