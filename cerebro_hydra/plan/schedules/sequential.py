"""One trial, one shard task at a time: the order of plain training."""

from __future__ import annotations

from collections.abc import Sequence

from cerebro_hydra.plan.actions import Action, ActionKind


def sequential(
    trial: int,
    shards: int,
    microbatches: int,
    barrier: bool,
    send: bool = False,
    tied: Sequence[tuple[int, ...]] = (),
) -> list[Action]:
    """Return the actions of one window (one optimizer step).

    ``barrier``: no update before every backward, as clipping by the global norm asks.
    ``send``: publish each shard once its update is done (last window of a sub-epoch).
    ``tied``: groups of shards that share a parameter; the first owns and updates it.
    """
    # 3 shards, 2 microbatches     F0 F1 F2 B2 B1 B0 | F0 F1 F2 B2 U2 B1 U1 B0 U0
    # the same with a barrier      F0 F1 F2 B2 B1 B0 | F0 F1 F2 B2 B1 B0 U0 U1 U2
    # with send, each U            ... U2 SEND2 ... U1 SEND1 ... U0 SEND0
    last = microbatches - 1
    final_backward = list(range(shards))  # the shard after whose last backward each is updated
    for owner, *others in tied:
        final_backward[owner] = min(final_backward[owner], *others, owner)

    program: list[Action] = []

    def update(shard: int) -> None:
        program.append(Action(trial, shard, ActionKind.U, last))
        if send:
            program.append(Action(trial, shard, ActionKind.SEND))

    for microbatch in range(microbatches):
        for shard in range(shards):
            program.append(Action(trial, shard, ActionKind.F, microbatch))
        for shard in reversed(range(shards)):
            program.append(Action(trial, shard, ActionKind.B, microbatch))
            if microbatch == last and not barrier:
                for ready in reversed(range(shards)):
                    if final_backward[ready] == shard:
                        update(ready)
    if barrier:
        for shard in range(shards):
            update(shard)
    return program
