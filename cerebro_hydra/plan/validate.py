"""Checks the rules of synchronous training on any list of actions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import product

from cerebro_hydra.errors import InvalidSchedule
from cerebro_hydra.plan.actions import Action, ActionKind

F, B, U = ActionKind.F, ActionKind.B, ActionKind.U
LOAD, SPILL, SEND = ActionKind.LOAD, ActionKind.SPILL, ActionKind.SEND


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
    done: dict[Action, int] = {}
    for index, action in enumerate(actions):
        _check_shape(index, action, shards, microbatches)
        if action.kind in (LOAD, SPILL):
            continue
        if action in done:
            _refuse(index, action, f"was done before, as action {done[action]}")
        _check_order(index, action, done, shards, microbatches, barrier, tied)
        done[action] = index
    for trial in sorted({action.trial for action in actions}):
        _check_complete(trial, done, shards, microbatches)
    if resident is not None:
        _check_memory(actions, set(resident), budget, shard_bytes)
    elif budget is not None:
        raise ValueError("budget is given without resident; pass the shards that are on the device")


def _refuse(index: int, action: Action, rule: str) -> None:
    raise InvalidSchedule(f"action {index}, {action}: {rule}")


def _check_shape(index: int, action: Action, shards: int, microbatches: int) -> None:
    if action.shard >= shards:
        _refuse(index, action, f"there are only {shards} shards")
    if action.microbatch is not None and action.microbatch >= microbatches:
        _refuse(index, action, f"there are only {microbatches} microbatches")
    if action.kind is U and action.microbatch != microbatches - 1:
        _refuse(index, action, f"an update names its last microbatch, {microbatches - 1}")


def _check_order(
    index: int,
    action: Action,
    done: Mapping[Action, int],
    shards: int,
    microbatches: int,
    barrier: bool,
    tied: Sequence[tuple[int, ...]],
) -> None:
    """Check that everything that must precede the action is done, and nothing that must follow."""
    trial, shard, microbatch = action.trial, action.shard, action.microbatch
    last = microbatches - 1
    needs: list[tuple[Action, str]] = []
    if Action(trial, shard, SEND) in done:
        _refuse(index, action, "nothing happens to a shard after its SEND")
    if action.kind is SEND:
        needs.append((Action(trial, shard, U, last), "SEND comes after the update"))
    elif action.kind is U:
        group = set(range(shards)) if barrier else {shard}
        group.update(*(members for members in tied if members[0] == shard))
        why = "every backward comes before the update (barrier, tied weights)"
        backwards = product(sorted(group), range(microbatches))
        needs.extend((Action(trial, other, B, m), why) for other, m in backwards)
    elif microbatch is not None:
        if action.kind is F:
            owners = {shard, *(members[0] for members in tied if shard in members)}
            for owner in sorted(owners):
                if Action(trial, owner, U, last) in done:
                    _refuse(index, action, f"shard {owner} was updated: a mixed weight version")
            if shard > 0:
                why = "F of a shard comes after F of the shard before"
                needs.append((Action(trial, shard - 1, F, microbatch), why))
        else:
            needs.append((Action(trial, shard, F, microbatch), "B comes after its own F"))
            if shard < shards - 1:
                why = "B of a shard comes after B of the shard behind"
                needs.append((Action(trial, shard + 1, B, microbatch), why))
        if microbatch > 0:
            why = f"{action.kind} of a shard takes the microbatches first in, first out"
            needs.append((Action(trial, shard, action.kind, microbatch - 1), why))
    for need, why in needs:
        if need not in done:
            _refuse(index, action, f"{need} is missing before it: {why}")


def _check_complete(trial: int, done: Mapping[Action, int], shards: int, microbatches: int) -> None:
    expected = [
        Action(trial, shard, kind, microbatch)
        for kind, shard, microbatch in product((F, B), range(shards), range(microbatches))
    ]
    expected += [Action(trial, shard, U, microbatches - 1) for shard in range(shards)]
    sends = [Action(trial, shard, SEND) for shard in range(shards)]
    if any(send in done for send in sends):
        expected += sends
    for action in expected:
        if action not in done:
            raise InvalidSchedule(f"{action} never happens: each task is done exactly once")


def _check_memory(
    actions: Sequence[Action],
    resident: set[tuple[int, int]],
    budget: int | None,
    shard_bytes: Mapping[tuple[int, int], int] | None,
) -> None:
    if budget is not None and shard_bytes is None:
        raise ValueError("budget is given without shard_bytes; pass the bytes by (trial, shard)")

    def used() -> int:
        return 0 if shard_bytes is None else sum(shard_bytes[each] for each in resident)

    if budget is not None and used() > budget:
        raise InvalidSchedule(f"{used()} bytes are resident at first, but the budget is {budget}")
    for index, action in enumerate(actions):
        shard = (action.trial, action.shard)
        if action.kind is LOAD:
            if shard in resident:
                _refuse(index, action, "the shard is on the device already")
            resident.add(shard)
            if budget is not None and used() > budget:
                _refuse(index, action, f"{used()} bytes are resident, but the budget is {budget}")
        elif shard not in resident:
            _refuse(index, action, "the shard is not on the device; LOAD comes before use")
        elif action.kind is SPILL:
            resident.discard(shard)
