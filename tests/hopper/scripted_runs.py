"""Runs of a real coordinator with scripted agents, and what they leave."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cerebro_hydra.data.manifest import ColumnSpec, Manifest, PartitionInfo, partition_path
from cerebro_hydra.hopper.coordinator import Coordinator
from cerebro_hydra.hopper.run_config import trial_config
from cerebro_hydra.hopper.trials import MergeStates, News, NewTrial
from cerebro_hydra.plan.hop.journal import fold
from cerebro_hydra.plan.messages.codec import from_json
from cerebro_hydra.plan.messages.config import HopConfig
from cerebro_hydra.plan.messages.events import Event, RecutRefused, SearchClosed, TrialAdded
from cerebro_hydra.plan.messages.instructions import CutFiner, Instruction
from cerebro_hydra.storage import LocalStore
from cerebro_hydra.storage.run_document import RunDocument, TrialSpec
from cerebro_hydra.storage.run_folder import RunFolder
from tests.end_to_end.runs import Tape
from tests.hopper.scripted_agents import ScriptedLauncher
from tests.journals import comparable


def manifest(partitions: int) -> Manifest:
    infos = [
        PartitionInfo(split, index, 5, 0, f"attempt/{partition_path(split, index)}", digests=(7,))
        for split in ("train", "val")
        for index in range(partitions)
    ]
    return Manifest("f" * 32, (ColumnSpec("x", "float32", (2,)),), tuple(infos))


Described = tuple[RunDocument, list[TrialSpec]]


def described(
    trials: int, partitions: int, epochs: int, order: str = "dynamic", **of_trials: Any
) -> Described:
    """A run and its trials."""
    return document(partitions, epochs, order), [
        TrialSpec(
            trial=t,
            trial_id=f"trial-{t:03d}",
            params={},
            seed=t,
            cut={},
            template={},
            nbytes=30,
            batch_size=5,
            accumulate=1,
            steps=(1,) * partitions,
            shards=((f"{t:032x}", f"{t + 256:032x}"),),
            **of_trials,
        )
        for t in range(trials)
    ]


def document(partitions: int, epochs: int, order: str = "dynamic") -> RunDocument:
    return RunDocument(
        run_id="run",
        factory=None,
        seed=0,
        order=order,
        num_epochs=epochs,
        num_partitions=partitions,
        evaluation_metric="loss",
        metrics={"loss": "min"},
        feature_columns=("x",),
        label_columns=("y",),
        store={},
        fingerprint="f" * 32,
        validated=True,
        threads=1,
    )


class GivenTrials:
    """The source of a run whose trials are known, and train for the same number of epochs."""

    def __init__(
        self, specs: Sequence[TrialSpec], epochs: int, merge_metrics: MergeStates | None = None
    ) -> None:
        self._specs, self._epochs = specs, epochs
        self._merge_metrics = merge_metrics

    def start(self, put: Callable[[News], None]) -> Iterable[News]:
        """Add every trial with its whole budget, and close the search."""
        for spec in self._specs:
            yield NewTrial(spec, TrialAdded(trial_config(spec), self._epochs))
        yield SearchClosed()

    def follow(self, event: Event, instructions: Sequence[Instruction]) -> Iterable[Event]:
        """Decide nothing; no trial that is given is cut anew."""
        asked = (each for each in instructions if isinstance(each, CutFiner))
        return [RecutRefused(each.trial, each.error) for each in asked]

    def merge_metrics(self, trial: int, states: list[dict[str, Any]]) -> dict[str, float]:
        assert self._merge_metrics is not None
        return self._merge_metrics(trial, states)

    def close(self) -> None:
        """Do nothing."""


def run(
    tmp_path: Any,
    launcher: ScriptedLauncher,
    of: Described,
    merge_metrics: MergeStates | None = None,
    **options: Any,
) -> tuple[RunFolder, Any, Tape]:
    doc, specs = of
    trials = GivenTrials(specs, doc.num_epochs, merge_metrics)
    folder = RunFolder(LocalStore(str(tmp_path)), doc.run_id)
    tape = Tape()
    data = manifest(doc.num_partitions)
    coordinator = Coordinator(
        folder, doc, trials, launcher, no_factory, manifest=data, observers=[tape], **options
    )
    return folder, coordinator.run(), tape


def no_factory(params: Any) -> Any:
    """Stand for the user's factory, which scripted agents never run."""


def journal(folder: RunFolder) -> tuple[HopConfig, list[dict[str, Any]]]:
    """The configuration and all records of a run."""
    first, *records = [line for segment in folder.read_segments() for line in segment]
    return from_json(first["config"]), records


def restored(folder: RunFolder) -> dict[str, Any]:
    return comparable(fold(*journal(folder)))
