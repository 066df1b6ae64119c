"""The engine as agents use it: a new one each sub-epoch, state only as bytes and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.admission import Admission, admit
from cerebro_hydra.shards.engine import Engine, TrainTotals, read_state
from cerebro_hydra.shards.layout import initial_segments, read_tensors
from cerebro_hydra.shards.sample import Sample
from cerebro_hydra.shards.structure import Structure, StructureCache
from tests.shards import plain

STEPS_PER_EPOCH = 4


@dataclass
class Trial:
    """One trial between hops."""

    recipe: Recipe
    admission: Admission
    structure: Structure
    mode: str = "keep"
    step: int = 0
    events: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.layout = self.admission.layout
        self.shards = [
            ({n: b.tobytes() for n, b in segments.items()}, "null")
            for segments in initial_segments(self.recipe, self.layout)
        ]

    def engine(self) -> Engine:
        return Engine(
            self.structure, self.layout, self.recipe, plain.TRIAL_SEED, STEPS_PER_EPOCH, self.mode
        )

    def need(self, k: int):
        self.events.append(f"need{k}")
        content, cursor = self.shards[k]
        frozen = np.frombuffer(content["frozen"], np.uint8)  # read-only, as received bytes are
        trainable = np.frombuffer(content["trainable"], np.uint8).copy()
        return {"frozen": frozen, "trainable": trainable}, json.loads(cursor)

    def publish(self, k: int, segments, cursor) -> None:
        self.events.append(f"publish{k}")
        content = {name: buffer.tobytes() for name, buffer in segments.items()}
        self.shards[k] = content, json.dumps(cursor)

    def train(self, windows) -> TrainTotals:
        totals = self.engine().train(iter(windows), self.step, self.need, self.publish)
        self.step += totals.steps
        return totals

    def cursor(self, k: int) -> dict:
        return json.loads(self.shards[k][1])

    def averages(self) -> dict[str, tuple]:
        """The moving average of every trainable parameter, as bytes."""
        found = {}
        for content, _ in self.shards:
            tensors = read_tensors(np.frombuffer(content["trainable"], np.uint8))
            found |= {n: plain.bits(t) for n, t in tensors.items() if n.startswith("ema:")}
        return {name.removeprefix("ema:"): value for name, value in found.items()}

    def loaded(self) -> Recipe:
        """The recipe with the trial's present state in its model and optimizer."""
        segments = [
            {name: np.frombuffer(b, np.uint8) for name, b in content.items()}
            for content, _ in self.shards
        ]
        read_state(self.recipe, self.layout, segments)
        return self.recipe


def start(
    recipe: Recipe, windows, mode: str = "keep", cache: StructureCache | None = None
) -> Trial:
    """Admit a recipe on the batches it will see."""
    by_rows = {batch.rows: batch for window in windows for batch in window}
    examples = [(batch.features, batch.labels) for batch in by_rows.values()]
    cache = cache or StructureCache()
    admission = admit(recipe, examples, plain.TRIAL_SEED, cache)
    structure = cache.get(recipe.model, admission.spec, Sample.of(recipe, examples[0]))
    return Trial(recipe, admission, structure, mode)


def assert_equal_to_plain(
    make: Callable[[], Recipe], sub_epochs, mode: str = "keep", cut: str | None = "export"
) -> Trial:
    """Train twice, plainly and in shards with a hop after every sub-epoch; every bit agrees."""
    reference = make()
    sums, _, averaged = plain.train(reference, sub_epochs, STEPS_PER_EPOCH)
    trial = start(make(), [w for windows in sub_epochs for w in windows], mode)
    if cut is not None:
        assert trial.admission.spec.mode == cut, trial.admission.report.text()
    totals = [trial.train(windows) for windows in sub_epochs]
    assert [t.loss_sum for t in totals] == sums
    assert [t.rows for t in totals] == [sum(b.rows for w in s for b in w) for s in sub_epochs]
    assert plain.everything(trial.loaded()) == plain.everything(reference)
    expected = {} if averaged is None else dict(averaged.module.named_parameters())
    averages = trial.averages()
    assert averages == {name: plain.bits(expected[name]) for name in averages}
    assert bool(averages) == (averaged is not None)
    groups = json.loads(trial.shards[0][1])["groups"]
    assert [g["lr"] for g in groups] == [g["lr"] for g in reference.optimizer.param_groups]
    return trial
