"""Trials that run out of memory in a batch that is larger than what was measured before."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra import replay
from cerebro_hydra.errors import Interrupted
from cerebro_hydra.observe.report import render
from cerebro_hydra.plan.messages.instructions import ChangeCut, CutFiner
from cerebro_hydra.storage import LocalStore, RunFolder
from cerebro_hydra.storage.run_document import TrialSpec
from cerebro_hydra.testing.local_backend import LocalBackend
from cerebro_hydra.tune import CustomSearch, Fork, SearchResult
from cerebro_hydra.tune.searches import ListSearch
from cerebro_hydra.verification import verify
from tests.end_to_end.runs import Tape, statuses
from tests.end_to_end.trials import growing_batches

pytestmark = pytest.mark.slow

BUDGET = 400_000  # two of three shards, beside what short batches need
GROWS = {"lr": 0.01, "batches": "long"}


def search(path: Path, *candidates: dict[str, Any], devices: int = 1, **options: Any) -> ListSearch:
    return ListSearch(
        backend=LocalBackend(1, devices_per_worker=devices, device_memory=BUDGET),
        store=LocalStore(str(path)),
        estimator_gen_fn=growing_batches.recipe,
        candidates=candidates,
        **{"num_epochs": 3, "verbose": 0, **options},
    )


def specs(result: SearchResult) -> list[TrialSpec]:
    folder = RunFolder.open(result.run_path)
    return [folder.read_trial(number, folder.run_id) for number in folder.trials()]


def check(result: SearchResult) -> None:
    report = verify(result.run_path)
    assert report.ok, str(report)
    assert "belong to no state" not in str(report), "the former shards were not deleted"
    for spec in specs(result):
        (trial,) = (each for each in result.trials if each.trial_id == spec.trial_id)
        if trial.status == "finished":
            assert replay(result.run_path, spec.trial_id).identical
    assert "cut into 6 shards instead of 3" in render(RunFolder.open(result.run_path))


def test_a_trial_goes_on_in_more_shards_once_and_its_neighbours_as_if_nothing_had_happened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    never = GROWS | {"batches": "never"}
    result = search(tmp_path, GROWS, GROWS | {"batches": "endless"}, never, verbose=1).fit(
        growing_batches.texts()
    )
    told = capsys.readouterr().out
    assert "trial-000 ran out of memory; it goes on from state 1, cut into 6 shards" in told
    assert statuses(result) == ["finished", "failed", "finished"]
    assert [len(each.cut["at"]) + 1 for each in specs(result)] == [6, 6, 3]
    error = result.trials[1].error
    assert error.endswith("It ran out of memory cut into 3 shards, and again cut into 6")
    assert "a batch of shape [8, 60] takes" in error
    check(result)


@pytest.mark.long
def test_a_run_with_a_trial_that_was_cut_finer_is_extended_and_replays(tmp_path: Path) -> None:
    texts = growing_batches.texts()
    by_modules = GROWS | {"cut": "modules", "ema": 0.9}
    begun = search(tmp_path, GROWS, by_modules, devices=2).fit(texts)
    longer = search(tmp_path, GROWS, by_modules, devices=2, num_epochs=5)
    result = longer.fit(texts, resume=begun.run_path)
    assert [len(each.history["val_loss"]) for each in result.trials] == [5, 5]
    assert not any(each.finer for each in specs(result)), "both were cut finer"
    check(result)


@pytest.mark.long
@pytest.mark.parametrize("kind", [CutFiner, ChangeCut])
def test_a_run_that_is_interrupted_while_a_trial_is_cut_finer_goes_on_and_replays(
    tmp_path: Path, kind: type
) -> None:
    texts, done = growing_batches.texts(), list[str]()

    def interrupt(tape: Tape) -> None:
        if not done and tape.of(kind, last=True):
            done.append("interrupted")
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted) as raised:
        search(tmp_path, GROWS, observers=[Tape(interrupt)]).fit(texts)
    result = search(tmp_path, GROWS).fit(texts, resume=raised.value.result.run_path)
    assert statuses(result) == ["finished"]
    assert [len(each.cut["at"]) + 1 for each in specs(result)] == [6]
    check(result)


class ForksAtTheEnd:
    """Forks its only candidate after an epoch."""

    epochs = 2
    closed = False

    def __init__(self) -> None:
        self._asked = False

    def ask(self) -> dict[str, Any] | None:
        params, self._asked = (None if self._asked else GROWS), True
        return params

    def tell(self, trial: int, epochs: int, metrics: Any) -> list[Any]:
        if epochs == 2 and trial == 0 and not self.closed:
            self.closed = True
            return [Fork(0, GROWS | {"lr": 0.02}, 5)]
        return []


@pytest.mark.long
def test_a_fork_of_a_trial_that_was_cut_finer_has_its_cut_and_its_room(tmp_path: Path) -> None:
    result = CustomSearch(
        make_searcher=ForksAtTheEnd,
        backend=LocalBackend(1, device_memory=BUDGET),
        store=LocalStore(str(tmp_path)),
        estimator_gen_fn=growing_batches.recipe,
        num_epochs=5,
        verbose=0,
    ).fit(growing_batches.texts())
    assert statuses(result) == ["finished"] * 2
    parent, fork = specs(result)
    assert (len(parent.cut["at"]), parent.finer) == (5, False)
    assert (len(fork.cut["at"]), fork.finer) == (5, True), "it lacked nothing"
    assert (fork.recompute, fork.tasks) == (parent.recompute, parent.tasks)
    check(result)
