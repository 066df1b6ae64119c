"""Each check of the suite of models fails where its promise is broken."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.engine import graph_tasks, sub_epoch
from cerebro_hydra.shards.engine.layout import memory_of
from cerebro_hydra.testing import run_in_process
from cerebro_hydra.testing.load_alone import run_alone
from cerebro_hydra.testing.model_case import ModelCase
from cerebro_hydra.testing.run_in_process import CutTrial


def net():
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 8), nn.ReLU(),
        nn.Linear(8, 3),
    )  # fmt: skip


class Fine(ModelCase):
    cuts = (2,)
    build = staticmethod(net)

    def recipe(self, shards):
        model = self.build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return Recipe(model, optimizer, nn.CrossEntropyLoss(), shards=shards)

    def batch(self, rows, seed):
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(rows, 6, generator=g)
        return (x,), (torch.randint(3, (rows,), generator=g),)


CHECKS = (
    "test_admission_cuts_as_asked",
    "test_cut_equals_eager",
    "test_recompute_equals_keep",
    "test_hop_equals_stay",
    "test_evaluation_equals_eager",
    "test_state_survives_safetensors",
)


def failing(case: ModelCase) -> set[str]:
    """The checks that a case does not pass, those apart that start other processes."""
    failed = set()
    for name in CHECKS:
        try:
            getattr(case, name)()
        except AssertionError:
            failed.add(name)
    return failed


def test_a_fine_model_passes():
    assert failing(Fine()) == set()


class HasUnusedWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.unused, self.b = nn.Linear(6, 8), nn.Linear(2, 2), nn.Linear(8, 3)

    def forward(self, x):
        return self.b(self.a(x))


class FineWithUnusedWeights(Fine):
    build = HasUnusedWeights


def test_a_model_with_weights_that_get_no_gradient_passes():
    assert failing(FineWithUnusedWeights()) == set()


class OtherRandomNumbers(Fine):
    def start(self, shards, mode="keep", cut="modules"):
        trial = super().start(shards, mode, cut)
        trial.trial_seed += 1
        return trial


def test_other_random_numbers_are_noticed():
    assert {"test_cut_equals_eager", "test_state_survives_safetensors"} <= failing(
        OtherRandomNumbers()
    )


class ForgetsMomentum(CutTrial):
    """Its hops carry everything but the optimizer's state of shard 1."""

    def need(self, k):
        segments, cursor = super().need(k)
        if k == 1:
            for entry in self.admission.layout.shards[1].trainable.entries:
                if entry.name == "exists":
                    entry.view(memory_of(segments["trainable"])).zero_()
        return segments, cursor


class HopsForget(Fine):
    kind = ForgetsMomentum

    def start(self, shards, mode="keep", cut="modules"):
        trial = super().start(shards, mode, cut)
        trial.__class__ = self.kind
        return trial


def test_a_run_in_this_process_that_forgets_something_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(Fine, "in_processes", False)
    Fine().test_run_on_two_partitions_replays(tmp_path / "fine")
    with pytest.raises(AssertionError, match="the run has"):
        HopsForget().test_run_on_two_partitions_replays(tmp_path / "forgets")


def test_hops_that_forget_something_are_noticed():
    failed = failing(HopsForget())
    assert {"test_hop_equals_stay", "test_cut_equals_eager"} <= failed
    assert "test_recompute_equals_keep" not in failed


class RecomputesOnLiveBuffers(graph_tasks.GraphTasks):
    def forward(self, k, batch):
        super().forward(k, batch)
        if k in batch.buffers_before:
            batch.buffers_before[k] = {}


def test_statistics_that_move_twice_are_noticed(monkeypatch):
    trial = Fine().start(2, cut="export")  # admission would refuse such an engine
    monkeypatch.setattr(Fine, "start", lambda self, shards, mode="keep", cut="": again(trial, mode))
    monkeypatch.setattr(sub_epoch, "GraphTasks", RecomputesOnLiveBuffers)
    with pytest.raises(AssertionError):
        Fine().test_recompute_equals_keep()
    Fine().test_hop_equals_stay()


def again(trial: CutTrial, mode) -> CutTrial:
    """A trial from the beginning, without admission."""
    recipe = Fine().make(2)
    seed, steps = trial.trial_seed, trial.steps_per_epoch
    return CutTrial(recipe, trial.admission, trial.cut_model, seed, steps, mode)


class DropsInEvaluation(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.b(nn.functional.dropout(self.a(x), 0.5, training=True))


class EvaluatesRandomly(Fine):
    build = DropsInEvaluation


def test_an_evaluation_that_is_random_is_noticed(tmp_path):
    with pytest.raises(ConfigurationError, match="output 0 of the model in evaluation"):
        EvaluatesRandomly().test_evaluation_equals_eager()
    with pytest.raises(ConfigurationError, match="other bits"):
        EvaluatesRandomly().test_export_loads_without_its_source(tmp_path)


class EvaluatesBeforeItsTraining(CutTrial):
    """It evaluates the weights that it began with."""

    def evaluate(self, batches):
        now, self.shards = self.shards, again(self, "keep").shards
        try:
            return super().evaluate(batches)
        finally:
            self.shards = now


class EvaluatesOldWeights(HopsForget):
    kind = EvaluatesBeforeItsTraining


def test_an_evaluation_of_other_weights_is_noticed():
    assert failing(EvaluatesOldWeights()) == {"test_evaluation_equals_eager"}


class LooksAtValues(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.b(self.a(x) if x.sum() > 0 else self.a(2 * x))


class HasNoGraph(Fine):
    build = LooksAtValues


def test_a_model_that_is_not_cut_as_asked_is_noticed():
    assert failing(HasNoGraph()) == {"test_admission_cuts_as_asked"}


def test_a_trip_through_safetensors_that_rounds_is_noticed(monkeypatch):
    read = run_in_process.read_tensors

    def rounded(buffer):
        return {n: t.half().to(t.dtype) if t.is_floating_point() else t
                for n, t in read(buffer).items()}  # fmt: skip

    monkeypatch.setattr(run_in_process, "read_tensors", rounded)
    with pytest.raises(AssertionError):
        Fine().test_state_survives_safetensors()


def test_an_export_that_needs_a_refused_package_is_noticed(tmp_path):
    Fine().test_export_loads_without_its_source(tmp_path)
    with pytest.raises(RuntimeError, match="safetensors"):
        run_alone(tmp_path, [torch.zeros(2, 6)], {"safetensors"})
