"""Writes a whole state to the run folder, by digest, while training goes on."""

from __future__ import annotations

from cerebro_hydra.agent.shard_store import ShardStore
from cerebro_hydra.storage.run_folder import RunFolder


def write_checkpoint(
    folder: RunFolder, shard_store: ShardStore, trial: int, visit: int, shards: int
) -> None:
    """Write the segments that the folder lacks, then the document that names them all.

    Raises:
        TransferError: some of the state is not on this agent.
    """
    entries = []
    for number in range(shards):
        shard = shard_store.wait(trial, visit, number, given_up=lambda: True)
        for digest, buffer in shard.segments.values():
            folder.write_object(digest, buffer.data)
        frozen, trainable = shard.digests
        entries.append({"frozen": frozen, "trainable": trainable, "cursor": dict(shard.cursor)})
    folder.write_state(trial, visit, {"trial": trial, "visit": visit, "shards": entries})
