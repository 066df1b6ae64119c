"""A run whose driver is killed goes on to the bits of the undisturbed run."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cerebro_hydra.data.claim import CLAIMS, is_claimed
from cerebro_hydra.errors import ConfigurationError, JournalError, SetupError, StoreError
from cerebro_hydra.hopper.protocol.resources import WorkerResources
from cerebro_hydra.observe import RunView
from cerebro_hydra.observe.records import Decision, NotSaved
from cerebro_hydra.plan.messages.events import TransferFailed
from cerebro_hydra.storage import LocalStore, RunFolder
from cerebro_hydra.storage.run_document import RUN_FILE
from cerebro_hydra.storage.run_folder import read_document
from cerebro_hydra.testing.datasets import write_dataset
from cerebro_hydra.testing.local_backend import Arrays, LocalBackend
from cerebro_hydra.tune import CustomSearch
from cerebro_hydra.tune.result import SearchResult
from cerebro_hydra.tune.resume import RunToResume
from cerebro_hydra.tune.running import run_claim
from cerebro_hydra.tune.searchers.searcher import TrainTo
from cerebro_hydra.verification import verify
from tests.end_to_end import models
from tests.end_to_end.drivers import flaky
from tests.end_to_end.drivers.resumed_driver import SPACE, search
from tests.end_to_end.runs import Tape, after_decisions, bits, classes, files, statuses
from tests.processes import start_python

pytestmark = pytest.mark.slow


def killed(folder: Path, decisions: int, *devices: str) -> str:
    """Run a driver until it has taken so many decisions, kill it, and return the run's path."""
    driver = start_python("-m", "tests.end_to_end.drivers.resumed_driver", folder, 2, *devices)
    assert driver.stdout is not None
    try:
        assert all(driver.stdout.readline() for _ in range(decisions)), "it had ended before"
    finally:
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
    (run,) = (folder / "runs").iterdir()
    return str(run)


def interrupted(folder: str | Path, decisions: int, **options: Any) -> str:
    """Send a driver a Ctrl-C after so many decisions, and return the run's path."""
    tape = after_decisions(decisions, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt) as interrupt:
        search(folder, 2, observers=[tape], **options).fit(classes())
    *_, command, call = str(interrupt.value).splitlines()
    run = interrupt.value.result.run_path
    assert command == f"resume it: cerebro-hydra resume {run}"
    assert call == f"or: search.fit(df, resume={run!r})"
    return run


def go_on(folder: str | Path, run: str, workers: int = 2, **options: Any) -> SearchResult:
    return search(folder, workers, **options).fit(classes(), resume=run)


def calm(folder: Path, **options: Any) -> dict[str, Any]:
    """Return the bits of a run that nothing disturbs."""
    return bits(search(folder / "calm", 2, **options).fit(classes()).run_path)


def test_a_run_whose_driver_is_killed_ends_with_the_bits_of_the_calm_run(tmp_path: Path) -> None:
    run = killed(tmp_path / "killed", random.Random(3).randrange(20, 40))
    result = go_on(tmp_path / "killed", run, workers=1, checkpoint="sub-epoch")
    assert result.run_path == run
    assert bits(run) == calm(tmp_path)
    assert not RunView.of_run(RunFolder.open(run)).differences
    assert verify(run).ok
    left = {trial: RunFolder.open(run).states(trial) for trial in range(3)}
    assert left == {trial: [0, 6] for trial in range(3)}, "what is not needed is gone"


def test_an_interrupted_run_is_extended(tmp_path: Path) -> None:
    """What is extended has the bits of a run that was so long and had all candidates at once."""
    run = interrupted(tmp_path / "run", 12, num_epochs=2)
    done = go_on(tmp_path / "run", run, num_epochs=2)
    assert statuses(done) == ["finished"] * 3
    again = go_on(tmp_path / "run", run, num_epochs=2)
    assert again.run_path == run, "a run that is over is only read"
    more = {"num_epochs": 3, "space": SPACE | {"lr": [*SPACE["lr"], 0.02]}}
    go_on(tmp_path / "run", run, **more)
    assert len(bits(run)) == 4
    assert bits(run) == calm(tmp_path, **more)


class Uneven:
    """Lets its trials train for as many epochs each as it is told."""

    def __init__(self, *epochs: int) -> None:
        self._left, self.epochs = [*epochs], 1

    @property
    def closed(self) -> bool:
        return not self._left

    def ask(self) -> dict[str, Any] | None:
        if not self._left:
            return None
        self.epochs = self._left.pop(0)
        return {"lr": 0.01 / self.epochs}

    def tell(self, trial: int, epochs: int, metrics: Any) -> tuple[()]:
        return ()


def uneven(place: Path, *epochs: int, num_epochs: int) -> CustomSearch:
    return CustomSearch(
        make_searcher=lambda: Uneven(*epochs),
        backend=LocalBackend(2),
        store=LocalStore(str(place)),
        estimator_gen_fn=models.feed_forward,
        num_epochs=num_epochs,
        order="seeded",
        verbose=0,
    )


def epochs_of(result: SearchResult) -> list[int]:
    return [len(trial.history["train_loss"]) for trial in result.trials]


class Extending(Uneven):
    """Lets its last trial alone go on where its run is extended, and proposes one more."""

    def extend(self, num_epochs: int) -> list[TrainTo]:
        self._left = [1]
        return [TrainTo(1, num_epochs)]


def test_a_searcher_is_asked_who_goes_on_where_its_run_is_extended(tmp_path: Path) -> None:
    def searching(num_epochs: int, further: int | None = None) -> CustomSearch:
        searcher = Extending(2, 1)
        if further is not None:
            searcher.extend = lambda num_epochs: [TrainTo(0, further)]  # type: ignore[method-assign]
        return replaced(uneven(tmp_path, num_epochs=num_epochs), searcher)

    run = searching(2).fit(classes()).run_path
    assert epochs_of(SearchResult.open(run)) == [2, 1]
    for wrong in (2, 4):
        with pytest.raises(ConfigurationError, match=r"extends the run by TrainTo\(trial=0"):
            searching(3, wrong).fit(classes(), resume=run)
    again = searching(3).fit(classes(), resume=run)
    assert epochs_of(again) == [2, 3, 1], "the trial that may train longest is not asked for"
    assert verify(run).ok
    assert epochs_of(searching(3).fit(classes(), resume=run)) == [2, 3, 1], "it is over"


def replaced(search: CustomSearch, searcher: Uneven) -> CustomSearch:
    search._make_searcher = lambda: searcher
    return search


def as_if_killed_before_its_extension_was_journalled(run: str, num_epochs: int) -> None:
    folder = RunFolder.open(run)
    document = replace(read_document(folder), num_epochs=num_epochs)
    folder.write_json(RUN_FILE, document.to_json())


def test_an_extension_that_was_cut_short_is_made_by_the_same_call(tmp_path: Path) -> None:
    run = uneven(tmp_path, 2, 1, num_epochs=2).fit(classes()).run_path
    as_if_killed_before_its_extension_was_journalled(run, 3)
    again = uneven(tmp_path, 2, 1, num_epochs=3).fit(classes(), resume=run)
    assert epochs_of(again) == [3, 1], "who might train as far as any other goes on"
    assert verify(run).ok


def test_a_run_over_before_its_last_epoch_is_only_read(tmp_path: Path) -> None:
    search = uneven(tmp_path, 1, num_epochs=2)
    run = search.fit(classes()).run_path
    before = files(run)
    assert epochs_of(search.fit(classes(), resume=run)) == [1]
    assert files(run) == before


def test_candidates_that_wait_train_as_far_as_a_run_is_extended(tmp_path: Path) -> None:
    run = interrupted(tmp_path, 1, num_epochs=1)
    as_if_killed_before_its_extension_was_journalled(run, 2)
    assert epochs_of(go_on(tmp_path, run, num_epochs=2)) == [2, 2, 2]


def test_a_resumed_run_refuses_arguments_that_would_make_it_another_one(tmp_path: Path) -> None:
    run = interrupted(tmp_path, 3)
    for options, said in [
        ({"seed": 5}, "seed is 5, and the run"),
        ({"num_epochs": 1}, "num_epochs is 1, and the run"),
        ({"checkpoint": "end"}, "checkpoint is 'end', and the run"),
        ({"keep": "last"}, "keep is 'last', and the run .* has None; give the search what"),
    ]:
        with pytest.raises(ConfigurationError, match=said):
            go_on(tmp_path, run, **options)
    on_gpus = search(tmp_path, 2)
    on_gpus.backend.resources = WorkerResources(device_kind="cuda")
    with pytest.raises(ConfigurationError, match=r"of kind 'cuda', and the run .* begun on 'cpu'"):
        on_gpus.fit(classes(), resume=run)


def test_a_run_that_had_decided_nothing_is_extended_with_new_limits(tmp_path: Path) -> None:
    run = interrupted(tmp_path, 3, num_epochs=1)
    shutil.rmtree(Path(run, "journal"))
    changed = {"num_epochs": 2, "batch_seconds": 60.0, "audit_share": 0.0}
    result = go_on(tmp_path, run, **changed)
    assert epochs_of(result) == [2, 2, 2]
    assert {name: getattr(result.document, name) for name in changed} == changed


def test_a_run_that_has_decided_does_not_go_on_without_what_describes_it(tmp_path: Path) -> None:
    run = interrupted(tmp_path, 3)
    Path(run, RUN_FILE).unlink()
    before = files(run)
    with pytest.raises(StoreError, match=r"run.json' is gone, and the run has a journal: restore"):
        go_on(tmp_path, run)
    with pytest.raises(StoreError, match=r"run.json' is gone, and the run has a journal: restore"):
        RunToResume(RunFolder.open(run))
    assert files(run) == before


def objects_of(run: str, state: Callable[[list[int]], int]) -> set[Path]:
    """Return the objects of one state of each trial."""
    folder = RunFolder.open(run)
    shards = [
        shard for t in range(3) for shard in folder.read_state(t, state(folder.states(t)))["shards"]
    ]
    named = {digest for shard in shards for digest in (shard["frozen"], shard["trainable"])}
    return {Path(run, "objects", f"{digest}.safetensors") for digest in named}


def test_a_run_whose_objects_are_gone_is_refused_at_once_with_their_names(tmp_path: Path) -> None:
    run = interrupted(tmp_path, 20)
    shutil.rmtree(Path(run, "objects"))
    before = files(run)
    said = (
        rf"trial-000: of its states .* files in '{run}' are gone, .*: objects/\w{{32}}.*; restore"
    )
    with pytest.raises(StoreError, match=said):
        go_on(tmp_path, run)
    assert files(run) == before


def test_a_run_whose_states_are_gone_is_refused_at_once_with_their_names(tmp_path: Path) -> None:
    run = interrupted(tmp_path, 20)
    for state in Path(run, "trials", "trial-001").glob("state-*"):
        state.unlink()
    said = "trial-001: of its states .*trials/trial-001/state-000000.json.*; restore them"
    with pytest.raises(StoreError, match=said):
        go_on(tmp_path, run)


@pytest.mark.parametrize("instead", ["nothing", "a FIFO"])
def test_states_that_lack_objects_are_made_again_from_older_ones_without_a_try_to_read_them(
    tmp_path: Path, instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = interrupted(tmp_path, 40, checkpoint="sub-epoch")
    gone = objects_of(run, max) - objects_of(run, min)
    assert gone
    for path in gone:
        path.unlink()
        if instead == "a FIFO":
            os.mkfifo(path)
    tape = Tape()
    go_on(tmp_path, run, checkpoint="sub-epoch", observers=[tape], verbose=1)
    assert not [d for d in tape.of(Decision) if isinstance(d.event, TransferFailed)]
    assert "it goes on from an older state" in capsys.readouterr().out
    assert bits(run) == calm(tmp_path)
    assert verify(run).ok


def test_states_of_trials_that_are_extended_are_made_again_in_the_same_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = search(tmp_path, 2, num_epochs=2).fit(classes()).run_path
    for path in objects_of(run, max) - objects_of(run, min):
        path.unlink()
    tape = Tape()
    go_on(tmp_path, run, num_epochs=3, observers=[tape], verbose=1)
    assert not [d for d in tape.of(Decision) if isinstance(d.event, TransferFailed)]
    assert "it goes on from an older state" in capsys.readouterr().out
    assert bits(run) == calm(tmp_path, num_epochs=3)


def test_a_run_that_another_program_works_on_is_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = interrupted(tmp_path, 3)
    monkeypatch.setattr("cerebro_hydra.tune.running.CLAIM_SECONDS", 0.6)
    with run_claim(RunFolder.open(run)):
        before = files(run)
        with pytest.raises(ConfigurationError, match=f"process {os.getpid()} on .* works on the"):
            go_on(tmp_path, run, num_epochs=9)
        assert files(run) == before
        Path(run, "run.json").rename(tmp_path / "run.json")  # as if it were admitting its trials
        with pytest.raises(ConfigurationError, match="works on the run"):
            go_on(tmp_path, run)
        (tmp_path / "run.json").rename(Path(run, "run.json"))
        assert files(run) == before


def test_a_driver_that_was_held_up_says_who_has_taken_over_and_leaves_that_claim(
    tmp_path: Path,
) -> None:
    folder = RunFolder.open(interrupted(tmp_path, 3))
    claims = Path(folder.path, CLAIMS)
    said = "process 7 on elsewhere has taken over the run"
    with pytest.raises(JournalError, match=said), run_claim(folder):
        (claims / "000001").write_text("process 7 on elsewhere, renewed 3 times")
        raise SetupError("all agents are lost")  # because the other driver has ended them
    assert (claims / "000001").exists()
    assert is_claimed(folder.store, folder.path)


def test_a_run_moved_to_another_store_goes_on_under_its_own_name(tmp_path: Path) -> None:
    begun = interrupted(tmp_path / "old", 20)
    (tmp_path / "old").rename(tmp_path / "new")
    run = tmp_path / "new" / "runs" / Path(begun).name
    other = run.rename(run.with_name("other"))
    with pytest.raises(StoreError, match=rf"holds the run '{run.name}'; give its folder that name"):
        go_on(tmp_path / "new", str(other))
    other.rename(run)
    go_on(tmp_path / "new", str(run), workers=1)
    assert bits(run) == calm(tmp_path)


def test_a_store_that_refuses_for_some_seconds_costs_nothing(tmp_path: Path) -> None:
    """The journal and the states of trials wait, and are written when they can be."""
    marker = tmp_path / flaky.MARKER

    def refuse() -> None:
        marker.touch()
        threading.Timer(4.0, marker.unlink).start()

    tape, store = after_decisions(12, refuse), flaky.FlakyStore(str(tmp_path))
    options = {"observers": [tape], "store": store, "factory": flaky.feed_forward}
    found = search(tmp_path, 2, **options).fit(classes())
    assert "the journal" in {each.what for each in tape.of(NotSaved)}
    assert bits(found.run_path) == calm(tmp_path)


def other_rows(change: str) -> Arrays:
    """Return rows of the same columns, types and shapes as those of the run."""
    arrays = {name: array.copy() for name, array in classes().arrays.items()}
    match change:
        case "one value":
            arrays["features"][17, 3] += 0.5
        case "labels of other rows":
            arrays["label"] = np.roll(arrays["label"], 1)
        case "a row less":
            arrays = {name: array[1:] for name, array in arrays.items()}
        case "another order":
            arrays = {name: array[::-1] for name, array in arrays.items()}
    return Arrays(arrays)


def test_a_run_goes_on_with_its_own_rows_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = interrupted(tmp_path, 3, num_epochs=1)
    before = files(run)
    for change, said in (
        ("one value", "has 200 rows with other values, and the run .* was begun on 200; give"),
        ("labels of other rows", "has 200 rows with other values"),
        ("a row less", "has 199 rows, and the run .*the values of its 199 rows were compared"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            search(tmp_path, 2, num_epochs=1).fit(other_rows(change), resume=run)
    assert files(run) == before
    options = {"num_epochs": 1, "verbose": 1, "validation": 0.4}
    search(tmp_path, 1, **options).fit(other_rows("another order"), resume=run)
    assert "has the rows of the run: the values of its 200 rows were" in capsys.readouterr().out


def test_a_run_on_data_that_was_prepared_before_is_compared_by_its_rows_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which rows it held out, and by which seed, may be known to nobody any more."""
    begun = search(tmp_path, 2, num_epochs=1)
    write_dataset(begun.store, classes().arrays, 2, 0.25, seed=5)
    run = begun.fit_on_prepared_data().run_path
    with pytest.raises(ConfigurationError, match=r"has 199 rows, and the run .* was begun on 200"):
        search(tmp_path, 2, num_epochs=2).fit(other_rows("a row less"), resume=run)
    go_on(tmp_path, run, num_epochs=2, verbose=1)
    assert "as many rows as the run, 200; no more was compared" in capsys.readouterr().out


@pytest.mark.long
def test_a_run_on_devices_goes_on_with_fewer_workers(tmp_path: Path) -> None:
    run = killed(tmp_path / "killed", 30, "2")
    more = search(tmp_path / "killed", 1, devices=2, checkpoint="sub-epoch")
    more.fit(classes(), resume=run)
    assert bits(run) == calm(tmp_path)
    assert not RunView.of_run(RunFolder.open(run)).differences
    assert verify(run).ok
