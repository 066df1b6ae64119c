"""A trial's documents in a finer cut are written when that is journalled, or by a resume."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from cerebro_hydra.hopper.journal import Journal
from cerebro_hydra.hopper.resumed_run import ResumedRun
from cerebro_hydra.hopper.run_config import trial_config
from cerebro_hydra.hopper.trials import is_written, write_recut
from cerebro_hydra.observe.records import Decision
from cerebro_hydra.plan.messages import events as ev
from cerebro_hydra.plan.messages.config import HopConfig
from cerebro_hydra.plan.messages.events import RecutState, TrialRecut
from cerebro_hydra.plan.policy.policy import Scheduler
from cerebro_hydra.storage import LocalStore, RunFolder
from cerebro_hydra.storage.run_document import TrialSpec

WHOLE, HALVES = (("a" * 32, "b" * 32),), (("c" * 32, "d" * 32), ("e" * 32, "f" * 32))
SPEC = TrialSpec(
    trial=0, trial_id="trial-000", params={}, seed=7, cut={"mode": "modules"}, template={},
    nbytes=30, batch_size=5, accumulate=1, steps=(3,), shards=WHOLE, finer=True,
)  # fmt: skip


def recut() -> Decision:
    finer = replace(SPEC, shards=HALVES, recompute=True, finer=False)
    document = json.loads(json.dumps(finer.to_json()))
    return Decision(3, 1.0, TrialRecut(trial_config(finer), (RecutState(0, HALVES),), document), ())


def begun(path: Path) -> RunFolder:
    """A run whose driver was killed when it had journalled the cut, and nothing else."""
    folder = RunFolder(LocalStore(str(path)), "run-1")
    folder.write_trial(SPEC)
    shards = [{"frozen": f, "trainable": t, "cursor": None} for f, t in WHOLE]
    folder.write_state(0, 0, {"trial": 0, "state": 0, "shards": shards})
    config = HopConfig(1, evaluate=False)
    scheduler = Scheduler(config)
    journal = Journal.begin(folder, config)

    def handle(event: ev.Event) -> None:
        journal.append(1.0, scheduler.handle(event))

    handle(ev.TrialAdded(trial_config(SPEC), 1))
    handle(ev.WorkerJoined(0, "a", (0,)))
    (attempt,) = scheduler.state.attempts
    handle(ev.TaskFailed(attempt, "a", "no memory", memory=True))
    handle(recut().event)
    journal.close()
    return folder


def test_what_a_killed_driver_did_not_write_is_written_when_the_run_is_resumed(
    tmp_path: Path,
) -> None:
    folder = begun(tmp_path)
    assert not is_written(folder, recut())
    ResumedRun(folder).write_states()
    assert is_written(folder, recut())
    assert folder.read_trial(0, "run-1").shards == HALVES
    found = folder.read_state(0, 0, "run-1")["shards"]
    assert [(shard["frozen"], shard["trainable"]) for shard in found] == list(HALVES)


def test_a_trial_that_went_on_in_its_finer_cut_is_left_alone(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    write_recut(folder, recut())
    folder.delete_state(0, 0)
    ResumedRun(folder).write_states()
    assert folder.states(0) == []
