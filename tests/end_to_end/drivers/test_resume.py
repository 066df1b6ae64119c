"""A run whose driver is killed goes on to the bits of the undisturbed run."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cerebro_hydra.data.claim import CLAIMS
from cerebro_hydra.errors import ConfigurationError, StoreError
from cerebro_hydra.hopper.protocol.resources import WorkerResources
from cerebro_hydra.observe import Decision
from cerebro_hydra.observe.records import NotSaved
from cerebro_hydra.storage import LocalStore, RunFolder
from cerebro_hydra.storage.run_document import RUN_FILE
from cerebro_hydra.storage.run_folder import read_document
from cerebro_hydra.testing.datasets import write_dataset
from cerebro_hydra.testing.local_backend import Arrays, LocalBackend
from cerebro_hydra.tune import CustomSearch
from cerebro_hydra.tune.result import SearchResult
from cerebro_hydra.tune.running import run_claim
from cerebro_hydra.verification import verify
from tests.end_to_end import models
from tests.end_to_end.drivers import flaky
from tests.end_to_end.drivers.resumed_driver import RATES, rows, search, space

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).resolve().parents[3]


def bits(run_path: str) -> dict[str, Any]:
    """Return the metrics of every trial, and the digests of its result."""
    result, folder = SearchResult.open(run_path), RunFolder.open(run_path)
    found: dict[str, Any] = {}
    for view in result._view.trials.values():
        assert view.status == "finished", view.reason
        state = folder.read_state(view.trial, view.result_visit)
        found[view.trial_id] = (repr(view.history), state["shards"])
        for shard in state["shards"]:
            for digest in (shard["frozen"], shard["trainable"]):
                folder.read_object(digest)
    return found


def killed(folder: Path, workers: int, decisions: int, *resume: str) -> str:
    """Run a driver until it has taken so many decisions, kill it, and return the run's path."""
    command = [sys.executable, "-m", "tests.end_to_end.drivers.resumed_driver"]
    driver = subprocess.Popen(
        [*command, str(folder), str(workers), *resume],
        stdout=subprocess.PIPE,
        text=True,
        cwd=CHECKOUT,
        start_new_session=True,
    )
    assert driver.stdout is not None
    try:
        for _ in range(decisions):
            if not driver.stdout.readline():
                break
    finally:
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
    (run,) = (folder / "runs").iterdir()
    return str(run)


def calm(folder: Path, **options: Any) -> dict[str, Any]:
    """Return the bits of a run that nothing disturbs."""
    return bits(search(str(folder / "calm"), 2, observers=[], **options).fit(rows()).run_path)


def test_a_run_whose_driver_is_killed_ends_with_the_bits_of_the_calm_run(tmp_path: Path) -> None:
    place = tmp_path / "sub-epoch"
    run = killed(place, 2, random.Random(3).randrange(20, 40))
    result = search(str(place), 1, observers=[], checkpoint="sub-epoch").fit(rows(), resume=run)
    assert result.run_path == run
    assert bits(run) == calm(tmp_path)
    assert not result._view.differences
    assert verify(run).ok
    left = {trial: RunFolder.open(run).states(trial) for trial in range(3)}
    assert left == {trial: [0, 6] for trial in range(3)}, "what is not needed is gone"


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_a_run_goes_on_from_any_moment_on_any_number_of_workers(tmp_path: Path, seed: int) -> None:
    moments = random.Random(seed)
    place = tmp_path / moments.choice(["epoch", "sub-epoch"])
    run = killed(place, 2, moments.randrange(1, 70))
    killed(place, 2, moments.randrange(1, 40), run)
    options = {"checkpoint": place.name, "observers": []}
    search(str(place), moments.choice([1, 2, 3]), **options).fit(rows(), resume=run)
    assert bits(run) == calm(tmp_path)


class Signals:
    """Sends this process a Ctrl-C after some decisions."""

    def __init__(self, decisions: int) -> None:
        self.left = decisions

    def on_record(self, record: Any) -> None:
        self.left -= isinstance(record, Decision)
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupted_run_says_how_to_go_on_and_is_extended(tmp_path: Path) -> None:
    """What is extended has the bits of a run that was so long and had all candidates at once."""
    place = str(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt) as interrupt:
        search(place, 2, num_epochs=2, observers=[Signals(12)]).fit(rows())
    *_, command, call = str(interrupt.value).splitlines()
    run = interrupt.value.result.run_path
    assert command == f"resume it: cerebro-hydra resume {run}"
    assert call == f"or: search.fit(df, resume={run!r})"
    done = search(place, 2, num_epochs=2, observers=[]).fit(rows(), resume=run)
    assert [trial.status for trial in done.trials] == ["finished"] * 3
    again = search(place, 2, num_epochs=2, observers=[]).fit(rows(), resume=run)
    assert again.run_path == run, "a run that is over is only read"
    more = {"num_epochs": 3, "search_space": space(*RATES, 0.02)}
    search(place, 2, observers=[], **more).fit(rows(), resume=run)
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
        return {"lr": RATES[self.epochs]}

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


def as_if_killed_before_its_extension_was_journalled(run: str, num_epochs: int) -> None:
    folder = RunFolder.open(run)
    document = replace(read_document(folder), num_epochs=num_epochs)
    folder.write_json(RUN_FILE, document.to_json())


def test_an_extension_that_was_cut_short_is_made_by_the_same_call(tmp_path: Path) -> None:
    run = uneven(tmp_path, 2, 1, num_epochs=2).fit(rows()).run_path
    as_if_killed_before_its_extension_was_journalled(run, 3)
    again = uneven(tmp_path, 2, 1, num_epochs=3).fit(rows(), resume=run)
    assert epochs_of(again) == [3, 1], "who might train as far as any other goes on"
    assert verify(run).ok


def test_a_run_over_before_its_last_epoch_is_only_read(tmp_path: Path) -> None:
    search = uneven(tmp_path, 1, num_epochs=2)
    run = search.fit(rows()).run_path
    before = files(run)
    assert epochs_of(search.fit(rows(), resume=run)) == [1]
    assert files(run) == before


def test_candidates_that_wait_train_as_far_as_a_run_is_extended(tmp_path: Path) -> None:
    place = str(tmp_path)
    with pytest.raises(KeyboardInterrupt) as interrupt:
        search(place, 2, num_epochs=1, observers=[Signals(1)]).fit(rows())
    run = interrupt.value.result.run_path
    as_if_killed_before_its_extension_was_journalled(run, 2)
    result = search(place, 2, num_epochs=2, observers=[]).fit(rows(), resume=run)
    assert epochs_of(result) == [2, 2, 2]


def test_a_resumed_run_refuses_arguments_that_would_make_it_another_one(tmp_path: Path) -> None:
    place = str(tmp_path)
    with pytest.raises(KeyboardInterrupt) as interrupt:
        search(place, 2, observers=[Signals(3)]).fit(rows())
    run = interrupt.value.result.run_path
    for options, said in [
        ({"seed": 5}, "seed is 5, and the run"),
        ({"num_epochs": 1}, "num_epochs is 1, and the run"),
        ({"checkpoint": "end"}, "checkpoint is 'end', and the run"),
        ({"keep": "last"}, "keep is 'last', and the run .* has None; give the search what"),
    ]:
        with pytest.raises(ConfigurationError, match=said):
            search(place, 2, **options).fit(rows(), resume=run)
    on_gpus = search(place, 2)
    on_gpus.backend.resources = WorkerResources(device_kind="cuda")
    with pytest.raises(ConfigurationError, match=r"of kind 'cuda', and the run .* begun on 'cpu'"):
        on_gpus.fit(rows(), resume=run)


def test_a_run_that_had_decided_nothing_is_extended_with_new_limits(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt) as interrupt:
        search(str(tmp_path), 2, num_epochs=1, observers=[Signals(3)]).fit(rows())
    run = interrupt.value.result.run_path
    shutil.rmtree(Path(run, "journal"))
    changed = {"num_epochs": 2, "batch_seconds": 60.0, "audit_share": 0.0}
    result = search(str(tmp_path), 2, observers=[], **changed).fit(rows(), resume=run)
    assert {len(trial.history["train_loss"]) for trial in result.trials} == {2}
    assert {name: getattr(result.document, name) for name in changed} == changed


def test_a_run_that_another_program_works_on_is_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = str(tmp_path)
    with pytest.raises(KeyboardInterrupt) as interrupt:
        search(place, 2, observers=[Signals(3)]).fit(rows())
    run = interrupt.value.result.run_path
    monkeypatch.setattr("cerebro_hydra.tune.running.CLAIM_SECONDS", 0.6)
    with run_claim(RunFolder.open(run)):
        before = files(run)
        with pytest.raises(ConfigurationError, match=f"process {os.getpid()} on .* works on the"):
            search(place, 2, num_epochs=9).fit(rows(), resume=run)
        assert files(run) == before
        Path(run, "run.json").rename(tmp_path / "run.json")  # as if it were admitting its trials
        with pytest.raises(ConfigurationError, match="works on the run"):
            search(place, 2).fit(rows(), resume=run)
        (tmp_path / "run.json").rename(Path(run, "run.json"))
        assert files(run) == before


def files(run: str) -> dict[Path, bytes]:
    found = (path for path in Path(run).rglob("*") if path.is_file())
    return {path: path.read_bytes() for path in found if path.parent.name != CLAIMS}


def test_a_run_moved_to_another_store_goes_on_under_its_own_name(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt) as interrupt:
        search(str(tmp_path / "old"), 2, observers=[Signals(20)]).fit(rows())
    (tmp_path / "old").rename(tmp_path / "new")
    run = tmp_path / "new" / "runs" / Path(interrupt.value.result.run_path).name
    other = run.rename(run.with_name("other"))
    with pytest.raises(StoreError, match=rf"holds the run '{run.name}'; give its folder that name"):
        search(str(tmp_path / "new"), 2).fit(rows(), resume=str(other))
    other.rename(run)
    search(str(tmp_path / "new"), 1, observers=[]).fit(rows(), resume=str(run))
    assert bits(str(run)) == calm(tmp_path)


def test_a_store_that_refuses_for_some_seconds_costs_nothing(tmp_path: Path) -> None:
    """The journal and the states of trials wait, and are written when they can be."""
    marker = tmp_path / flaky.MARKER
    told: list[NotSaved] = []

    class Full:
        def on_record(self, record: Any) -> None:
            if isinstance(record, NotSaved):
                told.append(record)
            if isinstance(record, Decision) and record.seq == 12:
                marker.touch()
                threading.Timer(4.0, marker.unlink).start()

    found = search(
        str(tmp_path),
        2,
        observers=[Full()],
        store=flaky.FlakyStore(str(tmp_path)),
        estimator_gen_fn=flaky.feed_forward,
    ).fit(rows())
    assert "the journal" in {each.what for each in told}
    assert bits(found.run_path) == calm(tmp_path)


def other_rows(change: str) -> Arrays:
    """Return rows of the same columns, types and shapes as `rows`."""
    arrays = {name: array.copy() for name, array in rows().arrays.items()}
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
    place = str(tmp_path)
    with pytest.raises(KeyboardInterrupt) as interrupt:
        search(place, 2, num_epochs=1, observers=[Signals(3)]).fit(rows())
    run = interrupt.value.result.run_path
    before = files(run)
    for change, said in (
        ("one value", "has 200 rows with other values, and the run .* was begun on 200; give"),
        ("labels of other rows", "has 200 rows with other values"),
        ("a row less", "has 199 rows, and the run .*the values of its 199 rows were compared"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            search(place, 2, num_epochs=1, observers=[]).fit(other_rows(change), resume=run)
    assert files(run) == before
    options = {"num_epochs": 1, "observers": [], "verbose": 1, "validation": 0.4}
    search(place, 1, **options).fit(other_rows("another order"), resume=run)
    assert "has the rows of the run: the values of its 200 rows were" in capsys.readouterr().out


def test_a_run_on_data_that_was_prepared_before_is_compared_by_its_rows_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which rows it held out, and by which seed, may be known to nobody any more."""
    place = str(tmp_path)
    begun = search(place, 2, num_epochs=1, observers=[])
    write_dataset(begun.store, rows().arrays, 2, 0.25, seed=5)
    run = begun.fit_on_prepared_data().run_path
    with pytest.raises(ConfigurationError, match=r"has 199 rows, and the run .* was begun on 200"):
        search(place, 2, num_epochs=2, observers=[]).fit(other_rows("a row less"), resume=run)
    search(place, 2, num_epochs=2, observers=[], verbose=1).fit(rows(), resume=run)
    assert "as many rows as the run, 200; no more was compared" in capsys.readouterr().out
