"""The sequential schedule runs one shard task at a time, in the order of plain training."""

from __future__ import annotations

from collections.abc import Sequence

from cerebro_hydra.plan.messages.actions import Action, ActionKind


def sequential(
    trial: int,
    shards: int,
    microbatches: int,
    barrier: bool,
    send: bool = False,
    tied: Sequence[tuple[int, ...]] = (),
    first: int = 0,
) -> list[Action]:
    """Return the actions of one window (one optimizer step).

    Args:
        barrier: no update comes before every backward is done, as clipping by the global norm
            demands.
        send: each shard is published after its update, as in the last window of a sub-epoch.
        tied: groups of shards that share a parameter; the first of a group owns and updates it.
        first: the number of the window's first microbatch.
    """
    # 3 shards, 2 microbatches     F0 F1 F2 B2 B1 B0 | F0 F1 F2 B2 U2 B1 U1 B0 U0
    # the same with a barrier      F0 F1 F2 B2 B1 B0 | F0 F1 F2 B2 B1 B0 U0 U1 U2
    # with send, each U            ... U2 SEND2 ... U1 SEND1 ... U0 SEND0
    last = first + microbatches - 1
    # Shard k is updated after the last backward of shard final_backward[k].
    final_backward = list(range(shards))
    for owner, *others in tied:
        final_backward[owner] = min(final_backward[owner], *others, owner)

    actions: list[Action] = []

    def update(shard: int) -> None:
        actions.append(Action(trial, shard, ActionKind.U, last))
        if send:
            actions.append(Action(trial, shard, ActionKind.SEND))

    for microbatch in range(first, last + 1):
        for shard in range(shards):
            actions.append(Action(trial, shard, ActionKind.F, microbatch))
        for shard in reversed(range(shards)):
            actions.append(Action(trial, shard, ActionKind.B, microbatch))
            if microbatch == last and not barrier:
                for ready in reversed(range(shards)):
                    if final_backward[ready] == shard:
                        update(ready)
    if barrier:
        for shard in range(shards):
            update(shard)
    return actions
