"""What a finished run has is never lost where an extension of it fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra.errors import AllTrialsFailed
from cerebro_hydra.observe.text import troubles
from cerebro_hydra.plan.messages.instructions import ExtensionFailed
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.tune.result import SearchResult
from cerebro_hydra.verification import verify
from tests.end_to_end.drivers import extended
from tests.end_to_end.drivers.resumed_driver import search
from tests.end_to_end.runs import Tape, bits, classes, statuses

pytestmark = pytest.mark.slow


def late(place: Path, num_epochs: int, *markers: Path, **options: Any):
    space = {"lr": [0.01, 0.003], "marker": [str(each) for each in markers]}
    return search(
        place, 2, factory=extended.fails_late, space=space, num_epochs=num_epochs, **options
    )


@pytest.mark.parametrize("keep", ["best", "last"])
def test_trials_that_fail_when_they_are_extended_keep_what_they_had(
    tmp_path: Path, keep: str
) -> None:
    marker, options = tmp_path / "fails", {"keep": keep}
    result = late(tmp_path / "run", 2, marker, **options).fit(classes())
    run, best = result.run_path, result.best_trial
    marker.touch()
    with pytest.raises(AllTrialsFailed) as failure:
        late(tmp_path / "run", 4, marker, **options).fit(classes(), resume=run)
    first, *_, last = str(failure.value).splitlines()
    assert first.startswith("none of 2 trials could be trained further: ValueError: a mistake that")
    assert last.startswith("each keeps what it had reached, and the same call goes on from there")
    kept = SearchResult.open(run)
    assert statuses(kept) == ["finished"] * 2
    assert [each.history for each in kept.trials] == [each.history for each in result.trials]
    assert kept.best_trial.trial_id == best.trial_id
    assert all("a mistake that shows late" in (each.error or "") for each in kept.trials)
    assert kept.get_best_model().torch() is not None
    assert verify(run).ok
    marker.unlink()
    again = late(tmp_path / "run", 4, marker, **options).fit(classes(), resume=run)
    assert not any(each.error for each in again.trials)
    calm = late(tmp_path / "calm", 4, marker, **options).fit(classes())
    assert bits(run) == bits(calm.run_path)
    assert verify(run).ok


def test_the_failure_of_an_extension_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    markers, tape = (tmp_path / "first", tmp_path / "second"), Tape()
    run = late(tmp_path / "run", 1, *markers).fit(classes()).run_path
    markers[0].touch()
    result = late(tmp_path / "run", 2, *markers, observers=[tape]).fit(classes(), resume=run)
    failed = [bool(trial.error) for trial in result.trials]
    assert failed == [trial.params["marker"] == str(markers[0]) for trial in result.trials]
    assert statuses(result) == ["finished"] * 4
    said = [line for record in tape.records for line in troubles(record)]
    assert sum("could not be trained up to epoch 2, and keeps what it has" in s for s in said) == 2
    told = [i for r in RunFolder.open(run).read_records() for i in r["instructions"]]
    assert sum(each["type"] == ExtensionFailed.__name__ for each in told) == 2
    markers[0].unlink()
    again = late(tmp_path / "run", 2, *markers).fit(classes(), resume=run)
    assert [len(trial.history["train_loss"]) for trial in again.trials] == [2] * 4
