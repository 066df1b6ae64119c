"""Whole runs of populations: forks by reference, with other parameters, replayed by lineage."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from cerebro_hydra.plan.messages.events import SubEpochDone, TrialForked, TrialProposed
from cerebro_hydra.plan.messages.instructions import Checkpoint, Commit, ForkState, StartSubEpoch
from cerebro_hydra.recipe import exclusive_generator
from cerebro_hydra.recipe.plain_trainer import PlainTrainer
from cerebro_hydra.replay.record import RunData, read_trial, with_threads
from cerebro_hydra.replay.states import load_model, read_saved
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.storage.names import trial_name
from cerebro_hydra.tune import SearchResult, hp_choice
from cerebro_hydra.verification import verify
from tests.end_to_end.runs import Tape, assert_replays, classes
from tests.end_to_end.searches.counted_store import CountedStore
from tests.end_to_end.searches.populations import FIXED, SPACE, changeable, population

pytestmark = pytest.mark.slow


class States(Tape):
    """Also keeps the digests of committed states, and which files a fork begins and ends with.

    Args:
        store: counts the files.
    """

    def __init__(self, store: CountedStore) -> None:
        super().__init__()
        self.store = store
        self.made: dict[int, tuple[tuple[str, str], ...]] = {}  # digests by attempt
        self.states: dict[tuple[int, int], tuple[tuple[str, str], ...]] = {}
        self.proposed: dict[int, int] = {}  # files so far, when a fork was proposed
        self.begun: dict[int, int] = {}  # and when it had trained its first sub-epoch

    def on_record(self, record: Any) -> None:
        super().on_record(record)
        for done in self.of(SubEpochDone, last=True):
            self.made[done.attempt] = done.digests
        for commit in self.of(Commit, last=True):
            self.states[commit.trial, commit.state] = self.made[commit.attempt]
            if commit.trial in self.proposed:
                self.begun.setdefault(commit.trial, len(self.store.transfers()))
        for fork in self.of(TrialProposed, last=True):
            if fork.parent is not None:
                self.proposed[fork.trial] = len(self.store.transfers())


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> tuple[SearchResult, States]:
    folder = tmp_path_factory.mktemp("calm")
    tape = States(store := CountedStore(str(folder)))
    return population(folder, store=store, observers=[tape]).fit(classes(120)), tape


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


def test_no_byte_of_a_state_is_copied_published_or_fetched_for_a_fork(
    calm: tuple[SearchResult, States],
) -> None:
    """Beyond what any trial's first sub-epoch after a rest fetches, which is one state."""
    _, tape = calm
    transfers = tape.store.transfers()
    assert any(each.of_segment and each.pid != os.getpid() for each in transfers), "agents count"
    starts = {start.attempt: start for start in tape.of(StartSubEpoch)}
    for fork in tape.of(ForkState):
        named = {digest for shard in tape.states[fork.parent, fork.state] for digest in shard}
        meanwhile = transfers[tape.proposed[fork.trial] : tape.begun[fork.trial]]
        parts = [each for each in meanwhile if each.of_segment]
        assert [each for each in parts if each.pid == os.getpid()] == [], "the driver needs none"
        written = {Path(each.path).stem for each in parts if each.kind == "write"}
        assert not written & named
        documents = [each for each in meanwhile if f"/{trial_name(fork.trial)}/state" in each.path]
        assert documents and sum(each.nbytes for each in documents) < 4096
        assert fork.state not in [c.state for c in tape.of(Checkpoint) if c.trial == fork.trial]
        done = [d for d in tape.of(SubEpochDone) if starts[d.attempt].trial == fork.trial]
        assert done[0].hop.bytes_moved <= done[0].nbytes


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


def test_dropout_changes_at_the_fork_and_not_before(tmp_path: Path) -> None:
    space = {name: hp_choice([value]) for name, value in FIXED.items()}
    space["dropout"] = hp_choice([0.1, 0.5])
    result = population(
        tmp_path,
        search_space=space,
        num_models=2,
        num_epochs=2,
        mutations=["dropout"],
        resample_probability=0.0,
    ).fit(classes(120))
    fork = result.trials[2]
    ((number, base),) = read_trial(RunFolder.open(result.run_path), 2).ancestors
    parent = result.trials[number]
    assert {parent.params["dropout"], fork.params["dropout"]} == {0.1, 0.5}
    assert fork.params == {**parent.params, "dropout": fork.params["dropout"]}
    saved = read_saved(RunFolder.open(result.run_path), 2, len(fork.visit_log)).tensors
    changed = trained_plainly(result, number, base, fork.params["dropout"])
    assert changed.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in changed.items())
    kept = trained_plainly(result, number, base, parent.params["dropout"])
    assert not torch.equal(kept["param:0.weight"], saved["param:0.weight"])
    assert_replays(result)


def trained_plainly(
    result: SearchResult, parent: int, base: int, dropout: float
) -> dict[str, torch.Tensor]:
    """Train as trial 2 in plain PyTorch: one model and one optimizer, whose dropout changes."""
    run = RunData.open(result.run_path, str(Path(result.run_path).parents[1] / "plain"))
    specs = [run.folder.read_trial(trial, run.folder.run_id) for trial in (parent, 2)]
    recipe = changeable(dict(specs[0].params))
    load_model(recipe.model, read_saved(run.folder, parent, 0).tensors, "the parent")
    trainer = PlainTrainer(recipe, specs[0].seed, specs[0].steps_per_epoch)
    with exclusive_generator, with_threads(run.document.threads):
        for state, (epoch, partition) in enumerate(result.trials[2].visit_log, start=1):
            if state == base + 1:
                recipe.model[2].p = dropout
                spec = specs[1]
                trainer = PlainTrainer(recipe, spec.seed, spec.steps_per_epoch, trainer.steps)
            trainer.train(run.windows(specs[1], epoch, [partition]))
    return trainer.tensors()


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
