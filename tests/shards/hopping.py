"""The engine as agents use it: a new one each sub-epoch, state only as bytes and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.admission.admit import AdmittedCut, admit
from cerebro_hydra.shards.cut.model import CutModel, CutModelCache
from cerebro_hydra.shards.cut.sample import Sample
from cerebro_hydra.shards.engine.engine import Mode
from cerebro_hydra.shards.engine.layout import TrialRuntime, in_place, on_host
from cerebro_hydra.shards.engine.uncut import uncut_training
from cerebro_hydra.testing.run_in_process import CutTrial
from tests.shards import plain

STEPS_PER_EPOCH = 4


class Trial(CutTrial):
    """One trial between hops, which notes in `events` what the engine asks for and gives."""

    def __init__(
        self, recipe: Recipe, admission: AdmittedCut, cut_model: CutModel, mode: Mode
    ) -> None:
        super().__init__(recipe, admission, cut_model, plain.TRIAL_SEED, STEPS_PER_EPOCH, mode)
        self.layout = admission.layout
        self.staleness: tuple[int, ...] = ()
        self.events: list[str] = []

    def need(self, k: int) -> Any:
        self.events.append(f"need{k}")
        return super().need(k)

    def publish(self, k: int, segments: Any, cursor: Any) -> None:
        self.events.append(f"publish{k}")
        super().publish(k, segments, cursor)

    def runtime(self, recipe: Recipe | None = None) -> TrialRuntime:
        return replace(super().runtime(recipe), staleness=self.staleness)

    def cursor(self, k: int) -> dict:
        return json.loads(self.shards[k][1])


def start(
    recipe: Recipe, windows: Sequence[Any], mode: Mode = "keep", cache: CutModelCache | None = None
) -> Trial:
    """Admit a recipe on the batches it will see."""
    by_rows = {batch.rows: batch for window in windows for batch in window}
    examples = [(batch.features, batch.labels) for batch in by_rows.values()]
    cache = cache or CutModelCache()
    admission = admit(recipe, examples, plain.TRIAL_SEED, cache)
    cut_model = cache.get(recipe.model, admission.spec, Sample.of(recipe, examples[0]))
    return Trial(recipe, admission, cut_model, mode)


def train_uncut(trial: Trial, windows: Sequence[Any], recipe: Recipe) -> float:
    """Train a sub-epoch of a trial as one model; return its loss, summed over rows."""
    numbers = range(trial.cut_model.num_shards)
    given, cursors = zip(*map(trial.need, numbers), strict=True)
    segments = [in_place(each) for each in given]
    found: list[tuple[float, int]] = []
    with uncut_training(
        trial.runtime(recipe), [*map(on_host, segments)], cursors[0], trial.step
    ) as training:
        for window in windows:
            found += zip(training.step(window), [batch.rows for batch in window], strict=True)
        training.check_unwritten()
        for k in numbers:
            trial.publish(k, segments[k], training.cursor())
    trial.step += len(windows)
    return sum(loss * rows for loss, rows in found)


def owned(trial: Trial, shard: int) -> tuple[str, ...]:
    """Return the names of the parameters that a shard owns."""
    return tuple(p.name for p in trial.cut_model.params if p.owner == shard)
