"""Watches what evaluations change, which must leave the trial as it is.

What a forward sets anew in each evaluation is no harm, because attributes are as before afterwards.
An evaluation that depends on earlier ones is refused, and so is training that depends on one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cerebro_hydra.errors import ConfigurationError, NonFiniteLoss
from cerebro_hydra.plan.policy.audit_budget import AuditBudget
from cerebro_hydra.recipe import Recipe, RunningEvaluation
from cerebro_hydra.recipe.attributes import kept_attributes
from cerebro_hydra.recipe.module_origins import is_own
from cerebro_hydra.shards.admission.effects.after_steps import AfterSteps, bits_of_step
from cerebro_hydra.shards.admission.effects.held_state import (
    OF_METRIC,
    HeldState,
    SetByTraining,
    not_computed_with,
)
from cerebro_hydra.shards.admission.effects.late_effects import FREE_SECONDS, EarlierReadings
from cerebro_hydra.shards.admission.effects.object_reader import ObjectReader
from cerebro_hydra.shards.admission.effects.readings import (
    AS,
    KnownChanges,
    Reading,
    changed,
    containers_of,
    have_grown,
    is_of_process,
    name_of,
    told,
)
from cerebro_hydra.shards.admission.effects.shared_watch import SharedWatch
from cerebro_hydra.shards.admission.effects.value_texts import PLAIN
from cerebro_hydra.shards.admission.global_draws import GlobalDraws
from cerebro_hydra.shards.admission.held_beside import HeldBeside
from cerebro_hydra.shards.admission.written_tensors import instead_of_writing, other_values
from cerebro_hydra.shards.cut.sample import Example, copy_example
from cerebro_hydra.shards.cut.second_names import told_if_nan
from cerebro_hydra.shards.cut.values import AttributeValues, TensorKey
from cerebro_hydra.shards.digest import tensor_digest
from cerebro_hydra.shards.engine.differences import TensorContent
from cerebro_hydra.shards.engine.layout import TrialRuntime
from cerebro_hydra.shards.engine.microbatch import UsesElsewhere, memory_reads_seen
from cerebro_hydra.shards.places import Places

DRAWS = "random numbers of torch"
"""Stands among what evaluations set anew for numbers that they draw, on which nothing depends."""

UNREAD = "unread: "
"""Begins, among what evaluations set anew, the names of attributes that training sets, and with
which no evaluation computes unless it has set them itself."""


_SET_TOO = (
    "a worker that evaluates may not have trained before. Set it in each evaluation, too, or keep "
    "it in a buffer of the model"
)


class EvaluationEffects:
    """Watches attributes, and what loss, metrics and collate hold, in admission's evaluations.

    Args:
        evaluated: the recipe with the model that is evaluated, which may be a moving average.
    """

    def __init__(self, recipe: Recipe, evaluated: Recipe) -> None:
        self._recipe = recipe
        self._held, self._held_by_evaluated = HeldState(recipe), HeldState(evaluated)
        self._beside = HeldBeside(recipe)
        self._precision = evaluated.precision
        self._before: Reading = {}
        self.latest: Reading = {}
        """What there was in the latest evaluation."""
        self.written: set[str] = set()
        """What evaluations have changed; that later ones do so, too, is no harm."""
        self._shared: set[str] = set()  # the paths of that which trials share
        self.draws = False
        """Whether one has drawn random numbers of torch."""
        self._unread: set[str] = set()

    @property
    def set_anew(self) -> set[str]:
        """Return what evaluations changed and drew, which is no harm, and what none reads."""
        unread = {UNREAD + name for name in self._unread}
        shared = sorted(self._shared)[: KnownChanges.MOST]
        return self.written | unread | {*shared, *([DRAWS] if self.draws else [])}

    def begin(self) -> None:
        """Note what there is before an evaluation."""
        self._before = self._read_evaluated()

    def look(self) -> None:
        """Look at what there is, as long as the evaluation has not given the attributes back."""
        self.latest = self._read_evaluated()
        self._note(changed(self._before, self.latest))

    def _note(self, paths: Collection[str]) -> None:
        self.written |= set(map(name_of, paths))
        self._shared |= set(filter(is_of_process, paths))

    def _read_evaluated(self) -> Reading:
        with self._precision():  # which sets the configs of models, too
            return _read(self._held_by_evaluated)

    def check(self, steps: AfterSteps, trained_attributes: Collection[str]) -> None:
        """Evaluate with a history and without one, and train after an evaluation and without one.

        Args:
            trained_attributes: those that training has changed.

        Raises:
            ConfigurationError: something depends on an earlier evaluation; the message names it.
        """
        if not self.written and not trained_attributes:
            return  # there is no history
        self._unread = self._find_unread(steps, trained_attributes)
        evaluated = AttributeValues(self._recipe.model)
        before = self._after(steps, evaluated, lambda: None)
        fewer, present = AttributeValues(self._recipe.model), HeldBeside(self._recipe)
        of_fewer = self._after(steps, fewer, partial(self._evaluate_fewer, steps))
        present.give_back()
        alone = self._after(steps, evaluated, lambda: self.evaluate(steps.example))
        self._check_beside(steps, trained_attributes)
        self._check_trained(steps, trained_attributes)
        self._check_earlier(steps)
        of_first = changed(before, alone) | changed(before, of_fewer)
        self._note(of_first)
        if not self.written:
            return
        for _ in range(2):
            found = self._after(steps, steps.history, lambda: None)
            later = self._after(steps, steps.history, lambda: self.evaluate(steps.example))
            set_by_some = of_first | changed(found, later)
            for where in sorted(alone.keys() & set_by_some, key=_in_order):
                if name_of(where) in self.written and later.get(where) != alone[where]:
                    raise ConfigurationError(
                        f"each evaluation changes {told(where)}, on which others may depend; "
                        f"{_remedy(where)}"
                    )
        if not of_first:
            return
        bits: list[list[str]] = []

        def step() -> None:
            bits.append(bits_of_step(self._recipe, steps))

        def evaluate_and_step() -> None:
            self._evaluate_fewer(steps)
            step()

        plain = self._after(steps, AttributeValues(self._recipe.model), step)
        after = self._after(steps, evaluated, evaluate_and_step)
        present.give_back()
        if bits[0] != bits[1]:
            where = min(
                of_first, key=lambda each: (plain.get(each) == after.get(each), _in_order(each))
            )  # one that training leaves as the evaluation has set it
            raise ConfigurationError(
                f"training depends on {told(where)}, which an evaluation has changed; "
                f"{_remedy(where)}"
            )

    def check_buffers(self, steps: AfterSteps, buffers: Mapping[str, Tensor]) -> None:
        """Refuse training that computes with buffers which evaluations set anew: those are lost.

        Args:
            buffers: by their names, as an evaluation has set them.

        Raises:
            ConfigurationError: it does; the message names one.
        """
        recipe, model = self._recipe, self._recipe.model

        def bits(others: Mapping[str, Tensor]) -> list[str]:
            of_others = {f"buffer:{name}": each for name, each in others.items()}
            other = replace(steps, trained={**steps.trained, **of_others})
            with other.in_use(model, AttributeValues(model)):
                found = bits_of_step(recipe, other)
                left = (b for name, b in model.named_buffers() if name not in buffers)
                return [*found, *(tensor_digest(each) for each in left)]

        plain = bits({}) if buffers else []
        for name, left in sorted(buffers.items()):
            for others in (buffers, *({name: value} for value in (left, *other_values(left)))):
                found = list[str]()
                with suppress(Exception):  # a step can't do with such a value
                    found = bits({n: value.clone() for n, value in others.items()})
                if found != plain:
                    raise ConfigurationError(
                        f"training depends on buffer {name!r}, to which evaluations write: each "
                        f"worker has copies of its own there; {instead_of_writing(model, name)}"
                    )

    def _check_beside(self, steps: AfterSteps, trained: Collection[str]) -> None:
        """Refuse evaluations that compute with what training leaves in a loss or in the collate."""
        recipe, model = self._recipe, self._recipe.model
        names = sorted({name_of(each) for each in trained if _is_of_loss_or_collate(each)})
        if not names:
            return

        def evaluated() -> list[str]:
            with steps.in_use(model, AttributeValues(model)):
                steps.key.reseed("evaluation")
                return self.evaluate(steps.example)

        losses = nn.ModuleList(each for each in recipe.losses if isinstance(each, nn.Module))
        built, found = AttributeValues(losses, of=nn.ModuleList([model, losses])), []
        with suppress(Exception), built.in_use():  # what fails on such rows is told elsewhere
            for each in (steps, steps.of_larger_rows().of_another_step()):
                with steps.in_use(model, AttributeValues(model)):
                    bits_of_step(recipe, each)
                found.append(evaluated())
        if len(found) == 2 and found[0] != found[1]:
            raise ConfigurationError(
                f"evaluations compute with {told(names[0])}, which training sets; {_SET_TOO}"
            )

    def _check_trained(self, steps: AfterSteps, trained: Collection[str]) -> None:
        """Refuse evaluations that compute with a number that training sets, though it may be 0."""
        model, held = self._recipe.model, self._held

        def evaluated(name: str, more: float) -> list[str]:
            with steps.in_use(model, steps.copied_history(model)):
                for module, attribute, _ in held.attributes([name]):
                    vars(module)[attribute] = vars(module)[attribute] + more
                steps.key.reseed("evaluation")
                return self.evaluate(steps.example)

        with steps.history.in_use():
            numbers = {
                name
                for module, attribute, name in held.attributes(set(map(name_of, trained)))
                if type(vars(module).get(attribute)) in (int, float)
                if name not in self._unread
            }
        with steps.in_use(model, AttributeValues(model)), suppress(Exception):
            places = [*held.attributes(numbers)]
            before = [vars(module).get(attribute) for module, attribute, _ in places]
            self.evaluate(steps.example)
            numbers -= {  # which evaluations make themselves
                name
                for (module, attribute, name), built in zip(places, before, strict=True)
                if vars(module).get(attribute) != built
            }
        for name in sorted(numbers):
            found = list[list[str]]()
            with suppress(Exception):  # as where it is a size
                found += [evaluated(name, more) for more in (0, 1)]
            if len(found) == 2 and found[0] != found[1]:
                raise ConfigurationError(
                    f"evaluations compute with {told(name)}, which training sets; {_SET_TOO}"
                )

    def _check_earlier(self, steps: AfterSteps) -> None:
        """Refuse evaluations that depend on what those before have kept, of a batch or weights."""
        model, found = self._recipe.model, list[list[str]]()
        present = HeldBeside(self._recipe)
        with suppress(Exception):  # what fails on such rows is told elsewhere
            for earlier in ([], [steps.of_larger_rows()]):
                self._beside.give_back()
                attributes = AttributeValues(model)
                for each in earlier:
                    with each.in_use(model, attributes, size=0.5):
                        self.evaluate(each.example)
                with steps.in_use(model, attributes):
                    bits_of_step(self._recipe, steps)  # in between, epochs train
                with steps.in_use(model, attributes):
                    steps.key.reseed("evaluation")
                    found.append(self.evaluate(steps.example))
        present.give_back()
        if self.written and len(found) == 2 and found[0] != found[1]:
            where = min(self.written, key=_in_order)
            raise ConfigurationError(
                f"evaluations depend on {told(where)}, which the first one sets and later ones use "
                "as it is; each worker evaluates anew, with its own weights and batches. Compute "
                f"it in each evaluation, or {_remedy(where)}"
            )

    def _evaluate_fewer(self, steps: AfterSteps) -> None:
        with suppress(Exception):  # what fails on such rows is told elsewhere
            self.evaluate(steps.of_fewer_rows().example)

    def _after(
        self, steps: AfterSteps, attributes: AttributeValues, run: Callable[[], object]
    ) -> Reading:
        """Return what there is after a run of the model, which changes these attributes alone."""
        with steps.in_use(self._recipe.model, attributes):
            run()
            return _read(self._held)

    def _find_unread(self, steps: AfterSteps, changed_names: Collection[str]) -> set[str]:
        """Return with which of the attributes that training has changed no evaluation computes."""
        model = self._recipe.model

        def bits(names: Collection[str]) -> list[str]:
            with steps.in_use(model, AttributeValues(model)):
                self._held.stand_in(names, SetByTraining)
                steps.key.reseed("evaluation")
                return self.evaluate(steps.example)

        names = {name for *_, name in self._held.attributes(changed_names)}
        return not_computed_with(names, SetByTraining, bits)

    def evaluate(self, example: Example) -> list[str]:
        """Evaluate an example with what the model has; return what tells what that gave."""
        recipe, model = self._recipe, self._recipe.model
        model.eval()
        columns, labels = copy_example(example)
        rows = int((labels or columns)[0].shape[0])
        features, targets = recipe.collated(columns, labels, None)
        compiled = recipe.compiled(model)
        evaluation, found = RunningEvaluation(recipe), []
        with torch.no_grad(), recipe.precision(), compiled, suppress(NonFiniteLoss):
            outputs = recipe.call(model, recipe.inputs(features, targets))
            loss = recipe.compute_loss(outputs, targets).item()
            evaluation.add(loss, outputs, targets, rows)
            leaves = (each for each in tree_leaves(outputs) if isinstance(each, Tensor))
            found = [repr(evaluation.result()), *(repr(TensorContent.of(each)) for each in leaves)]
        return found


_SWITCHED = "train() and eval() are called at other times here than in a loop of one's own"


def check_switched(model: nn.Module) -> None:
    """Refuse a model that notes how often it is switched to training, such as to count epochs.

    Raises:
        ConfigurationError: its own `train` or `eval` does; the message names what it changes.
    """
    kinds = {type(module) for module in model.modules()}
    if not any(is_own(each.train.__module__) or is_own(each.eval.__module__) for each in kinds):
        return

    def read() -> Reading:
        plain = {
            f"attribute {name!r} of {f'module {place!r}' if place else 'the model'}": repr(value)
            for place, module in model.named_modules()
            for name, value in vars(module).items()
            if type(value) in PLAIN
        }
        return plain | {f"buffer {n!r}": tensor_digest(b) for n, b in model.named_buffers()}

    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with kept_attributes(model):
        model.train()
        before = read()
        model.eval()
        model.train()
        found = sorted(changed(before, read()))
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    if found:
        raise ConfigurationError(
            f"each call of train() and eval() changes {found[0]}, and {_SWITCHED}; count steps in "
            "the forward, in a registered buffer, `if self.training`"
        )


def check_switched_blindly(model: nn.Module) -> None:
    """Refuse a model that looks at its tensors when it is switched; on a worker it may have others.

    Raises:
        ConfigurationError: its `train` or `eval` does; the message names what it looks at.
    """
    methods = {m for module in model.modules() for m in (type(module).train, type(module).eval)}
    if methods <= {nn.Module.train, nn.Module.eval}:
        return
    places = Places()
    for kind, tensors in (
        ("parameter", model.named_parameters()),
        ("buffer", model.named_buffers()),
    ):
        for name, tensor in tensors:
            with suppress(RuntimeError):  # one of some kinds has no memory
                places.add(f"{kind} {name!r}", tensor.detach())
    uses = UsesElsewhere(places)
    with kept_attributes(model), memory_reads_seen(), uses, suppress(Exception):
        model.eval()
        model.train()
    if uses.found is not None:
        raise ConfigurationError(
            f"train() or eval() uses {uses.found}, which may not have come to a worker then, and "
            f"{_SWITCHED}; look at it in the forward, such as `if self.training and ...`"
        )


class LateEvaluation:
    """Compares what there is before and after an evaluation on an agent, as admission has done.

    Args:
        trial: its recipe is that which is evaluated.
        trained: the attributes that the trial's first steps changed.
        evaluated: what admission's evaluations changed.
        budget: the seconds that readings take beyond `FREE_SECONDS` are added to what it has spent.
        earlier: of the recipe's model.
    """

    def __init__(
        self,
        trial: TrialRuntime,
        trained: Collection[str],
        evaluated: Collection[str],
        budget: AuditBudget,
        earlier: EarlierReadings,
    ) -> None:
        self._recipe, self._spoilt = trial.recipe, trial.spoilt
        self._trained, self._known = KnownChanges(trained), set(evaluated)
        self._unread = {e.removeprefix(UNREAD) for e in evaluated if e.startswith(UNREAD)}
        self._budget = budget
        self._earlier = earlier
        self._held = HeldState(trial.recipe, {each.name for each in trial.cut_model.buffers})
        self._trains = self._read_trains()
        self._draws = GlobalDraws()
        self._texts = partial(earlier.texts_in_code, self._held)
        self._shared = SharedWatch(self._trained, self._known, self._texts, earlier.as_built)
        self._shared.find_as_alone()
        self._before: Reading | None = None

    def stand_in(self) -> None:
        """Let what training sets be as built, and what no evaluation reads be gone."""
        self._earlier.give_back(self._recipe.model, self._held, self._trained.names)
        self._held.stand_in(self._unread, SetByTraining)

    def begin(self) -> None:
        """Note what attributes there are before an evaluation, while the model has its tensors."""
        reader = self._read()
        self._before = reader.found
        self._shared.begin(reader)

    def ending(self) -> AbstractContextManager[None]:
        """Let the body end the evaluation; if it fails, others have what they shared before it."""
        return self._shared.ending(self.abandon)

    def abandon(self) -> None:
        """Give back what trials share, as far as the evaluation should not have changed it."""
        if self._before is not None:
            with suppress(Exception):  # of code that can't be looked at where it failed
                self._shared.find_as_alone()
                reader = self._read()
                late = set(self._late(self._changed_attributes(self._before, reader.found)))
                late -= self._shared.made_by_builds(late, reader)
                self._shared.give_back(late, reader, lambda: self._read().found)
        self._shared.end()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the generators of Python and NumPy while the trial computes.

        Raises:
            NonFiniteLoss: see `told_if_nan`.
        """
        with self._shared.computing(), told_if_nan(self._spoilt), self._draws.watched():
            yield

    def check(self, written: Collection[TensorKey], draws: bool) -> None:
        """Compare with what there is after the evaluation, before its attributes are given back.

        Args:
            written: the tensors of the model to which the evaluation wrote.
            draws: whether it drew random numbers of torch.

        Raises:
            ConfigurationError: it changed what admission's evaluations left alone.
        """
        self._draws.check()
        if draws and DRAWS not in self._known:
            raise ConfigurationError(
                "an evaluation drew random numbers, as none did at admission, and they have no key "
                "there; draw them `if self.training` only"
            )
        tensors = {f"{kind} {name!r}" for kind, name in written}
        if self._read_trains() != self._trains:
            raise ConfigurationError(
                "an evaluation changed which parameters train, or made one; choose in the factory "
                "what trains"
            )
        self._shared.find_as_alone()
        reader = None if self._before is None else self._read()
        before, after = self._before or {}, {} if reader is None else reader.found
        late = self._late(tensors | self._changed_attributes(before, after))
        if late and reader is not None:
            meanwhile = self._shared.made_by_builds(late, reader)
            late = [path for path in late if path not in meanwhile]
        if self._shared.late:
            late = sorted(self._shared.late)
        elif late and reader is not None:
            self._shared.check_cause(late, reader)
        if late:
            raise ConfigurationError(
                f"an evaluation changed {told(late[0])}, as none did at admission, and it must "
                f"leave the trial as it is; {_remedy(late[0])}"
            )
        if reader is not None:
            self._shared.check(after)

    def _late(self, found: set[str]) -> list[str]:
        return sorted((path for path in found if name_of(path) not in self._known), key=_in_order)

    def _changed_attributes(self, before: Reading, after: Reading) -> set[str]:
        found = changed(before, after)
        # Another trial of the process may have trained meanwhile.
        found -= {p for p in found if is_of_process(p) and self._trained.covers(p)}
        grown = have_grown(found, before, after)
        found -= {path for path in grown if self._may_grow(path, before)}
        return {path for path in found if not self._follows(path, after)}

    def _follows(self, path: str, after: Reading) -> bool:
        """Return whether it is what each evaluation sets anew, by another name."""
        texts = (after.get(each, "") for each in containers_of(path))
        others = (text.removeprefix(AS) for text in texts if text.startswith(AS))
        return any(name_of(other) in self._known for other in others)

    def _may_grow(self, path: str, before: Reading) -> bool:
        """Return whether it may be a cache: training has made some, or another trial shares it."""
        known = self._trained.covers(path) or _is_of_metric(path)
        return known or self._trained.may_grow(path, before, self._texts)

    def _read(self) -> ObjectReader:
        begun = time.thread_time()
        reader = self._held.read_all()
        reader.found |= self._held.read_metrics()
        self._budget.spent += max(0.0, time.thread_time() - begun - FREE_SECONDS)
        return reader

    def _read_trains(self) -> dict[str, bool]:
        return {name: p.requires_grad for name, p in self._recipe.model.named_parameters()}


def _read(held: HeldState) -> Reading:
    return held.read() | held.read_metrics()


def _in_order(path: str) -> tuple[bool, str]:
    """Return what sorts a metric last, as it holds the loss, whose own name tells more."""
    return _is_of_metric(path), path


def _is_of_metric(name: str) -> bool:
    return name.startswith(f"a value{OF_METRIC}")


def _is_of_loss_or_collate(name: str) -> bool:
    return any(holder in name for holder in (" of the loss", " of loss ", " of the collate"))


def _remedy(name: str) -> str:
    if _is_of_metric(name):
        return "keep it in the state of an object with start, update, merge and compute"
    if _is_of_loss_or_collate(name):
        return "let it keep nothing from one call to the next"
    return "write to it `if self.training` only, or let every forward set it anew"
