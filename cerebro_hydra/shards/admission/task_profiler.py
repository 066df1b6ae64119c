"""Profiles the tasks of a cut trial: what they need of a device beside its state, and how long.

Trials of equal structure share one profile.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from cerebro_hydra.errors import ConfigurationError, NonFiniteLoss
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.queues.visit_spec import ShardSpec, VisitSpec
from cerebro_hydra.plan.sizing.pipeline import Pipeline
from cerebro_hydra.recipe import RandomKey, Recipe
from cerebro_hydra.recipe.compiled_units import uncompiled
from cerebro_hydra.shards.admission.trial_profile import (
    UNWATCHED,
    CrossingBytes,
    Needs,
    TaskProfile,
    TrialProfile,
    asked_recompute,
    watchable,
)
from cerebro_hydra.shards.cut.model import CutModel, Recent
from cerebro_hydra.shards.cut.model_key import model_key
from cerebro_hydra.shards.cut.sample import Example, Sample, copy_example, example_of_rows
from cerebro_hydra.shards.cut.torch_cond import is_cond
from cerebro_hydra.shards.cut.values import AttributeValues
from cerebro_hydra.shards.engine.bound_model import HeldTensors
from cerebro_hydra.shards.engine.evaluation import EvaluatedShards
from cerebro_hydra.shards.engine.graph_passes import StoredTensor, TensorLog, tensors_of
from cerebro_hydra.shards.engine.graph_tasks import GraphPass, GraphTasks
from cerebro_hydra.shards.engine.layout import (
    ALIGNMENT,
    HostSegments,
    Memory,
    TrialLayout,
    TrialRuntime,
    aligned,
    initial_segments,
    memory_of,
    on_host,
    write_initial,
)
from cerebro_hydra.shards.engine.microbatch import (
    LiveBytes,
    Microbatch,
    ReadsElsewhere,
    SubEpochInput,
)
from cerebro_hydra.shards.engine.optimizer import StateTemplate
from cerebro_hydra.shards.engine.sub_epoch import SubEpoch
from cerebro_hydra.shards.engine.uncut import uncut_training

_MOST_ROUNDS, _ENOUGH_SECONDS = 6, 0.2

Task = tuple[Literal["F", "B", "U"], int]

_SMALL_SCALE = 2.0**-13

MOST_PROFILES = 1000
"""Profiles that are kept, so that equal models are cut alike."""


def gradients_outlive_tasks(recipe: Recipe, cut_model: CutModel) -> bool:
    """Return whether gradients are kept from a backward to a later task."""
    return recipe.barrier or recipe.accumulate > 1 or bool(cut_model.tied)


def profile(
    recipe: Recipe,
    cut_model: CutModel,
    layout: TrialLayout,
    example: Example,
    *,
    keep: bool = True,
    recompute: bool = True,
    evaluated_rows: int = 0,
) -> TaskProfile:
    """Measure steps of state 0 on one batch: with all shards in memory, and with one at a time.

    The bytes are those of tensors; what operations take for themselves is not seen. The model is as
    before afterwards, and so are the process's random numbers.

    Args:
        keep, recompute: the ways of training to measure. If only one of them is possible, that one
            is.
        evaluated_rows: those of the largest batch of an evaluation, which may have more.

    Raises:
        NonFiniteLoss: the loss is NaN or infinite.
        ConfigurationError: the model can't be run with its shards unloaded between tasks, and
            ``keep`` is False.
    """
    random_state = torch.default_generator.get_state()
    try:
        # At a small scale no update is skipped, which would have and take less.
        trial = TrialRuntime(
            recipe.at_scale(_SMALL_SCALE), cut_model, layout, seed=0, steps_per_epoch=1
        )
        own = recipe.training_step is not None
        shared = cut_model.shared | (set() if own else _read_elsewhere(trial, example))
        measured = _Measured(trial, example, shared)
        again, moving, kept, left, crossing = None, None, None, None, None
        if own:
            kept = _of_own_step(measured)
        else:
            again, moving = _recomputed(measured, or_not=keep) if recompute else (None, None)
            kept, left, crossing = _kept(measured) if keep else (None, None, None)
        measured = measured._replace(example=example_of_rows(example, evaluated_rows))
        evaluation, evaluated = _evaluated(measured), _left_by_evaluation(measured)
        batch = sum(each.nbytes for each in _microbatch(recipe, example).inputs)
    finally:
        torch.default_generator.set_state(random_state)
    names = tuple(sorted(shared))
    moved = moving or left
    if recipe.compile:
        batch = UNWATCHED  # within a watch blocks would not run compiled
    return TaskProfile(evaluation, kept, again, names, batch, moved, evaluated, crossing)


class _Measured(NamedTuple):
    """Holds what is measured."""

    trial: TrialRuntime
    example: Example
    shared: frozenset[str]


def _recomputed(
    measured: _Measured, or_not: bool
) -> tuple[Needs, tuple[int, ...] | None] | tuple[None, None]:
    """Return the needs of training, and what a microbatch leaves where it can move."""
    try:
        step = _ProfiledStep(measured, recompute=True)
        memory = _recomputing(_measure_memory(step), step.gradients_outlive)
        return _timed(step, memory), step.left
    except ConfigurationError:
        if or_not:
            return None, None
        raise


def _kept(measured: _Measured) -> tuple[Needs, tuple[int, ...] | None, CrossingBytes | None]:
    """Return the needs of training, and what a microbatch leaves where it can move.

    The second is what it leaves if it may go anywhere after every task, the third if it does not.
    """
    step = _ProfiledStep(measured, recompute=False)
    return _timed(step, _keeping(_measure_memory(step))), step.left, step.crossing


def _of_own_step(measured: _Measured) -> Needs:
    """Return the needs of training by the user's own step, which is the backward of one shard."""
    trial, example, _ = measured
    (segments,) = initial_segments(trial.recipe, trial.layout)
    step: Task = ("B", 0)
    found, seconds = dict[Task, _TaskMemory](), []
    with uncut_training(trial, [on_host(segments)], None, 0) as training:
        for watched in (True, False):  # the optimizers make their state the first time
            begun = time.perf_counter()
            with _live_tasks(found) if watched else nullcontext() as live:
                features, labels = copy_example(example)
                batch = _Batch(features, labels, int((labels or features)[0].shape[0]))
                with nullcontext() if live is None else live.measured(step):
                    training.step([batch])
            seconds.append(time.perf_counter() - begun)
    return (ShardSpec(0, found[step].peak, 0, 0.0, seconds[-1], 0.0),)


def _evaluated(measured: _Measured) -> Needs:
    """Return what forwards of an evaluation need, each with its shard alone in memory."""
    trial, example, shared = measured
    found: dict[Task, _TaskMemory] = {}
    segments = list(map(on_host, initial_segments(trial.recipe, trial.layout)))
    task = ExitStack()

    def reach(_: object, k: int) -> None:
        task.close()
        for other in range(trial.num_shards):
            if other != k and other in shards:
                shards.release(other, needed=True)
        if k not in shards:
            shards.receive(k, segments[k])
        task.enter_context(live.measured(("F", k)))

    with _live_tasks(found) as live:
        shards = EvaluatedShards(trial, shared)
        features, labels = copy_example(example)
        rows = int((labels or features)[0].shape[0])
        with shards.evaluating(), task:
            shards.begin_batch()
            with suppress(NonFiniteLoss):  # a model may need a step before its loss is finite
                shards.run(_Batch(features, labels, rows), reach)
            task.close()
            shards.end_batch()
    held = max(max(memory.before, memory.after) for memory in found.values())
    activations = [max(0, found["F", k].peak - held) for k in range(trial.num_shards)]
    boundary = [held] + [0] * (trial.num_shards - 1)
    return tuple(ShardSpec(0, *each) for each in zip(activations, boundary, strict=True))


def _left_by_evaluation(measured: _Measured) -> tuple[int, ...] | None:
    """Return the bytes that forwards of an evaluation leave for those of other devices.

    There are none if the model is not cut as a graph, or a forward writes to another shard's
    buffer, of which each device would have its own.
    """
    trial, example, shared = measured
    cut_model, log = trial.cut_model, TensorLog({}, 0)
    owner = {buffer.name: buffer.owner for buffer in cut_model.buffers}
    if cut_model.graphs is None:
        return None
    graphs = cut_model.graphs.of(_microbatch(trial.recipe, example).inputs)
    if any(owner[name] != k for k, graph in enumerate(graphs.eval) for name in graph.mutates):
        return None
    shards, left = EvaluatedShards(trial, shared), []
    features, labels = copy_example(example)
    rows = int((labels or features)[0].shape[0])
    with shards.evaluating():
        shards.begin_pass(0, _Batch(features, labels, rows))
        for k, segments in enumerate(initial_segments(trial.recipe, trial.layout)):
            shards.receive(k, on_host(segments))
            before = log.nbytes
            with suppress(NonFiniteLoss):
                shards.forward(Action(0, k, ActionKind.F, 0))
            log.lay_out(shards.passes.tensors)
            left.append(log.nbytes - before)
    return tuple(left)


class _Batch(NamedTuple):
    features: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]
    rows: int


# ---------------------------------------------------------------------- memory


@dataclass
class _TaskMemory:
    """Holds the live bytes at a task's begin, peak and end."""

    before: int
    peak: int
    after: int


class _LiveTasks(LiveBytes):
    """Notes the live bytes of tasks."""

    def __init__(self, found: dict[Task, _TaskMemory]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_cond(func):
            raise RuntimeError("what its branches have can't be counted")
        return super().__torch_dispatch__(func, types, args, kwargs)

    @contextmanager
    def measured(self, task: Task) -> Iterator[None]:
        before = self.peak = self.now
        yield
        self._found[task] = _TaskMemory(before, self.peak, self.now)


@contextmanager
def _live_tasks(found: dict[Task, _TaskMemory]) -> Iterator[_LiveTasks]:
    """Note the live bytes of tasks for a while; compiled code would hide them."""
    with uncompiled(), _LiveTasks(found) as live:
        yield live


def _measure_memory(step: _ProfiledStep) -> dict[Task, _TaskMemory]:
    found: dict[Task, _TaskMemory] = {}
    with _live_tasks(found) as live:
        step.take(live.measured)
    return found


def _recomputing(
    memory: Mapping[Task, _TaskMemory], gradients_outlive: bool
) -> list[tuple[int, int]]:
    """Return each shard's activations and boundary bytes, where F leaves the boundary alone.

    What there is from the first task on, such as the batch, counts as the boundary of shard 0.
    """
    last = max(k for _, k in memory)
    # Tasks of one shard that follow one another may leave more between them.
    begins = {task: m.before for task, m in memory.items() if task != ("B", last)}
    held = max(n for (kind, _), n in begins.items() if kind != "U" or gradients_outlive)
    left = [max(0, memory["F", k].after - memory["F", k].before) for k in range(last)]
    boundary = [max(0, held - sum(left)), *left]
    held = sum(boundary)
    peaks = [max(m.peak for (_, at), m in memory.items() if at == k) for k in range(last + 1)]
    return [(max(0, peak - held), own) for peak, own in zip(peaks, boundary, strict=True)]


def _keeping(memory: Mapping[Task, _TaskMemory]) -> list[tuple[int, int]]:
    """Return each shard's activations, which stay from F to B, and no boundary."""
    forwards = [m for (kind, _), m in memory.items() if kind == "F"]
    kept = [max(0, m.after - m.before) for m in forwards[:-1]]
    kept.append(max(m.peak for m in memory.values()) - sum(kept))
    return [(nbytes, 0) for nbytes in kept]


def _read_elsewhere(trial: TrialRuntime, example: Example) -> set[str]:
    """Return the parameters that a microbatch reads while another shard than their own visits."""
    recipe, layout = trial.recipe, trial.layout
    segments = list(map(on_host, initial_segments(recipe, layout)))
    names = {
        segments[k][name].data_ptr() + entry.offset: entry.name.partition(":")[2]
        for k, shard in enumerate(layout.shards)
        for name, segment in (("frozen", shard.frozen), ("trainable", shard.trainable))
        for entry in segment.entries
        if entry.name.startswith("param:") and entry.nbytes
    }
    at = 0

    def reach(_: object, k: int) -> None:
        nonlocal at
        at = k

    owner = {p.name: p.owner for p in trial.cut_model.params}
    sub_epoch = SubEpoch(trial, SubEpochInput())
    with sub_epoch.tasks(keep=True) as tasks:
        for k, each in enumerate(segments):
            sub_epoch.receive(k, each, None)
        sub_epoch.begin_window(0)
        with uncompiled(), ReadsElsewhere(names, owner, lambda: at) as reads:
            tasks.run(_microbatch(recipe, example), reach)
    return set(reads.found)


# ---------------------------------------------------------------------- seconds


def _timed(step: _ProfiledStep, memory: Sequence[tuple[int, int]]) -> Needs:
    """Return needs with the seconds of each task, the least of several rounds of a fast step."""
    fastest: dict[Task, float] = {}

    @contextmanager
    def measured(task: Task) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        spent = time.perf_counter() - begun
        fastest[task] = min(spent, fastest.get(task, spent))

    begun = time.perf_counter()
    for _ in range(_MOST_ROUNDS):
        step.take(measured)
        if time.perf_counter() - begun > _ENOUGH_SECONDS:
            break
    return tuple(
        ShardSpec(0, *nbytes, fastest["F", k], fastest["B", k], fastest["U", k])
        for k, nbytes in enumerate(memory)
    )


# ---------------------------------------------------------------------- the step


def _microbatch(recipe: Recipe, example: Example) -> Microbatch:
    return Microbatch.collated(recipe, copy_example(example), RandomKey(0, 0, 0), weight=None)


class _Crossing:
    """Notes which tensors of a microbatch go from shard to shard, as `TensorLog` stores them."""

    def __init__(self) -> None:
        self._batch = 0
        self._held: dict[str, int] = {}
        # By name and memory: the address of one that was freed may be the next one's.
        self._values: dict[tuple[str, StorageWeakRef], list[int]] = {}
        self._gradients: dict[tuple[str, str, StorageWeakRef], list[int]] = {}

    def note(
        self,
        kind: str,
        k: int,
        going: GraphPass,
        held: Mapping[str, Tensor],
        behind: Collection[str],
    ) -> None:
        """Note what is there after F or B of shard k, with the values for the shard behind."""
        tensors = tensors_of(going, {})
        sizes = {key: _stored_bytes(tensor) for key, tensor in tensors.items()}
        if kind == "F":
            self._held |= {name: _stored_bytes(tensor) for name, tensor in held.items()}
            self._batch = sum(n for (what, _), n in sizes.items() if what in ("feature", "target"))
            for (what, name), nbytes in sizes.items():
                if what == "value" and name in behind:
                    value = str(name), _memory(tensors[what, name])
                    self._values.setdefault(value, [k, k, nbytes])[1] = k + 1
        else:
            for (what, name), nbytes in sizes.items():
                if what in ("gradient", "tied"):
                    gradient = what, str(name), _memory(tensors[what, name])
                    self._gradients.setdefault(gradient, [k, k, nbytes])[1] = k

    @property
    def bytes(self) -> CrossingBytes:
        """Return what was noted."""
        values, gradients = (
            tuple(sorted((made, last, nbytes) for made, last, nbytes in spans.values()))
            for spans in (self._values, self._gradients)
        )
        return CrossingBytes(self._batch + sum(self._held.values()), values, gradients)


def _memory(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _stored_bytes(tensor: Tensor) -> int:
    end = StoredTensor.of(tensor, 0).end
    return end + -end % ALIGNMENT


class _ProfiledStep:
    """Takes the first step of a trial, as often as wanted, and tells of every task."""

    def __init__(self, measured: _Measured, recompute: bool) -> None:
        self._trial, self._example, self._shared = measured
        self._recipe, self._cut_model = self._trial.recipe, self._trial.cut_model
        self._recompute = recompute
        self.gradients_outlive = gradients_outlive_tasks(self._recipe, self._cut_model)
        self._sub_epoch: SubEpoch
        self._task: ExitStack
        self._at: Task | None = None
        self._going: GraphPass | None = None
        self._left: list[int] = []
        self._crossing = _Crossing()
        self._segments: list[HostSegments] = []
        self._gradients: list[Memory] = []

    def take(self, measured: Callable[[Task], AbstractContextManager[None]]) -> None:
        """Take the step; each task runs within what `measured` returns for it.

        The optimizer makes its state the first time, and then has it, as in all later steps.
        """
        self._measured, self._at, self._going = measured, None, None
        self._held = HeldTensors(self._shared)
        self._begin()
        self._sub_epoch = SubEpoch(self._trial, SubEpochInput(), self._held)
        with self._sub_epoch.tasks(keep=not self._recompute) as tasks, ExitStack() as self._task:
            batch = _microbatch(self._recipe, self._example)
            self._sub_epoch.begin_window(0)
            self._sub_epoch.begin_microbatch(0)
            if isinstance(tasks, GraphTasks):
                self._log, self._left = TensorLog({}, 0), [0] * self._cut_model.num_shards
                self._going, self._crossing = GraphPass(batch), _Crossing()
                tasks.carry(self._going, self._reach)
            else:
                tasks.run(batch, self._reach)
            self._end()
            self._going = None
            self._sub_epoch.end_microbatch()
            if self.gradients_outlive:
                for k in range(self._cut_model.num_shards):
                    self._go_to(k, needed=False)
                    self._update(k)

    def _begin(self) -> None:
        """Bring parameters and buffers to state 0, in the same memory each time."""
        layout = self._trial.layout
        if not self._segments:
            self._segments = list(initial_segments(self._recipe, layout))
            sizes = [shard.gradients.nbytes for shard in layout.shards]
            self._gradients = [memory_of(aligned(nbytes, zeroed=True)) for nbytes in sizes]
            return
        for gradients in self._gradients:
            gradients.zero_()
        write_initial(self._recipe, layout, self._segments)

    def _reach(self, kind: Literal["F", "B"], k: int) -> None:
        self._end()
        self._go_to(k, needed=kind == "F")
        self._at = kind, k
        self._task.enter_context(self._measured(self._at))

    def _end(self) -> None:
        """End the task under way, with the update that follows."""
        self._task.close()
        if self._at is None:
            return
        kind, k = self._at
        if self._going is not None:
            before = self._log.nbytes
            self._log.lay_out(tensors_of(self._going, self._moving_copies()))
            self._left[k] += self._log.nbytes - before
            assert self._cut_model.graphs is not None
            graphs = self._cut_model.graphs.of(self._going.batch.inputs).train
            behind = graphs[k + 1].live_in if kind == "F" and k + 1 < len(graphs) else ()
            self._crossing.note(kind, k, self._going, self._moving_copies(), behind)
        if kind == "B" and not self.gradients_outlive:
            self._update(k)

    @property
    def left(self) -> tuple[int, ...] | None:
        """Return the bytes that tasks of each shard left for others, if those were graphs.

        The last shard leaves the buffers that it overwrites, too, unless its backward follows.
        """
        graphs = self._cut_model.graphs
        if graphs is None:
            return None
        buffers = dict(self._recipe.model.named_buffers())
        overwritten = graphs.of(_microbatch(self._recipe, self._example).inputs).train[-1].mutates
        sizes = [buffers[name].nbytes for name in overwritten]
        more = sum(nbytes + -nbytes % ALIGNMENT for nbytes in sizes)
        return *self._left[:-1], self._left[-1] + more

    @property
    def crossing(self) -> CrossingBytes | None:
        """Return what crosses if tasks of neighbours are on one device, if those were graphs."""
        if self._cut_model.graphs is None:
            return None
        return self._crossing.bytes

    def _moving_copies(self) -> dict[str, Tensor]:
        copies, names = self._held.copies, self._cut_model.read_elsewhere
        return {name: copies[name] for name in names & copies.keys()}

    def _update(self, k: int) -> None:
        with self._measured(("U", k)):
            self._sub_epoch.update(k)

    def _go_to(self, k: int, needed: bool) -> None:
        """Have shard k alone in memory, or beside the others if activations are kept."""
        if self._recompute:
            for other in range(self._cut_model.num_shards):
                if other != k and other in self._sub_epoch:
                    self._sub_epoch.release(other, needed=needed, last=False)
        if k not in self._sub_epoch:
            self._sub_epoch.receive(k, on_host(self._segments[k]), None, self._gradients[k])


class TaskProfiler:
    """Profiles cut trials for devices with a budget. Not thread-safe.

    Args:
        budget: the bytes of the smallest device; None means no limit.
        devices: how many a worker has, on which depends which versions of weights are kept.
        both: whether both ways with activations are measured, where one of them is to be chosen.
    """

    def __init__(self, budget: int | None, devices: int = 1, both: bool = False) -> None:
        self.budget, self._devices, self._both = budget, devices, both
        self._profiles = Recent[Hashable, TaskProfile](MOST_PROFILES)

    def profile(
        self,
        recipe: Recipe,
        cut_model: CutModel,
        layout: TrialLayout,
        template: StateTemplate,
        example: Example,
        evaluated_rows: int = 0,
    ) -> TrialProfile:
        """Return the profile of a trial for its largest batch, which is the example.

        Args:
            evaluated_rows: those of the largest batch of an evaluation.

        Raises:
            ConfigurationError: the model can't be run shard by shard, as it would have to be.
        """
        whole = TrialProfile.of(recipe, cut_model, layout, None)
        asked = asked_recompute(recipe)

        def measure() -> TaskProfile:
            recompute = whole.recomputes(asked, self.budget, recipe.accumulate)
            keep = not recompute or (self._both and asked is None)
            with AttributeValues(recipe.model).in_use():
                return watchable(
                    lambda: profile(
                        recipe, cut_model, layout, example,
                        keep=keep, recompute=asked is not False,
                        evaluated_rows=evaluated_rows,
                    )
                )  # fmt: skip

        key = model_key(recipe.model, Sample.of(recipe, example))
        what = (
            key,
            cut_model.spec,
            (len(example[0][0]), evaluated_rows),
            type(recipe.optimizer),
            json.dumps(template.to_json()),
            (recipe.accumulate > 1, recipe.clip_grad_norm is None, recipe.recompute),
        )
        alike = key is not None and recipe.training_step is None
        tasks = self._profiles.get(what, measure) if alike else measure()
        return TrialProfile.of(recipe, cut_model, layout, tasks)

    def fits(self, recipe: Recipe, found: TrialProfile, buffers: int) -> bool:
        """Return whether a device has room for so many of the trial's shards, of which one runs."""
        return self.budget is None or self.need(recipe, found, buffers) <= self.budget

    def need(self, recipe: Recipe, found: TrialProfile, buffers: int) -> int:
        """Return the bytes of a device that has room for so many of the trial's shards."""
        window, pipeline = recipe.accumulate, found.pipeline(recipe, self._devices, self.budget)
        recompute = found.recomputes(asked_recompute(recipe), self.budget, window)
        alone = Pipeline(staleness=pipeline.staleness)
        visits = found.training(0, window, window, recompute, alone), found.evaluation(0, 1)
        return max(visit.buffered_need(buffers) for visit in visits)

    def with_all_room(self, found: TrialProfile, window: int) -> TrialProfile:
        """Return the profile of a trial that needs more than was measured, by an unknown amount.

        Its activations are computed again, and its tasks may have all that a device has beside the
        shard that they compute with; the next one is not copied meanwhile. A microbatch stays on
        one device, because nobody knows what it would leave for another one.
        """
        assert self.budget is not None and found.tasks is not None
        budget = self.budget

        def enlarged(visit: VisitSpec) -> Needs:
            free = [budget - visit.held_bytes - shard.state for shard in visit.device_shards]
            return tuple(
                replace(shard, state=0, activations=max(shard.activations, most))
                for shard, most in zip(visit.shards, free, strict=True)
            )

        training = enlarged(found.training(0, window, window, recompute=True))
        evaluation = enlarged(found.evaluation(0, 1))
        tasks = replace(
            found.tasks, keep=None, recompute=training, evaluation=evaluation, moving=None,
            evaluated=None,
        )  # fmt: skip
        return replace(found, tasks=tasks)
