"""Checks the rules of synchronous training on any list of actions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from cerebro_hydra.errors import InvalidSchedule
from cerebro_hydra.plan.actions import Action, ActionKind
from cerebro_hydra.plan.graph import TaskGraph
from cerebro_hydra.plan.memory_check import MemoryCheck

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
