"""The conformance suite of models: inherit `ModelCase` and give it a model and its batches."""

from __future__ import annotations

import importlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import cerebro_hydra
from cerebro_hydra.data.batches import Batch
from cerebro_hydra.recipe import Columns, PlainTrainer, Recipe, recipe_of
from cerebro_hydra.shards.admission.admit import AdmittedCut, admit
from cerebro_hydra.shards.cut.model import CutModelCache
from cerebro_hydra.shards.cut.sample import Example, Sample, copy_example
from cerebro_hydra.shards.engine.differences import contents, first_difference, same_bits
from cerebro_hydra.shards.engine.engine import Mode
from cerebro_hydra.shards.engine.layout import on_host
from cerebro_hydra.shards.engine.uncut import uncut_training
from cerebro_hydra.shards.export.program import save_exported
from cerebro_hydra.storage import LocalStore
from cerebro_hydra.testing.addresses import OddAddresses, move_state
from cerebro_hydra.testing.load_alone import run_alone
from cerebro_hydra.testing.local_backend import Arrays, LocalBackend
from cerebro_hydra.testing.run_in_process import CutTrial, run_in_process
from cerebro_hydra.tune import GridSearch, hp_choice

Shards = int | list[str]
"""A number of shards, or names of modules to cut at, as `Recipe` takes them."""

TRIAL_SEED = 11
STEPS_PER_EPOCH = 10
PRELOADED = ("transformers.modeling_utils",)
"""Modules that agents load in advance beside torch; those that are absent are passed over."""


class ModelCase(ABC):
    """The promises of training in shards; a subclass, collected by pytest, gives the model.

    The subclass must be importable by its module's name: agents in other processes build it.

    Attributes:
        columns: names of the features and targets, in the order of `batch`.
        cuts: numbers of shards to try.
        rows: a full batch and the smaller last one.
        ways: how the model can be cut; "export" is left out where it can't be exported.
        in_processes: whether the run that is replayed has two agents in processes of their own;
            otherwise it takes place in this process, which is faster.
    """

    columns: Columns = Columns(("features",), ("label",))
    cuts: ClassVar[tuple[int, ...]] = (2, 3)
    rows: ClassVar[tuple[int, int]] = (6, 4)
    ways: ClassVar[tuple[str, ...]] = ("modules", "export")
    in_processes: ClassVar[bool] = True

    @abstractmethod
    def recipe(self, shards: Shards) -> Recipe:
        """Build the trial; the suite has seeded torch, so that every call gives the same bits."""

    @abstractmethod
    def batch(self, rows: int, seed: int) -> Example:
        """Return features and targets: int64, float32 or bool, each of shape (rows, ...)."""

    # ------------------------------------------------------------------ what the suite uses

    def make(self, shards: Shards) -> Recipe:
        """Build the recipe, seeded and bound to its columns."""
        torch.manual_seed(5)
        recipe = recipe_of(self.recipe(shards)).bind(self.columns)
        recipe.batch_size = self.rows[0]
        return recipe

    def sub_epochs(self) -> list[list[list[Batch]]]:
        """Return two sub-epochs of several steps, each ending with the smaller batch."""
        full, last = self.rows
        sizes = ((full, full, last), (full, last))
        batches = [
            [self._batch(n, 10 * i + j) for j, n in enumerate(s)] for i, s in enumerate(sizes)
        ]
        every = self.make(1).accumulate
        return [[b[i : i + every] for i in range(0, len(b), every)] for b in batches]

    def start(self, shards: Shards, mode: Mode = "keep", cut: str = "modules") -> CutTrial:
        """Return a trial that was just built, as one like it was admitted on batches of both sizes.

        Trials that are alike share one admission, as in a search.
        """
        cut_models, admissions = _known_of(type(self))
        examples = [self.batch(n, seed) for seed, n in enumerate(self.rows)]
        key = str(shards), cut
        if key not in admissions:
            admissions[key] = admit(self._cut(shards, cut), examples, TRIAL_SEED, cut_models)
        recipe, admission = self._cut(shards, cut), admissions[key]
        cut_model = cut_models.get(recipe.model, admission.spec, Sample.of(recipe, examples[0]))
        return CutTrial(recipe, admission, cut_model, TRIAL_SEED, STEPS_PER_EPOCH, mode)

    def _cut(self, shards: Shards, cut: str) -> Recipe:
        recipe = self.make(shards)
        recipe.cut = cut
        return recipe

    def plain(self) -> PlainTrainer:
        """Return a trainer of the same trial, uncut."""
        return PlainTrainer(self.make(1), TRIAL_SEED, STEPS_PER_EPOCH)

    def _batch(self, rows: int, seed: int) -> Batch:
        features, targets = self.batch(rows, seed)
        return Batch(tuple(features), tuple(targets), rows)

    # ------------------------------------------------------------------ the promises

    def test_admission_cuts_as_asked(self) -> None:
        """Admission cuts in the way that is asked for, and into as many shards."""
        for cut, shards in itertools.product(self.ways, self.cuts):
            trial = self.start(shards, cut=cut)
            report = trial.admission.report
            assert report.mode == cut, report.text()
            assert report.fallback is None, report.text()
            assert trial.cut_model.num_shards == shards

    def test_cut_equals_eager(self) -> None:
        """Losses and the whole state agree in every bit, at every cut, over hops."""
        plain = self.plain()
        sums = [plain.train(windows) for windows in self.sub_epochs()]
        for cut, shards in itertools.product(self.ways, self.cuts):
            trial = self.start(shards, cut=cut)
            totals = [trial.train(windows) for windows in self.sub_epochs()]
            assert [(t.loss_sum, t.rows) for t in totals] == sums
            different = set(trial.losses)
            assert len(different) == len(trial.losses), "one loss for all batches proves nothing"
            assert_same_state(trial.tensors(), plain)

    def test_bits_are_the_same_at_every_address(self) -> None:
        """Forward, loss, backward and optimizer don't look at where their operands lie."""
        aligned, moved = self.plain(), self.plain()
        for window in self.sub_epochs()[0]:
            expected = aligned.train([window])
            move_state(moved.recipe)
            with OddAddresses() as addresses:
                assert moved.train([window]) == expected
            assert addresses.moved
        assert_same_state(moved.tensors(), aligned)

    def test_recompute_equals_keep(self) -> None:
        """Graphs that are kept and graphs that are made again give the same bytes."""
        for cut in self.ways:
            kept, again = (self.start(self.cuts[-1], mode, cut) for mode in ("keep", "recompute"))
            for windows in self.sub_epochs():
                kept.train(windows)
                again.train(windows)
            assert kept.losses == again.losses
            assert kept.shards == again.shards

    def test_hop_equals_stay(self) -> None:
        """A hop through bytes and JSON after every step changes nothing; an audit agrees."""
        windows = [window for windows in self.sub_epochs() for window in windows]
        stayed, hopped = (self.start(self.cuts[-1]) for _ in range(2))
        stayed.train(windows)
        for window in windows[:-1]:
            hopped.train([window])
        self._audit(hopped, windows[-1])
        assert stayed.losses == hopped.losses
        assert stayed.shards == hopped.shards

    def test_evaluation_equals_eager(self) -> None:
        """After training, loss and metrics of unseen rows agree, and the state stays as it is."""
        plain = self.plain()
        unseen = [self._batch(n, 100 + n) for n in self.rows]
        plain.train(self.sub_epochs()[0])
        for cut, shards in itertools.product(self.ways, self.cuts):
            trial = self.start(shards, cut=cut)
            trial.train(self.sub_epochs()[0])
            before = list(trial.shards)
            assert trial.evaluate(unseen) == plain.evaluate(unseen)
            assert trial.shards == before

    def test_state_survives_safetensors(self) -> None:
        """Segments are files that the safetensors library reads and writes; training goes on."""
        first, second = self.sub_epochs()
        trial = self.start(self.cuts[-1])
        trial.train(first)
        cursors = [cursor for _, cursor in trial.shards]
        rewritten = list(zip(trial.rewritten_by_safetensors(), cursors, strict=True))
        assert rewritten == trial.shards
        trial.shards = rewritten
        trial.train(second)
        plain = self.plain()
        for windows in self.sub_epochs():
            plain.train(windows)
        assert_same_state(trial.tensors(), plain)

    def test_export_loads_without_its_source(self, tmp_path: Path) -> None:
        """A process that can't import the model gives the trained model's predictions."""
        plain = self.plain()
        plain.train(self.sub_epochs()[0])
        recipe = plain.recipe
        recipe.model.load_state_dict(plain.evaluated_model().state_dict())
        features, _ = recipe.collated(*self.batch(self.rows[0], 200), None)
        save_exported(recipe, features, tmp_path)
        features, _ = recipe.collated(*self.batch(self.rows[1], 201), None)
        found = run_alone(tmp_path, features, self._sources(recipe))
        recipe.model.eval()
        with torch.no_grad(), recipe.precision():
            expected = recipe.predictions(recipe.call(recipe.model, features))
        assert len(found) == len(expected)
        assert all(map(same_bits, found, expected))

    @pytest.mark.slow
    def test_run_on_two_partitions_replays(self, tmp_path: Path) -> None:
        """A trial hops between two partitions, and replay finds every bit again."""
        full, last = self.rows
        features, targets = self.batch(5 * (2 * full + last) // 2, 300)
        names = (*self.columns.features, *self.columns.targets)
        pairs = zip(names, (*features, *targets), strict=True)
        arrays = {name: tensor.numpy() for name, tensor in pairs}
        factory = partial(build_case, f"{type(self).__module__}:{type(self).__qualname__}")
        run = self._run_on_agents if self.in_processes else self._run_here
        run_path = run(LocalStore(str(tmp_path)), arrays, factory)
        report = cerebro_hydra.replay(run_path, "trial-000", factory)
        assert report.visits == 2
        assert report.identical, str(report)

    def _audit(self, trial: CutTrial, window: list[Batch]) -> None:
        """Train a step also with a model that was just built, from a copy of the state."""
        numbers = range(trial.cut_model.num_shards)
        segments, cursors = zip(*map(trial.need, numbers), strict=True)
        copies = [
            on_host({name: each.copy() for name, each in shard.items()}) for shard in segments
        ]
        batches = [Batch(*copy_example((b.features, b.labels)), b.rows) for b in window]
        layout = trial.admission.layout
        with uncut_training(trial.runtime(self.make(1)), copies, cursors[0], trial.step) as uncut:
            losses = uncut.step(batches)
            trained = uncut.trainer.tensors()
            trial.train([window])
            mean = sum(loss * b.rows for loss, b in zip(losses, window, strict=True))
            assert trial.losses[-1] == mean / sum(b.rows for b in window)
            after = [trial.need(number)[0] for number in numbers]
            assert first_difference(layout, after, contents(trained)) is None

    def _run_on_agents(self, store: LocalStore, arrays: Any, factory: Any) -> str:
        result: Any = GridSearch(
            backend=LocalBackend(2, preloaded=PRELOADED),  # type: ignore[arg-type]
            store=store,
            estimator_gen_fn=factory,
            search_space={"shards": hp_choice([self.cuts[-1]])},
            num_epochs=1,
            feature_columns=self.columns.features,
            label_columns=self.columns.labels or None,
            sample_weight_column=self.columns.weight,
            verbose=0,
        ).fit(Arrays(arrays))  # type: ignore[arg-type]
        (trial,) = result.trials
        assert sorted(trial.visit_log) == [(0, 0), (0, 1)]
        assert result.totals.bytes_moved > 0
        return str(result.run_path)

    def _run_here(self, store: LocalStore, arrays: Any, factory: Any) -> str:
        shards = self.cuts[-1]
        trial = self.start(shards)
        return run_in_process(store, arrays, self.columns, trial, {"shards": shards}).path

    def _sources(self, recipe: Recipe) -> set[str]:
        """Return the packages that the model's code comes from."""
        classes = (type(self), *(type(module) for module in recipe.model.modules()))
        found = {kind.__module__.split(".")[0] for kind in classes} | {"transformers"}
        return found - {"torch", "cerebro_hydra"}


def build_case(name: str, params: Mapping[str, Any]) -> Recipe:
    """Build the recipe of a case's run; `name` is "module:class"."""
    module, _, qualname = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    case: ModelCase = found()
    return case.make(params["shards"])


@cache
def _known_of(
    case: type[ModelCase],
) -> tuple[CutModelCache, dict[tuple[str, str], AdmittedCut]]:
    """Return what serves all tests of a case: exports, and what was admitted by shards and cut."""
    return CutModelCache(), {}


def assert_same_state(cut: Mapping[str, Tensor], plain: PlainTrainer) -> None:
    """Check that a trial in shards holds the state of plain training, in every bit."""
    expected = plain.tensors()
    saved = plain.recipe.model.state_dict()
    # Buffers that no checkpoint holds and nobody writes to are not part of a trial's state.
    needed = {n for n in expected if not n.startswith("buffer:") or n[7:] in saved}
    assert needed <= set(cut), f"lost: {sorted(needed - set(cut))}"
    assert set(cut) <= set(expected), (
        f"more than plain training: {sorted(set(cut) - set(expected))}"
    )
    different = [name for name in cut if not same_bits(cut[name], expected[name])]
    assert not different, f"other bits than plain training: {different}"
