"""Takes the first steps of a trial plainly and in shards, and says where they differ.

Errors that the user's code raises on a batch are told with the columns of that batch.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from cerebro_hydra.errors import ConfigurationError, NonFiniteLoss, StepDiffers
from cerebro_hydra.foreign_text import error_text
from cerebro_hydra.recipe import (
    Evaluation,
    PlainTrainer,
    RandomKey,
    Recipe,
    SumOverRows,
    state_tensors,
)
from cerebro_hydra.recipe.attributes import kept_in
from cerebro_hydra.recipe.own_step import OwnStep
from cerebro_hydra.recipe.randomness import generator_states, unit_hooks
from cerebro_hydra.shards.admission.effects.after_steps import (
    STEPS_PER_EPOCH,
    AfterSteps,
    ExampleBatch,
    check_own_step,
    plain_trainer,
)
from cerebro_hydra.shards.admission.effects.evaluation_effects import (
    EvaluationEffects,
    check_switched,
)
from cerebro_hydra.shards.admission.effects.held_state import HeldState, kept_by_optimizer
from cerebro_hydra.shards.admission.effects.readings import Reading, told
from cerebro_hydra.shards.admission.effects.shared_values import SharedState, shared_kept
from cerebro_hydra.shards.admission.effects.training_effects import SideEffects
from cerebro_hydra.shards.admission.global_draws import refused_random_numbers
from cerebro_hydra.shards.admission.held_beside import HeldBeside
from cerebro_hydra.shards.admission.metric_parts import warnings_of_parts
from cerebro_hydra.shards.admission.step_errors import forms_of, told_with_batch
from cerebro_hydra.shards.admission.written_tensors import (
    BuffersInOneMemory,
    WrittenTensors,
    check_averaged,
    refused_writes,
)
from cerebro_hydra.shards.cut.choice import UnitProfile
from cerebro_hydra.shards.cut.model import CutModel
from cerebro_hydra.shards.cut.sample import Example
from cerebro_hydra.shards.cut.second_names import (
    OTHER_VALUES,
    SecondNames,
    in_place,
    move,
    on_copies,
)
from cerebro_hydra.shards.cut.values import AttributeValues, ParameterValues, TensorKey
from cerebro_hydra.shards.engine.differences import (
    Recorder,
    TensorContent,
    contents,
    first_difference,
    first_operation,
)
from cerebro_hydra.shards.engine.engine import Engine, Mode
from cerebro_hydra.shards.engine.layout import (
    HostSegments,
    TrialLayout,
    TrialRuntime,
    initial_segments,
)
from cerebro_hydra.shards.engine.optimizer import StateTemplate

STEPS_PER_BATCH_SIZE = 2

_SCHEDULED_STEPS = 16  # of an LR scheduler alone, which take no time

_VIEWS = "such as a tensor or array that .data, .detach() or .numpy()"
_OWN_MEMORY = "as each worker has the model in memory of its own"


@dataclass(frozen=True)
class Evaluated:
    """Holds what the plain model gives for one example in evaluation."""

    example: Example
    outputs: Sequence[TensorContent]
    """The contents of the tensors among the model's outputs."""
    evaluation: Evaluation


@dataclass(frozen=True)
class CutCheck:
    """Holds cuts against two steps at every batch size that the plain model took."""

    recipe: Recipe
    trial_seed: int
    windows: tuple[tuple[Example, int], ...]
    """The example of each step, and how often its window repeats it."""
    losses: tuple[SumOverRows, ...]
    """The loss of each step."""
    evaluated: tuple[Evaluated, ...]
    """Every example after these steps, but those whose loss is not finite any more."""
    template: StateTemplate
    """The form of the optimizer state that these steps have made."""
    trained: Mapping[str, TensorContent]
    """The plain model's state after these steps, named as a checkpoint names it."""
    profile: UnitProfile
    """What its forwards on the largest example showed of each unit."""
    written: tuple[str, ...]
    """The buffers and frozen parameters to which it wrote in these steps."""
    reordered: tuple[str, ...]
    """The buffers to which these steps gave other strides."""
    attributes: tuple[str, ...]
    """Marks of what else these steps changed; see `KnownChanges`."""
    set_in_evaluation: tuple[str, ...]
    """What evaluations changed, which set it anew; see `EvaluationEffects`."""
    named_elsewhere: frozenset[str]
    """The buffers to which something else than the model refers, too."""
    warnings: Mapping[str, str]
    """What the user should know of metrics, by their names; see `warnings_of_parts`."""
    shared: Sequence[str]
    """What these steps set that the trials of a process share, in words."""
    shared_state: SharedState
    """What these share, as it was before these steps; shards begin with it."""

    @classmethod
    def plain(cls, recipe: Recipe, examples: Sequence[Example], trial_seed: int) -> CutCheck:
        """Train the recipe's own model plainly, which then has its own state again.

        Raises:
            ConfigurationError: model, loss or optimizer don't work on the batches.
        """
        model = recipe.model
        check_switched(model)
        second_names, memory = SecondNames(model), BuffersInOneMemory(model)
        microbatches = min(recipe.accumulate, 2)
        windows = tuple(
            (example, microbatches) for example in examples for _ in range(STEPS_PER_BATCH_SIZE)
        )
        losses = []
        profile, effects = UnitProfile(), SideEffects(recipe)
        largest = largest_example(examples)
        kept: list[SecondNames] = []
        recipe = _settled(recipe, windows, trial_seed, kept)
        if recipe.training_step is not None:
            trainer = plain_trainer(recipe, trial_seed)
            # What comes of many steps on one batch is no change of the first ones.
            with told_with_batch(trainer, largest), kept_in(_holders(recipe.training_step)):
                check_own_step(trainer, largest, kept)
        initial = state_tensors(recipe)
        parameters, attributes = ParameterValues.initial(model), AttributeValues(model)
        with parameters.in_use(), attributes.in_use(), refused_random_numbers():
            trainer = plain_trainer(recipe, trial_seed)
            effects.before_steps(trainer.scheduler)
            writes = WrittenTensors(model, initial)
            for example, times in windows:
                measured = profile.measured(model) if example is largest else nullcontext()
                with told_with_batch(trainer, example), measured:
                    losses.append(trainer.train([_window(example, times)]))
                effects.after_step(trainer.recipe.optimizer, trainer.scheduler)
            effects.check_kept()
            writes.check_made()
            writes.check_shapes()
            written, reordered = writes.names(), writes.reordered()
            memory.check(written)
            check_averaged(recipe, written)
            del writes  # it refers to buffers, too
            of_evaluation = EvaluationEffects(recipe, _evaluated_recipe(trainer))
            with refused_writes(trainer.evaluated_model()) as set_anew:
                given: dict[int, Any] = {}
                evaluated = tuple(
                    _evaluated(trainer, each, trial_seed, of_evaluation, given) for each in examples
                )
                with told_with_batch(trainer, largest):
                    outputs = given.pop(id(largest))
                    evaluated_model = trainer.evaluated_model()
                    warnings = warnings_of_parts(recipe, evaluated_model, largest, outputs)
                del given, outputs
            kept.append(SecondNames(model, known=1))  # by what gives the parameters these values
            for names in kept:
                _check_second_names(recipe, names, written, largest, trial_seed, second_names.keys)
            state, optimizer = trainer.tensors(), trainer.recipe.optimizer
        trainer.phase = "step after the first ones"
        with told_with_batch(trainer, examples[0]):
            after = AfterSteps(state, attributes, examples[0], RandomKey(trial_seed, 0, 0))
            effects.check(after)
            effects.check_caches(after, of_evaluation.evaluate, of_evaluation.latest)
            of_evaluation.check(after, effects.changes)
            of_evaluation.check_buffers(after, set_anew)
            effects.find_set_anew(after)  # which are not made for good
            effects.find_made(after)
            effects.check_references()
            shared = effects.find_shared(after, of_evaluation.evaluate)
        try:
            with AttributeValues(model).in_use():  # hooks of its steps may write to buffers
                template = StateTemplate.learn(model, optimizer)
        except Exception as error:
            if (known := kept_by_optimizer(optimizer, effects.changes)) is not None:
                raise known from error
            raise
        trained = contents(state)
        optimizer.state.clear()  # it and an LR scheduler refer to one another
        with (
            ParameterValues.initial(model).in_use(),
            AttributeValues(model, kept=second_names.has).in_use(),
        ):
            _check_second_names(recipe, second_names, written, largest, trial_seed)
        finite = tuple(each for each in evaluated if each is not None)
        return cls(
            recipe, trial_seed, windows, tuple(losses), finite, template, trained, profile, written,
            reordered, effects.known,
            tuple(sorted(of_evaluation.set_anew | {f"buffer {name!r}" for name in set_anew})),
            frozenset(name for kind, name in second_names.keys if kind == "buffer"),
            warnings, shared, effects.shared,
        )  # fmt: skip

    @property
    def rows(self) -> tuple[int, ...]:
        """Return the numbers of rows of the examples, the largest first."""
        counts = {features[0].shape[0] for (features, _), _ in self.windows}
        return tuple(sorted(counts, reverse=True))

    def difference(self, cut_model: CutModel, layout: TrialLayout) -> str | None:
        """Return what differs when the same steps are taken in shards, or None if no bit does."""
        shards = _Shards(self, cut_model, layout)
        found = self._difference_in_training(shards, layout)
        if found is None:
            return self._difference_in_evaluation(shards)
        where = self._where(cut_model, layout)
        return f"{found}; {where}" if where else found

    def _difference_in_training(self, shards: _Shards, layout: TrialLayout) -> str | None:
        for step, (expected, rows) in enumerate(self.losses):
            try:
                loss = shards.step(step)
            except NonFiniteLoss as error:  # plainly it is finite
                return f"{error_text(error).partition(';')[0]}, not {expected / rows!r}"
            if loss != expected:
                return f"the loss of step {step} is {loss / rows!r}, not {expected / rows!r}"
        return first_difference(layout, shards.segments, self.trained)

    def _difference_in_evaluation(self, shards: _Shards) -> str | None:
        for expected in self.evaluated:
            outputs = _Outputs()
            found = shards.evaluate(expected.example, outputs)
            pairs = zip(outputs.contents, expected.outputs, strict=True)
            for number, (here, there) in enumerate(pairs):
                if here != there:
                    return f"output {number} of the model in evaluation"
            for name, (there_total, rows) in expected.evaluation.sums.items():
                here_total, _ = found.sums[name]
                if repr(here_total) != repr(there_total):  # NaN equals itself
                    return (
                        f"{name} in evaluation is {here_total / rows!r}, not {there_total / rows!r}"
                    )
            if repr(found.states) != repr(expected.evaluation.states):
                return (
                    f"custom metrics keep {found.states} in evaluation, "
                    f"not {expected.evaluation.states}"
                )
        return None

    def _where(self, cut_model: CutModel, layout: TrialLayout) -> str | None:
        """Take the steps again on both sides, and compare operation by operation."""
        plain = plain_trainer(self.recipe, self.trial_seed)
        values = ParameterValues.initial(self.recipe.model)
        attributes = AttributeValues(self.recipe.model)
        shards = _Shards(self, cut_model, layout, modes=("keep",))
        for step, window in enumerate(self.windows):
            uncut, cut = Recorder(), Recorder()

            def entered(unit: str, uncut: Recorder = uncut) -> None:
                uncut.unit = unit

            hooked = unit_hooks(self.recipe.model, entered)
            with values.in_use(), attributes.in_use(), uncut, hooked:
                plain.train([_window(*window)])
            with cut, suppress(NonFiniteLoss, StepDiffers):
                shards.step(step)
            if (operation := first_operation(uncut, cut)) is not None:
                return f"the first operation whose output differs is {operation}, in step {step}"
        return None


class _Shards:
    """Takes the same steps in shards, which hop after each."""

    def __init__(
        self,
        check: CutCheck,
        cut_model: CutModel,
        layout: TrialLayout,
        modes: Sequence[Mode] = ("keep", "recompute"),
    ) -> None:
        self._check = check
        self.segments: list[HostSegments] = list(initial_segments(check.recipe, layout))
        self._cursors: list[dict[str, Any] | None] = [None] * cut_model.num_shards
        self._cut_model = cut_model
        self._layout = layout
        self._modes = modes
        self._absent = ParameterValues.absent(check.recipe.model)

    def step(self, number: int) -> float:
        """Train one step; return the sum of its loss over rows."""

        def publish(k: int, segments: HostSegments, cursor: dict[str, Any]) -> None:
            self._cursors[k] = json.loads(json.dumps(cursor))
            self.segments[k] = segments

        window = _window(*self._check.windows[number])
        engine = self._engine(self._modes[number % len(self._modes)])
        with self._elsewhere():
            return engine.train([window], number, self._need, publish).loss_sum

    def evaluate(self, example: Example, on_outputs: Callable[[Any], object]) -> Evaluation:
        """Measure one example."""
        with self._elsewhere():
            return self._engine("keep").evaluate(_window(example, 1), self._need, on_outputs)

    @contextmanager
    def _elsewhere(self) -> Iterator[None]:
        """Let the model be as another worker builds it, so that it has no state to itself."""
        model = self._check.recipe.model
        with self._absent.in_use(), AttributeValues(model).in_use():
            yield

    def _engine(self, mode: Mode) -> Engine:
        check = self._check
        trial = TrialRuntime(
            check.recipe, self._cut_model, self._layout, check.trial_seed, STEPS_PER_EPOCH
        )
        return Engine(trial, mode)

    def _need(self, k: int) -> tuple[HostSegments, dict[str, Any] | None]:
        if k:
            self._check.shared_state.give_back()
        return self.segments[k], self._cursors[k]


def _holders(step: OwnStep) -> Iterator[Any]:
    """Yield what has a training step's own attributes; those of a model are kept elsewhere."""
    holder = getattr(step, "__self__", step)
    if hasattr(holder, "__dict__") and not isinstance(holder, nn.Module):
        yield holder


def largest_example(examples: Sequence[Example]) -> Example:
    """Return the example with the most rows."""
    return max(examples, key=lambda e: e[0][0].shape[0] if e[0][0].dim() else 0)


def evaluate_once(recipe: Recipe, example: Example, trial_seed: int) -> None:
    """Evaluate an example with the uncut model alone, which shows most of what can't work.

    Raises:
        ConfigurationError: as `told_with_batch`.
    """
    trainer, beside = plain_trainer(recipe, trial_seed), HeldBeside(recipe)
    with shared_kept(recipe), told_with_batch(trainer, example), suppress(NonFiniteLoss):
        try:
            trainer.evaluate(_window(example, 1))
        except ConfigurationError as error:
            names = None if recipe.columns is None else recipe.columns.targets
            labels = forms_of(example[1], names)
            raise ConfigurationError(f"on first rows with labels ({labels}), {error}") from error
    beside.give_back()  # the next one is to be the first


def _settled(
    recipe: Recipe,
    windows: Sequence[tuple[Example, int]],
    trial_seed: int,
    kept: list[SecondNames],
) -> Recipe:
    """Return the recipe at a scale of its losses that stays, and with which no step is skipped.

    Steps that are skipped would show nothing of the optimizer.

    Args:
        kept: as of `on_copies`.

    Raises:
        ConfigurationError: there is no such scale, or the steps can't be taken.
    """
    if recipe.scaler is None:
        return recipe
    recipe = recipe.at_scale(recipe.scaler.get_scale())
    while True:
        with on_copies(recipe.model, kept):
            trainer = plain_trainer(recipe, trial_seed)
            scaling = trainer.scaling
            assert scaling is not None
            with refused_random_numbers():
                for example, times in windows:
                    with told_with_batch(trainer, example):
                        trainer.train([_window(example, times)])
                    if scaling.skipped:
                        break
            trainer.recipe.optimizer.state.clear()
        if not scaling.skipped:
            return recipe
        recipe = recipe.at_scale(scaling.state()["scale"])


def _evaluated_recipe(trainer: PlainTrainer) -> Recipe:
    """Return the trainer's recipe with the model that is evaluated."""
    twin = copy.copy(trainer.recipe)
    twin.model = trainer.evaluated_model()
    return twin


def _evaluated(
    trainer: PlainTrainer,
    example: Example,
    trial_seed: int,
    effects: EvaluationEffects,
    given: dict[int, Any],
) -> Evaluated | None:
    """Evaluate an example; None if its loss is not finite, from which a trial may recover.

    Args:
        given: gets a copy of the model's outputs by the id of the example.
    """
    outputs = _Outputs()

    def on_outputs(found: Any) -> None:
        given[id(example)] = tree_map_only(Tensor, Tensor.clone, found)
        outputs(found)
        effects.look()

    # Evaluation has no key, so random numbers drawn there must differ from those of the shards.
    RandomKey(trial_seed, 0, 0).reseed("evaluation")
    states = generator_states(trainer.recipe.device)
    effects.begin()
    with told_with_batch(trainer, example):
        try:
            found = trainer.evaluate(_window(example, 1), on_outputs)
        except NonFiniteLoss:
            return None
    effects.look()  # what loss and metrics have changed
    effects.draws |= generator_states(trainer.recipe.device) != states
    return Evaluated(example, outputs.contents, found)


def _check_second_names(
    recipe: Recipe,
    names: SecondNames,
    written: Collection[str],
    example: Example,
    trial_seed: int,
    built: Collection[TensorKey] | None = None,
) -> None:
    """Check that nothing reads what training changes by another name than the model's own.

    The model has copies of its tensors meanwhile, which are to be as they were.

    Args:
        written: the buffers and frozen parameters that training changes.
        built: the tensors that have such names since the model was built, if steps have made these
            names: then nothing may keep another one for later steps, either.

    Raises:
        ConfigurationError: something does, which would see the updates of no worker.
    """
    keys = names.changed_by_training(written)
    if not keys:
        return
    # A copy of the model has its own buffer where an attribute refers to one since it was built.
    of_steps = [] if built is None else [key for key in keys if key not in built]
    held = HeldState(recipe)

    def repeated(moved: Collection[TensorKey], value: float) -> tuple[list[Any], list[Reading]]:
        """Return what steps give, and what is held after each, if these tensors hop before each."""
        found: list[Any] = []
        readings: list[Reading] = []
        with in_place(recipe.model, names.has, written):
            move(recipe.model, moved, value)
            with names.overwritten(moved, value), suppress(Exception):
                trainer = plain_trainer(recipe, trial_seed)
                for _ in range(2 if of_steps else 1):
                    found.append(trainer.train([_window(example, 1)]))
                    found.append(contents(trainer.tensors()))
                    outputs = _Outputs()
                    RandomKey(trial_seed, 0, 0).reseed("evaluation")
                    with suppress(NonFiniteLoss):
                        found.append(repr(trainer.evaluate(_window(example, 1), outputs)))
                    found.append(outputs.contents)
                    if of_steps:
                        readings.append(held.read())
                    move(recipe.model, moved, value)
                found.append(_learning_rates(trainer))
        return found, readings

    repeated((), 0.0)  # what it does once, such as to fill a cache, is done
    expected, readings = repeated((), 0.0)
    again, others = repeated((), 0.0)
    if again != expected:
        return  # what the steps keep, or draw, is told elsewhere

    def spoilt(moved: Collection[TensorKey]) -> tuple[bool, str | None]:
        """Return whether something reads these, and where one is kept from one step to the next."""
        runs = [repeated(moved, value) for value in OTHER_VALUES]
        read = any(found != expected for found, _ in runs)
        for plain, other, after in zip(readings, others, runs[0][1], strict=False):
            for path, text in sorted(plain.items()):
                if other.get(path) == text != after.get(path, text):
                    return read, path
        return read, None

    read, path = spoilt(keys)
    if read:
        kind, name = next((key for key in keys if spoilt([key])[0]), keys[0])
        raise ConfigurationError(
            f"a hook, the forward, the loss, the training step or an LR schedule reads {kind} "
            f"{name!r} by another name, {_VIEWS} gave when the model was made or in an earlier "
            f"step; that would see no update, {_OWN_MEMORY}. Refer to the module that has the "
            f"{kind}, and read it there in each step"
        )
    if path is not None and of_steps != keys:
        _, path = spoilt(of_steps)
    if path is not None:
        kind, name = next((key for key in of_steps if spoilt([key])[1]), of_steps[0])
        raise ConfigurationError(
            f"{told(path)} keeps {kind} {name!r} by another name for later steps, {_VIEWS} gave in "
            f"one of the first; that would see no update, {_OWN_MEMORY}. Set it anew in every "
            f"step, before it is read, or refer to the module that has the {kind}"
        )


def _learning_rates(trainer: PlainTrainer) -> list[str]:
    """Return the learning rates of each param group that an LR scheduler gives next."""
    found: list[str] = []
    for _ in range(_SCHEDULED_STEPS):
        trainer.recipe.lr_schedule.advance(trainer.scheduler, steps=1, epochs=1)
        found += [repr(group["lr"]) for group in trainer.recipe.optimizer.param_groups]
    return found


class _Outputs:
    """Takes what a model gives for each batch, and keeps the contents of its tensors."""

    def __init__(self) -> None:
        self.contents: list[TensorContent] = []

    def __call__(self, outputs: Any) -> None:
        leaves = tree_leaves(outputs)
        self.contents += [TensorContent.of(leaf) for leaf in leaves if isinstance(leaf, Tensor)]


def _window(example: Example, times: int) -> list[ExampleBatch]:
    return [ExampleBatch.of(example) for _ in range(times)]
