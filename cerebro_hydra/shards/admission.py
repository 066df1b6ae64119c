"""Before a trial trains: cut its model, and prove on real batches that the cut keeps every bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Recipe, units
from cerebro_hydra.shards.cut_check import CutCheck
from cerebro_hydra.shards.cut_choice import CutChoice, Places, by_blocks, by_name, by_time, whole
from cerebro_hydra.shards.cut_model import CutModel, CutModelCache
from cerebro_hydra.shards.cut_spec import CutSpec
from cerebro_hydra.shards.engine import UnfitShape
from cerebro_hydra.shards.layout import TrialLayout
from cerebro_hydra.shards.module_graph import layer_starts
from cerebro_hydra.shards.report import CutReport
from cerebro_hydra.shards.sample import Example, Sample
from cerebro_hydra.shards.shard_times import measure_layers, measure_shards
from cerebro_hydra.shards.state_template import StateTemplate
from cerebro_hydra.shards.trace import CutFailed

__all__ = ["AdmittedCut", "CutReport", "StateTemplate", "admit"]


@dataclass(frozen=True)
class AdmittedCut:
    """An admitted trial: its cut, what that gives, its optimizer state, where all of it lies."""

    spec: CutSpec
    report: CutReport
    template: StateTemplate
    layout: TrialLayout


def admit(
    recipe: Recipe,
    examples: Sequence[Example],
    trial_seed: int,
    cache: CutModelCache | None = None,
) -> AdmittedCut:
    """Choose a cut and hold it against plain training: two steps at every batch size.

    Loss, parameters, buffers and optimizer state must agree in every bit, with graphs kept and
    recomputed, and through a hop. Where a cut fails, coarser ones follow: the layers of a
    `Sequential`, then one shard; the report says why. The recipe is not changed.

    Args:
        examples: real batches (features, targets), one for each batch size that will occur.

    Raises:
        ConfigurationError: model, loss or optimizer don't work on the batches, `shards` names a
            place where no cut is possible, or training differs even uncut.
    """
    if not examples:
        raise ConfigurationError("admission needs a batch to try the model on; there are no rows")
    cache = cache or CutModelCache()
    check = CutCheck.plain(recipe, examples, trial_seed)
    trained = check.trainer.recipe
    template = StateTemplate.learn(trained.model, trained.optimizer)
    largest = max(examples, key=lambda e: e[0][0].shape[0] if e[0][0].dim() else 0)
    sample = Sample.of(recipe, largest)

    reasons: list[str] = []
    for choice in _candidates(recipe, sample, largest, template, cache, reasons):
        try:
            cut_model = cache.get(recipe.model, choice.spec, sample)
            layout = TrialLayout.make(recipe, cut_model, template)
            # Modules run as they are may keep something to themselves, which would not hop.
            hop = partial(CutModel.build, recipe.model, choice.spec, sample)
            again = None if choice.spec.mode == "export" else hop
            difference = check.difference(cut_model, layout, again)
        except UnfitShape as error:
            difference = str(error)
        except ConfigurationError:
            raise
        except Exception as error:
            difference = f"{type(error).__name__}: {error}"
        if difference is None:
            notes = [*reasons, *([choice.note] if choice.note else [])]
            report = CutReport.of(cut_model, layout, choice.why, "; ".join(notes) or None)
            return AdmittedCut(choice.spec, report, template, layout)
        mode = choice.spec.mode
        reasons.append(f"cut by {mode}, training differs from the uncut model: {difference}")
    raise ConfigurationError(
        "the model can't be trained reproducibly: " + "; ".join(reasons) + ". Look for random "
        "numbers from outside of torch's CPU generator or in evaluation, state outside of "
        "parameters and buffers, or torch.utils.checkpoint"
    )


def _candidates(
    recipe: Recipe, sample: Sample, example: Example, template: StateTemplate,
    cache: CutModelCache, reasons: list[str],
) -> Iterator[CutChoice]:  # fmt: skip
    """Cuts to try, the finest first; why one can't be tried goes into `reasons`."""
    if recipe.shards == 1 or recipe.shards == [] or recipe.shards == [[]]:
        yield whole()
        return

    def choose(places: Places) -> CutChoice:
        if isinstance(recipe.shards, int):
            return by_time(places, times(places), recipe.shards)
        if isinstance(recipe.shards[0], str):
            return by_name(places, recipe.shards)
        return by_blocks(places, recipe.shards)

    def times(places: Places) -> Sequence[float]:
        spec = CutSpec(places.mode, places.legal)

        def measure() -> list[float]:
            if places.mode == "layers":
                return measure_layers(recipe, places.legal, sample)
            cut_model = cache.get(recipe.model, spec, sample)
            layout = TrialLayout.make(recipe, cut_model, template)
            return measure_shards(recipe, cut_model, layout, example)

        return cache.times(recipe.model, spec, sample, measure)

    try:
        traced = cache.trace(recipe.model, sample)
        by_number = isinstance(recipe.shards, int)
        legal = traced.worthwhile if by_number else traced.legal
        yield choose(Places("export", legal, tuple(traced.train.markers)))
    except CutFailed as error:
        reasons.append(str(error))
    try:
        starts = layer_starts(recipe.model)
        order = tuple(f"{unit}@0" for unit in units(recipe.model))
        yield choose(Places("layers", starts, order))
    except CutFailed as error:
        reasons.append(f"{error}, so it is one shard")
    yield whole()
