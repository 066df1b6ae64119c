"""Chooses how the trials of a search train, among what changes no bit, in as much time as there is.

Each way is judged by a simulation of the whole search: its hopper, the queues of all workers, and
evaluations. The choices are the cut, a synchronous schedule over so many devices, and whether
activations are computed again. No device is named: where a trial waits for whichever device is
free, the same cuts end as early as with the best devices named (``benchmarks/placement``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from cerebro_hydra.hopper.protocol.resources import WorkerResources
from cerebro_hydra.observe.planned import MOST_BARS, WorkerLane, lanes_of
from cerebro_hydra.observe.records import Decision
from cerebro_hydra.observe.timeline import Timeline
from cerebro_hydra.plan.costs.model import CostModel
from cerebro_hydra.plan.human_units import seconds_text
from cerebro_hydra.plan.messages.config import HopConfig
from cerebro_hydra.plan.messages.events import TrialProposed
from cerebro_hydra.plan.schedules.trial_plan import TrialPlan
from cerebro_hydra.plan.sizing.cuts import balance, cut_by_bytes
from cerebro_hydra.planning.followed_search import Recorded
from cerebro_hydra.planning.plan import any_metric, fitting
from cerebro_hydra.planning.planned_trials import PlannedTrial, as_measured
from cerebro_hydra.planning.simulated_search import Outcome, Place, simulate
from cerebro_hydra.shards.admission.trial_profile import Needs, TaskProfile

LEAST_GAIN = 0.05
"""The share of the plain choice's seconds that another one must save, since seconds are guesses."""

MORE_SHARDS = 6
"""So many shards more than the plain choice has are tried."""

WORD_SECONDS = 0.0005
"""What a task in a pipeline waits for words beside its own seconds (``benchmarks/gap``)."""

MOST_SUB_EPOCHS, MOST_ACTIONS, MOST_EPOCHS = 400, 1500, 2
"""Of a search that is judged; a part of a larger one is, and its visits flow."""


@dataclass(frozen=True)
class Way:
    """Is one way to train a trial.

    Args:
        trial: as it is trained so.
        cuts: the units at which its shards but the first begin; None if it is cut as without a
            plan.
    """

    trial: PlannedTrial
    cuts: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Choice:
    """Tells which way was chosen, and what is expected of the search.

    Args:
        seconds: that it takes so.
        plain_seconds: that it takes without a plan.
        tried: how many ways were judged.
        possible: how many there are.
    """

    way: Way
    seconds: float
    plain_seconds: float
    tried: int
    possible: int

    def text(self, trials: int) -> str:
        """Return it in a line.

        Args:
            trials: that the search has, as far as is known.
        """
        plan = self.way.trial.spec.plan
        many = f"{trials} trials are" if trials > 1 else "the trial is"
        of = f"{self.tried} of {self.possible} ways were simulated"
        plain = seconds_text(self.plain_seconds)
        if plan is None:
            saved = f"no other way is expected to save {LEAST_GAIN:.0%}"
            return f"plan: the plain choice, {many} expected to train for {plain}; {saved} ({of})"
        shards = len(self.way.trial.profile.shards)
        cut = f"{shards} shards" if shards > 1 else "one shard"
        where = f" over {plan.devices} devices" if plan.devices > 1 else ""
        kept = "computed again" if plan.recompute else "kept"
        taken = seconds_text(self.seconds)
        return (
            f"plan: {cut}, {plan.schedule}{where}, activations {kept}; {many} expected to train "
            f"for {taken}, and for {plain} by the plain choice ({of})"
        )


def ways(
    plain: PlannedTrial, units: PlannedTrial | None, resources: WorkerResources, cuts_are_free: bool
) -> Iterator[Way]:
    """Yield the ways to train a trial that workers can take, the plain one first.

    Args:
        plain: without a plan.
        units: the same, with each shard as small as the user lets it be; None if it is not known.
        cuts_are_free: whether these may be joined to larger ones.
    """
    plain = _evened(plain)
    yield Way(plain)
    if units is not None:
        units = _at_pace(_evened(units), plain)
    as_it_is = plain.plan_followed(resources)
    asked = plain.spec.recompute
    again = (False, True) if asked is None else (asked,)
    for recompute in again:
        for cuts, plan in [
            *_pipelined(units, resources.devices, recompute, cuts_are_free),
            *_sequential(plain, units, resources, recompute, cuts_are_free),
        ]:
            if cuts is None and plan == as_it_is:
                continue
            source = plain if cuts is None or units is None else units
            profile = source.profile if cuts is None else source.profile.joined(cuts)
            assert profile.tasks is not None
            if (profile.tasks.recompute if recompute else profile.tasks.keep) is None:
                continue
            spec = replace(
                source.spec,
                plan=plan,
                recompute=asked,
                schedule=plain.spec.schedule,
                **as_measured(profile),
                shards=source.spec.shards[:1] * len(profile.shards),
            )
            trial = PlannedTrial(spec)
            fits = not isinstance(fitting(trial, resources, (1, 0)), str)
            if fits and trial.plan_followed(resources) == plan:
                yield Way(trial, cuts)


def _evened(trial: PlannedTrial) -> PlannedTrial:
    """Return a trial whose tasks take as long in both ways where they do the same.

    What is computed again is never faster; where it was measured so, that was by chance.
    """
    tasks = trial.profile.tasks
    if tasks is None or tasks.keep is None or tasks.recompute is None:
        return trial
    keep, again = [], []
    for kept, repeated in zip(tasks.keep, tasks.recompute, strict=True):
        forward = min(kept.forward, repeated.forward)
        update = min(kept.update, repeated.update)
        less, more = sorted((kept.backward, repeated.backward))
        keep.append(replace(kept, forward=forward, backward=less, update=update))
        again.append(replace(repeated, forward=forward, backward=more, update=update))
    return _with(trial, replace(tasks, keep=tuple(keep), recompute=tuple(again)))


def _at_pace(units: PlannedTrial, plain: PlannedTrial) -> PlannedTrial:
    """Return a trial in small shards whose steps take as long as those of the plain choice.

    A cut costs next to nothing (``benchmarks/cut_overhead``), and the two were measured apart.
    """
    mine, other = units.profile.tasks, plain.profile.tasks
    if mine is None or other is None:
        return units
    for way in ("keep", "recompute"):
        needs, told = getattr(mine, way), getattr(other, way)
        if needs and told and (seconds := _seconds(needs)):
            pace = _seconds(told) / seconds
            keep, again = (_timed(each, pace) for each in (mine.keep, mine.recompute))
            return _with(units, replace(mine, keep=keep, recompute=again))
    return units


def _seconds(needs: Needs) -> float:
    return sum(each.forward + each.backward + each.update for each in needs)


def _with(trial: PlannedTrial, tasks: TaskProfile) -> PlannedTrial:
    return replace(trial, spec=replace(trial.spec, tasks=tasks.to_json()))


_Cut = tuple[tuple[int, ...] | None, TrialPlan]


def _pipelined(
    units: PlannedTrial | None, devices: int, recompute: bool, cuts_are_free: bool
) -> Iterator[_Cut]:
    """Yield plans by which several devices train a trial together."""
    if units is None or units.profile.tasks is None or units.profile.tasks.moving is None:
        return
    count = len(units.profile.shards)
    for used in range(min(devices, count), 1, -1):
        for schedule in ("1f1b", "gpipe", "interleaved"):
            shards = 2 * used if schedule == "interleaved" else used
            if shards > count:
                continue
            cuts = _by_time(units, shards) if cuts_are_free else (*range(1, count),)
            yield cuts, TrialPlan(schedule, recompute, used)


def _sequential(
    plain: PlannedTrial,
    units: PlannedTrial | None,
    resources: WorkerResources,
    recompute: bool,
    cuts_are_free: bool,
) -> Iterator[_Cut]:
    """Yield plans by which a device at a time trains a trial."""
    plan = TrialPlan("sequential", recompute)
    yield None, plan
    if units is None or not cuts_are_free or resources.device_memory is None:
        return
    count, fewest = len(units.profile.shards), len(plain.profile.shards)
    found = dict.fromkeys(
        cut(units, shards)
        for shards in range(1, min(fewest + MORE_SHARDS, count) + 1)
        for cut in (_by_time, _by_bytes)
    )
    for cuts in found:
        yield cuts, plan


def _by_time(units: PlannedTrial, shards: int) -> tuple[int, ...]:
    """Return where so many shards of equal time begin."""
    visit = units.uncut_visit
    parts = balance([unit.forward + unit.backward for unit in visit.shards], shards)
    return tuple(part.start for part in parts[1:])


def _by_bytes(units: PlannedTrial, shards: int) -> tuple[int, ...]:
    """Return where so many shards begin of which the largest is as small as can be."""
    parts = cut_by_bytes(units.uncut_visit.device_shards, shards)
    return tuple(part.start for part in parts[1:])


class SearchJudge:
    """Says how long a search takes whose trials train in certain ways.

    Args:
        config: what is fixed for the run.
        place: its workers.
        costs: of moves and hops.
    """

    def __init__(self, config: HopConfig, place: Place, costs: CostModel) -> None:
        self._config, self.place, self._costs = config, place, costs

    def seconds(self, trials: Sequence[PlannedTrial], epochs: int) -> float:
        """Return what trials take, about; a large search is judged by a part of it.

        It is infinite if one of them does not fit.
        """
        few = min(epochs, MOST_EPOCHS)
        outcome = self.outcome(trials, few, MOST_SUB_EPOCHS, MOST_ACTIONS)
        if outcome.refused:
            return math.inf
        return outcome.seconds * epochs / few

    def lanes(self, trials: Sequence[PlannedTrial], epochs: int) -> tuple[WorkerLane, ...]:
        """Return what each worker does of a search; nothing of one that is too large for that."""
        outcome = self.outcome(trials, epochs, MOST_BARS, MOST_ACTIONS)
        if outcome.part > 1:
            return ()
        timeline = Timeline()
        decided = zip(outcome.timeline.moments, outcome.timeline.records, strict=True)
        for seq, (moment, (event, instructions)) in enumerate(decided):
            timeline.apply(Decision(seq, moment, event, tuple(instructions)))
        timeline.lay_out()
        return lanes_of(timeline)

    def outcome(
        self, trials: Sequence[PlannedTrial], epochs: int, sub_epochs: int, actions: int
    ) -> Outcome:
        """Return what trials take, each for so many epochs."""
        trained = [(_slowed(trial), epochs) for trial in trials]

        def admit(candidate: TrialProposed) -> PlannedTrial | str:
            trial = trained[candidate.trial][0].numbered(candidate.trial)
            return fitting(trial, self.place.resources, (max(self.place.train_rows), 0))

        return simulate(
            self._config,
            Recorded(trained),
            admit,
            self.place,
            self._costs,
            any_metric,
            sub_epochs,
            actions,
        )


def _slowed(trial: PlannedTrial) -> PlannedTrial:
    """Return a trial whose tasks wait for words, too, where they go from device to device."""
    plan, tasks = trial.spec.plan, trial.profile.tasks
    if plan is None or plan.devices == 1 or tasks is None:
        return trial
    keep, again = (_timed(each, 1.0, WORD_SECONDS) for each in (tasks.keep, tasks.recompute))
    return _with(trial, replace(tasks, keep=keep, recompute=again))


def _timed(needs: Needs | None, pace: float, more: float = 0.0) -> Needs | None:
    """Return tasks that take so many times as long, and passes that take some seconds more."""
    return needs and tuple(
        replace(
            each,
            forward=pace * each.forward + more,
            backward=pace * each.backward + more,
            update=pace * each.update,
        )
        for each in needs
    )


def choose(
    judge: SearchJudge,
    possible: Iterable[Way],
    before: Sequence[PlannedTrial],
    alike: int,
    epochs: int,
    elapsed: Callable[[], float],
    build: float = 0.0,
) -> Choice:
    """Return the best way that was found for trials that are alike.

    Args:
        possible: the ways to train each of them, the plain one first.
        before: the other trials of the search.
        alike: how many there are.
        elapsed: is asked before each way which share of the time is over.
        build: the seconds in which a device makes the graphs of a trial for its first task in a
            pipeline, one device after the other.
    """
    all_ways = [*possible]
    found: dict[int, float] = {}
    for number, way in enumerate(all_ways):
        if number and elapsed() >= 1.0:
            break
        found[number] = judge.seconds([*before, *[way.trial] * alike], epochs)
        plan = way.trial.spec.plan
        if plan is not None and plan.devices > 1:
            found[number] += build * plan.devices
    best = min(found, key=found.__getitem__)
    if found[best] > (1 - LEAST_GAIN) * found[0]:
        best = 0
    return Choice(all_ways[best], found[best], found[0], len(found), len(all_ways))
