"""Whole runs of populations: forks by reference, with other parameters, replayed by lineage."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra.plan.messages.events import SubEpochDone, TrialForked
from cerebro_hydra.plan.messages.instructions import Commit, ForkState
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.tune import SearchResult, hp_choice
from cerebro_hydra.verification import verify
from tests.end_to_end.runs import Tape, assert_replays, bits, classes
from tests.end_to_end.searches.populations import SPACE, population
from tests.processes import start_python

pytestmark = pytest.mark.slow


class States(Tape):
    """Also keeps the digests of every state that was committed."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[tuple[str, str], ...]] = {}  # digests by attempt
        self.states: dict[tuple[int, int], tuple[tuple[str, str], ...]] = {}

    def on_record(self, record: Any) -> None:
        super().on_record(record)
        for done in self.of(SubEpochDone, last=True):
            self.made[done.attempt] = done.digests
        for commit in self.of(Commit, last=True):
            self.states[commit.trial, commit.state] = self.made[commit.attempt]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> tuple[SearchResult, States]:
    folder = tmp_path_factory.mktemp("calm")
    tape = States()
    return population(folder, observers=[tape]).fit(classes(120)), tape


def test_the_worst_give_way_to_forks_that_replay_by_their_lineage(
    calm: tuple[SearchResult, States],
) -> None:
    result, tape = calm
    ends = Counter((trial.status, len(trial.history["train_loss"])) for trial in result.trials)
    assert ends["finished", 4] == 4
    assert ends["stopped", 1] == ends["stopped", 2] == ends["stopped", 3] == 1
    forked = tape.of(TrialForked)
    assert [event.config.trial for event in forked] == [4, 5, 6]
    for event in forked:
        fork, parent = result.trials[event.config.trial], result.trials[event.parent]
        assert fork.params != parent.params
        begun = event.state // 2
        assert fork.history["val_loss"][:begun] == parent.history["val_loss"][:begun]
    assert_replays(result)
    assert verify(result.run_path).ok
    changed = [
        {name for name in SPACE if result.trials[e.config.trial].params[name]
         != result.trials[e.parent].params[name]}
        for e in forked
    ]  # fmt: skip
    assert set.union(*changed) >= {"lr", "momentum", "weight_decay"}


def test_a_fork_names_the_segments_of_its_parent_and_copies_none(
    calm: tuple[SearchResult, States],
) -> None:
    result, tape = calm
    folder = RunFolder.open(result.run_path)
    forks = tape.of(ForkState)
    assert len(forks) == 3
    for fork in forks:
        shards = folder.read_state(fork.trial, fork.state)["shards"]
        mine = tuple((shard["frozen"], shard["trainable"]) for shard in shards)
        assert mine == tape.states[fork.parent, fork.state]


def test_what_changes_takes_effect_at_the_fork(calm: tuple[SearchResult, States]) -> None:
    result, tape = calm
    folder = RunFolder.open(result.run_path)
    for event in tape.of(TrialForked):
        trial = result.trials[event.config.trial]
        state = max(folder.states(event.config.trial))
        assert state > event.state, "it has trained"
        (options,) = {
            (group["lr"], group["momentum"], group["weight_decay"])
            for shard in folder.read_state(event.config.trial, state)["shards"]
            for group in shard["cursor"]["groups"]
        }
        assert options == tuple(trial.params[n] for n in ("lr", "momentum", "weight_decay"))
        spec = folder.read_trial(event.config.trial, folder.run_id)
        assert spec.batch_size == trial.params["batch_size"]


def test_a_population_whose_driver_is_killed_midway_decides_as_the_calm_one(
    tmp_path: Path, calm: tuple[SearchResult, States]
) -> None:
    driver = start_python("-m", "tests.end_to_end.searches.populations", tmp_path, 2)
    driver.wait(300)
    assert driver.returncode == -signal.SIGKILL
    (run,) = (tmp_path / "runs").iterdir()
    result = population(tmp_path, checkpoint="sub-epoch").fit(classes(120), resume=str(run))
    assert bits(result.run_path) == bits(calm[0].run_path), "two seeded runs, one of them resumed"
    assert [t.params for t in result.trials] == [t.params for t in calm[0].trials]
    assert_replays(result)


def test_a_fork_of_another_structure_fails_alone(tmp_path: Path) -> None:
    space = {**SPACE, "width": hp_choice([8, 9])}
    options = {"mutations": ["width"], "num_epochs": 2, "resample_probability": 0.0}
    result = population(tmp_path, search_space=space, **options).fit(classes(120))
    assert len(result.trials) == 5
    fork = result.trials[4]
    if fork.status == "failed":
        assert "makes another model or optimizer than" in (fork.error or "")
    others = Counter(trial.status for trial in result.trials[:4])
    assert others == {"finished": 3, "stopped": 1}
