"""Gives back what a trial changes of what the trials of its process share.

A trial that changes some of it late fails. Another one must not train on what it left there, nor
finish as if nothing had been if it computed in the meantime. What each step of a trial sets anew is
as it was before for those that don't.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import ClassVar

from cerebro_hydra.errors import ConfigurationError, StepDiffers
from cerebro_hydra.recipe.build import builds_so_far
from cerebro_hydra.shards.admission.effects.as_built import AsBuilt, Found
from cerebro_hydra.shards.admission.effects.filled_caches import (
    ABSENT,
    MOST_ITEMS,
    Variable,
    forget_by_settings,
)
from cerebro_hydra.shards.admission.effects.object_reader import ObjectReader
from cerebro_hydra.shards.admission.effects.readings import (
    CACHED,
    NOTHING,
    OF_CLASS,
    PART,
    KnownChanges,
    Reading,
    containers_of,
    is_of_process,
    name_of,
    told,
)
from cerebro_hydra.shards.cut.values import Contents

_MEANWHILE = (
    "another trial of its process changed {} while this one computed, whose code names it, too, so "
    "that steps had one value or the other"
)
_LEFT = (
    "another trial of the same process has changed {}, which this one's code names, too, and that "
    "can't be given back; let no step change what trials share, or run the search again without it"
)


class SharedWatch:
    """Knows what a trial shares with others of its process, as it was when a visit began.

    Args:
        known: what the trial's first steps changed.
        evaluated: the names of what admission's evaluations changed.
        texts: returns the texts that stand in its code.
        as_built: what its factory has left.

    Attributes:
        late: what the trial has set though its first steps did not, and others' do.
    """

    _open: ClassVar[weakref.WeakSet[SharedWatch]] = weakref.WeakSet()
    _given_back: ClassVar[list[frozenset[str]]] = []  # the paths, of each time
    _left: ClassVar[dict[str, str]] = {}  # what could not be given back, as it is read since then

    def __init__(
        self,
        known: KnownChanges,
        evaluated: Collection[str],
        texts: Callable[[], Collection[str]],
        as_built: AsBuilt,
    ) -> None:
        self._known, self._evaluated, self._texts = known, frozenset(evaluated), texts
        self._reader: ObjectReader | None = None
        self._before: Reading = {}
        self._noted: _Noted | None = None
        self._as_built = as_built
        self.late: set[str] = set()
        self._since = self._builds = 0

    def begin(self, reader: ObjectReader) -> None:
        """Note what there is.

        Args:
            reader: has just read it.

        Raises:
            ConfigurationError: another trial has left something else there for good.
        """
        self._reader, self._before, self._noted = reader, reader.found, _Noted(reader)
        self._since, self._builds = len(self._given_back), builds_so_far()
        for path, text in self._left.items():
            if self._before.get(path) == text:
                raise ConfigurationError(_LEFT.format(told(path)))
        self._open.add(self)

    def find_as_alone(self) -> None:
        """Let what others set be as if the trial were alone in its process.

        That is what their steps set anew and its own don't, and what its factory has left.
        """
        changed = [found for _, found in self._of_others() if not found.is_there]
        for found in changed:
            with suppress(Exception):  # a class may refuse it
                found.give_back()
        if changed:
            forget_by_settings(self._as_built.caches)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Let the body compute for the trial, and note what of that it sets itself."""
        self.find_as_alone()
        found = self._of_others()
        yield
        changed = {path for path, each in found if not each.is_there}
        own = (p for p in changed if self._known.covers(p) or name_of(p) in self._evaluated)
        self.late |= changed.difference(own)

    def _of_others(self) -> list[tuple[str, Found]]:
        return [
            (path, each)
            for path, each in self._as_built.of_others(self._known, self._evaluated).items()
            if not self._before or self._names(path) or self._as_built.has(path)
        ]

    def end(self) -> None:
        """End the visit."""
        self._open.discard(self)

    @contextmanager
    def ending(self, abandon: Callable[[], None]) -> Iterator[None]:
        """Let the body end the visit; if it fails, call what gives back what it has changed."""
        try:
            yield
        except BaseException:
            abandon()
            raise
        finally:
            self.end()

    def check(self, after: Reading) -> None:
        """Look whether another trial has changed something while this one computed.

        Raises:
            StepDiffers: one has.
        """
        found = set(filter(self._names, self._given_back_meanwhile()))
        for other in self._others():
            late = other._changed_in(after)
            found |= late - other.made_by_builds(late)
        if found := {path for path in found if not self._changes(path)}:
            raise StepDiffers(_MEANWHILE.format(told(min(found))))

    def made_by_builds(
        self, paths: Collection[str], reader: ObjectReader | None = None
    ) -> set[str]:
        """Return what a factory may have set that has built another trial meanwhile.

        Args:
            reader: has read the trial since then, if that was done.
        """
        if builds_so_far() == self._builds:
            return set()
        self._reader = reader or self._reader
        return {path for path in paths if is_of_process(path) and not self._sets(path)}

    def check_cause(self, late: Collection[str], reader: ObjectReader) -> None:
        """Look whether another trial may have changed what is not as it was.

        Raises:
            StepDiffers: one may, and this one's own code changes none of it.
        """
        self._reader, names = reader, {path for path in late if is_of_process(path)}
        given_back = set(filter(self._is_given_back, names))
        others = {p for p in names - given_back if any(o._names(p) for o in self._others())}
        if names and given_back | others == set(late) and not any(map(self._sets, others)):
            raise StepDiffers(_MEANWHILE.format(told(min(names))))

    def give_back(
        self, late: Collection[str], reader: ObjectReader, read: Callable[[], Reading]
    ) -> None:
        """Let what was changed be as it was when the visit began, as far as it can be.

        Args:
            late: what was changed.
            reader: has read it since then.
            read: reads it again.
        """
        self._reader = reader
        paths = frozenset(
            path
            for path in late
            if is_of_process(path) and not (self._changes(path) or self._is_given_back(path))
            # Whose code sets it gives it back, if it is under way.
            if self._sets(path) or not any(other._sets(path) for other in self._others())
        )
        if self._noted is None or not paths:
            return
        self._noted.give_back({each for path in paths for each in containers_of(path)}, reader)
        self._given_back.append(paths)
        now = read()
        left = (path for path in paths if path in now and now[path] != self._before.get(path))
        self._left.update({path: now[path] for path in left})

    def _given_back_meanwhile(self) -> frozenset[str]:
        return frozenset[str]().union(*self._given_back[self._since :])

    def _is_given_back(self, path: str) -> bool:
        """Return whether another trial has given back a value, or what it is in, meanwhile."""
        return not self._given_back_meanwhile().isdisjoint(containers_of(path))

    def _sets(self, path: str) -> bool:
        """Return whether the trial's code sets a value, as far as one can see."""
        if self._reader is None:
            return False
        holders = [*containers_of(path)]
        own = self._reader.set_by_code()
        return not own.isdisjoint(holders) or any(map(self._reader.is_changed, holders))

    def _others(self) -> Iterator[SharedWatch]:
        return (each for each in tuple(self._open) if each is not self)

    def _names(self, path: str) -> bool:
        """Return whether the trial's code names a value, or what it is in."""
        of_class = name_of(path).partition(OF_CLASS)[2]
        known = self._noted is not None and of_class in self._noted.classes
        return known or any(each in self._before for each in containers_of(path))

    def _changed_in(self, after: Reading) -> set[str]:
        """Return what is another one in a reading, and is not to change while this visit lasts."""
        found = set[str]()
        for path, text in after.items():
            if self._before.get(path) == text or CACHED in path or not is_of_process(path):
                continue
            is_new = self._before.get(path, NOTHING) == NOTHING
            if is_new and (not self._names(path) or self._may_grow(path)):
                continue
            if not (self._changes(path) or AsBuilt.is_known(path, text)):
                found.add(path)
        return found

    def _changes(self, path: str) -> bool:
        """Return whether the trial's first steps or evaluations did, or those of any other."""
        own = name_of(path) in self._evaluated or self._known.covers(path)
        return own or KnownChanges.moved_by_any(path)

    def _may_grow(self, path: str) -> bool:
        return self._known.may_grow(path, self._before, self._texts)


class _Noted:
    """Holds variables, attributes of classes and items of containers, by their paths."""

    def __init__(self, reader: ObjectReader) -> None:
        shared = ((p, v) for p, v in reader.variables.items() if is_of_process(p))
        self._variables = {path: (each, each.value) for path, each in shared}
        self.classes = {told: (kind, dict(vars(kind))) for told, kind in reader.classes.items()}
        self._contents = {
            path: (held, Contents.of(held))
            for path, held in reader.containers.items()
            if len(held) <= MOST_ITEMS
        }

    def give_back(self, paths: Collection[str], reader: ObjectReader) -> None:
        """Let these be as they were; what was not there is taken away.

        Args:
            reader: has met what was not.
        """
        for path in sorted(paths):  # what holds others comes first
            with suppress(Exception):  # a class may refuse it
                self._give_back(path, reader)

    def _give_back(self, path: str, reader: ObjectReader) -> None:
        name, _, of = name_of(path).partition(OF_CLASS)
        if PART not in path and of in self.classes:
            kind, attributes = self.classes[of]
            attribute = name.split("'")[1]
            found: Variable | None = Variable(kind, attribute)
            before: object = attributes.get(attribute, ABSENT)
        else:
            known = self._variables.get(path)
            found, before = known or (reader.variables.get(path), ABSENT)
        if found is not None and found.value is not before:
            found.set(before)
        if path in self._contents:
            holder, contents = self._contents[path]
            if not Contents.of(holder).is_same(contents):
                contents.fill(holder)
