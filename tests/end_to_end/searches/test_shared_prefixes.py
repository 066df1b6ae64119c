"""Whole runs in which trials are one as long as their schedules agree, replayed by lineage."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.plan.messages.events import SubEpochDone, TrialForked
from cerebro_hydra.tune import MedianStopping, SearchResult, hp_choice
from cerebro_hydra.verification import verify
from tests.end_to_end.runs import Tape, assert_replays, bits, classes
from tests.end_to_end.searches.shared_prefixes import SPACE, steps
from tests.processes import start_python

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> tuple[SearchResult, Tape]:
    tape = Tape()
    return steps(tmp_path_factory.mktemp("calm"), observers=[tape]).fit(classes(120)), tape


def test_schedules_that_agree_are_trained_once_and_replay_by_lineage(
    calm: tuple[SearchResult, Tape],
) -> None:
    result, tape = calm
    assert [trial.params["fall_after"] for trial in result.trials] == [3, 3, 1, 1, 2, 2]
    assert {len(trial.history["train_loss"]) for trial in result.trials} == {4}
    forks = [(e.config.trial, e.parent, e.state // 2) for e in tape.of(TrialForked)]
    assert forks == [(2, 0, 1), (3, 1, 1), (4, 0, 2), (5, 1, 2)]
    assert len(tape.of(SubEpochDone)) == 2 * (6 * 4 - 2 * (1 + 2)), "of two partitions"
    for fork, parent, epochs in forks:
        one, other = result.trials[fork], result.trials[parent]
        assert one.params["momentum"] == other.params["momentum"]
        ours, its = one.history["train_loss"], other.history["train_loss"]
        assert ours[:epochs] == its[:epochs] and ours[epochs] != its[epochs]
    assert_replays(result)
    assert verify(result.run_path).ok


@pytest.mark.long
def test_one_whose_driver_is_killed_midway_has_the_bits_of_the_calm_one(
    tmp_path: Path, calm: tuple[SearchResult, Tape]
) -> None:
    driver = start_python("-m", "tests.end_to_end.searches.shared_prefixes", tmp_path, 2)
    driver.wait(300)
    assert driver.returncode == -signal.SIGKILL
    (run,) = (tmp_path / "runs").iterdir()
    search = steps(tmp_path, checkpoint="sub-epoch", share_prefixes=False)
    with pytest.raises(ConfigurationError, match="share_prefixes is False, and the run was begun"):
        search.fit(classes(120), resume=str(run))
    more = {**SPACE, "fall_after": hp_choice([3, 1, 2, 4])}
    search = steps(tmp_path, checkpoint="sub-epoch", search_space=more)
    with pytest.raises(ConfigurationError, match="candidates is 8, and the run was begun with 6"):
        search.fit(classes(120), resume=str(run))
    result = steps(tmp_path, checkpoint="sub-epoch").fit(classes(120), resume=str(run))
    assert bits(result.run_path) == bits(calm[0].run_path), "two seeded runs, one of them resumed"
    assert_replays(result)


def test_what_differs_from_the_beginning_shares_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space = {
        "momentum": hp_choice([0.5]), "fall_after": hp_choice([1]),
        "dropout": hp_choice([0.2, 0.3, "none"]),
    }  # fmt: skip
    result = steps(tmp_path, search_space=space, num_epochs=2, verbose=1).fit(classes(120))
    assert [trial.status for trial in result.trials] == ["finished", "finished", "failed"]
    assert "share_prefixes: 0 of 6 epochs are trained once" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"share_prefixes": "yes"}, "share_prefixes is 'yes'; it is True or False"),
        ({"stopping": MedianStopping(), "order": "dynamic"}, "give one of them"),
    ],
)
def test_what_can_not_be_shared_is_refused(tmp_path: Path, options: dict, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        steps(tmp_path, **options)
