"""Admits a trial: its model is cut, and real batches prove that the cut keeps every bit.

Trials whose keys are equal share one admission. A report tells the cut shard by shard.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from cerebro_hydra.errors import ConfigurationError, NonFiniteLoss, StepDiffers
from cerebro_hydra.foreign_text import error_text, is_error, named_error_text
from cerebro_hydra.plan.schedules.registry import is_pipelined
from cerebro_hydra.plan.sizing.pipeline import Pipeline
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.recipe.attributes import kept_attributes
from cerebro_hydra.recipe.checked_parts import AUTO
from cerebro_hydra.recipe.compiled_units import compiled_alike
from cerebro_hydra.recipe.module_origins import is_own
from cerebro_hydra.shards.admission.compare import CutCheck, largest_example
from cerebro_hydra.shards.admission.effects.as_built import AsBuilt
from cerebro_hydra.shards.admission.effects.evaluation_effects import (
    DRAWS,
    check_switched_blindly,
)
from cerebro_hydra.shards.admission.effects.held_state import kept_by_optimizer
from cerebro_hydra.shards.admission.effects.readings import KnownChanges
from cerebro_hydra.shards.admission.fit import choose_number_to_fit, choose_to_fit, measure_shards
from cerebro_hydra.shards.admission.task_profiler import TaskProfiler
from cerebro_hydra.shards.admission.trial_profile import TrialProfile
from cerebro_hydra.shards.cut.choice import (
    CutChoice,
    CutPoints,
    choose_by_blocks,
    choose_by_name,
    choose_by_time,
    choose_given,
    choose_whole,
)
from cerebro_hydra.shards.cut.model import CutModel, CutModelCache
from cerebro_hydra.shards.cut.model_key import structure_key
from cerebro_hydra.shards.cut.sample import Example, Sample
from cerebro_hydra.shards.cut.second_names import SecondNames
from cerebro_hydra.shards.cut.shard_graph import CrossingValue
from cerebro_hydra.shards.cut.small_buffers import small_buffers
from cerebro_hydra.shards.cut.spec import CutSpec
from cerebro_hydra.shards.cut.torch_cond import cond_failed, is_of_cond, leave_cond
from cerebro_hydra.shards.cut.trace import CutFailed
from cerebro_hydra.shards.digest import tensor_digest
from cerebro_hydra.shards.engine.layout import TrialLayout, check_no_overlap
from cerebro_hydra.shards.engine.microbatch import UnfitShape
from cerebro_hydra.shards.engine.optimizer import NOT_CLONED, StateTemplate
from cerebro_hydra.shards.heap import kept_heap
from cerebro_hydra.shards.mapped_memory import MappedMemory

_COPIES_TRAINED = 13
"""Bytes that admission takes for each byte of parameters that train, as measured with AdamW, a
moving average, clipping by the norm and a profile of the tasks; without these it is about half."""
_COPIES_FROZEN = 3

_NOT_ADMITTED = ("model", "optimizer", "warm_start", "early_stopping")
"""Fields of a recipe that are in the key in another form, or decide nothing in a step."""

_OF_SCHEDULE = ("model", "optimizer", "lr_scheduler", "lr_interval", "lr_metric")

_DIFFERS = "training differs from the uncut model"

_NAN_IN_EVALUATION = f"a step failed: {NonFiniteLoss.__name__}: the validation loss"

_FREE_OPTIONS = ("lr", "initial_lr", "weight_decay")


@dataclass(frozen=True)
class AdmittedCut:
    """Holds a trial's admitted cut, the report, the optimizer state and the layout in memory."""

    spec: CutSpec
    report: CutReport
    template: StateTemplate
    layout: TrialLayout
    profile: TrialProfile
    """What the queues of workers must know; without tasks if nobody asked for them."""
    attributes: tuple[str, ...] = ()
    """Marks of what else the first steps changed, which depends on no history; `KnownChanges`."""
    set_in_evaluation: tuple[str, ...] = ()
    """What the first evaluations changed, each of which sets it anew."""
    warnings: Mapping[str, str] = field(default_factory=dict)
    """What the user should know of metrics, by their names."""

    def pipeline(self, recipe: Recipe, devices: int, budget: int | None) -> Pipeline:
        """Return how the trial is spread over the devices of a worker.

        The devices that workers have when a trial is admitted decide once for all which older
        weights its tasks read.

        Args:
            budget: the bytes of the smallest device.

        Raises:
            ConfigurationError: there are no stages as they were asked for, or the schedule can't
                have what the trial demands of it.
        """
        return self.profile.pipeline(recipe, devices, budget)


def memory_needed(recipe: Recipe) -> int:
    """Return about how many bytes the admission of a recipe takes at once, at most."""
    parameters = [(p.nbytes, p.requires_grad) for p in recipe.model.parameters()]
    return sum(
        nbytes * (_COPIES_TRAINED if trains else _COPIES_FROZEN) for nbytes, trains in parameters
    )


@contextmanager
def on_disk(recipe: Recipe, folder: str, resident: float) -> Iterator[None]:
    """Let what a model's admission needs lie in files, of which this much is in memory at once.

    Its parameters are there from now on, and what else is made until the end.

    Raises:
        ConfigurationError: two parameters share memory.
    """
    check_no_overlap(recipe)
    stay = SecondNames(recipe.model).keys  # so that admission still finds them
    with MappedMemory(folder, resident):
        for name, parameter in recipe.model.named_parameters():
            if ("parameter", name) not in stay:
                parameter.data = parameter.data.clone()
        yield


def admit(
    recipe: Recipe,
    examples: Sequence[Example],
    trial_seed: int,
    cache: CutModelCache | None = None,
    profiler: TaskProfiler | None = None,
    least_shards: int = 1,
    evaluated_rows: Collection[int] = (),
    given: CutSpec | None = None,
) -> AdmittedCut:
    """Choose a cut and compare it with plain training, two steps at every batch size.

    Loss, parameters, buffers and optimizer state must agree in every bit, with graphs kept and
    recomputed, and through a hop. Where a cut fails, fewer shards are tried, then the whole model.
    The report says why. The recipe is not changed.

    Args:
        examples: real batches (features, targets), one for each batch size that trains.
        profiler: measures the admitted cut, and says what `shards="auto"` has to fit.
        least_shards: what `shards="auto"` tries to have at least.
        evaluated_rows: the batch sizes of evaluations, which may be larger than all that train.
        given: a cut by modules that is tried first, as that of the trial whose state this one has.

    Raises:
        ConfigurationError: the model, loss or optimizer fails on the batches, `shards` names a
            place where no cut is possible, a unit fits no device, or training differs even uncut.
    """
    if not examples:
        raise ConfigurationError("there are no rows; admission needs a batch to try the model on")
    with kept_heap(), compiled_alike():
        cache = cache or CutModelCache()
        rest = cache, profiler, least_shards, evaluated_rows, given
        return _admit(recipe, examples, trial_seed, *rest)


def _admit(
    recipe: Recipe,
    examples: Sequence[Example],
    trial_seed: int,
    cache: CutModelCache,
    profiler: TaskProfiler | None,
    least_shards: int,
    evaluated_rows: Collection[int],
    given: CutSpec | None,
) -> AdmittedCut:
    check = CutCheck.plain(recipe, examples, trial_seed)
    template = check.template
    largest = largest_example(examples)
    sample = Sample.of(recipe, largest, AsBuilt.settings_of(recipe))

    def profiled(spec: CutSpec) -> TrialProfile:
        assert profiler is not None
        cut_model = cache.get(recipe.model, spec, sample)
        layout = TrialLayout.make(recipe, cut_model, template)
        try:
            most = max(evaluated_rows, default=0)
            return profiler.profile(recipe, cut_model, layout, template, largest, most)
        except Exception as error:
            if not is_of_cond(error):
                raise
            leave_cond()
            told = cond_failed(error, "while its memory was measured")
            raise ConfigurationError(
                f"{told}; call it as torch.cond(...), or compute both branches and choose by "
                "torch.where"
            ) from error

    def times(points: CutPoints) -> Sequence[float]:
        spec = points.spec(points.allowed)

        def measure() -> list[float]:
            if points.mode == "modules":
                return check.profile.between(points.allowed)
            cut_model = cache.get(recipe.model, spec, sample)
            layout = TrialLayout.make(recipe, cut_model, template)
            return measure_shards(recipe, cut_model, layout, largest)

        return cache.times(recipe.model, spec, sample, measure)

    def measured(spec: CutSpec) -> TrialProfile:
        try:
            return profiled(spec)
        except (ConfigurationError, StepDiffers) as error:  # it may be about this cut
            raise CutFailed(error_text(error)) from error

    def by_number(points: CutPoints) -> tuple[CutChoice, Sequence[float]]:
        """Return the first choice where no places are named, and the seconds between places."""
        if isinstance(recipe.shards, int):
            seconds = times(points)
            choice = choose_by_time(points, seconds, recipe.shards)
            if profiler is not None:
                try:
                    choice = choose_number_to_fit(recipe, points, profiler, measured, choice)
                except ConfigurationError:
                    raise
                except Exception:  # what is tried next finds it again, and then fewer are tried
                    return choice, seconds
            return choice, seconds
        if profiler is None:
            return choose_whole(points), ()
        try:
            return choose_to_fit(recipe, points, profiler, measured, times, least_shards)
        except ConfigurationError:
            raise
        except Exception as error:
            attempts.append(FailedAttempt(f"by {points.mode}", _failed(error)))
            return choose_whole(points), ()

    attempts: list[FailedAttempt] = []
    tried: set[CutSpec] = set()
    refused: ConfigurationError | None = None
    rows = tuple(sorted({*check.rows, *evaluated_rows}, reverse=True))
    first = [] if given is None or check.shared else [choose_given(given)]
    others = _candidates(recipe, sample, check, rows, by_number, cache, attempts)
    for choice in itertools.chain(first, others):
        if choice.spec in tried:
            continue  # a model of few units has no more shards to give
        tried.add(choice.spec)
        refused = None
        try:
            cut_model = cache.get(recipe.model, choice.spec, sample)
            layout = TrialLayout.make(recipe, cut_model, template)
            profile = TrialProfile.of(recipe, cut_model, layout, None)
            difference = check.difference(cut_model, layout)
            reason = f"{_DIFFERS}: {difference}"
            if difference is None and profiler is not None:
                profile = profiled(choice.spec)
        except UnfitShape as error:
            difference = reason = str(error)
        except ConfigurationError as error:  # it may be about the cut, as one of memory that moves
            difference = reason = error_text(error)
            refused = error
        except Exception as error:
            difference = reason = _failed(error)
            if is_of_cond(error):
                leave_cond()
                reason = cond_failed(error, "in shards")
        if difference is None:
            check_switched_blindly(recipe.model)
            notes = [*([choice.note] if choice.note else []), *map(_uncompiled, recipe.uncompiled)]
            if (compiled := recipe.compiled_units) and choice.spec.mode == "modules":
                notes.append(f"compiled: {', '.join(compiled)}")
            report = CutReport.of(cut_model, layout, choice.why, notes, attempts)
            return AdmittedCut(
                choice.spec, report, template, layout, profile, check.attributes,
                check.set_in_evaluation, check.warnings,
            )  # fmt: skip
        shards, way = len(choice.spec.at) + 1, "as one shard"
        if shards > 1:
            way = f"by {choice.spec.mode} into {shards} shards"
            reason += check.shared_state.told
        attempts.append(FailedAttempt(way, reason))
    raise _refusal(attempts, check) if refused is None else _noted(refused, attempts)


def _uncompiled(name: str) -> str:
    module = f"module {name!r}" if name else "the model"
    return (
        f"{module} is compiled as a whole and runs as it was before torch.compile, because shards "
        "begin inside of it; compile its layers one by one"
    )


def _failed(error: Exception) -> str:
    if isinstance(error, CutFailed):
        return str(error)
    if is_error(error, StepDiffers):
        return f"{_DIFFERS}: {error}"
    return f"a step failed: {named_error_text(error)}"


def _refusal(attempts: Sequence[FailedAttempt], check: CutCheck) -> ConfigurationError:
    """Return the error of a model that differs even as one shard, with the attempts as notes."""
    difference = attempts[-1].reason.partition("; ")[0]
    if (known := _known_cause(attempts, check)) is not None:
        return known
    changed = " and ".join(KnownChanges(check.attributes).told(most=2))
    refusal = ConfigurationError(
        f"the model can't be trained reproducibly, as {difference}; look for random numbers from "
        "outside of torch's CPU generator or in evaluation, and for state outside of parameters "
        "and buffers" + (f", such as {changed}, which the first steps changed" if changed else "")
    )
    return _noted(refusal, attempts)


def _known_cause(attempts: Sequence[FailedAttempt], check: CutCheck) -> ConfigurationError | None:
    """Return the error of training that differs for a cause that is known, however it is cut."""
    reason = attempts[-1].reason if attempts else ""
    measured = re.search(r"[^: ][^:]* in evaluation", reason)
    if measured is not None or reason.startswith(_NAN_IN_EVALUATION):
        for place, module in _set_by_mode(check.recipe.model):
            refusal = ConfigurationError(
                f"train() or eval() of {f'module {place!r}' if place else 'the model'} "
                f"({type(module).__name__}) sets what evaluations compute with, and weights come "
                "only later; compute in forward what depends on weights"
            )
            return _noted(refusal, attempts)
    if not reason.startswith(_DIFFERS):
        return None
    if measured is not None and DRAWS in check.set_in_evaluation:
        refusal = ConfigurationError(
            f"{measured[0]} depends on random numbers, which have no key there; draw them "
            "`if self.training` only, and make layers in __init__, not in a forward"
        )
        return _noted(refusal, attempts)
    if measured is not None and check.recipe.ema is not None:
        refusal = ConfigurationError(
            f"{measured[0]} differs with ema={check.recipe.ema}: what a loss, a metric or a hook "
            "takes from the model itself, such as model.parameters(), is not the average, which "
            "ema evaluates; take a penalty on weights by weight_decay of the optimizer, or leave "
            "ema out"
        )
        return _noted(refusal, attempts)
    for name in check.reordered:
        refusal = ConfigurationError(
            f"training puts a tensor with other strides in the place of buffer {name!r}, in which "
            "kernels round otherwise; give it .contiguous(), or copy_ it there"
        )
        return _noted(refusal, attempts)
    kept = kept_by_optimizer(check.recipe.optimizer, check.attributes)
    return None if kept is None else _noted(kept, attempts)


def _set_by_mode(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the user's modules that set attributes when they are switched to evaluation."""
    for place, module in model.named_modules():
        if is_own(type(module).train.__module__) or is_own(type(module).eval.__module__):
            with kept_attributes(model):
                before = dict(vars(module.train()))
                held = vars(module.eval())
                if any(held.get(n) is not v for n, v in before.items() if n != "training"):
                    yield place, module


def _noted(refusal: ConfigurationError, attempts: Sequence[FailedAttempt]) -> ConfigurationError:
    for attempt in attempts:
        refusal.add_note(str(attempt))
    return refusal


def _unpipelined(
    schedule: str, attempts: Sequence[FailedAttempt], check: CutCheck
) -> ConfigurationError:
    """Return the error of a model whose microbatches can't go from device to device."""
    if (known := _known_cause(attempts, check)) is not None:
        return known
    why = f": {attempts[-1].reason}" if attempts else ""
    refusal = ConfigurationError(
        f"schedule is {schedule!r}, and the model's graph can't be cut into shards{why}; take "
        "schedule='sequential', which also trains a model that is cut by modules"
    )
    return _noted(refusal, attempts)


def _candidates(
    recipe: Recipe,
    sample: Sample,
    check: CutCheck,
    rows: tuple[int, ...],
    by_number: Callable[[CutPoints], tuple[CutChoice, Sequence[float]]],
    cache: CutModelCache,
    attempts: list[FailedAttempt],
) -> Iterator[CutChoice]:
    """Yield the cuts to try, the finest first, and add to `attempts` why one can't be tried."""
    profile = check.profile
    starts = profile.starts(recipe.model, _is_number(recipe.shards))
    overwritten = tuple(sorted(profile.overwritten))
    fixed = check.named_elsewhere.union(check.written)
    small = tuple(sorted(small_buffers(recipe.model).difference(fixed)))
    written = check.written + small
    between_units = CutPoints("modules", starts, profile.order, overwritten, written)
    if recipe.shards == 1 or (recipe.shards in ([], [[]]) and not recipe.cuts_graph):
        yield choose_whole(between_units)
        return
    if check.shared:
        reason = (
            f"each step sets {check.shared[0]}, which the trials of a process share, so that none "
            "may come between its shards; keep it in an attribute of the model"
        )
        if is_pipelined(recipe.schedule):
            raise ConfigurationError(f"schedule is {recipe.schedule!r}, and {reason}")
        attempts.append(FailedAttempt("into shards", reason))
        yield choose_whole(between_units)
        return

    def choices(points: CutPoints) -> Iterator[CutChoice]:
        if not _is_number(recipe.shards):
            named: Any = recipe.shards
            by_blocks = bool(named) and not isinstance(named[0], str)
            yield (choose_by_blocks if by_blocks else choose_by_name)(points, named)
            return
        choice, seconds = by_number(points)
        yield choice
        number = len(choice.spec.at) + 1
        while (number := number // 2) > 1:
            yield choose_by_time(points, seconds, number)

    if recipe.cuts_graph:
        try:
            between_markers = _between_markers(recipe, sample, rows, cache)
            yield from choices(replace(between_markers, overwritten=overwritten, written=small))
        except CutFailed as error:
            attempts.append(FailedAttempt("by export", str(error)))
        except ConfigurationError:
            raise
        except Exception as error:
            attempts.append(FailedAttempt("by export", _failed(error)))
    if is_pipelined(recipe.schedule):
        raise _unpipelined(recipe.schedule, attempts, check)
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
    allowed = first.cut_points_with_params if _is_number(recipe.shards) else first.cut_points
    in_all = tuple(unit for unit in allowed if all(unit in each.cut_points for each in traced))
    return CutPoints("export", in_all, tuple(first.train.markers), rows=rows)


def _is_number(shards: object) -> bool:
    """Return whether no places are named, so that each shard shall have parameters."""
    return shards == AUTO or isinstance(shards, int)


def admission_key(recipe: Recipe, examples: Sequence[Example]) -> Hashable | None:
    """Return a key that is equal where one admission speaks for another, or None if unknown.

    Free are the trial's seed, the values of trainable parameters, which training changes anyway,
    and learning rate and weight decay, as long as they stay zero or not zero. All else that a
    recipe holds is in the key, and the settings that its code names in its process.
    """
    settings = {
        field.name: getattr(recipe, field.name)
        for field in dataclasses.fields(recipe)
        if field.name not in _NOT_ADMITTED
    }
    settings["shared"] = AsBuilt.settings_of(recipe)
    whole = (recipe.model, _optimizer(recipe), settings, [list(example) for example in examples])
    return structure_key(whole, constants=True)


def training_key(recipe: Recipe) -> Hashable | None:
    """Return a key that is equal where trials train alike but for LR schedules, or None if unknown.

    A trial's seed is not in it, nor are the options of its optimizer's groups, which the schedule
    changes.
    """
    settings = {
        field.name: getattr(recipe, field.name)
        for field in dataclasses.fields(recipe)
        if field.name not in _OF_SCHEDULE
    }
    values = [tensor_digest(parameter) for parameter in recipe.model.parameters()]
    settings["shared"] = AsBuilt.settings_of(recipe)
    whole = (recipe.model, _optimizer(recipe), settings, values)
    return structure_key(whole, constants=True)


def _optimizer(recipe: Recipe) -> dict[str, Any]:
    """Return what decides how the optimizer steps, with parameters by name."""
    optimizer: torch.optim.Optimizer = recipe.optimizer
    names = {id(p): name for name, p in recipe.model.named_parameters()}
    own = {key: value for key, value in vars(optimizer).items() if key not in NOT_CLONED}
    groups = [
        _options(group) | {"params": [names[id(p)] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    state = {names[id(p)]: dict(each) for p, each in optimizer.state.items()}
    own["defaults"] = _options(optimizer.defaults)
    return {"class": type(optimizer), "own": own, "groups": groups, "state": state}


def _options(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: (type(value), value != 0)
        if name in _FREE_OPTIONS and isinstance(value, int | float)
        else value
        for name, value in options.items()
    }


@dataclass(frozen=True)
class ShardReport:
    """Reports a shard: its first and last unit, why it begins there, what it holds and receives."""

    first_unit: str
    last_unit: str
    why: str
    trainable_params: int
    frozen_params: int
    state_nbytes: int
    receives: tuple[CrossingValue, ...]


@dataclass(frozen=True)
class FailedAttempt:
    """Tells in which way a model was to be cut, such as "by export", and why it is not."""

    way: str
    reason: str

    def __str__(self) -> str:
        return f"{self.way}: {self.reason}"

    @property
    def summary(self) -> str:
        """Return the attempt in one clause, without what the reason quotes."""
        return f"it is not cut {self.way}, because {re.split(r' [(]|: ', self.reason)[0]}"


@dataclass(frozen=True)
class CutReport:
    """Reports a cut.

    Args:
        fallback: says in a sentence why the model is not cut as was asked, or is None.
        attempts: the details: what was tried before.
    """

    mode: str
    shards: tuple[ShardReport, ...]
    fallback: str | None = None
    attempts: tuple[FailedAttempt, ...] = ()

    def text(self) -> str:
        """Return the report as text, one line per shard."""
        count = len(self.shards)
        lines = [f"{count} shard{'s' * (count != 1)}, cut by {self.mode}"]
        if self.fallback:
            lines.append(f"  note: {self.fallback}")
            lines += [f"    {attempt}" for attempt in self.attempts]
        for number, shard in enumerate(self.shards):
            crossing = ", ".join(
                f"{v.name} {v.dtype}[{_shown(v.shape)}] {v.nbytes:,} B" for v in shard.receives
            )
            lines.append(
                f"  shard {number}: {shard.first_unit} .. {shard.last_unit}, "
                f"{shard.trainable_params:,} trainable and {shard.frozen_params:,} frozen "
                f"parameters, {shard.state_nbytes:,} B of state"
                + (f", receives {crossing}" if crossing else "")
                + f" ({shard.why})"
            )
        return "\n".join(lines)

    @classmethod
    def of(
        cls,
        cut_model: CutModel,
        layout: TrialLayout,
        why: Sequence[str],
        notes: Sequence[str],
        attempts: Sequence[FailedAttempt],
    ) -> CutReport:
        """Return the report of a cut model, with the reason for the start of each shard."""
        shards = []
        for k, units in enumerate(cut_model.units):
            names = [unit.removesuffix("@0") for unit in units] or ["(the model)"]
            graphs = cut_model.graphs
            shards.append(
                ShardReport(
                    first_unit=names[0],
                    last_unit=names[-1],
                    why=why[k],
                    trainable_params=_count(cut_model, k, frozen=False),
                    frozen_params=_count(cut_model, k, frozen=True),
                    state_nbytes=layout.shards[k].nbytes,
                    receives=graphs.train[k].crossing if graphs else (),
                )
            )
        notes = [*(attempt.summary for attempt in attempts[:1]), *notes]
        return cls(cut_model.spec.mode, tuple(shards), "; ".join(notes) or None, tuple(attempts))


def _shown(shape: Sequence[int | None]) -> str:
    free = ["rows", *("any" for _ in shape[1:])]
    return ", ".join(
        name if size is None else str(size) for name, size in zip(free, shape, strict=False)
    )


def _count(cut_model: CutModel, shard: int, frozen: bool) -> int:
    return sum(
        math.prod(p.shape) for p in cut_model.params if p.owner == shard and p.frozen == frozen
    )
