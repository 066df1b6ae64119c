from __future__ import annotations

import dataclasses
import json
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cerebro_hydra.available_memory import available_memory
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.hopper.protocol.resources import DEFAULT_RESOURCES, WorkerResources
from cerebro_hydra.planning.biller import Biller
from cerebro_hydra.recipe import Columns, Recipe, build_keeping_random_state
from cerebro_hydra.storage import LocalStore, RunFolder
from cerebro_hydra.storage.digest import digest
from cerebro_hydra.storage.run_document import TrialSpec
from cerebro_hydra.testing.datasets import write_dataset
from cerebro_hydra.tune.admission import Admission, Refused
from cerebro_hydra.tune.example_batches import ExampleBatches
from tests.tune import tune_models

COLUMNS = Columns(("features",), ("label",))


def examples(
    path: Path, rows: int, partitions: int = 2, validation: float | None = None
) -> ExampleBatches:
    random = np.random.default_rng(0)
    columns = {
        "features": random.normal(size=(rows, 16)).astype(np.float32),
        "label": random.integers(0, 4, rows),
    }
    store = LocalStore(str(path))
    manifest = write_dataset(store, columns, partitions, validation)
    return ExampleBatches(manifest, store, COLUMNS)


@dataclasses.dataclass
class Outcome:
    """What became of candidates."""

    folder: RunFolder
    specs: list[TrialSpec] = dataclasses.field(default_factory=list)
    refused: dict[int, str] = dataclasses.field(default_factory=dict)
    told: list[str] = dataclasses.field(default_factory=list)
    metrics: dict[str, str] = dataclasses.field(default_factory=dict)


def admit_with(
    factory: Callable[[Any], Any],
    path: Path,
    candidates: Sequence[dict[str, Any]] = ({},),
    evaluation_metric: str = "loss",
    resources: WorkerResources = DEFAULT_RESOURCES,
    run: str = "run",
) -> Outcome:
    found = Outcome(RunFolder(LocalStore(str(path)), run))
    bill = Biller(resources, 2, found.told.append)
    of_run = examples(path, 70), found.folder, 3, evaluation_metric, found.told.append, bill
    admission = Admission(factory, COLUMNS, *of_run)
    for number, params in enumerate(candidates):
        try:
            found.specs.append(admission.admit(number, params).spec)
        except Refused as refusal:
            found.refused[number] = str(refusal)
    found.metrics = admission.metrics
    return found


def admit(path: Path, *candidates: dict[str, Any]) -> Outcome:
    return admit_with(tune_models.small, path, candidates)


def test_examples_have_every_size_that_training_meets(tmp_path: Path) -> None:
    # 41 rows are partitions of 21 and 20: batches of 8, 8, 5 and 8, 8, 4.
    found = examples(tmp_path, 41)
    assert found.sizes(8) == [8, 5, 4]
    batches = found.batches(8)
    assert [batch.rows for batch in batches] == [8, 5, 4]
    assert [tuple(batch.features[0].shape) for batch in batches] == [(8, 16), (5, 16), (4, 16)]
    assert torch.equal(batches[0].features[0][:4], batches[2].features[0])


def test_evaluations_have_sizes_of_their_own(tmp_path: Path) -> None:
    found = examples(tmp_path / "split", 60, 1, 0.2)
    assert (found.sizes(16), found.evaluated_sizes(16)) == ([16], {12})
    assert examples(tmp_path / "whole", 60).evaluated_sizes(16) == set()


def with_rows(path: Path, *rows: int) -> ExampleBatches:
    """Batches of prepared data that says it has so many rows per partition."""
    real = examples(path, 41)
    infos = [
        dataclasses.replace(info, rows=count)
        for info, count in zip(real.manifest.partitions, rows, strict=True)
    ]
    manifest = dataclasses.replace(real.manifest, partitions=tuple(infos))
    store = LocalStore(str(path))
    return ExampleBatches(manifest, store, COLUMNS)


def test_batch_larger_than_the_first_partition_repeats_its_rows(tmp_path: Path) -> None:
    found = with_rows(tmp_path, 20, 21)
    assert found.sizes(64) == [21, 20]
    (largest, _) = found.batches(64)
    assert largest.rows == 21
    assert torch.equal(largest.features[0][20], largest.features[0][0])
    assert len(torch.unique(largest.features[0], dim=0)) == 20


def test_partition_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="1 training rows for 2 partitions; give more"):
        with_rows(tmp_path, 1, 0)


def test_state_0_is_written_by_digest_and_equal_layers_share_bytes(tmp_path: Path) -> None:
    admitted = admit(tmp_path, {"lr": 0.1}, {"lr": 0.2}, {"width": 6})
    folder = admitted.folder
    assert [spec.trial_id for spec in admitted.specs] == ["trial-000", "trial-001", "trial-002"]
    for spec in admitted.specs:
        state = folder.read_state(spec.trial, 0)
        found = [(shard["frozen"], shard["trainable"]) for shard in state["shards"]]
        assert tuple(found) == spec.shards
        assert len(found) == 2
        for pair in found:
            for name in pair:
                assert digest(folder.read_object(name)) == name
    first, second, wider = admitted.specs
    assert first.shards == second.shards, "one seed, one initialisation"
    assert first.shards != wider.shards
    assert len({spec.seed for spec in admitted.specs}) == 3


def test_steps_per_partition_are_its_windows(tmp_path: Path) -> None:
    admitted = admit(tmp_path, {"batch_size": 16}, {"batch_size": 35})
    assert [spec.steps for spec in admitted.specs] == [(3, 3), (1, 1)]
    assert admitted.specs[0].steps_per_epoch == 6


def test_a_refused_trial_keeps_its_number_and_shifts_nobody_elses(tmp_path: Path) -> None:
    found = admit(tmp_path, {"width": -1}, {"width": 8}, {"width": -2})
    whole = admit(tmp_path / "whole", {"width": 6}, {"width": 8})
    (spec,) = found.specs
    assert (spec.trial, spec.trial_id, spec.params["width"]) == (1, "trial-001", 8)
    assert spec == whole.specs[1], "its seed and all else are as if no other were refused"
    assert list(found.refused) == [0, 2]
    assert "ValueError: no layer is -2 wide" in found.refused[2]
    said = r"trial-002 \(width=-2\) failed before training: ValueError: no layer is -2 wide \(.*\)"
    assert re.fullmatch(said, found.told[-1])


class FailsAt(nn.Linear):
    """Can't list its parameters when it is asked for the n-th time."""

    def __init__(self, n: int, error: Exception) -> None:
        super().__init__(16, 4)
        self.left, self.error = [n], error

    def parameters(self, recurse: bool = True) -> Any:
        self.left[0] -= 1
        if self.left[0] == 0:
            raise self.error
        return super().parameters(recurse)


@pytest.mark.parametrize("error", [OSError("no device"), RuntimeError("a bug"), KeyError("a")])
def test_an_error_anywhere_in_admission_ends_its_trial_alone(
    tmp_path: Path, error: Exception
) -> None:
    def factory(params: dict[str, Any]) -> Recipe:
        model = FailsAt(params["n"], error)
        optimizer = torch.optim.SGD(list(nn.Linear.parameters(model)), lr=0.1)
        return Recipe(model, optimizer, nn.CrossEntropyLoss(), shards=1)

    found = admit_with(factory, tmp_path, [{"n": n} for n in range(1, 13)])
    assert any(str(error.args[0]) in said for said in found.refused.values())
    assert len(found.refused) + len(found.specs) == 12


def test_an_error_of_the_system_in_admission_ends_its_trial_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([OSError("no such file: /proc/meminfo")])

    def fails_once() -> int:
        for error in answers:
            raise error
        return available_memory()

    monkeypatch.setattr("cerebro_hydra.tune.admission.available_memory", fails_once)
    found = admit(tmp_path, {}, {})
    assert [*found.refused] == [0] and [spec.trial for spec in found.specs] == [1]
    assert "no such file: /proc/meminfo" in found.refused[0]


def test_an_interrupt_in_admission_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("cerebro_hydra.tune.admission.available_memory", interrupt)
    with pytest.raises(KeyboardInterrupt):
        admit(tmp_path, {})


class Counts(nn.Module, metaclass=tune_models.Counting):
    """It counts its steps where no hop carries them, and where admission does not look."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counts.forwards += self.training
        return self.layer(x) * Counts.forwards


def test_a_refusal_is_told_without_its_details(tmp_path: Path) -> None:
    def factory(params: dict[str, Any]) -> Recipe:
        model = Counts()
        return Recipe(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())

    found = admit_with(factory, tmp_path)
    assert found.told[0].endswith("state outside of parameters and buffers")
    assert "\nas one shard: " in found.refused[0]


def test_report_is_told_once_per_structure(tmp_path: Path) -> None:
    same = {"width": 8, "batch_size": 8}, {"width": 6}, {"width": 8, "lr": 1}
    told = admit(tmp_path, {"width": 8}, *same).told
    assert [line.split(":")[0] for line in told] == ["trial-000", "trial-002"]


def test_directions_of_all_measured_names_are_known(tmp_path: Path) -> None:
    assert admit(tmp_path, {"metrics": ["accuracy"]}).metrics == {"loss": "min", "accuracy": "max"}


def test_models_of_other_threads_are_built_before_or_after(tmp_path: Path) -> None:
    params = {"lr": 0.1}
    expected = admit(tmp_path / "alone", params)
    admitting, building, built = threading.Event(), threading.Event(), threading.Event()

    def other(params: dict[str, Any]) -> Any:
        building.set()
        built.wait(30)
        return tune_models.small(params)

    def aside() -> None:
        admitting.wait(30)
        build_keeping_random_state(other, params, 1, COLUMNS)

    def first(params: dict[str, Any]) -> Any:
        admitting.set()
        building.wait(1)  # in vain: the other thread waits until this trial is admitted
        try:
            return tune_models.small(params)
        finally:
            built.set()

    thread = threading.Thread(target=aside)
    thread.start()
    found = admit_with(first, tmp_path, [params])
    thread.join()
    assert not found.refused
    assert found.specs[0].shards == expected.specs[0].shards


def test_a_metric_that_is_not_measured_ends_admission_at_the_first_trial(tmp_path: Path) -> None:
    built = SimpleQueue[float]()  # what a factory leaves in a list is taken out again

    def counting(params: dict[str, Any]) -> Any:
        built.put(params["lr"])
        return tune_models.small(params)

    with pytest.raises(ConfigurationError, match=r"'f1', which is not measured; measured are"):
        admit_with(counting, tmp_path, [{"lr": 0.1}, {"lr": 0.2}], "f1")
    assert {built.get() for _ in range(built.qsize())} == {0.1}


def test_a_trial_that_is_another_one_each_time_fails_alone(tmp_path: Path) -> None:
    def factory(params: dict[str, Any]) -> Any:
        model, generator = nn.Linear(16, 4), np.random.default_rng(None if params["other"] else 5)
        loss = nn.CrossEntropyLoss(torch.tensor(generator.random(4)).float())
        return Recipe(model, torch.optim.SGD(model.parameters(), lr=params["lr"]), loss)

    candidates = [{"lr": lr, "other": other} for lr in (0.1, 0.2) for other in (False, True)]
    found = admit_with(factory, tmp_path, candidates)
    assert [spec.trial for spec in found.specs] == [0, 2] and list(found.refused) == [1, 3]
    assert "makes another trial each time that it is called" in found.refused[1]
    assert "buffer 'weight' of the loss differ" in found.refused[3]


def test_only_trials_that_differ_in_settings_alone_are_built_once(tmp_path: Path) -> None:
    built = SimpleQueue[dict[str, Any]]()

    def factory(params: dict[str, Any]) -> Any:
        built.put(params)
        model = nn.Sequential(nn.Dropout(params.get("p", 0.5)), nn.Linear(16, 4))
        model.table = set(range(params.get("table", 1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=params.get("lr", 0.1))
        clip = params.get("clip")
        return Recipe(model, optimizer, nn.CrossEntropyLoss(), clip_grad_norm=clip)

    trials = [{"lr": 0.1}, {"lr": 0.2}, {"clip": 1.0}, {"p": 0.1}, {"table": 2}]
    assert not admit_with(factory, tmp_path, trials).refused
    calls = [built.get() for _ in range(built.qsize())]
    assert [calls.count(params) for params in trials] == [2, 1, 1, 2, 2]


class TellsOnce(nn.Linear):
    told = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not TellsOnce.told:
            TellsOnce.told = True  # and writes a line to a logger
        return super().forward(x)


def test_a_flag_that_first_steps_set_once_is_there_for_those_of_the_next_trial(
    tmp_path: Path,
) -> None:
    def factory(params: dict[str, Any]) -> Any:
        model = nn.Sequential(nn.Dropout(params["p"]), TellsOnce(16, 4))
        return Recipe(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())

    first, second = admit_with(factory, tmp_path, [{"p": 0.1}, {"p": 0.2}]).specs
    assert any(each.startswith("attribute 'told' of class") for each in first.attributes)
    assert first.attributes == second.attributes and not TellsOnce.told


class SharesATable(nn.Linear):
    table: torch.Tensor | None = None

    def __init__(self, base: float) -> None:
        super().__init__(16, 4)
        self.base = base

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if SharesATable.table is None:
            SharesATable.table = torch.arange(16) / self.base
        return super().forward(x + SharesATable.table)


def test_a_table_that_the_first_trial_makes_for_all_is_refused_if_another_one_makes_another(
    tmp_path: Path,
) -> None:
    def factory(params: dict[str, Any]) -> Any:
        model = nn.Sequential(nn.Dropout(params["p"]), SharesATable(params["base"]))
        return Recipe(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())

    trials = [{"p": 0.1, "base": 2.0}, {"p": 0.2, "base": 2.0}, {"p": 0.1, "base": 3.0}]
    found = admit_with(factory, tmp_path, trials)
    assert [spec.trial for spec in found.specs] == [0, 1] and SharesATable.table is None
    assert "attribute 'table' of class" in found.refused[2]
    assert "keep it in an attribute of the model" in found.refused[2]


def test_a_trial_that_measures_other_things_than_the_first_is_refused_alone(tmp_path: Path) -> None:
    found = admit(tmp_path, {"metrics": ["accuracy"]}, {"metrics": []}, {"metrics": ["accuracy"]})
    assert [spec.trial for spec in found.specs] == [0, 2]
    assert list(found.refused) == [1]
    assert (
        "measures {'loss': 'min'}, and the trials before it {'loss': 'min', 'accuracy': 'max'}"
        in (found.refused[1])
    )
    assert found.metrics == {"loss": "min", "accuracy": "max"}


def test_equal_structures_take_their_first_steps_once_and_each_has_its_own_state(
    tmp_path: Path,
) -> None:
    def forwards(*candidates: dict[str, Any]) -> int:
        tune_models.Counted.forwards = 0
        run = f"run-{len(admitted)}"
        admitted.extend(admit_with(tune_models.counted, tmp_path, candidates, run=run).specs)
        return tune_models.Counted.forwards

    admitted: list[Any] = []
    alone = forwards({"dropout": 0.1})
    assert alone > 0
    assert forwards({"lr": 0.1}, {"lr": 0.2}, {"lr": 0.2, "scale": 2.0}) == alone
    first, second, scaled = admitted[1:]
    assert first.shards == second.shards != scaled.shards
    assert first.cut == second.cut == scaled.cut
    assert forwards({"dropout": 0.1}, {"dropout": 0.2}) == 2 * alone
    assert forwards({"lr": float("nan")}, {"lr": 0.1}) > alone, "a refusal speaks for no other"


def test_what_no_device_can_hold_is_refused_with_the_numbers_before_training(
    tmp_path: Path,
) -> None:
    def told(**resources: Any) -> list[str]:
        found = admit_with(tune_models.small, tmp_path, resources=WorkerResources(**resources))
        assert not found.refused
        return [line for line in found.told if "a device needs" in line]

    tight = WorkerResources(device_memory=300)
    found = admit_with(tune_models.small, tmp_path, resources=tight)
    assert "a device needs " in found.refused[0]
    assert "the largest device has 300 B" in found.refused[0]
    assert "raise device_memory" in found.refused[0]
    assert not found.specs
    (table,) = told(device_memory=1 << 20)
    assert "GPUs" not in table
    (table,) = told(device_memory=1 << 20, device_kind="cuda")
    assert table.endswith("GPUs compute and copy at another speed.")
    assert told() == []


def test_automatic_cuts_of_a_grid_are_in_the_documents_with_what_they_need(tmp_path: Path) -> None:
    model = {"width": 64, "batch_size": 4, "shards": "auto"}  # 26 kB as one shard, 18 kB as two
    candidates = [{"lr": 0.1, **model}, {"lr": 0.2, **model}]

    def cuts(resources: WorkerResources) -> list[TrialSpec]:
        found = admit_with(tune_models.small, tmp_path, candidates, resources=resources)
        assert not found.refused
        return found.specs

    for spec in cuts(DEFAULT_RESOURCES):
        assert spec.cut["at"] == [] and spec.tasks is None, "nobody asked for a budget"
    whole, _ = cuts(WorkerResources(device_memory=1 << 20))
    assert whole.cut["at"] == [] and whole.tasks is not None
    first, second = cuts(WorkerResources(device_memory=24_000))
    assert first.cut["at"] and first.cut == second.cut
    assert first.tasks == second.tasks is not None, "they were measured once"
    assert TrialSpec.from_json(json.loads(json.dumps(first.to_json())), "a trial") == first


class DropsLayers(nn.Module):
    """Leaves layers out at random, so that a trial's seed decides which of them run first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.last = nn.Linear(16, 4)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        x = self.first(features)
        for layer in self.layers:
            if not self.training or torch.rand(()) < 0.5:
                x = x + layer(x).relu()
        return self.last(x)


@pytest.mark.parametrize("shards", [1, 3, ["last"]])
def test_a_fork_has_the_cut_of_its_parent_where_random_numbers_decide_what_runs(
    tmp_path: Path, shards: Any
) -> None:
    def factory(params: dict[str, Any]) -> Recipe:
        model = DropsLayers()
        optimizer = torch.optim.SGD(model.parameters(), lr=params["lr"], momentum=0.5)
        return Recipe(model, optimizer, nn.CrossEntropyLoss(), shards=shards)

    def admission() -> Admission:
        return Admission(
            factory,
            COLUMNS,
            examples(tmp_path, 64),
            RunFolder(LocalStore(str(tmp_path)), "run"),
            3,
            "loss",
            print,
            Biller(DEFAULT_RESOURCES, 2, print),
        )

    parent = admission().admit(0, {"lr": 0.1}).spec
    for trial in range(1, 5):  # each in a process of its own, as after a resume
        assert admission().admit(trial, {"lr": 0.2}, parent).spec.cut == parent.cut


class Scaled(nn.Module):
    def __init__(self, where: str, scale: float) -> None:
        super().__init__()
        self.last, value = nn.Linear(16, 4), torch.tensor(scale)
        if where == "parameter":
            self.scale = nn.Parameter(value, requires_grad=False)
        else:
            self.register_buffer("scale", value, persistent=where == "buffer")

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.last(features * self.scale)


@pytest.mark.parametrize("where", ["parameter", "buffer", "own"])
def test_a_fork_whose_parameters_change_what_it_takes_over_is_refused_by_name(
    tmp_path: Path, where: str
) -> None:
    def factory(params: dict[str, Any]) -> Recipe:
        model = Scaled(where, params["scale"])
        return Recipe(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())

    told: list[str] = []
    folder = RunFolder(LocalStore(str(tmp_path)), "run")
    bill = Biller(DEFAULT_RESOURCES, 2, told.append)
    of_run = examples(tmp_path, 64), folder, 3, "loss", told.append, bill
    admission = Admission(factory, COLUMNS, *of_run)
    parent = admission.admit(0, {"scale": 0.5}).spec
    assert admission.admit(1, {"scale": 0.5}, parent).spec.shards == parent.shards
    if where == "own":  # no state has it
        assert admission.admit(2, {"scale": 0.25}, parent).spec.shards == parent.shards
        return
    with pytest.raises(
        Refused, match=rf"{where} 'scale' is another one by .*0\.25.* than by .*0\.5"
    ):
        admission.admit(2, {"scale": 0.25}, parent)


@pytest.mark.parametrize("schedule", ["sequential", "gpipe"])
def test_a_fork_of_a_graph_that_is_one_shard_has_the_cut_of_its_parent(
    tmp_path: Path, schedule: str
) -> None:
    def factory(params: dict[str, Any]) -> Recipe:
        made = tune_models.small(params | {"shards": "auto"})
        return dataclasses.replace(made, cut="export", schedule=schedule)

    told: list[str] = []
    admission = Admission(
        factory,
        COLUMNS,
        examples(tmp_path, 70),
        RunFolder(LocalStore(str(tmp_path)), "run"),
        3,
        "loss",
        told.append,
        Biller(DEFAULT_RESOURCES, 2, told.append),
    )
    parent = admission.admit(0, {"lr": 0.1}).spec
    assert (parent.cut["mode"], parent.cut["at"]) == ("export", [])
    assert admission.admit(1, {"lr": 0.2}, parent).spec.cut == parent.cut


def test_replicas_for_which_a_resumed_run_lacks_workers_end_it_and_no_trial(
    tmp_path: Path,
) -> None:
    """The data is in as many partitions as the run had workers."""

    def factory(params: dict[str, Any]) -> Recipe:
        return dataclasses.replace(tune_models.small({}), **params)

    folder = RunFolder(LocalStore(str(tmp_path)), "run")
    bill = Biller(DEFAULT_RESOURCES, 2, print)
    data = examples(tmp_path, 70, partitions=3)
    admission = Admission(factory, COLUMNS, data, folder, 3, "loss", print, bill)
    with pytest.raises(ConfigurationError, match=r"replicas is 3, and the backend has 2 worker"):
        admission.admit(0, {"replicas": 3})
    with pytest.raises(Refused, match="replicas is 4, and there are 3 partitions"):
        admission.admit(1, {"replicas": 4})
    assert admission.admit(2, {"replicas": 2}).spec.replicas == 2


class Tied(nn.Module):
    """The last layer's weight is the first one's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(16, 16) for _ in range(3))
        self.last.weight = self.first.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.middle(torch.relu(self.first(rows)))))


def piped(params: dict[str, Any]) -> Recipe:
    """Build a small model in three shards, for a pipeline."""
    given = dict(params)
    made = tune_models.small({"shards": ["1", "3"]})
    if given.pop("tied", False):
        model = Tied()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        made = Recipe(model, optimizer, made.loss, made.metrics, shards=["middle", "last"])
    return dataclasses.replace(made, **given)


def test_how_old_the_weights_are_that_a_trial_reads_is_decided_by_the_devices_at_admission(
    tmp_path: Path,
) -> None:
    candidates = [
        {"schedule": "pipedream"},
        {"schedule": "pipedream", "vertical_sync": True},
        {"schedule": "2bw", "accumulate": 2},
        {"schedule": "1f1b", "accumulate": 2},
        {"schedule": "pipedream", "vertical_sync": True, "tied": True},
        {"schedule": "pipedream", "stages": [1, 2]},
        {"schedule": "1f1b", "accumulate": 2, "stages": [1, 2]},
    ]
    for devices, expected in {
        3: [(2, 1, 0), (2, 2, 2), (1, 1, 1), (), (2, 2, 2), (1, 0, 0), ()],
        1: [(), (), (1, 1, 1), (), (), (1, 0, 0), ()],
    }.items():
        resources = WorkerResources(devices=devices)
        found = admit_with(piped, tmp_path, candidates, resources=resources, run=str(devices))
        assert not found.refused
        assert [spec.staleness for spec in found.specs] == expected
        of_a_device = {3: (1, 1, 1), 1: (3,)}[devices]
        assert [spec.stages for spec in found.specs] == [
            *[of_a_device] * 3, (), of_a_device, *[(1, 2)] * 2
        ]  # fmt: skip
        spec = found.specs[2]
        assert TrialSpec.from_json(json.loads(json.dumps(spec.to_json())), "a trial") == spec
        assert not any(spec.finer for spec in found.specs if spec.staleness)


def test_what_pipelines_of_older_weights_can_not_have_is_refused_before_training(
    tmp_path: Path,
) -> None:
    candidates = [
        {"schedule": "2bw", "accumulate": 1},
        {"schedule": "pipedream", "tied": True},
        {"schedule": "pipedream", "clip_grad_norm": 1.0},
        {"schedule": "pipedream", "accumulate": 2},
        {"schedule": "2bw", "accumulate": 2, "cut": "modules"},
        {"schedule": "2bw", "accumulate": 2, "stages": 4},
        {"schedule": "1f1b", "accumulate": 2, "stages": [1, 1]},
    ]
    refused = admit_with(piped, tmp_path, candidates, resources=WorkerResources(devices=3)).refused
    reasons = [
        "'2bw' and accumulate is 1, .* take an accumulate of at least 2, or fewer stages",
        r"shards \[0, 2\] share a parameter, of which stages \[0, 2\] would read different",
        "'pipedream' and clip_grad_norm is given",
        "'pipedream' and accumulate is 2",
        "cut is 'modules', which keeps a batch on one device; .* schedule='sequential'",
        "stages is 4, and the model is cut into 3 shards; take at most 3 stages",
        r"stages is \[1, 1\], which are 2 shards, and the model is cut into 3; let the numbers",
    ]
    for number, reason in enumerate(reasons):
        assert re.search(reason, refused[number]), refused[number]
