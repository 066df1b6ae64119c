"""Admits a trial: its model is cut, and real batches prove that the cut keeps every bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from cerebro_hydra.errors import ConfigurationError, StepDiffers
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.cut_check import CutCheck, largest_example
from cerebro_hydra.shards.cut_choice import (
    CutChoice,
    CutPoints,
    choose_by_blocks,
    choose_by_name,
    choose_by_time,
    choose_whole,
)
from cerebro_hydra.shards.cut_model import CutModelCache
from cerebro_hydra.shards.cut_report import CutReport, FailedAttempt
from cerebro_hydra.shards.cut_spec import CutSpec
from cerebro_hydra.shards.kept_heap import kept_heap
from cerebro_hydra.shards.layout import TrialLayout
from cerebro_hydra.shards.microbatch_maker import UnfitShape
from cerebro_hydra.shards.sample import Example, Sample
from cerebro_hydra.shards.shard_times import measure_shards
from cerebro_hydra.shards.state_template import StateTemplate
from cerebro_hydra.shards.trace import CutFailed


@dataclass(frozen=True)
class AdmittedCut:
    """Holds a trial's admitted cut, the report, the optimizer state and the layout in memory."""

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
    """Choose a cut and compare it with plain training, two steps at every batch size.

    Loss, parameters, buffers and optimizer state must agree in every bit, with graphs kept and
    recomputed, and through a hop. Where a cut fails, fewer shards are tried, then the whole model.
    The report says why. The recipe is not changed.

    Args:
        examples: real batches (features, targets), one for each batch size that will occur.

    Raises:
        ConfigurationError: the model, loss or optimizer fails on the batches, `shards` names a
            place where no cut is possible, or training differs even uncut.
    """
    if not examples:
        raise ConfigurationError("there are no rows; admission needs a batch to try the model on")
    with kept_heap():
        return _admit(recipe, examples, trial_seed, cache or CutModelCache())


def _admit(
    recipe: Recipe, examples: Sequence[Example], trial_seed: int, cache: CutModelCache
) -> AdmittedCut:
    check = CutCheck.plain(recipe, examples, trial_seed)
    trained = check.trainer.recipe
    template = StateTemplate.learn(trained.model, trained.optimizer)
    largest = largest_example(examples)
    sample = Sample.of(recipe, largest)

    attempts: list[FailedAttempt] = []
    tried: set[CutSpec] = set()
    for choice in _candidates(recipe, sample, largest, check, template, cache, attempts):
        if choice.spec in tried:
            continue  # a model of few units has no more shards to give
        tried.add(choice.spec)
        try:
            cut_model = cache.get(recipe.model, choice.spec, sample)
            layout = TrialLayout.make(recipe, cut_model, template)
            difference = check.difference(cut_model, layout)
            reason = f"training differs from the uncut model: {difference}"
        except UnfitShape as error:
            difference = reason = str(error)
        except StepDiffers as error:
            difference = reason = f"training differs from the uncut model: {error}"
        except ConfigurationError:
            raise
        except Exception as error:
            difference = reason = _raised(error)
        if difference is None:
            report = CutReport.of(cut_model, layout, choice.why, choice.note, attempts)
            return AdmittedCut(choice.spec, report, template, layout)
        shards = len(choice.spec.at) + 1
        way = f"by {choice.spec.mode} into {shards} shards" if shards > 1 else "as one shard"
        attempts.append(FailedAttempt(way, reason))
    raise _refusal(attempts)


def _raised(error: Exception) -> str:
    return f"a step failed: {type(error).__name__}: {error}"


def _refusal(attempts: Sequence[FailedAttempt]) -> ConfigurationError:
    """Return the error of a model that differs even as one shard, with the attempts as notes."""
    difference = attempts[-1].reason.partition("; ")[0]
    refusal = ConfigurationError(
        f"the model can't be trained reproducibly, as {difference}; look for random numbers from "
        "outside of torch's CPU generator or in evaluation, and for state outside of parameters "
        "and buffers"
    )
    for attempt in attempts:
        refusal.add_note(str(attempt))
    return refusal


def _candidates(
    recipe: Recipe, sample: Sample, example: Example, check: CutCheck, template: StateTemplate,
    cache: CutModelCache, attempts: list[FailedAttempt],
) -> Iterator[CutChoice]:  # fmt: skip
    """Yield the cuts to try, the finest first, and add to `attempts` why one can't be tried."""
    by_number = isinstance(recipe.shards, int)
    profile = check.profile
    starts = profile.starts(recipe.model, by_number)
    between_units = CutPoints(
        "modules", starts, profile.order, tuple(sorted(profile.overwritten)), check.written
    )
    if recipe.shards == 1 or recipe.shards == [] or recipe.shards == [[]]:
        yield choose_whole(between_units)
        return

    def choices(points: CutPoints) -> Iterator[CutChoice]:
        if not isinstance(recipe.shards, int):
            by_name = isinstance(recipe.shards[0], str)
            yield (choose_by_name if by_name else choose_by_blocks)(points, recipe.shards)
            return
        seconds, number = times(points), recipe.shards
        yield choose_by_time(points, seconds, number)
        while (number := min(number, len(seconds)) // 2) > 1:
            yield choose_by_time(points, seconds, number)

    def times(points: CutPoints) -> Sequence[float]:
        spec = points.spec(points.allowed)

        def measure() -> list[float]:
            if points.mode == "modules":
                return profile.between(points.allowed)
            cut_model = cache.get(recipe.model, spec, sample)
            layout = TrialLayout.make(recipe, cut_model, template)
            return measure_shards(recipe, cut_model, layout, example)

        return cache.times(recipe.model, spec, sample, measure)

    if recipe.cut == "export":
        try:
            between_markers = _between_markers(recipe, sample, check.rows, cache)
            yield from choices(replace(between_markers, overwritten=between_units.overwritten))
        except CutFailed as error:
            attempts.append(FailedAttempt("by export", str(error)))
        except ConfigurationError:
            raise
        except Exception as error:
            attempts.append(FailedAttempt("by export", _raised(error)))
    yield from choices(between_units)
    yield choose_whole(between_units)


def _between_markers(
    recipe: Recipe, sample: Sample, rows: tuple[int, ...], cache: CutModelCache
) -> CutPoints:
    """Return where the model's graph can be cut, or its graphs for each of these numbers of rows.

    Raises:
        CutFailed: `torch.export` can't take the model.
    """
    traced = [cache.trace(recipe.model, sample)]
    if traced[0].any_rows:
        rows = ()
    else:
        traced = [cache.trace(recipe.model, sample, each) for each in rows]
    first = traced[0]
    allowed = first.cut_points_with_params if isinstance(recipe.shards, int) else first.cut_points
    in_all = tuple(unit for unit in allowed if all(unit in each.cut_points for each in traced))
    return CutPoints("export", in_all, tuple(first.train.markers), rows=rows)
