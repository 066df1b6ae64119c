"""Whole runs: what they train on, how they are made and watched, and what is checked of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

import cerebro_hydra
from cerebro_hydra import GridSearch, LocalStore, hp_choice
from cerebro_hydra.data.claim import CLAIMS
from cerebro_hydra.observe import AgentStarted, Decision, Record, RunView
from cerebro_hydra.plan.messages.instructions import Commit
from cerebro_hydra.storage import RunFolder, Store
from cerebro_hydra.testing.local_backend import Arrays, LocalBackend
from tests.processes import children_of, devices_of

PRELOADED = ["transformers.modeling_utils"]


def classes(rows: int = 200, features: tuple[int, ...] = (16,), labels: int = 4) -> Arrays:
    """Return rows whose features tell their label."""
    random = np.random.default_rng(7)
    y = random.integers(0, labels, rows)
    x = random.normal(size=(rows, *features)) + y.reshape(-1, *[1] * len(features)) / 3
    return Arrays({"features": x.astype(np.float32), "label": y})


def files(run: str) -> dict[Path, bytes]:
    """Return the content of all files of a run."""
    found = (path for path in Path(run).rglob("*") if path.is_file())
    return {path: path.read_bytes() for path in found if path.parent.name != CLAIMS}


def frame_of(spark: Any, data: Arrays) -> Any:
    """Return the same rows as a DataFrame."""
    fields = []
    for name, column in data.arrays.items():
        kind = {"f": "float", "i": "long"}[column.dtype.kind]
        fields.append(f"{name} array<{kind}>" if column.ndim > 1 else f"{name} {kind}")
    columns = [column.tolist() for column in data.arrays.values()]
    return spark.createDataFrame(list(zip(*columns, strict=True)), ", ".join(fields))


def grid(
    backend: Any,
    store: Path | Store,
    factory: Callable[..., Any],
    space: Mapping[str, Sequence[Any]],
    **options: Any,
) -> GridSearch:
    """Return a search over a grid, of two epochs unless the options say otherwise."""
    return GridSearch(
        backend=backend,
        store=LocalStore(str(store)) if isinstance(store, Path) else store,
        estimator_gen_fn=factory,
        search_space={name: hp_choice(list(values)) for name, values in space.items()},
        **{"num_epochs": 2, "evaluation_metric": "accuracy", "verbose": 0, **options},
    )


def search(
    path: Path,
    factory: Callable[..., Any],
    space: Mapping[str, Sequence[Any]],
    data: Any,
    workers: int = 2,
    tls: bool = False,
    resources: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> Any:
    """Train a grid in processes of this machine."""
    backend = LocalBackend(workers, preloaded=PRELOADED, tls=tls, **resources)
    return grid(backend, path, factory, space, **options).fit(data)


def two_rates(store: Path, factory: Callable[..., Any], metric: str, **options: Any) -> Any:
    """Train two trials on two workers, ranked by a metric; with its rate of 0 one learns nothing.

    All rows are 131 of `classes`, of which three in ten are held out.
    """
    given = {"evaluation_metric": metric, "validation": 0.3, **options}
    result = grid(LocalBackend(2), store, factory, {"lr": [0.0, 0.1]}, **given).fit(classes(131))
    assert result.best_trial.params == {"lr": 0.1}
    assert_replays(result)
    return result


def statuses(result: Any) -> list[str]:
    """Return how each trial ended."""
    return [trial.status for trial in result.trials]


def assert_replays(result: Any) -> None:
    """Check that every trial has the bits of plain training."""
    for trial in result.trials:
        report = cerebro_hydra.replay(result.run_path, trial.trial_id)
        assert report.identical, str(report)


def assert_equal_bits(mine: Any, other: Any, trial: int) -> None:
    """Check that a trial finished in two runs with the same visits, metrics and weights."""
    a, b = mine.trials[trial], other.trials[trial]
    assert (a.status, a.visit_log, a.history) == ("finished", b.visit_log, b.history)
    states = [result.torch(each.trial_id).state_dict() for result, each in ((mine, a), (other, b))]
    assert states[0].keys() == states[1].keys()
    for name in states[0]:
        assert states[0][name].numpy().tobytes() == states[1][name].numpy().tobytes()


def bits(run_path: str | Path) -> dict[str, Any]:
    """Return every trial's status, metrics, and digests of its result, whose segments are whole."""
    folder = RunFolder.open(str(run_path))
    found: dict[str, Any] = {}
    for view in RunView.of_run(folder).trials.values():
        assert view.result_state is not None, view.reason
        state = folder.read_state(view.trial, view.result_state)
        found[view.trial_id] = (view.status, view.visit_log, repr(view.history), state["shards"])
        for shard in state["shards"]:
            for digest in (shard["frozen"], shard["trainable"]):
                folder.read_object(digest)
    return found


class Tape:
    """Keeps all records of a run, and lets a test act on each.

    Args:
        act: is called with the tape after each record.
    """

    def __init__(self, act: Callable[[Tape], object] = lambda tape: None) -> None:
        self.records: list[Record] = []
        self.pids: dict[int, list[int]] = {}  # of each worker's agents
        self.agents: dict[str, int] = {}  # pids by incarnation
        self.commits = 0
        self.decisions = 0
        self._act = act

    def on_record(self, record: Record) -> None:
        """Take a record."""
        self.records.append(record)
        if isinstance(record, AgentStarted):
            self.pids.setdefault(record.worker, []).append(record.pid)
            self.agents[record.incarnation] = record.pid
        if isinstance(record, Decision):
            self.decisions += 1
            self.commits += sum(isinstance(each, Commit) for each in record.instructions)
        self._act(self)

    @property
    def last(self) -> Any:
        """Return the newest record."""
        return self.records[-1]

    def of(self, kind: type, last: bool = False) -> list[Any]:
        """Return records, events and instructions of a kind: all, or those of the last record."""
        found: list[Any] = []
        for record in self.records[-1:] if last else self.records:
            each = (record.event, *record.instructions) if isinstance(record, Decision) else ()
            found += [one for one in (record, *each) if isinstance(one, kind)]
        return found


def after_decisions(number: int, act: Callable[[], object]) -> Tape:
    """Return a tape that acts once so many decisions were made."""

    def acts(tape: Tape) -> None:
        if isinstance(tape.last, Decision) and tape.decisions == number:
            act()

    return Tape(acts)


def interrupted(number: int, sent: int) -> Tape:
    """Return a tape that sends this process a signal after so many decisions."""
    return after_decisions(number, lambda: os.kill(os.getpid(), sent))


@contextmanager
def a_device_killed(backend: LocalBackend) -> Iterator[Tape]:
    """Kill a device of worker 0 once a sub-epoch is committed; the body's run is taped."""
    killed: list[int] = []

    def kill(tape: Tape) -> None:
        devices = [] if killed or not tape.commits else devices_of(agent_of(backend))
        if devices:  # else it is not there yet, and the sub-epoch was another worker's
            killed.append(devices[0])
            os.kill(killed[0], signal.SIGKILL)

    yield Tape(kill)
    assert killed, "no device was killed"


def agent_of(backend: LocalBackend) -> int | None:
    """Return the agent of worker 0; None if it is not there yet."""
    try:
        return next(iter(children_of(backend.agents.pid(0))), None)
    except (KeyError, AssertionError):
        return None
