"""What a finished run has is never lost where an extension of it fails."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra.errors import AllTrialsFailed, ConfigurationError
from cerebro_hydra.observe.text import troubles
from cerebro_hydra.plan.messages.instructions import ExtensionFailed
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.tune.result import SearchResult
from cerebro_hydra.verification import verify
from tests.end_to_end.drivers import extended
from tests.end_to_end.drivers.resumed_driver import search
from tests.end_to_end.runs import Tape, after_decisions, bits, classes, files, statuses

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


def changing(place: Path, factory: extended.Changing, num_epochs: int, **options: Any):
    options = {"space": {"lr": [0.01, 0.003]}, **options}
    return search(place, 2, factory=factory, num_epochs=num_epochs, **options)


OTHERS = {
    "wider": "the names, types and shapes of the model's parameters",
    "names": "the names, types and shapes of the model's parameters",
    "tanh": "the Tanh modules of the model, which it did not have",
    "lr": "the optimizer's lr, 0.1 and not 0.01",
    "loss": "loss",
    "ema": "ema, 0.9 and not None",
    "scheduler": "lr_scheduler, ",
    "accumulate": "accumulate, 2 and not 1",
    "batch_size": "batch_size, 8 and not 16",
    "metric": "metrics, ['accuracy', 'mae'] and not ['accuracy']",
}


def test_other_code_is_refused_by_name_before_anything_is_trained_or_written(
    tmp_path: Path,
) -> None:
    factory = extended.Changing(tmp_path / "how")
    run = changing(tmp_path / "run", factory, 1).fit(classes()).run_path
    before = files(run)
    for how, part in OTHERS.items():
        factory.place.write_text(how)
        for more in ({}, {"space": {"lr": [0.01, 0.003, 0.001]}}):  # more epochs, or candidates
            with pytest.raises(ConfigurationError) as refusal:
                changing(tmp_path / "run", factory, 1 if more else 2, **more).fit(
                    classes(), resume=run
                )
            said = str(refusal.value)
            assert said.startswith(f"trial-000 of the run {run!r} has other code than it was"), said
            assert part in said and "warm_start" in said
    factory.place.write_text("broken")
    with pytest.raises(ConfigurationError, match=r"trial-000 .* can't be built: ValueError: a mis"):
        changing(tmp_path / "run", factory, 2).fit(classes(), resume=run)
    assert files(run) == before
    factory.place.write_text("as it was")
    changing(tmp_path / "run", factory, 2).fit(classes(), resume=run)
    calm = changing(tmp_path / "calm", factory, 2).fit(classes())
    assert bits(run) == bits(calm.run_path)


def test_other_values_in_the_code_are_told_before_anything_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    factory = extended.Changing(tmp_path / "how")
    run = changing(tmp_path / "run", factory, 1).fit(classes()).run_path
    factory.place.write_text("shifted")
    changing(tmp_path / "run", factory, 2, verbose=1).fit(classes(), resume=run)
    told = "trial-000 goes on with other values than before: a value of the collate at .by, "
    assert f"{told}0.5 and not 0.0" in capsys.readouterr().out


def test_a_run_that_was_interrupted_goes_on_with_its_own_code_only(tmp_path: Path) -> None:
    factory = extended.Changing(tmp_path / "how")
    tape = after_decisions(12, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt) as interrupt:
        changing(tmp_path / "run", factory, 2, observers=[tape]).fit(classes())
    run = interrupt.value.result.run_path
    factory.place.write_text("loss")
    with pytest.raises(ConfigurationError, match="has other code than it was admitted with: loss"):
        changing(tmp_path / "run", factory, 2).fit(classes(), resume=run)
    factory.place.write_text("as it was")
    assert statuses(changing(tmp_path / "run", factory, 2).fit(classes(), resume=run)) == [
        "finished"
    ] * len(SearchResult.open(run).trials)


def test_of_a_run_without_a_record_of_its_code_the_form_is_compared(tmp_path: Path) -> None:
    factory = extended.Changing(tmp_path / "how")
    run = changing(tmp_path / "run", factory, 1).fit(classes()).run_path
    folder = RunFolder.open(run)
    for number in range(2):  # as earlier versions wrote it
        folder.write_trial(replace(folder.read_trial(number, folder.run_id), code=None))
    for how, part in {
        "wider": "the number of the model's parameters, 697 and not 676",
        "names": "the parameters that train, ['a.bias', 'a.weight', 'c.bias', 'c.weight'] and not",
        "batch_size": "batch_size, 8 and not 16",
        "accumulate": "accumulate, 2 and not 1",
    }.items():
        factory.place.write_text(how)
        with pytest.raises(ConfigurationError) as refusal:
            changing(tmp_path / "run", factory, 2).fit(classes(), resume=run)
        assert part in str(refusal.value)
    factory.place.write_text("tanh")  # nothing tells
    result = changing(tmp_path / "run", factory, 2).fit(classes(), resume=run)
    assert statuses(result) == ["finished"] * 2
