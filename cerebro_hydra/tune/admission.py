"""Admission: before it trains, a trial is built, cut, tried on real batches and written down.

What it needs of a worker's tiers is said; what can't fit is refused. A trial that is cut anew has
its states laid out in the shards of the new cut: the same tensors, in other segments.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from torch import Tensor, nn

from cerebro_hydra.available_memory import available_memory
from cerebro_hydra.data.preparation.prepared import value_ranges
from cerebro_hydra.errors import CerebroHydraError, ConfigurationError
from cerebro_hydra.foreign_text import traceback_text
from cerebro_hydra.hopper.run_config import trial_config
from cerebro_hydra.hopper.trials import written
from cerebro_hydra.kernels import as_in_shell
from cerebro_hydra.observe.text import parameters
from cerebro_hydra.plan.human_units import bytes_text
from cerebro_hydra.plan.messages.events import RecutState, TrialRecut
from cerebro_hydra.plan.messages.instructions import CutFiner
from cerebro_hydra.plan.schedules.registry import is_flushed, is_pipelined
from cerebro_hydra.plan.schedules.trial_plan import TrialPlan
from cerebro_hydra.planning.auto_plan import ALONE, Outlook
from cerebro_hydra.planning.biller import Biller
from cerebro_hydra.planning.planned_trials import as_cut, shared_with_forks, trial_spec
from cerebro_hydra.recipe import (
    Columns,
    Metric,
    Recipe,
    build_keeping_random_state,
    build_recipe,
    exact_by_address,
    exclusive_generator,
    load_warm_start,
    trial_seed,
)
from cerebro_hydra.recipe.checked_parts import AUTO, least_shards
from cerebro_hydra.recipe.numerics import mkl_mode
from cerebro_hydra.recipe.shared_settings import shared_settings_kept
from cerebro_hydra.replay.states import read_segment
from cerebro_hydra.shards.admission.admit import (
    AdmittedCut,
    CutReport,
    admission_key,
    admit,
    memory_needed,
    on_disk,
)
from cerebro_hydra.shards.admission.effects.isolated_factory import IsolatedFactory
from cerebro_hydra.shards.admission.effects.readings import KnownChanges
from cerebro_hydra.shards.admission.effects.shared_values import shared_kept
from cerebro_hydra.shards.admission.same_builds import SameBuilds
from cerebro_hydra.shards.admission.shared_layers import SharedLayers
from cerebro_hydra.shards.admission.trial_code import form_differences, trial_code
from cerebro_hydra.shards.admission.trial_profile import TaskProfile, asked_recompute
from cerebro_hydra.shards.cut.model import CutModelCache
from cerebro_hydra.shards.cut.sample import Example
from cerebro_hydra.shards.cut.spec import CutSpec
from cerebro_hydra.shards.engine.differences import same_bits
from cerebro_hydra.shards.engine.layout import (
    EXISTS,
    Bytes,
    HostSegments,
    SegmentLayout,
    TrialLayout,
    filled,
    initial_segments,
    is_optimizer_state,
)
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.storage.digest import digest
from cerebro_hydra.storage.names import trial_name
from cerebro_hydra.storage.run_document import TrialSpec
from cerebro_hydra.storage.trial_code import Difference, TrialCode
from cerebro_hydra.tune.example_batches import ExampleBatches, check_value_ranges, check_weights
from cerebro_hydra.tune.trial import reason

_SEGMENTS_AT_ONCE = 2
"""A shard of a finer cut begins in one shard of the former cut, and may end in the next one."""


@dataclass(frozen=True)
class Admitted:
    """A trial that may train, with the custom metrics that merge its states."""

    spec: TrialSpec
    state_metrics: tuple[Metric, ...]


class Refused(Exception):
    """A trial's own code failed; the message is its traceback."""


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Turn whatever a trial's own code raises into a refusal, in a thread that has no other use.

    It may be an exit of the interpreter, or a cancelled task of asyncio; Ctrl-C is for the main
    thread.
    """
    try:
        yield
    except GivenUp:
        raise
    except BaseException as error:
        raise Refused(traceback_text(error)) from error


class GivenUp(SystemExit):
    """Unwinds a thread that was given up, without a word."""


@contextlib.contextmanager
def failing_alone() -> Iterator[None]:
    """Let an error that nobody foresaw end the trial that it comes from, and not the search.

    It may be of the system, of torch, or of ours; Ctrl-C is none.
    """
    try:
        yield
    except (Refused, CerebroHydraError):
        raise
    except Exception as error:
        raise Refused(traceback_text(error)) from error


class Admission:
    """Admits the trials of one run, one model in memory at a time.

    Trials whose recipes are equal but for what `admission_key` leaves free share the steps that one
    of them took.
    """

    def __init__(
        self,
        factory: Callable[[Any], Any],
        columns: Columns,
        examples: ExampleBatches,
        folder: RunFolder | None,
        seed: int,
        evaluation_metric: str,
        report: Callable[[str], None],
        biller: Biller,
        keep: str | None = None,
    ) -> None:
        """Admit nothing yet; `report` is given a description of every new cut.

        Without a folder nothing is written, as where trials are only planned.
        """
        if not exact_by_address():
            report(
                "warning: products here depend on where in memory their operands lie, because "
                f"MKL's mode is {mkl_mode()}; import cerebro_hydra before MKL is called, or set "
                f"{as_in_shell('fast')} before Python starts"
            )
        self._factory = IsolatedFactory(factory)
        self._columns = columns
        self._examples = examples
        self._folder = folder
        self._seed = seed
        self._evaluation_metric = evaluation_metric
        self._report = report
        self._biller = biller
        self._keep = keep
        self.metrics: dict[str, str] = {}
        """Direction of every measured name, "loss" first; empty before a trial is admitted."""
        self._ranges = value_ranges(examples.manifest, examples.store)
        check_weights(columns, self._ranges)
        self._cut_models = CutModelCache()
        self._profiler = biller.profiler
        self._cuts: dict[Hashable, AdmittedCut] = {}
        self._auto_plan = None
        if folder is not None:
            self._auto_plan = biller.auto_plan(examples.manifest, folder)
        self._told: set[Hashable] = set()
        self._shared_layers = SharedLayers(by_turns=biller.profiler is not None)
        self._made: dict[str, str] = {}  # what first steps made of what trials share
        self._same_builds = SameBuilds(self._factory)

    def admit(
        self,
        trial: int,
        params: Mapping[str, Any],
        parent: TrialSpec | None = None,
        outlook: Outlook = ALONE,
    ) -> Admitted:
        """Admit a candidate; a fork must have the shards of its parent.

        Args:
            outlook: what is known of the search, by which `plan="auto"` chooses.

        Raises:
            Refused: its own code failed, or something did that nobody foresaw, or it measures other
                things than the trials before it.
            NotWritten: the store refuses a file; what was written before needs no second try.
            StoreError: the store can't be read or written, which no candidate can help.
            DataError: rows can't be read as they were prepared.
            ConfigurationError: the evaluation metric is not measured.
        """
        try:
            with exclusive_generator, failing_alone(), self._factory:
                spec, recipe = self._admit(trial, params, parent, outlook)
        except Refused as refusal:
            what = f"{trial_name(trial)} ({parameters(params)})"
            self._report(f"{what} failed before training: {reason(str(refusal))}")
            raise
        measured = directions_of(recipe)
        require_measured(self._evaluation_metric, measured)
        self.metrics = measured
        return Admitted(spec, tuple(recipe.state_metrics))

    def recut(self, asked: CutFiner) -> TrialRecut:
        """Admit a trial that ran out of memory again, in about twice the shards.

        Raises:
            Refused: it can't be cut finer, or its states can't be laid out.
            DataError: rows can't be read as they were prepared.
        """
        with exclusive_generator, failing_alone(), self._factory:
            with refusing():
                assert self._folder is not None, "what is only planned is not cut finer"
                spec = self._folder.read_trial(asked.trial, self._folder.run_id)
                recipe = build_recipe(self._factory, spec.params, self._seed, self._columns)
            with self._within_memory(spec.trial, recipe):
                return self._recut(spec, recipe, asked)

    def _recut(self, spec: TrialSpec, recipe: Recipe, asked: CutFiner) -> TrialRecut:
        assert self._folder is not None, "what is only planned is not cut finer"
        folder = self._folder
        recipe.shards, recipe.recompute = AUTO, True
        before, examples = len(spec.shards), self._example_batches(recipe)
        with refusing():
            if self._profiler is None or self._profiler.budget is None:
                raise ConfigurationError("the backend has no device_memory any more; give it one")
            if recipe.warm_start is not None:
                load_warm_start(recipe.model, recipe.warm_start)
            cut = self._cut(recipe, examples, spec.seed, 2 * before)
            if len(cut.layout.shards) <= before:
                raise ConfigurationError(
                    f"the model can't be cut into more than {before} shards; use a smaller "
                    "batch_size, with accumulate"
                )
            profile = self._profiler.with_all_room(cut.profile, recipe.accumulate)
            cut = replace(cut, profile=profile)  # the one admitted may serve other trials
            states = [relaid_state(folder, spec.trial, v, cut.layout) for v in asked.states]
        finer = replace(
            spec,
            **as_cut(cut),
            shards=states[0].digests,
            recompute=True,
            finer=asked.inherited and spec.finer,
            stages=(),
            plan=None,
        )
        with refusing():
            stages = self._biller.check(finer, profile)
        self._report_cut(finer, cut.report, stages)
        document = json.loads(json.dumps(finer.to_json()))
        return TrialRecut(trial_config(finer), tuple(states), document)

    def code_differences(self, spec: TrialSpec) -> tuple[list[Difference], TrialSpec]:
        """Return in what a trial that was admitted before has other code now, and what it is now.

        The code of a trial of an earlier version, whose document has none, is not known.

        Raises:
            Refused: it can't be built any more.
        """
        with exclusive_generator, refusing(), self._factory:
            first = self._built(spec)
            now = trial_code(first)
            then = spec.code
            if then is None or now is None or not then.is_comparable(now):
                return form_differences(spec, first), spec
            if not then.differences(now):
                return [], spec
            again = trial_code(self._built(spec))
            return then.differences(now, again), replace(spec, code=now)

    def _built(self, spec: TrialSpec) -> Recipe:
        return build_keeping_random_state(self._factory, spec.params, self._seed, self._columns)

    def state_metrics(self, params: Mapping[str, Any]) -> tuple[Metric, ...]:
        """Return the custom metrics of a trial that was admitted in another process."""
        with exclusive_generator, self._factory:
            recipe = build_keeping_random_state(self._factory, params, self._seed, self._columns)
            recipe.take_form(self._example_batches(recipe)[0])
        return tuple(recipe.state_metrics)

    def _check_metrics(self, metrics: dict[str, str]) -> None:
        """Refuse a trial that can't be compared with those before it."""
        if self.metrics and metrics != self.metrics:
            raise ConfigurationError(
                f"this trial measures {metrics}, and the trials before it {self.metrics}; give all "
                "SparkEstimators the same metrics"
            )

    def _admit(
        self, trial: int, params: Mapping[str, Any], parent: TrialSpec | None, outlook: Outlook
    ) -> tuple[TrialSpec, Recipe]:
        with refusing():
            build = partial(build_recipe, self._factory, params, self._seed, self._columns)
            recipe, code = self._same_builds.of(
                build, self._first_example, trial_seed(self._seed, trial)
            )
            self._biller.check_compile(recipe)
            self._shared_layers.check(trial_name(trial), recipe.model)
        self._biller.require_workers(recipe, len(self._examples.partition_rows))
        with self._within_memory(trial, recipe):
            return self._compared(trial, params, parent, recipe, code, outlook), recipe

    def _first_example(self, recipe: Recipe) -> Example:
        return self._example_batches(recipe)[0]

    def _compared(
        self,
        trial: int,
        params: Mapping[str, Any],
        parent: TrialSpec | None,
        recipe: Recipe,
        code: TrialCode | None,
        outlook: Outlook,
    ) -> TrialSpec:
        if recipe.warm_start is not None:
            with refusing():
                load_warm_start(recipe.model, recipe.warm_start)
        finer = self._may_be_cut_finer(recipe)
        if parent is not None and (recipe.shards == AUTO or finer or _as_many(recipe, parent)):
            recipe.shards = list(parent.cut["at"])  # measured anew, times may give another cut
            if not is_pipelined(recipe.schedule):  # else its graph is cut in any case
                recipe.cut = parent.cut["mode"]
        if parent is not None and _reads_as(recipe, parent):
            recipe.stages = list(parent.stages)
        finer_tasks = _finer_tasks(parent, recipe) if finer else None
        if finer_tasks is not None:
            recipe.recompute = True
        seed, examples = trial_seed(self._seed, trial), self._example_batches(recipe)
        with refusing(), shared_kept(recipe, self._factory.factory) as shared:
            admission = (
                self._cut(recipe, examples, seed)
                if parent is None
                else self._cut_as(parent, recipe, examples, seed)
            )
            if shared is not None:
                shared.check_made(self._made, KnownChanges(admission.attributes))
            recipe.take_form(examples[0])  # another trial's admission may have served this one
            self._check_metrics(directions_of(recipe))
            plan = None if parent is None else _plan_as(recipe, parent)
            if parent is None and self._auto_plan is not None:
                cut = partial(self._cut, recipe, examples, seed)
                admission, plan = self._auto_plan.choose(recipe, admission, cut, outlook)
            pipeline = self._biller.pipeline(admission, recipe)
            self._biller.check_replicas(recipe, len(self._examples.partition_rows))
            if parent is None:
                initial = initial_segments(recipe, admission.layout)
            elif any(getattr(parent, n) != v for n, v in shared_with_forks(admission).items()):
                raise ConfigurationError(
                    f"{params} makes another model or optimizer than {dict(parent.params)}, whose "
                    f"trial it forks; give forks of {parent.trial_id} parameters that change "
                    "neither"
                )
            else:
                self._check_taken_over(parent, params, recipe.model, admission.layout)
        shards = self._written(initial) if parent is None else parent.shards
        if parent is None and self._folder is not None:  # a fork begins with its parent's state
            entries = [{"frozen": f, "trainable": t, "cursor": None} for f, t in shards]
            document = {"trial": trial, "state": 0, "shards": entries}
            written(partial(self._folder.write_state, trial, 0, document))
        if finer_tasks is not None:
            profile = replace(admission.profile, tasks=finer_tasks)
            admission = replace(admission, profile=profile)
        spec = replace(
            trial_spec(recipe, admission, self._examples.partition_rows, plan),
            trial=trial,
            trial_id=trial_name(trial),
            params=dict(params),
            seed=seed,
            shards=shards,
            patience=recipe.early_stopping,
            keep=self._kept_by(recipe),
            custom_metrics=tuple(metric.name for metric in recipe.state_metrics),
            finer=finer,
            staleness=pipeline.staleness,
            stages=pipeline.stages,
            code=code,
        )
        stages = ""
        if self._profiler is not None:
            with refusing():
                stages = self._biller.check(spec, admission.profile)
        if self._folder is not None:
            written(partial(self._folder.write_trial, spec))
        self._report_cut(spec, admission.report, stages)
        for metric, warning in admission.warnings.items():
            self._report_once(metric, f"warning: {spec.trial_id}: {warning}")
        return spec

    def _check_taken_over(
        self, parent: TrialSpec, params: Mapping[str, Any], model: nn.Module, layout: TrialLayout
    ) -> None:
        """Refuse a fork whose parameters make what the state of its parent would replace.

        Weights that train are its parent's in any case, however they were initialised.
        """
        folder = self._folder
        if folder is None or (parent.recompute and 0 not in folder.states(parent.trial)):
            return  # a fork that was cut finer begins with a later state
        own: dict[str, Tensor] = {f"buffer:{n}": buffer for n, buffer in model.named_buffers()}
        frozen = ((n, p.detach()) for n, p in model.named_parameters() if not p.requires_grad)
        own |= {f"param:{name}": value for name, value in frozen}
        for shard, digests in zip(layout.shards, parent.shards, strict=True):
            for segment, named in zip((shard.frozen, shard.trainable), digests, strict=True):
                names = [entry.name for entry in segment.entries if entry.name in own]
                theirs = read_segment(folder, named) if names else {}
                for name in names:
                    if not same_bits(own[name], theirs[name]):
                        kind, _, called = name.partition(":")
                        raise ConfigurationError(
                            f"{kind.replace('param', 'parameter')} {called!r} is another one by "
                            f"{dict(params)} than by {dict(parent.params)}, and a fork takes over "
                            f"that of {parent.trial_id}; keep what parameters of forks change in "
                            "an attribute, or in a buffer with persistent=False"
                        )

    @contextlib.contextmanager
    def _within_memory(self, trial: int, recipe: Recipe) -> Iterator[None]:
        """Let the recipe's admission need no more memory than there is."""
        with refusing():
            needed = memory_needed(recipe)
        free = available_memory()
        if needed <= free:
            yield
            return
        folder = tempfile.gettempdir()
        self._report(
            f"{trial_name(trial)} is admitted in files under {folder}, which is slower: it needs "
            f"{bytes_text(needed)} of memory, and {bytes_text(free)} are free"
        )
        with contextlib.ExitStack() as stack:
            with refusing():
                stack.enter_context(on_disk(recipe, folder, resident=free / 4))
            yield

    def _kept_by(self, recipe: Recipe) -> str:
        """Return which epoch a trial keeps where the search doesn't say it."""
        told = self._examples.manifest.has_validation or recipe.early_stopping is not None
        return self._keep or ("best" if told else "last")

    def _written(self, initial: Iterable[Mapping[str, Any]]) -> tuple[tuple[str, str], ...]:
        """Write the segments of a state by digest; return (frozen, trainable) of each shard."""
        write = partial(write_segments, self._folder)
        return tuple(written(partial(write, segments)) for segments in initial)

    def _example_batches(self, recipe: Recipe) -> list[Example]:
        return [(b.features, b.labels) for b in self._examples.batches(recipe.batch_size)]

    def _may_be_cut_finer(self, recipe: Recipe) -> bool:
        """Return whether more shards than the trial has may help it when it runs out of memory.

        Where tasks read older weights, a finer cut would change which.
        """
        limited = self._profiler is not None and self._profiler.budget is not None
        by_number = recipe.shards == AUTO or (type(recipe.shards) is int and recipe.shards > 1)
        keeps = recipe.recompute is not False and is_flushed(recipe.schedule)
        return limited and by_number and keeps

    def _cut_as(
        self, parent: TrialSpec, recipe: Recipe, examples: Sequence[Example], seed: int
    ) -> AdmittedCut:
        """Return the cut of a fork: its parent's, if it asks for shards that begin where its do.

        The random numbers of a trial may decide which units run first, as with layer drop, so that
        the fork's own first steps would give another order of units.
        """
        given = CutSpec.from_json(parent.cut)
        if given.mode == "export":
            return self._cut(recipe, examples, seed)
        if recipe.shards == list(given.at):
            return self._cut(recipe, examples, seed, given=given)
        cut = self._cut(recipe, examples, seed)
        if cut.spec.at != given.at or cut.spec == given:
            return cut
        return self._cut(recipe, examples, seed, given=given)

    def _cut(
        self,
        recipe: Recipe,
        examples: Sequence[Example],
        seed: int,
        least: int = 1,
        given: CutSpec | None = None,
    ) -> AdmittedCut:
        """Return the cut of a trial, as an equal one was admitted or after trying it.

        Args:
            given: is tried first.
        """
        if is_pipelined(recipe.schedule):  # each stage has a shard at least
            least = max(least, least_shards(recipe.stages, self._biller.devices))
        key = admission_key(recipe, examples)
        if key is not None and (key, least, given) in self._cuts:
            return self._cuts[key, least, given]
        with shared_settings_kept():
            evaluated = self._examples.evaluated_sizes(recipe.batch_size)
            tools = self._cut_models, self._profiler
            cut = admit(recipe, examples, seed, *tools, least, evaluated, given)
        check_value_ranges(recipe, self._columns, examples[-1], self._ranges)
        if key is not None:
            self._cuts[key, least, given] = cut
        return cut

    def _report_once(self, about: Hashable, line: str) -> None:
        if about not in self._told:
            self._told.add(about)
            self._report(line)

    def _report_cut(self, spec: TrialSpec, report: CutReport, stages: str) -> None:
        """Report a cut and its stages, unless an earlier trial has the same ones.

        Batch sizes and measured times are left aside.
        """
        most = max(self._examples.partition_rows)
        if spec.batch_size > most:
            self._report_once(
                spec.batch_size,
                f"{spec.trial_id}: batch_size is {spec.batch_size:,}, and a partition has at most "
                f"{most:,} training rows, so that these are one batch",
            )
        shape = tuple(
            replace(shard, receives=tuple(replace(v, nbytes=0) for v in shard.receives))
            for shard in report.shards
        )
        pipeline = spec.schedule, spec.stages, spec.staleness, spec.accumulate, spec.plan
        told = "\n".join(filter(None, [f"{spec.trial_id}: {report.text()}", stages]))
        self._report_once((shape, *pipeline), told)


def _as_many(recipe: Recipe, parent: TrialSpec) -> bool:
    """Return whether a fork asks for as many shards as its parent has, which times placed."""
    return type(recipe.shards) is int and 1 < recipe.shards == len(parent.shards)


def _reads_as(recipe: Recipe, parent: TrialSpec) -> bool:
    """Return whether a fork is to read older weights as its parent does, whose stages are known."""
    alike = recipe.stages == AUTO and recipe.schedule == parent.schedule
    return alike and bool(parent.stages) and not is_flushed(recipe.schedule)


def _plan_as(recipe: Recipe, parent: TrialSpec) -> TrialPlan | None:
    """Return the plan of a fork, which is its parent's unless its schedule is given otherwise."""
    return parent.plan if is_flushed(recipe.schedule) and recipe.stages == AUTO else None


def _finer_tasks(parent: TrialSpec | None, recipe: Recipe) -> TaskProfile | None:
    """Return what a fork's tasks need if that is as for its parent, which was cut finer."""
    if parent is None or parent.tasks is None or not parent.recompute:
        return None
    steps = parent.batch_size, parent.accumulate
    alike = asked_recompute(recipe) is None and steps == (recipe.batch_size, recipe.accumulate)
    return TaskProfile.from_json(parent.tasks) if alike else None


def directions_of(recipe: Recipe) -> dict[str, str]:
    """Return the direction of everything that a recipe measures, "loss" first."""
    return {"loss": "min", **{metric.name: metric.direction for metric in recipe.metric_list}}


def require_measured(evaluation_metric: str, metrics: Mapping[str, str]) -> None:
    """Refuse a metric that is to decide and is not measured.

    Raises:
        ConfigurationError: names it, and what is measured.
    """
    if evaluation_metric not in metrics:
        raise ConfigurationError(
            f"evaluation_metric is {evaluation_metric!r}, which is not measured; "
            f"measured are {list(metrics)}; add it to the metrics of the SparkEstimator"
        )


def relaid_state(folder: RunFolder, trial: int, state: int, layout: TrialLayout) -> RecutState:
    """Write the segments of a state in another layout, and describe the state so.

    Its document stays as it is.

    Raises:
        ConfigurationError: the state lacks a tensor of the layout.
        StoreError: the store can't be read or written.
    """
    shards = folder.read_state(trial, state, folder.run_id)["shards"]
    cursors = [shard["cursor"] or None for shard in shards]
    assert all(cursor == cursors[0] for cursor in cursors), "shards of a state have one cursor"
    names = list(dict.fromkeys(name for s in shards for name in (s["frozen"], s["trainable"])))
    made = [write_segments(folder, each) for each in _relaid(folder, names, layout)]
    return RecutState(state, tuple(made), None if cursors[0] is None else dict(cursors[0]))


def write_segments(folder: RunFolder | None, segments: Mapping[str, Bytes]) -> tuple[str, str]:
    """Write the segments of a shard by digest; return those of (frozen, trainable).

    Without a folder they are only named.
    """
    named = {name: digest(buffer) for name, buffer in segments.items()}
    if folder is not None:
        for name, buffer in segments.items():
            folder.write_object(named[name], buffer.data)
    return named["frozen"], named["trainable"]


def _relaid(folder: RunFolder, names: Sequence[str], layout: TrialLayout) -> Iterator[HostSegments]:
    """Yield the segments of each shard, with few others in memory beside them."""

    @lru_cache(_SEGMENTS_AT_ONCE)
    def tensors_of(segment: str) -> dict[str, Tensor]:
        return read_segment(folder, segment)

    where = {tensor: segment for segment in names for tensor in tensors_of(segment)}

    def made(segment: SegmentLayout) -> Bytes:
        found = {}
        for name in (entry.name for entry in segment.entries if entry.name != EXISTS):
            if name in where:
                found[name] = tensors_of(where[name])[name]
            elif not is_optimizer_state(name):
                raise ConfigurationError(f"the former shards have no {name!r}")
        return filled(segment, found)

    for shard in layout.shards:
        yield {"frozen": made(shard.frozen), "trainable": made(shard.trainable)}
