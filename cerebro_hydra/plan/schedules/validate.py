"""Checks any list of actions: the rules of training, weight versions, and bytes in each place.

`MemoryCheck` knows no schedule and shares no code with the queues that it checks. The validator
feeds it a list of actions; the simulator tells it when each action begins and ends.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from cerebro_hydra.errors import InvalidSchedule
from cerebro_hydra.plan.messages.actions import HOST, Action, ActionKind, Part
from cerebro_hydra.plan.schedules.graph import TaskGraph

F, B, U, SEND = ActionKind.F, ActionKind.B, ActionKind.U, ActionKind.SEND


def validate(
    actions: Sequence[Action],
    *,
    shards: int,
    microbatches: int,
    barrier: bool,
    tied: Sequence[tuple[int, ...]] = (),
    resident: Collection[tuple[int, int]] | None = None,
    budget: int | None = None,
    shard_bytes: Mapping[tuple[int, int], int] | None = None,
) -> None:
    """Check one window (one optimizer step) of every trial that occurs in ``actions``.

    Args:
        shards: number of shards of a trial.
        microbatches: number of microbatches of the window.
        barrier: whether no update may come before every backward is done.
        tied: groups of shards that share a parameter; the first of a group updates it.
        resident: the (trial, shard) pairs that are on the device beforehand. If given, a shard
            must be loaded before use.
        budget: the bytes that the resident shards may have at any time.
        shard_bytes: bytes by (trial, shard); a budget needs them.

    Raises:
        InvalidSchedule: an action breaks a rule; the message names the first such action and
            the rule.
        ValueError: a budget comes without `shard_bytes` or without `resident`.
    """
    graph = TaskGraph(shards, microbatches, microbatches, barrier, tuple(tied))
    validate_order(actions, {action.trial: graph for action in actions})
    if resident is not None:
        if budget is not None and shard_bytes is None:
            raise ValueError("budget is given without shard_bytes; pass the bytes of each shard")
        memory = MemoryCheck({None: budget}, None, shard_bytes or {})
        memory.begin_resident(resident, None)
        validate_memory(actions, memory)
    elif budget is not None:
        raise ValueError("budget is given without resident; pass the shards that are on the device")


def validate_order(actions: Sequence[Action], graphs: Mapping[int, TaskGraph]) -> None:
    """Check that each task of the trials' graphs is done once, and after all that it waits for.

    Forwards and backwards must find the weights that `TaskGraph.version` says.

    Raises:
        InvalidSchedule: an action breaks a rule; the message names it and the rule.
    """
    done: dict[Action, int] = {}
    for index, action in enumerate(actions):
        if not (action.kind.computes or action.kind is SEND):
            continue
        task = replace(action, device=None)
        graph = graphs[task.trial]
        _check_shape(index, task, graph)
        if task in done:
            _refuse(index, action, f"was done before, as action {done[task]}")
        for need, why in graph.needs(task):
            if need not in done:
                _refuse(index, action, f"{need} is missing before it: {why}")
        done[task] = index
    for trial, graph in sorted(graphs.items()):
        _check_complete(trial, graph, done)
        if graph.training:
            versions_held([action for action in actions if action.trial == trial], graph)


def versions_held(actions: Sequence[Action], graph: TaskGraph) -> list[int]:
    """Return the most weight versions that each shard had at once for tasks that were to come.

    A shard has room for one version more than its staleness, so that an update whose version has no
    room takes that of the oldest one. `actions` are those of one trial.

    Raises:
        InvalidSchedule: a task reads a version that is not made yet, or whose room was taken.
    """
    newest = [0] * graph.shards
    ended = [0] * graph.shards  # microbatches whose backward is done
    most = [1] * graph.shards
    for index, action in enumerate(actions):
        shard = action.shard
        if action.kind in (F, B):
            version = graph.version(shard, action.microbatch or 0)
            oldest = newest[shard] - (graph.staleness[shard] if graph.staleness else 0)
            if version > newest[shard]:
                _refuse(index, action, f"weight version {version} of the shard is not made yet")
            if version < oldest:
                _refuse(index, action, f"weight version {version} of the shard is there no longer")
        if action.kind is B:
            ended[shard] += 1
        if action.kind is U:
            newest[shard] += 1
            if ended[shard] < graph.microbatches:
                needed = newest[shard] - graph.version(shard, ended[shard]) + 1
                most[shard] = max(most[shard], needed)
    return most


def validate_memory(actions: Sequence[Action], memory: MemoryCheck) -> None:
    """Check that every action finds its shard in its place, and bytes under every budget.

    Raises:
        InvalidSchedule: an action breaks a rule; the message names it and the rule.
    """
    for index, action in enumerate(actions):
        try:
            memory.begin(action)
            memory.end(action)
        except InvalidSchedule as error:
            raise InvalidSchedule(f"action {index}, {error}") from None


def _refuse(index: int, action: Action, rule: str) -> None:
    raise InvalidSchedule(f"action {index}, {action}: {rule}")


def _check_shape(index: int, action: Action, graph: TaskGraph) -> None:
    if action.shard >= graph.shards:
        _refuse(index, action, f"there are only {graph.shards} shards")
    if action.kind is not F and not graph.training:
        _refuse(index, action, "an evaluation has forwards alone")
    if action.microbatch is None:
        return
    if action.microbatch >= graph.microbatches:
        _refuse(index, action, f"there are only {graph.microbatches} microbatches")
    last = graph.window_of(action.microbatch)[-1]
    if action.kind is U and action.microbatch != last:
        _refuse(index, action, f"an update names its last microbatch, {last}")


def _check_complete(trial: int, graph: TaskGraph, done: Mapping[Action, int]) -> None:
    tasks = (graph.tasks(trial, window) for window in range(graph.windows))
    sends = [Action(trial, shard, SEND) for shard in range(graph.shards)]
    published = sends if any(send in done for send in sends) else []
    for action in chain(chain.from_iterable(tasks), published):
        if action not in done:
            raise InvalidSchedule(f"{action} never happens: each task is done exactly once")


Key = tuple[int, int]  # trial and shard
Place = int | None  # the device of an action, which may be HOST or unnamed


@dataclass(slots=True)
class _Whereabouts:
    """Holds where one shard's state is."""

    in_dram: bool
    on_device: bool = False
    device: Place = None
    moving: bool = False
    parts: set[Part] = field(default_factory=set)  # that the device has
    written: set[Part] = field(default_factory=set)  # of these DRAM has not the changes


def _leave(here: _Whereabouts) -> None:
    """Note that a shard's device has nothing of it."""
    here.on_device = False
    here.parts, here.written = set(), set()


class MemoryCheck:
    """Follows the shards of a worker through its tiers.

    Args:
        budgets: the bytes of each device; None means no limit.
        host_budget: the bytes of DRAM; None means no limit.
        state: the bytes of each shard's state.
        activations: the bytes that a task of the shard has beside the state.
        keeping: the visits whose forwards keep these bytes on the device until their backward.
        apart: the bytes of each state that a device may do without, by part: gradients in a
            forward, and what updates alone need in a backward. Without it all comes at once.
        at_home: the visits whose updates find in DRAM what they alone need.
    """

    def __init__(
        self,
        budgets: Mapping[Place, int | None],
        host_budget: int | None,
        state: Mapping[Key, int],
        activations: Mapping[Key, int] | None = None,
        keeping: Collection[int] = (),
        apart: Mapping[Key, Mapping[Part, int]] | None = None,
        at_home: Collection[int] = (),
    ) -> None:
        self._at_home = at_home
        self.budgets: dict[Place, int | None] = {**budgets, HOST: host_budget}
        self.peak: dict[Place, int] = dict.fromkeys(self.budgets, 0)
        self._used: dict[Place, int] = dict.fromkeys(self.budgets, 0)
        self._state = state
        self._activations = {} if activations is None else activations  # may be filled later
        self._keeping = keeping  # likewise
        self._apart = {} if apart is None else apart  # likewise
        self._kept: dict[tuple[Key, int | None], Place] = {}  # by shard and microbatch
        self._shards: dict[Key, _Whereabouts] = {}
        self._abandoned: set[int] = set()  # visits whose changes may be lost

    def begin_resident(self, shards: Collection[Key], device: Place) -> None:
        """Put shards on a device before the first action."""
        for key in shards:
            self._shards[key] = _Whereabouts(True, True, device, parts={*self._sizes(key)})
            self._used[device] += self._state.get(key, 0)
        budget = self.budgets[device]
        if budget is not None and self._used[device] > budget:
            raise InvalidSchedule(
                f"{self._used[device]} bytes are resident at first, but the budget is {budget}"
            )

    def begin(self, action: Action) -> None:
        """Begin an action, whose bytes count from now on.

        Raises:
            InvalidSchedule: the shard is not where the action needs it, or a budget is passed.
        """
        key = (action.trial, action.shard)
        here = self._shards.get(key)
        state = self._state.get(key, 0)
        match action.kind:
            case ActionKind.RECV:
                self._demand(here is None, action, "the shard was received before")
                self._shards[key] = _Whereabouts(True, moving=True)
                self._add(HOST, state, action)
            case ActionKind.LOAD if action.device == HOST:
                here = self._at_rest(here, action)
                self._demand(not here.in_dram, action, "the shard is in DRAM already")
                here.in_dram = here.moving = True
                self._add(HOST, state, action)
            case ActionKind.LOAD:
                if here is None and self.budgets[HOST] is None:  # the list says nothing of DRAM
                    here = self._shards[key] = _Whereabouts(True)
                here = self._at_rest(here, action)
                coming = set(action.parts) or {*self._sizes(key)}
                more = here.device == action.device and not here.parts & coming
                self._demand(
                    not here.on_device or more, action, "the shard is on the device already"
                )
                self._demand(here.in_dram, action, "the shard is on disk; LOAD@host comes first")
                here.device, here.on_device, here.moving = action.device, True, True
                here.parts |= coming
                self._add(action.device, self._bytes_of(key, coming), action)
            case ActionKind.SPILL | ActionKind.DROP if action.device == HOST:
                here = self._at_rest(here, action)
                self._demand(here.in_dram, action, "the shard is not in DRAM")
                self._demand(not here.on_device, action, "the shard is still on a device")
                here.moving = True
            case ActionKind.SPILL | ActionKind.DROP:
                here = self._at_rest(here, action)
                there = here.on_device and here.device == action.device
                self._demand(there, action, "the shard is not on the device")
                saved = set(action.parts) or {*self._sizes(key)}
                safe = here.written <= (saved if action.kind is ActionKind.SPILL else set())
                safe |= action.trial in self._abandoned
                self._demand(safe, action, "its changes would be lost; SPILL writes them back")
                here.moving = True
            case ActionKind.SEND:
                pass
            case _:
                there = here is not None and here.on_device and here.device == action.device
                rule = "the shard is not on the device; LOAD comes before use"
                self._demand(there and not (here and here.moving), action, rule)
                if here is not None and (lacking := self._read(action) - here.parts):
                    what = "".join(sorted(lacking))
                    self._demand(False, action, f"parts {what!r} of the shard are not there")
                if not self._takes_over(action):
                    self._add(action.device, self._activations.get(key, 0), action)

    def end(self, action: Action) -> None:
        """End an action that has begun."""
        key = (action.trial, action.shard)
        state = self._state.get(key, 0)
        here = self._shards.get(key)
        if here is None:
            return
        if action.kind is ActionKind.SEND:
            if not here.on_device:  # from now on it is kept, and not the visit's
                self._used[HOST] -= state if here.in_dram else 0
                del self._shards[key]
            return
        if action.kind.computes:
            self._note_written(action, here)
            keeps = action.kind is F and action.trial in self._keeping
            if keeps and action.trial not in self._abandoned:
                self._kept[key, action.microbatch] = action.device
            else:
                self._used[action.device] -= self._activations.get(key, 0)
            return
        here.moving = False
        if action.kind in (ActionKind.SPILL, ActionKind.DROP):
            if action.device == HOST:
                self._used[HOST] -= state
                here.in_dram = False
            else:
                self._used[action.device] -= self._bytes_of(key, here.parts)
                _leave(here)

    def abandon(self, trial: int) -> None:
        """Let the changes of a trial be lost, because it was cancelled or begins anew."""
        self._abandoned.add(trial)
        for (key, microbatch), device in list(self._kept.items()):
            if key[0] == trial:
                del self._kept[key, microbatch]
                self._used[device] -= self._activations.get(key, 0)

    def begin_anew(self, trial: int) -> None:
        """Forget the shards of an abandoned trial, the first of which is told to be received again.

        Raises:
            InvalidSchedule: one of them is still there.
        """
        if trial not in self._abandoned:
            return
        self._abandoned.remove(trial)
        for key, here in list(self._shards.items()):
            if key[0] == trial:
                if here.in_dram or here.on_device or here.moving:
                    raise InvalidSchedule(f"t{trial}s{key[1]} is there when its visit begins anew")
                del self._shards[key]

    def lose(self, device: int) -> None:
        """Take everything off a device that died."""
        for here in self._shards.values():
            if here.on_device and here.device == device:
                here.moving = False
                _leave(here)
        self._used[device] = 0
        self._kept = {each: place for each, place in self._kept.items() if place != device}

    def _sizes(self, key: Key) -> Mapping[Part, int]:
        """Return the bytes of a shard's state by part."""
        apart = self._apart.get(key, {})
        return {Part.PARAMETERS: self._state.get(key, 0) - sum(apart.values()), **apart}

    def _bytes_of(self, key: Key, parts: Collection[Part]) -> int:
        return sum(nbytes for part, nbytes in self._sizes(key).items() if part in parts)

    def _read(self, action: Action) -> set[Part]:
        """Return the parts that a task must find on its device."""
        parts = {*self._sizes((action.trial, action.shard))}
        if action.kind is not U or action.trial in self._at_home:
            parts.discard(Part.OPTIMIZER)
        if action.kind is F:
            parts.discard(Part.GRADIENTS)
        return parts

    def _note_written(self, action: Action, here: _Whereabouts) -> None:
        """Note what a task leaves on its device; an update uses gradients up."""
        parts = {*self._sizes((action.trial, action.shard))}
        if action.kind is U:
            here.written = self._read(action) - {Part.GRADIENTS}
        elif action.kind is B:
            here.written.add(Part.GRADIENTS if Part.GRADIENTS in parts else Part.PARAMETERS)

    def _takes_over(self, action: Action) -> bool:
        """Return whether a backward goes on in the bytes that its forward has kept."""
        forward = (action.trial, action.shard), action.microbatch
        if action.kind is not B or forward not in self._kept:
            return False
        device = self._kept.pop(forward)
        self._demand(device == action.device, action, f"its forward was on device {device}")
        return True

    def _at_rest(self, here: _Whereabouts | None, action: Action) -> _Whereabouts:
        if here is None:
            raise InvalidSchedule(f"{action}: the shard is not on the device, nor anywhere else")
        self._demand(not here.moving, action, "the shard is being moved")
        return here

    def _demand(self, holds: bool, action: Action, rule: str) -> None:
        if not holds:
            raise InvalidSchedule(f"{action}: {rule}")

    def _add(self, place: Place, nbytes: int, action: Action) -> None:
        if place not in self._used:
            raise InvalidSchedule(f"{action}: there is no such device")
        self._used[place] += nbytes
        self.peak[place] = max(self.peak[place], self._used[place])
        budget = self.budgets[place]
        if budget is not None and self._used[place] > budget:
            raise InvalidSchedule(
                f"{action}: {self._used[place]} bytes are resident, but the budget is {budget}"
            )
