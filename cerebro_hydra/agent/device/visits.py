"""Opens the sub-epochs and evaluations of trials that are built with the user's factory.

A trial is trained uncut on a device that has all of its shards at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch

from cerebro_hydra.agent.device.builder import Partitions, TrialBuilder, decode_partitions
from cerebro_hydra.agent.device.device import DeviceVisit
from cerebro_hydra.agent.device.messages import Losses, VisitOrder
from cerebro_hydra.data.batches import Batch
from cerebro_hydra.data.manifest import Manifest
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.messages.instructions import Evaluate, StartSubEpoch
from cerebro_hydra.plan.policy.audit_budget import AuditBudget
from cerebro_hydra.recipe import Evaluation, Recipe, Window
from cerebro_hydra.recipe.attributes import kept_attributes
from cerebro_hydra.recipe.compiled_units import compile_alike
from cerebro_hydra.recipe.placement import CPU
from cerebro_hydra.recipe.randomness import (
    compute_as,
    compute_deterministically,
    random_numbers_kept,
)
from cerebro_hydra.shards.admission.effects.evaluation_effects import LateEvaluation
from cerebro_hydra.shards.admission.effects.late_effects import (
    FREE_SECONDS,
    EarlierReadings,
    LateEffects,
)
from cerebro_hydra.shards.admission.trial_profile import TaskProfile, TrialProfile
from cerebro_hydra.shards.engine.differences import TensorDigests, tensor_digests
from cerebro_hydra.shards.engine.evaluation import ShardEvaluation
from cerebro_hydra.shards.engine.graph_passes import PassRecord
from cerebro_hydra.shards.engine.layout import (
    Bytes,
    Segments,
    TrialLayout,
    TrialRuntime,
    memory_of,
)
from cerebro_hydra.shards.engine.microbatch import Execution, MemoryLimit, SubEpochInput
from cerebro_hydra.shards.engine.uncut import UncutTraining, uncut_training
from cerebro_hydra.shards.engine.visit_run import VisitRun
from cerebro_hydra.shards.heap import TRIM_SECONDS, kept_heap, trim_heap
from cerebro_hydra.shards.mapped_memory import MappedMemory
from cerebro_hydra.shards.replicas.gradient_chain import GradientChain, RankLinks
from cerebro_hydra.storage import Store
from cerebro_hydra.storage.run_document import RunDocument, TrialSpec

STATES_OF_A_MAPPED_STEP = 2
"""States of its largest shard that an audit in mapped files has in memory at once."""


def open_trials(
    document: RunDocument,
    manifest: Manifest,
    own: Sequence[int],
    scratch: str,
    factory: Callable[..., Any],
    device: torch.device = CPU,
) -> TrialVisits:
    """Return what opens visits on a device, in a process of its own."""
    torch.set_num_threads(document.threads)
    compute_as(document.numerics)
    compile_alike()
    compute_deterministically(device)
    store = Store.from_dict(dict(document.store))
    decoded = partial(decode_partitions, manifest, store, scratch, None)
    splits = decoded(own)
    builder = TrialBuilder(document, factory, splits["train"], splits["val"], device, scratch)
    return TrialVisits(builder, decoded)


class TrialVisits:
    """Opens visits of the trials of a builder.

    Args:
        decoded: decodes the partitions that a lost worker had, when the first task on them comes.
        reserved: leaves bytes of the agent's memory to a visit that computes in it.
        scratch: a folder on a disk of this machine.
        links: returns those of a visit with replicas, to their agents.
    """

    def __init__(
        self,
        builder: TrialBuilder,
        decoded: Callable[[Sequence[int]], Mapping[str, Partitions]],
        reserved: Callable[[int], AbstractContextManager[object]] = nullcontext,
        scratch: str | None = None,
        links: Callable[[StartSubEpoch], RankLinks] | None = None,
    ) -> None:
        self._builder = builder
        self._links = links
        self._decoded = decoded
        self._reserved = reserved
        self._scratch = scratch
        self._spares: dict[int, Recipe | BaseException] = {}  # for the next audit of each trial
        self._looks = AuditBudget(builder.audit_share)  # for what training leaves that can't hop
        self._readings: dict[int, tuple[torch.nn.Module, EarlierReadings]] = {}  # of what it leaves

    def profile(self, trial: TrialSpec) -> TrialProfile:
        """Build a trial, unless it was built before, and describe it."""
        self._builder.add(trial)
        built = self._builder.get(trial.trial)
        runtime = built.runtime
        tasks = None if trial.tasks is None else TaskProfile.from_json(trial.tasks)
        profile = TrialProfile.of(runtime.recipe, runtime.cut_model, runtime.layout, tasks)
        return replace(profile, build_seconds=built.build_seconds)

    def forget(self, trial: int) -> None:
        """Forget a trial that is over."""
        self._builder.forget(trial)
        self._spares.pop(trial, None)
        self._readings.pop(trial, None)

    def open(self, order: VisitOrder) -> DeviceVisit:
        """Return a visit of a trial."""
        task = order.task
        self._builder.add(order.trial)
        partition = task.partition
        if not self._builder.has(partition):
            splits = self._decoded([partition])
            self._builder.add_partitions(splits["train"], splits["val"])
        audits = order.audits is not None
        if order.watched is not None or audits:
            self._build_spare(task.trial)
        trial = self._builder.get(task.trial).runtime
        if audits:
            trial = replace(trial, recipe=self._take_spare(task.trial))
        uncut = audits or task.uncut or trial.recipe.training_step is not None
        if audits or task.uncut:
            trial = replace(trial, cut_model=trial.cut_model.eager(trial.recipe.model))
        execution = _execution(order, trial.recipe)
        if isinstance(task, Evaluate):
            batches = self._builder.validation(task.trial, partition)
            earlier = self._earlier(task.trial, trial.recipe.model)
            return EvaluationVisit(trial, order, batches, execution, self._looks, earlier)
        chain: GradientChain | None = None
        if task.replicas:
            windows, chain = self._with_replicas(order, task, trial)
        else:
            windows = self._builder.windows(task.trial, task.epoch, partition, order.audits or 0)
        first = order.first_step
        metrics = task.metrics if first == order.start_step and task.metrics else None
        if audits:
            windows = islice(windows, 1)
        known = order.trial.attributes, order.trial.set_in_evaluation
        earlier = self._earlier(task.trial, trial.recipe.model, kept=not audits)
        effects = LateEffects(trial, *known, self._looks, earlier)
        memory = _Memory(trial.layout, order, self._reserved, self._scratch, self._looks, effects)
        if not audits:
            effects.begin(_may_look(self._looks), looks=self._looks.share > 0)
        steps = _ComparedSteps(effects, order, trial.recipe.accumulate)
        given = SubEpochInput(first, windows, metrics, order.trial.steps[partition])
        if uncut and not order.recompute:
            return PlainVisit(trial, given, memory, effects, steps)
        sub_epoch = VisitRun(trial, given, execution, chain)
        stays = not order.recompute or order.resident
        return TrainingVisit(sub_epoch, trial.layout, stays, memory, effects, steps)

    def _with_replicas(
        self, order: VisitOrder, task: StartSubEpoch, trial: TrialRuntime
    ) -> tuple[Iterator[Window], GradientChain]:
        """Return the windows of a rank, and its place in the chain.

        Raises:
            ConfigurationError: it is not a visit that can have replicas.
        """
        if self._links is None or not order.resident or task.uncut:
            raise ConfigurationError(
                f"replicas is {len(task.replicas)}, and the trial is trained in one piece, or not "
                "in the memory of its worker; leave replicas out"
            )
        place = task.trial, task.epoch, task.partitions, task.rank
        rounds = self._builder.rounds(task.trial, task.partitions)
        chain = GradientChain(self._links(task), trial.layout, trial.recipe.accumulate, rounds)
        return self._builder.replica_windows(*place), chain

    def _earlier(self, trial: int, model: torch.nn.Module, kept: bool = True) -> EarlierReadings:
        """Return what earlier visits have read of a trial's model, unless it was built anew."""
        own = {n: each for n, each in self._readings.items() if self._builder.keeps(n)}
        if not kept or trial not in own or own[trial][0] is not model:
            earlier = EarlierReadings(as_built=self._builder.get(trial).as_built)
            self._readings = own | ({trial: (model, earlier)} if kept else {})
            return earlier
        return own[trial][1]

    def _build_spare(self, trial: int) -> None:
        """Build a second recipe of a trial for an audit, while no visit uses its model.

        The factory may give the same model again, or fail; then the audit tells of it.
        """
        if trial not in self._spares:
            try:
                with random_numbers_kept():
                    self._spares[trial] = self._builder.another_recipe(trial)
            except BaseException as error:
                self._spares[trial] = error
            kept = filter(self._builder.keeps, self._spares)
            self._spares = {each: self._spares[each] for each in kept}

    def _take_spare(self, trial: int) -> Recipe:
        spare = self._spares.pop(trial)
        if isinstance(spare, BaseException):
            raise spare
        return spare


def _execution(order: VisitOrder, recipe: Recipe) -> Execution:
    """Return how a device is to do the tasks of a visit."""
    shared, limit = (), None
    if (tasks := order.trial.tasks) is not None:
        shared = tasks["shared"]
        if order.task_bytes is not None and recipe.collate is not None:
            limit = MemoryLimit(tasks["batch"], order.task_bytes)  # else batches are alike
    return Execution(
        order.recompute, order.resident, order.moves, order.crossings, shared, limit, order.watched
    )


def _may_look(looks: AuditBudget) -> bool:
    """Return whether there is time to look at what a visit leaves beside its shards."""
    return bool(looks.share) and looks.allows(0.0, first_epoch=True)


class _Memory:
    """Has the slots of a visit's shards, and takes care of the heap where they are the agent's.

    What an audit computes leaves all random numbers as they are.
    """

    def __init__(
        self,
        layout: TrialLayout,
        order: VisitOrder,
        reserved: Callable[[int], AbstractContextManager[object]],
        scratch: str | None,
        looks: AuditBudget,
        effects: LateEffects,
    ) -> None:
        self.resident = order.resident
        self._looks = looks
        self._effects = effects
        self._layout = layout
        self._audits = order.audits is not None
        self._slots: dict[int, Segments] = {}
        self._stack = ExitStack()
        self._beside = layout.step_bytes(first=order.first_step == 0)
        self._trims = time.monotonic() + TRIM_SECONDS
        self._mapped: MappedMemory | None = None
        if order.mapped:
            assert scratch is not None
            largest = max(shard.nbytes for shard in layout.shards)
            self._mapped = MappedMemory(scratch, STATES_OF_A_MAPPED_STEP * largest)
        elif self.resident:
            self._stack.enter_context(reserved(self._beside))
            self._stack.enter_context(kept_heap())

    def __getitem__(self, shard: int) -> Segments:
        """Return the slots of a shard."""
        return self._slots[shard]

    def moved(self, slots: Segments) -> Segments:
        """Return slots whose trainable segment is a copy in a mapped file, if that is wanted."""
        if self._mapped is None:
            return slots
        with self._mapped:
            return {**slots, "trainable": slots["trainable"].clone()}

    def load(self, shard: int, slots: Segments) -> None:
        """Take a shard, for which LR lambdas are called then."""
        self._slots[shard] = slots
        self._effects.find_as_alone()

    def unload(self, shard: int) -> Segments:
        """Let go of a shard, and return its slots."""
        return self._slots.pop(shard)

    def digests(self, shard: int) -> TensorDigests:
        """Return the digests of a shard's tensors."""
        return tensor_digests(self._layout.shards[shard], self._slots[shard])

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Let the body do tasks; now and then the heap is trimmed after it."""
        kept = random_numbers_kept() if self._audits else nullcontext()
        begun = time.perf_counter()
        with self._effects.watched(), kept, self._mapped or nullcontext():
            yield
        if not self._audits:
            self._looks.trained += time.perf_counter() - begun
        if self.resident and time.monotonic() > self._trims:
            trim_heap(self._beside)
            self._trims = time.monotonic() + TRIM_SECONDS

    def close(self) -> None:
        """Let go of all shards, and of what stands for attributes."""
        self._slots.clear()
        self._stack.close()
        self._effects.give_back()


class _ComparedSteps:
    """Tells what a step that is audited leaves in attributes, and what it leaves there uncut.

    A step is compared if all of it was done here, by the modules' own code.
    """

    def __init__(self, effects: LateEffects, order: VisitOrder, accumulate: int) -> None:
        self._effects = effects
        self._window = None if order.moves else order.watched
        self._audits = order.audits is not None
        self._accumulate = accumulate
        self._done = 0

    def begin(self, shard: int, microbatch: int) -> None:
        """Note that F of a shard begins."""
        window, place = divmod(microbatch, self._accumulate)
        if window and self._effects.awaits_first_step:
            self._effects.first_step_ended()
        if shard == 0 and window == self._window:
            if place == 0:
                self._done = 0
                self._effects.begin_step(window)
            self._done += 1

    def end(self, microbatch: int) -> TensorDigests:
        """Return what the step that ended with a microbatch is compared by."""
        if self._audits:
            return self._effects.all_values()
        window, place = divmod(microbatch, self._accumulate)
        if window != self._window or self._done != place + 1:
            return {}
        return self._effects.of_step(window)


class _Training:
    """Has the slots of a visit that trains, and what its steps are compared by."""

    def __init__(self, memory: _Memory, effects: LateEffects, steps: _ComparedSteps) -> None:
        self._memory, self._effects, self._steps = memory, effects, steps
        self._latest = 0  # microbatch of a task that was done

    def moved(self, slots: Segments) -> Segments:
        """Return slots with the same content where the visit wants them."""
        return self._memory.moved(slots)

    def digests(self, shard: int) -> TensorDigests:
        """Return the digests of a shard's tensors, with what the step left elsewhere."""
        effects = {} if shard else self._steps.end(self._latest)
        return {**self._memory.digests(shard), **effects}

    def _begin(self, task: Action) -> None:
        """Note that a task begins."""
        if task.kind is ActionKind.F:
            self._steps.begin(task.shard, task.microbatch or 0)


class TrainingVisit(_Training):
    """Trains a trial on a device."""

    def __init__(
        self,
        visit: VisitRun,
        layout: TrialLayout,
        stays: bool,
        memory: _Memory,
        effects: LateEffects,
        steps: _ComparedSteps,
    ) -> None:
        super().__init__(memory, effects, steps)
        self.stays, self.resident = stays, memory.resident
        self._marks = [len(shard.gradients.entries) for shard in layout.shards]
        self._visit = visit

    def load(self, shard: int, slots: Segments, cursor: Mapping[str, Any] | None) -> None:
        """Bind a shard to its slots."""
        self._memory.load(shard, slots)
        given = None if cursor is None else dict(cursor)
        self._visit.load(shard, slots, given, slots.get("gradients"))

    def complete(self, shard: int, slots: Segments) -> None:
        """Bind what has come of a shard that is bound."""
        self._memory.load(shard, slots)
        self._visit.complete(shard, slots, slots.get("gradients"))

    def unload(self, shard: int) -> tuple[Mapping[str, Any], bool]:
        """Leave a shard's slots as the visit has changed them."""
        self._visit.unload(shard)
        slot = self._memory.unload(shard).get("gradients")
        has_gradients = slot is None or bool(slot[: self._marks[shard]].any())
        return self._visit.cursor(shard), has_gradients

    def perform(
        self, task: Action, then: Callable[[Action], Action] | None = None
    ) -> tuple[Action, Losses]:
        """Do a task; the loss counts once the microbatch has ended."""

        def following(ended: Action) -> Action:
            assert then is not None
            self._latest = ended.microbatch or 0
            return then(ended)

        self._begin(task)
        with self._memory.computing():
            last = self._visit.perform(task, then=following)
        number = self._latest = last.microbatch or 0
        if last.kind is ActionKind.B and last.shard == 0 and number in self._visit.losses:
            return last, {number: self._visit.losses[number]}
        return last, {}

    def cursor(self, shard: int) -> Mapping[str, Any]:
        """Return the cursor of a shard."""
        return self._visit.cursor(shard)

    def take_up(self, tasks: Sequence[Action], slab: Bytes, record: PassRecord) -> None:
        """Begin a unit of a microbatch that moves."""
        self._visit.take_up(tasks, memory_of(slab), record)

    def put_down(self) -> PassRecord:
        """End such a unit."""
        return self._visit.put_down()

    def close(self) -> None:
        """End the visit after its last task."""
        with self._effects.ending():
            with closing(self._memory):
                self._visit.close()
            self._effects.check(self._visit.optimizers)

    def cancel(self) -> None:
        """End the visit where it stands."""
        self._visit.cancel()
        self._memory.close()
        self._effects.abandon()


class EvaluationVisit:
    """Evaluates a trial on a device, whose model has the attributes of before afterwards.

    Args:
        trial: who is evaluated.
        batches: the validation rows of a partition.
        execution: how its tasks are done.
        looks: the time for looking at what the evaluation changes.
        earlier: of the trial's model.
    """

    def __init__(
        self,
        trial: TrialRuntime,
        order: VisitOrder,
        batches: Iterator[Batch],
        execution: Execution,
        looks: AuditBudget,
        earlier: EarlierReadings,
    ) -> None:
        self.resident, self.stays = order.resident, order.resident or not order.recompute
        self._looks = looks
        known = order.trial.attributes, order.trial.set_in_evaluation
        self._effects = LateEvaluation(trial, *known, looks, earlier)
        may_look = _may_look(looks)
        waits = order.task.uncut and not order.recompute  # else shards leave before others come
        with ExitStack() as kept:
            kept.enter_context(kept_attributes(trial.recipe.model))
            self._effects.stand_in()
            if may_look:
                self._effects.begin()
            self._visit = ShardEvaluation(trial, batches, execution, may_look, waits)
            self._kept = kept.pop_all()

    def moved(self, slots: Segments) -> Segments:
        """Return the slots, for an evaluation copies nothing."""
        return slots

    def load(self, shard: int, slots: Segments, cursor: Mapping[str, Any] | None) -> None:
        """Bind a shard to its slots."""
        self._visit.load(shard, slots)

    def complete(self, shard: int, slots: Segments) -> None:
        """Take nothing: what forwards read comes at once."""

    def unload(self, shard: int) -> tuple[None, bool]:
        """Leave a shard's slots, which are as they were."""
        self._visit.unload(shard)
        return None, False

    def perform(
        self, task: Action, then: Callable[[Action], Action] | None = None
    ) -> tuple[Action, Losses]:
        """Do F of a shard."""
        with self._effects.watched():
            return self._visit.perform(task, then), {}

    def cursor(self, shard: int) -> None:
        """Return None: an evaluation changes nothing."""

    def digests(self, shard: int) -> TensorDigests:
        """Return nothing: an evaluation has no updates."""
        return {}

    def take_up(self, tasks: Sequence[Action], slab: Bytes, record: PassRecord) -> None:
        """Begin a unit of a microbatch that moves."""
        self._visit.take_up(tasks, memory_of(slab), record)

    def put_down(self) -> PassRecord:
        """End such a unit."""
        return self._visit.put_down()

    def close(self) -> Evaluation | None:
        """End the evaluation, and return what it gave, if its last shard was here.

        Raises:
            ConfigurationError: it changed what admission's evaluations left alone.
        """
        with self._kept, self._effects.ending():
            try:
                written = self._visit.written()
            finally:
                self._visit.close()
            self._looks.spent += max(0.0, self._visit.looked_seconds - FREE_SECONDS)
            self._effects.check(written, self._visit.draws)
        return self._visit.result

    def cancel(self) -> None:
        """End the evaluation where it stands."""
        with self._kept:
            self._visit.close()
            self._effects.abandon()


class PlainVisit(_Training):
    """Takes each step with the plain trainer, when the last microbatch's first backward comes.

    All shards are loaded then, because the visit keeps them from F to B; other tasks do nothing.

    Args:
        given: what the trial trains on.
    """

    stays, resident = True, False

    def __init__(
        self,
        trial: TrialRuntime,
        given: SubEpochInput,
        memory: _Memory,
        effects: LateEffects,
        steps: _ComparedSteps,
    ) -> None:
        super().__init__(memory, effects, steps)
        self._trial = trial
        self._given = given
        self._windows = enumerate(given.windows)
        self._at: tuple[int, Window] = (-1, ())
        self._cursors: dict[int, dict[str, Any] | None] = {}
        self._before = self._cursors  # the latest step
        self._training: UncutTraining | None = None  # while all shards are there
        self._optimizers: list[tuple[torch.optim.Optimizer, Any]] = []
        self._stack = ExitStack()

    def load(self, shard: int, slots: Segments, cursor: Mapping[str, Any] | None) -> None:
        """Take a shard, which lies in the slots."""
        self._memory.load(shard, slots)
        self._cursors[shard] = None if cursor is None else dict(cursor)

    def complete(self, shard: int, slots: Segments) -> None:
        """Take nothing: the whole of a shard comes at once."""

    def unload(self, shard: int) -> tuple[Mapping[str, Any] | None, bool]:
        """Let go of a shard."""
        self._end_training()
        self._memory.unload(shard)
        return self._cursors[shard], False

    def perform(
        self, task: Action, then: Callable[[Action], Action] | None = None
    ) -> tuple[Action, Losses]:
        """Take a step if the task is the first backward of its last microbatch."""
        number = task.microbatch or 0
        place, window = divmod(number, self._trial.recipe.accumulate)[::-1]
        while self._at[0] < window:
            self._at = next(self._windows)
        self._latest = number
        self._begin(task)
        last_of_all = place == len(self._at[1]) - 1 and task.shard == self._trial.num_shards - 1
        if task.kind is not ActionKind.B or not last_of_all:
            return task, {}
        with self._memory.computing():
            losses = self._step(self._given.start_step + window, self._at[1])
        first = number - place
        of_batches = zip(losses, self._at[1], strict=True)
        return task, {first + n: (loss, b.rows) for n, (loss, b) in enumerate(of_batches)}

    def _step(self, step: int, window: Window) -> list[float]:
        numbers = range(self._trial.num_shards)
        torch.set_num_threads(torch.get_num_threads())  # OpenMP keeps their number per thread
        if self._training is None:
            cursor, *others = (self._cursors[k] for k in numbers)
            if any(other != cursor for other in others):
                raise ValueError(f"shards of one state have different cursors: {cursor}, {others}")
            metrics = self._given.epoch_metrics if step == self._given.start_step else None
            self._training = self._stack.enter_context(
                uncut_training(
                    self._trial, [self._memory[k] for k in numbers], cursor, step, metrics
                )
            )
            trainer = self._training.trainer
            self._optimizers.append((trainer.recipe.optimizer, trainer.scheduler))
        losses = self._training.step(window)
        self._before = self._cursors
        self._cursors = dict.fromkeys(numbers, self._training.cursor())
        return losses

    def _end_training(self) -> None:
        """Give the model its own tensors back."""
        training, self._training = self._training, None
        with self._stack:
            if training is not None:
                training.check_unwritten()

    def cursor(self, shard: int) -> Mapping[str, Any] | None:
        """Return the cursor of a shard from before the step that a backward has taken."""
        return self._before[shard]

    def close(self) -> None:
        """End the visit."""
        with self._effects.ending():
            with closing(self._memory):
                self._end_training()
            self._effects.check(self._optimizers)

    def cancel(self) -> None:
        """End the visit where it stands."""
        self._training = None
        self._stack.close()
        self._memory.close()
        self._effects.abandon()
