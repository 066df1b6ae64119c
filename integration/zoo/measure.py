"""Cuts an architecture in each way that is asked for, and compares it with plain training."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cerebro_hydra.errors import ConfigurationError, StepDiffers
from cerebro_hydra.recipe import PlainTrainer
from cerebro_hydra.shards.admission.admit import AdmittedCut, admit
from cerebro_hydra.shards.cut.model import CutModelCache
from cerebro_hydra.shards.cut.sample import Sample
from cerebro_hydra.shards.engine.engine import Mode
from cerebro_hydra.testing.model_case import STEPS_PER_EPOCH, TRIAL_SEED, assert_same_state
from cerebro_hydra.testing.run_in_process import CutTrial
from integration.zoo.architecture import Architecture, Specimen

SHARDS = (2, 4)
WAYS = ("modules", "export")


@dataclass(frozen=True)
class Cut:
    """Tells what came of one cut that was asked for.

    Args:
        asked: the number of shards.
        way: how they were to be cut.
        got: the number of shards of the admitted cut, or 0 if the model was refused.
        mode: how it is cut, or None.
        differs: what differs from plain training after all, or None.
        note: why the cut is not as was asked, in the words of the report, or None.
    """

    asked: int
    way: str
    got: int
    mode: str | None
    differs: str | None
    note: str | None

    @property
    def as_asked(self) -> bool:
        return (self.got, self.mode) == (self.asked, self.way)


@dataclass(frozen=True)
class Measured:
    """Tells what came of every cut of one architecture."""

    name: str
    library: str
    parameters: int
    seconds: float
    cuts: tuple[Cut, ...]

    def cut(self, way: str, asked: int = SHARDS[-1]) -> Cut | None:
        """Return what came of a cut, or None if it was not tried."""
        return next((c for c in self.cuts if (c.way, c.asked) == (way, asked)), None)

    def with_ways_of(self, before: Measured | None) -> Measured:
        """Add the cuts of ways that were measured before and not again."""
        ways = {cut.way for cut in self.cuts}
        old = tuple(cut for cut in before.cuts if cut.way not in ways) if before else ()
        return replace(self, cuts=tuple(sorted(self.cuts + old, key=lambda c: WAYS.index(c.way))))


def measure(architecture: Architecture, ways: Sequence[str] = WAYS) -> Measured:
    """Cut a model into each number of shards, and train each cut beside the uncut model."""
    started = time.perf_counter()
    specimen = Specimen(architecture)
    plain = specimen.plain()
    parameters = sum(p.numel() for p in plain.recipe.model.parameters())
    sums = [plain.train([window])[0] for window in specimen.sub_epochs()[0]]
    if len(set(sums)) < len(sums):
        raise AssertionError(f"{architecture.name}: one loss for all batches proves nothing")
    cache = CutModelCache()
    cuts = tuple(
        _cut(specimen, asked, way, cache, plain, sums)
        for way, asked in itertools.product(ways, SHARDS)
    )
    seconds = round(time.perf_counter() - started, 1)
    return Measured(architecture.name, architecture.library, parameters, seconds, cuts)


def _cut(
    specimen: Specimen, asked: int, way: str, cache: CutModelCache, plain: PlainTrainer,
    sums: Sequence[float],
) -> Cut:  # fmt: skip
    recipe = specimen.make(asked)
    recipe.cut = way
    examples = [specimen.batch(rows, seed) for seed, rows in enumerate(specimen.rows)]
    try:
        admission = admit(recipe, examples, TRIAL_SEED, cache)
    except ConfigurationError as refusal:
        return Cut(asked, way, 0, None, None, str(refusal))
    got, report = len(admission.report.shards), admission.report
    differs = _difference(specimen, admission, cache, plain, sums)
    return Cut(asked, way, got, report.mode, differs, report.fallback)


def _difference(
    specimen: Specimen, admission: AdmittedCut, cache: CutModelCache, plain: PlainTrainer,
    sums: Sequence[float],
) -> str | None:  # fmt: skip
    """Return what differs from plain training, with hops and without, kept and recomputed."""

    def start(mode: Mode) -> CutTrial:
        recipe = specimen.make(1)
        sample = Sample.of(recipe, specimen.batch(specimen.rows[0], 0))
        cut_model = cache.get(recipe.model, admission.spec, sample)
        return CutTrial(recipe, admission, cut_model, TRIAL_SEED, STEPS_PER_EPOCH, mode)

    windows = specimen.sub_epochs()[0]
    stays, hops, recomputes = start("keep"), start("keep"), start("recompute")
    try:
        trained = {
            "stay": [stays.train(windows).loss_sum],
            "hop": [hops.train([window]).loss_sum for window in windows],
            "recompute": [recomputes.train([window]).loss_sum for window in windows],
        }
    except (ConfigurationError, StepDiffers) as error:
        return str(error)
    for name, found in trained.items():
        if found not in (list(sums), [sum(sums)]):
            return f"{name}: the losses are {found}, not {sums}"
    try:
        assert_same_state(stays.tensors(), plain)
    except AssertionError as error:
        return str(error)
    if not stays.shards == hops.shards == recomputes.shards:
        return "the shards that stay, hop and are recomputed differ"
    return None
