"""Refuses training that changes what hops with no shard: attributes, and other random numbers."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from contextlib import suppress
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.admission.effects.after_steps import AfterSteps, bits_of_step
from cerebro_hydra.shards.admission.effects.filled_caches import (
    ABSENT,
    MOST_ITEMS,
    FilledCaches,
    Growing,
    crowd,
)
from cerebro_hydra.shards.admission.effects.held_state import (
    MADE,
    OF_GRADIENT_HOOKS,
    OF_HOOKS,
    OF_OPTIMIZER,
    OF_PARAMETER,
    OF_SCHEDULER,
    THE_OPTIMIZER,
    HeldState,
    SetBefore,
    not_computed_with,
)
from cerebro_hydra.shards.admission.effects.readings import (
    AS,
    CACHED,
    GENERATOR,
    PART,
    KnownChanges,
    Reading,
    changed,
    containers_of,
    counts_of,
    entry_of,
    is_key,
    is_of_process,
    is_shared,
    made_for_good,
    moved_on,
    moving_of,
    name_of,
    told,
)
from cerebro_hydra.shards.admission.effects.shared_values import (
    SharedState,
    check_evaluations,
    set_anew,
    variables_of,
)
from cerebro_hydra.shards.admission.effects.value_texts import PLAIN
from cerebro_hydra.shards.cut.sample import Example
from cerebro_hydra.shards.cut.values import AttributeValues

_MOST_MADE = 16  # attributes made in the first step that may be set anew; more of them are not
_MOST_FLAGS = 8  # entries of dicts that are taken out one by one
_OTHER_NUMBERS = (1, -1, 1000)
"""What is added to a whole number to see whether it acts; a table of that length is still small."""
_PROBES = (True, False, 0.5, "", torch.tensor(0.5))
"""What is tried in place of an attribute of which a step may ask for its type."""

SET_ANEW = "let every forward set it anew"
"""Ends what to do in place of changing an attribute."""
IN_ATTRIBUTE = "keep it in an attribute of a module that every forward sets anew"
"""Ends what to do in place of changing what is in a container, or what trials share."""
_SIZES = (0.5, 2.0)
"""What weights are multiplied by so that the largest or smallest value so far is not the last."""

_CHANGED = "each step changes {}, which is no part of the state that hops"


class SideEffects:
    """Watches what training changes that hops with no shard; see `HeldState`.

    What a step leaves there is gone after a hop. That is no harm if each forward sets it anew, so
    it must be the same after a step of a model with a history and of one without.
    """

    _flags: ClassVar[set[str]] = set()  # what the admissions of this process have made

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._held = HeldState(recipe)
        losses = [each for each in recipe.losses if isinstance(each, nn.Module)]
        self._losses, self._modules = nn.ModuleList(losses), nn.ModuleList([recipe.model, *losses])
        self._built_losses = AttributeValues(self._losses, of=self._modules)
        read = self._held.read_all()
        self.shared = SharedState(read)
        self._readings, self._keys = [read.found], {n: set(d) for n, d in read.growing.items()}
        self._items = {
            path: list(held)
            for path, held in read.containers.items()
            if isinstance(held, list | deque) and len(held) <= MOST_ITEMS
        }
        values = {path: variable.value for path, variable in variables_of(read).items()}
        self._variables = {path: each for path, each in values.items() if type(each) in PLAIN}
        self._optimizers = [self._held.read_optimizer(recipe.optimizer)]
        self._schedulers: list[Reading] = []
        self._latest: Reading = {}  # after evaluations
        self._made_by_code: set[str] = set()  # of what is shared
        self._of_rows: set[str] = set()  # what the first step made of them, which is of no use
        self._made: set[str] = set()  # by the first step, for good
        self._looked_at: set[str] = set()  # by later steps, which may ask for their types
        self._anew: set[str] = set()  # in each step, before it computes with them
        self._shared: set[str] = set()  # likewise, but of what trials share
        self._counted: set[str] = set()  # of that, by what an optimizer or a schedule names

    def before_steps(self, scheduler: Any | None) -> None:
        """Read an LR scheduler that was made for these steps."""
        self._schedulers.append(self._held.read_scheduler(scheduler))

    def after_step(self, optimizer: torch.optim.Optimizer, scheduler: Any | None) -> None:
        """Read all of it after a step; the first two are on the same example."""
        self.shared.note()
        self._readings.append(self._held.read())
        self._optimizers.append(self._held.read_optimizer(optimizer))
        self._schedulers.append(self._held.read_scheduler(scheduler))

    @property
    def changes(self) -> tuple[str, ...]:
        """Return what steps have changed, as marks; see `KnownChanges`."""
        readings = (self._readings, self._optimizers, self._schedulers)
        marks = (KnownChanges.marks_of(each) for each in readings)
        return tuple(sorted(itertools.chain(*marks)))

    @property
    def known(self) -> tuple[str, ...]:
        """Return these marks, and those of what is shared, after evaluations as well."""
        made = sorted(path + KnownChanges.MADE for path in self._made)
        anew = sorted(name + KnownChanges.ANEW for name in self._anew | self._shared)
        return (
            *self.changes,
            *made,
            *anew,
            *KnownChanges.shared_marks(self._readings[0], self._latest, self._made_by_code),
        )

    def check_kept(self) -> None:
        """Refuse an optimizer or an LR scheduler that counts, and tensors kept on parameters.

        Steps without a history can't be taken with these alone. A clone of the optimizer steps on
        each shard after each hop, and begins with the factory's attributes.

        Raises:
            ConfigurationError: steps have changed one.
        """
        built, first, second = self._readings[:3]
        of_scheduler = {p for p in changed(first, second) if OF_SCHEDULER in name_of(p)}
        counted = counts_of(of_scheduler, second)
        for readings in (self._optimizers[:3], self._schedulers[:3]):
            counted |= counts_of(changed(*readings[:2]), readings[1]) | moving_of(readings)
        self._counted = set(filter(is_of_process, counted))
        for path in sorted(counted - self._counted):
            raise ConfigurationError(f"{_CHANGED.format(told(path))}; {remedy(path)}")
        for path in sorted(second.keys() - built.keys()):
            if path.startswith(OF_GRADIENT_HOOKS):
                raise ConfigurationError(f"the first steps add {told(path)}; {remedy(path)}")
            is_tensor = second[path].startswith("tensor ")
            if OF_PARAMETER in name_of(path) and is_tensor and first.get(path) == second[path]:
                raise ConfigurationError(f"{_CHANGED.format(told(path))}; {remedy(path)}")

    def check(self, after: AfterSteps) -> None:
        """Take a step with a history and one without, if these steps left different values.

        What the first step left and the second did not change must not follow from its rows.

        Raises:
            ConfigurationError: a value depends on the history; the message names it.
        """
        built, first, second = self._readings[:3]
        names = {name_of(path) for path in changed(first, second) if path in second}
        if names:
            # Twice with a history, because what comes back every other step is the same once.
            without, *with_history = (
                self._after_step(after, each)
                for each in (self._fresh(), after.history, after.history)
            )
            self._check_depends(names, without, with_history)
            for size in _SIZES:
                without, later = dict[str, str](), dict[str, str]()
                with suppress(Exception):  # of code that such weights are too large or small for
                    without = self._after_step(after, self._fresh(), size)
                    later = self._after_step(after, after.copied_history(self._recipe.model), size)
                self._check_depends(names, without, [later])
        once = changed(built, first)
        set_once = {path for path in once if first.get(path) == second.get(path)}
        if any(self._held.attributes({*map(name_of, set_once)})) or any(map(_is_member, once)):
            self._check_other_rows(after, set_once)

    def _check_depends(
        self, names: Collection[str], without: Reading, with_history: Sequence[Reading]
    ) -> None:
        for path in sorted(without):
            differs = any(state.get(path) != without[path] for state in with_history if state)
            if differs and name_of(path) in names:
                instead = remedy(path, without[path])
                raise ConfigurationError(f"{_CHANGED.format(told(path))}; {instead}")

    def _check_other_rows(self, after: AfterSteps, set_once: Collection[str]) -> None:
        """Refuse what the first step left and the second one on the same rows did not change.

        That is what other rows change, and what depends on a history; both may be seen in steps on
        different rows, as for the largest value so far.
        """
        model, built = self._recipe.model, self._readings[0]
        changes, depends = set[str](), dict[str, str]()
        for others in (after.of_other_rows(), after.of_larger_rows()):
            plain, acts = [""], [""]
            without, later = dict[str, str](), dict[str, str]()
            history = after.copied_history(model)
            before = self._after_step(after, history)  # a table of that shape is there then
            with suppress(Exception):  # of code for which such rows are no batch
                plain, without = self._step(others, self._fresh())
                acts, later = self._step(others, history)
            self._check_grown(after, without, before, later)
            changes |= {path for path, was in before.items() if moved_on(was, later.get(path))}
            for path, value in sorted(without.items()):
                if path in set_once and moved_on(value, later.get(path), built.get(path)):
                    if acts != plain:
                        raise ConfigurationError(
                            f"{told(path)} follows from the rows of the step that sets it, and "
                            "others use it; it is no part of the state that hops: "
                            f"{remedy(path, value)}"
                        )
                    self._of_rows.add(path)
                    depends[path] = value
        for path in sorted(changes & depends.keys()):
            raise ConfigurationError(
                f"{_CHANGED.format(told(path))}; {remedy(path, depends[path])}"
            )

    def _check_grown(
        self, after: AfterSteps, without: Reading, before: Reading, later: Reading
    ) -> None:
        """Refuse a set that other rows add to, and a dict that changes a step of rows that it has.

        Two steps on the same rows leave the same there. A dict may be a cache by rows.

        Args:
            without: after a step of other rows alone.
            before: after the first steps.
            later: after the first steps and one of these.
        """
        gained = {path.rpartition(PART)[0] for path in later.keys() - before.keys()} - {""}
        kept = sorted((later.keys() & before.keys()) - self._readings[0].keys())
        grown = [path for path in kept if path.rpartition(PART)[0] in gained]
        members = [path for path in grown if _is_member(path)]
        if not members and (entries := [path for path in grown if path not in without]):
            plain, acts = (self._step(after, each)[0] for each in (self._fresh(), after.history))
            number = {path.rpartition(PART)[0] for path in entries}
            members = entries if plain != acts or self._crowded(after, number) != acts else []
        for path in members:
            container = path.rpartition(PART)[0]
            raise ConfigurationError(f"{_CHANGED.format(told(container))}; {remedy(container)}")

    def _crowded(self, after: AfterSteps, containers: Collection[str]) -> list[str]:
        """Return the bits of a step where many steps before it have filled dicts of the model."""
        model = self._recipe.model
        with after.in_use(model, after.copied_history(model)):
            growing = self._held.read_all().growing
            for path in growing.keys() & set(containers):
                crowd(growing[path])
            return bits_of_step(self._recipe, after)

    def _fresh(self) -> AttributeValues:
        """Return the attributes of the model and of the losses as they were built."""
        with self._built_losses.in_use():
            return AttributeValues(self._modules)

    def find_made(self, after: AfterSteps) -> None:
        """Find what the first step made that later ones use as it is, and set no more.

        If that changes late, it depends on a history. What each step sets is no harm, though it was
        the same in the first steps; it is set in place of an object that is of no use, too. Nor is
        a whole number or a text with which no step computes, such as the length of a table.
        """
        made = {p for p in made_for_good(self._readings) if name_of(p) not in self._anew}
        made -= self._of_rows
        own = {name_of(path) for path in made if path.startswith("attribute ")}
        keys = {name_of(path) for path in made if is_key(self._readings[1][path])}
        places = sorted(self._held.attributes(own), key=lambda place: place[-1] in keys)
        anew = {
            place[-1]
            for place in places[:_MOST_MADE]
            if place[-1] not in self._looked_at
            and (
                self._sets_anew(after, *place)
                or (place[-1] in keys and not self._acts(after, *place[:2]))
            )
        }
        made = {path for path in made if name_of(path) not in anew}
        entries = sorted(path for path in made if PART in path)[:_MOST_MADE]
        self._made = made - {each for each in entries if self._sets_entry_anew(after, each)}

    def find_set_anew(self, after: AfterSteps) -> None:
        """Find the attributes that each step sets before it computes with what it finds there.

        What one of them keeps from a step to the next only later is lost at the next hop. So there
        is nothing to compute with in any of them when a sub-epoch begins.
        """
        changes = {name_of(path) for path in (*self.changes, *made_for_good(self._readings))}
        model, left = self._recipe.model, set[str]()

        def bits(names: Collection[str]) -> list[str]:
            with after.in_use(model, self._fresh()):
                self._held.stand_in(names, SetBefore)
                found = bits_of_step(self._recipe, after)
                held = self._held.attributes(names)
                left.update(n for m, a, n in held if isinstance(vars(m).get(a), SetBefore))
            return found

        names = {name for *_, name in self._held.attributes(changes)}
        names = not_computed_with(names, SetBefore, bits) - left
        self._looked_at = self._find_looked_at(after, names)
        self._anew = names - self._looked_at

    def find_shared(self, after: AfterSteps, evaluate: Callable[[Example], list[str]]) -> list[str]:
        """Find what trials share and each step sets anew; return in words what steps change of it.

        Args:
            evaluate: evaluates an example; it returns what that gave.
        """
        model, (built, first, second) = self._recipe.model, self._readings[:3]
        differs = {
            p for p in changed(first, second) if CACHED not in p and p in first and p in second
        }
        moved = {path for path in differs if is_of_process(path)}
        holders = set(itertools.chain.from_iterable(map(containers_of, differs)))
        aliases = {p: text.removeprefix(AS) for p, text in second.items() if text.startswith(AS)}
        moved |= {p for p, other in aliases.items() if is_of_process(p) and other in holders}

        def evaluated() -> list[str]:
            with after.in_use(model, AttributeValues(model)):
                after.key.reseed("evaluation")
                return evaluate(after.example)

        def run() -> list[str]:
            with after.in_use(model, self._fresh()):
                found = bits_of_step(self._recipe, after)
            return found + evaluated()

        read = self._held.read_all()
        self._shared = set_anew(read, changed(built, second), run)
        for path in sorted(self._counted - self._shared):  # a forward sets anew what they name, too
            raise ConfigurationError(f"{_CHANGED.format(told(path))}; {remedy(path)}")
        check_evaluations(read, self._shared, evaluated)
        return sorted(map(told, moved | self._shared))

    def _find_looked_at(self, after: AfterSteps, names: Collection[str]) -> set[str]:
        """Return the attributes that a later step uses, or of which one asks what they are.

        A first step may set what others find, and no stand-in can tell who asks for its type, so
        values of several types are tried.
        """
        model = self._recipe.model
        history, probes = after.copied_history(model), dict[str, list[Any]]()
        with history.in_use():
            for module, attribute, name in self._held.attributes(names):
                value = vars(module).get(attribute)
                members = list(type(value)) if isinstance(value, Enum) else []
                probes[name] = [*members, *_PROBES]

        def bits(values: Mapping[str, Any]) -> list[str]:
            attributes = after.copied_history(model)
            self._after_step(after, attributes)
            with after.in_use(model, attributes):
                for module, attribute, name in self._held.attributes(values.keys()):
                    vars(module)[attribute] = values[name]
                with suppress(Exception):
                    return bits_of_step(self._recipe, after)
            return []

        found, plain = set[str](), bits({}) if probes else []
        for number in range(max(map(len, probes.values()), default=0)):
            values = {name: each[number] for name, each in probes.items() if number < len(each)}
            if bits(values) != plain:
                found |= {name for name, value in values.items() if bits({name: value}) != plain}
        return found

    def _sets_anew(self, after: AfterSteps, module: nn.Module, attribute: str, name: str) -> bool:
        """Return whether a step sets an attribute before it uses what it finds there."""
        _, found = self._with(after, module, attribute, unusable := SetBefore(name))
        return found is not unusable

    def _sets_entry_anew(self, after: AfterSteps, path: str) -> bool:
        """Return whether a step sets an entry of a dict before it uses what it finds there."""
        holder, _, last = path.rpartition(PART)
        with after.in_use(self._recipe.model, after.history):
            held = self._held.read_all().growing.get(holder)
            if not isinstance(held, MutableMapping):
                return False
            own = {key: value for key, value in held.items() if f"[{key!r}]" == last}
            held.update(dict.fromkeys(own, unusable := SetBefore(path)))
            with suppress(Exception):
                bits_of_step(self._recipe, after)
            left = [held.get(key) for key in own]
            held.update(own)
        return bool(left) and all(each is not unusable for each in left)

    def _acts(self, after: AfterSteps, module: nn.Module, attribute: str) -> bool:
        """Return whether a step has other bits, or fails, with other values of an attribute."""
        plain, own = self._with(after, module, attribute)
        others = (own + "?",) if isinstance(own, str) else (own + n for n in _OTHER_NUMBERS)
        return any(self._with(after, module, attribute, each)[0] != plain for each in others)

    def _with(
        self, after: AfterSteps, module: nn.Module, attribute: str, *value: object
    ) -> tuple[list[str], Any]:
        """Return a step's bits, if it does not fail, and what it leaves in an attribute.

        Args:
            value: is there before the step, if one is given; None is left in a slot, which has its
                own.
        """
        bits, held = list[str](), vars(module)
        with after.in_use(self._recipe.model, after.history):
            if (own := held.get(attribute)) is None:
                return bits, None
            held[attribute] = value[0] if value else own
            with suppress(Exception):
                bits = bits_of_step(self._recipe, after)
            left, held[attribute] = held.get(attribute), own
        return bits, left

    def check_caches(
        self, after: AfterSteps, evaluate: Callable[[Example], object], evaluated: Reading
    ) -> None:
        """Let caches that the first steps have used be filled anew, by other weights and rows.

        Each process fills its own. So what is in one must follow from its key, or from what is
        constant. Nothing is known of caches without which a step fails.

        Args:
            after: after the first steps.
            evaluate: evaluates an example, as was done before.
            evaluated: what there was then.

        Raises:
            ConfigurationError: an entry depends on weights or rows; the message names it.
        """
        read = self._held.read_all()
        self._latest, self._made_by_code = read.found, read.made_by_code()
        built, first, second = self._readings[:3]
        variables = {
            path: (variable, self._variables.get(path, ABSENT))
            for path, variable in variables_of(read).items()
            if (path in self._variables or (path in read.variables and path not in built))
            and built.get(path) != first.get(path) == second.get(path)
        }
        growing = {path: each for path, each in read.growing.items() if is_shared(path)}
        lists = [
            (held, self._items.get(path, []))
            for path, held in read.containers.items()
            if isinstance(held, list | deque) and (path in self._items or path not in built)
            if len(self._items.get(path, [])) < len(held) <= MOST_ITEMS
        ]
        caches = FilledCaches(read.caches, growing, self._keys, read.is_written, variables, lists)
        if not caches.are_filled:
            return
        others = after.of_other_rows()
        model, again = self._recipe.model, dict[str, str]()
        attributes, filled, plain = AttributeValues(model), list[str](), list[str]()
        try:
            with suppress(Exception):
                filled = self._step(others, AttributeValues(model))[0]
            caches.empty()
            with suppress(Exception):
                plain, again = self._step(others, attributes)
            trained, of_rows = again.copy(), caches.lack()
            caches.empty()
            with suppress(Exception), after.in_use(model, attributes, size=0.5):
                evaluate(others.example)
                again |= self._held.read()
            for path, value in sorted((read.found | evaluated | second).items()):
                is_cached = CACHED in path or caches.hold(path)
                acts = filled and plain and filled != plain
                acted = (variables or lists) and acts and is_shared(path)
                is_first = acted and built.get(path) != first.get(path)
                if path.endswith(CACHED) or not (is_cached or is_first):
                    continue
                other = (again if is_cached else trained).get(path, value)
                stays = path not in second or first.get(path) == value == read.found.get(
                    path, value
                )
                if stays and other != value:
                    raise ConfigurationError(
                        f"{told(path)} is a cache of what depends on weights or rows, or has what "
                        "factories set there for some trials, so that each process has its own; "
                        "compute it in each step or in the factory, or register a buffer of the "
                        "model"
                    )
            self._check_number(others, caches, of_rows, filled)
            self._flags.update(read.found.keys() - built.keys())
            if filled and plain and filled != plain:
                texts = read.texts_in_code()
                flags = [p for p in read.found if p in self._flags and entry_of(p) in texts]
                self._check_flags(others, caches, growing, flags[:_MOST_FLAGS], filled)
        finally:
            caches.give_back()  # whoever comes next fills them, or has what was there
        caches.fill()

    def _check_number(
        self, others: AfterSteps, caches: FilledCaches, of_rows: Collection[str], filled: list[str]
    ) -> None:
        """Refuse what acts by the number of its entries, which other rows add to.

        Args:
            filled: the bits of a step of other rows with the entries of the first steps.
        """
        crowded = filled
        if of_rows and filled:
            caches.fill()
            caches.crowd(of_rows)
            with suppress(Exception):
                crowded, _ = self._step(others, AttributeValues(self._recipe.model))
        for path in of_rows if crowded != filled else ():
            raise ConfigurationError(f"{_CHANGED.format(told(path))}; {remedy(path)}")

    def _check_flags(
        self,
        others: AfterSteps,
        caches: FilledCaches,
        containers: Mapping[str, Growing],
        flags: Collection[str],
        filled: list[str],
    ) -> None:
        """Refuse an entry without which a step gives something else: it is none of a cache.

        Args:
            flags: the entries, which have names of their own in the code.
            filled: the bits of a step of other rows with all entries.
        """
        for path in flags:
            container = containers.get(path.rpartition(PART)[0])
            caches.fill()
            if not isinstance(container, MutableMapping) or entry_of(path) not in container:
                continue
            del container[entry_of(path)]
            bits = filled
            with suppress(Exception):  # a step fails without it
                bits = self._step(others, AttributeValues(self._recipe.model))[0]
            if bits != filled:
                raise ConfigurationError(
                    f"whether {told(path)} is there changes what a step gives, and the first steps "
                    f"or evaluations have set it; each process has its own: {remedy(path)}"
                )

    def check_references(self) -> None:
        """Refuse what refers to the optimizer, of which each shard steps a copy.

        Raises:
            ConfigurationError: something does; the message names it.
        """
        own, of_metrics = sorted(self._latest.items()), sorted(self._held.read_metrics().items())
        for path, text in (*own, *of_metrics):
            if text in THE_OPTIMIZER and OF_SCHEDULER not in name_of(path):
                raise ConfigurationError(
                    f"{told(path)} refers to the optimizer, of which each shard steps a copy, so "
                    "that its learning rate and its state stay as they were built; compute what "
                    "changes from a registered buffer that counts steps"
                )

    def _after_step(
        self, after: AfterSteps, attributes: AttributeValues, size: float = 1.0
    ) -> Reading:
        """Return what is held after a forward and a backward with these attributes."""
        return self._step(after, attributes, size)[1]

    def _step(
        self, after: AfterSteps, attributes: AttributeValues, size: float = 1.0
    ) -> tuple[list[str], Reading]:
        with after.in_use(self._recipe.model, attributes, size):
            return bits_of_step(self._recipe, after), self._held.read()


def _is_member(path: str) -> bool:
    """Return whether a value is a member of a set."""
    return path.rpartition(PART)[2].startswith("{")


def remedy(path: str, read: str = "") -> str:
    """Return what to do in place of changing a value, in words.

    Args:
        read: what a reading has of it.
    """
    name = name_of(path)
    if read.startswith(GENERATOR):
        return "draw from torch without a generator, as by torch.rand(()); a shard's key seeds that"
    if name.startswith(OF_HOOKS):
        if OF_OPTIMIZER in name:
            what = "keep it in the state of an optimizer of your own, self.state[p], "
        else:
            what = "register it as a buffer of the model "
        return f"{what}if the hook acts on it, or let the hook write to a file or a logger"
    if name.startswith(OF_GRADIENT_HOOKS):
        return "it does not hop; scale gradients with param groups or in the forward"
    if OF_OPTIMIZER in name:
        part = repr(name.split("'")[1]) if path == name else "..."
        return f"keep it in every param group, as group[{part}]"
    if OF_PARAMETER in name:
        return "keep it in the optimizer's state, or register it as a buffer of the model"
    if OF_SCHEDULER in name:
        return "let the learning rate depend on what the scheduler gives, such as the epoch"
    if "num_batches_tracked" in path or "running_mean" in path:
        return (
            "its norm is in training mode: call eval() of a frozen teacher in the factory, or make "
            "it a module of the model"
        )
    if name.startswith(("the class", "the object", "parameter ")):
        return "build the model with it, and let a registered buffer say when it acts"
    if name.startswith("buffer ") and name.endswith(MADE):
        return f"register it in the constructor as a tensor of its shape, or {SET_ANEW}"
    if is_of_process(name):
        return f"register it as a buffer of the model, or {IN_ATTRIBUTE}"
    return f"register it as a buffer of the model, or {SET_ANEW}"
