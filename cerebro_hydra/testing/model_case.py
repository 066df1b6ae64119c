"""The conformance suite of models: inherit `ModelCase` and give it a model and its batches."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import cerebro_hydra
from cerebro_hydra.recipe import Columns, Recipe, recipe_of
from cerebro_hydra.shards.admission import admit
from cerebro_hydra.shards.cut_model import CutModelCache
from cerebro_hydra.shards.differences import same_bits
from cerebro_hydra.shards.engine import Mode
from cerebro_hydra.shards.exported import save_exported
from cerebro_hydra.shards.sample import Example, Sample
from cerebro_hydra.storage import LocalStore
from cerebro_hydra.testing.cut_trial import CutTrial
from cerebro_hydra.testing.load_alone import run_alone
from cerebro_hydra.testing.local_backend import Arrays, LocalBackend
from cerebro_hydra.testing.plain_training import PlainTraining, Rows, Window
from cerebro_hydra.tune import GridSearch, hp_choice

Shards = int | list[str]
"""A number, or names of modules to cut at, as `Recipe` takes them."""

TRIAL_SEED = 11
STEPS_PER_EPOCH = 10
PRELOADED = ("transformers.modeling_utils",)
"""What agents of a run would import beside torch; a package that is absent is passed over."""


class ModelCase(ABC):
    """What training in shards promises of a model; a subclass, collected by pytest, gives one.

    The subclass must be importable by its module's name: agents in other processes build it.

    Attributes:
        columns: names of the features and targets, in the order of `batch`.
        cuts: numbers of shards to try; of a model that can't be cut, what a user might ask for.
        rows: a full batch and the smaller last one.
        mode: what admission must choose, "export", "layers" or "whole".
    """

    columns: ClassVar[Columns] = Columns(("features",), ("label",))
    cuts: ClassVar[tuple[int, ...]] = (2, 3)
    rows: ClassVar[tuple[int, int]] = (6, 4)
    mode: ClassVar[str] = "export"

    @abstractmethod
    def recipe(self, shards: Shards) -> Recipe:
        """Build the trial; the suite has seeded torch, so that every call gives the same bits."""

    @abstractmethod
    def batch(self, rows: int, seed: int) -> Example:
        """Features and targets of a batch: int64, float32 or bool, each of shape (rows, ...)."""

    # ------------------------------------------------------------------ what the suite uses

    def make(self, shards: Shards) -> Recipe:
        """The recipe, seeded and bound to its columns."""
        torch.manual_seed(5)
        recipe = recipe_of(self.recipe(shards)).bind(self.columns)
        recipe.batch_size = self.rows[0]
        return recipe

    def sub_epochs(self) -> list[list[Window]]:
        """Two sub-epochs of several steps, each ending with the smaller batch."""
        full, last = self.rows
        sizes = ((full, full, last), (full, last))
        batches = [
            [self._rows(n, 10 * i + j) for j, n in enumerate(s)] for i, s in enumerate(sizes)
        ]
        every = self.make(1).accumulate
        return [[b[i : i + every] for i in range(0, len(b), every)] for b in batches]

    def start(self, shards: Shards, mode: Mode = "keep") -> CutTrial:
        """Admit the recipe on batches of both sizes."""
        recipe = self.make(shards)
        examples = [self.batch(n, seed) for seed, n in enumerate(self.rows)]
        cut_models = _structures_of(type(self))
        admission = admit(recipe, examples, TRIAL_SEED, cut_models)
        cut_model = cut_models.get(recipe.model, admission.spec, Sample.of(recipe, examples[0]))
        return CutTrial(recipe, admission, cut_model, TRIAL_SEED, STEPS_PER_EPOCH, mode)

    def plain(self) -> PlainTraining:
        """The same trial, uncut."""
        return PlainTraining(self.make(1), TRIAL_SEED, STEPS_PER_EPOCH)

    def _rows(self, count: int, seed: int) -> Rows:
        features, targets = self.batch(count, seed)
        return Rows(tuple(features), tuple(targets), count)

    # ------------------------------------------------------------------ the promises

    def test_admission_cuts_as_asked(self) -> None:
        """It chooses the mode that the case names, with as many shards as were asked for."""
        for shards in self.cuts:
            trial = self.start(shards)
            report = trial.admission.report
            assert report.mode == self.mode, report.text()
            if self.mode != "whole":
                assert report.fallback is None, report.text()
            assert trial.cut_model.num_shards == (1 if self.mode == "whole" else shards)

    def test_cut_equals_eager(self) -> None:
        """Losses and the whole state agree in every bit, at every cut, over hops."""
        plain = self.plain()
        sums = []
        for windows in self.sub_epochs():
            losses = plain.train(windows)
            assert len(set(losses)) == len(losses), "one loss for different batches proves nothing"
            rows = [batch.rows for window in windows for batch in window]
            sums.append((sum(n * loss for n, loss in zip(rows, losses, strict=True)), sum(rows)))
        for shards in self.cuts:
            trial = self.start(shards)
            totals = [trial.train(windows) for windows in self.sub_epochs()]
            assert [(t.loss_sum, t.rows) for t in totals] == sums
            _assert_same_state(trial.tensors(), plain)

    def test_recompute_equals_keep(self) -> None:
        """Graphs that are kept and graphs that are made again give the same bytes."""
        kept, again = (self.start(self.cuts[-1], mode) for mode in ("keep", "recompute"))
        for windows in self.sub_epochs():
            kept.train(windows)
            again.train(windows)
        assert kept.losses == again.losses
        assert kept.shards == again.shards

    def test_hop_equals_stay(self) -> None:
        """A hop through bytes and JSON after every step changes nothing."""
        windows = [window for windows in self.sub_epochs() for window in windows]
        stayed, hopped = (self.start(self.cuts[-1]) for _ in range(2))
        stayed.train(windows)
        for window in windows:
            hopped.train([window])
        assert stayed.losses == hopped.losses
        assert stayed.shards == hopped.shards

    def test_evaluation_equals_eager(self) -> None:
        """After training, loss and metrics of unseen rows agree, and the state stays as it is."""
        plain = self.plain()
        unseen = [self._rows(n, 100 + n) for n in self.rows]
        plain.train(self.sub_epochs()[0])
        for shards in self.cuts:
            trial = self.start(shards)
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
        _assert_same_state(trial.tensors(), plain)

    def test_export_loads_without_its_source(self, tmp_path: Path) -> None:
        """A process that can't import the model gives the trained model's predictions."""
        plain = self.plain()
        plain.train(self.sub_epochs()[0])
        recipe = plain.recipe
        recipe.model.load_state_dict(plain.evaluated().state_dict())
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
    def test_run_on_two_agents_replays(self, tmp_path: Path) -> None:
        """A search in real processes: the trial hops, and replay finds every bit again."""
        full, last = self.rows
        features, targets = self.batch(5 * (2 * full + last) // 2, 300)
        names = (*self.columns.features, *self.columns.targets)
        arrays = zip(names, (*features, *targets), strict=True)
        result: Any = GridSearch(
            backend=LocalBackend(2, preloaded=PRELOADED),  # type: ignore[arg-type]
            store=LocalStore(str(tmp_path)),
            estimator_gen_fn=partial(
                build_case, f"{type(self).__module__}:{type(self).__qualname__}"
            ),
            search_space={"shards": hp_choice([self.cuts[-1]])},
            num_epochs=1,
            feature_columns=self.columns.features,
            label_columns=self.columns.labels,
            sample_weight_column=self.columns.weight,
            verbose=0,
        ).fit(Arrays({name: tensor.numpy() for name, tensor in arrays}))  # type: ignore[arg-type]
        (trial,) = result.trials
        assert sorted(trial.visit_log) == [(0, 0), (0, 1)]
        assert result.totals.bytes_moved > 0
        report = cerebro_hydra.replay(result.run_path, trial.trial_id)
        assert report.identical, str(report)

    def _sources(self, recipe: Recipe) -> set[str]:
        """Packages that the model's code comes from."""
        classes = (type(self), *(type(module) for module in recipe.model.modules()))
        found = {kind.__module__.split(".")[0] for kind in classes} | {"transformers"}
        return found - {"torch", "cerebro_hydra"}


def build_case(name: str, params: Mapping[str, Any]) -> Recipe:
    """The factory of a case's run; `name` is "module:class"."""
    module, _, qualname = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    case: ModelCase = found()
    return case.make(params["shards"])


@cache
def _structures_of(case: type[ModelCase]) -> CutModelCache:
    """One export of a model serves all tests of its case."""
    return CutModelCache()


def _assert_same_state(cut: Mapping[str, Tensor], plain: PlainTraining) -> None:
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
