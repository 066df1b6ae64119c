"""Lays states of a run out in the shards of another cut: the same tensors, in other segments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from torch import Tensor

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.plan.recut_events import RecutState
from cerebro_hydra.replay.states import read_segment
from cerebro_hydra.shards.layout import (
    EXISTS,
    Bytes,
    HostSegments,
    SegmentLayout,
    TrialLayout,
    filled,
    is_optimizer_state,
)
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.storage.digest import digest

_SEGMENTS_AT_ONCE = 2
"""A shard of a finer cut begins in one shard of the former cut, and may end in the next one."""


def relaid_state(folder: RunFolder, trial: int, visit: int, layout: TrialLayout) -> RecutState:
    """Write the segments of a state in another layout, and describe the state so.

    Its document stays as it is.

    Raises:
        ConfigurationError: the state lacks a tensor of the layout.
        StoreError: the store can't be read or written.
    """
    shards = folder.read_state(trial, visit, folder.run_id)["shards"]
    cursors = [shard["cursor"] or None for shard in shards]
    assert all(cursor == cursors[0] for cursor in cursors), "shards of a state have one cursor"
    names = list(dict.fromkeys(name for s in shards for name in (s["frozen"], s["trainable"])))
    made = [write_segments(folder, each) for each in _relaid(folder, names, layout)]
    return RecutState(visit, tuple(made), None if cursors[0] is None else dict(cursors[0]))


def write_segments(folder: RunFolder, segments: Mapping[str, Bytes]) -> tuple[str, str]:
    """Write the segments of a shard by digest; return those of (frozen, trainable)."""
    named = {name: digest(buffer) for name, buffer in segments.items()}
    for name, buffer in segments.items():
        folder.write_object(named[name], buffer.data)
    return named["frozen"], named["trainable"]


def _relaid(folder: RunFolder, names: Sequence[str], layout: TrialLayout) -> Iterator[HostSegments]:
    """Yield the segments of each shard, with few others in memory beside them."""

    @lru_cache(_SEGMENTS_AT_ONCE)
    def tensors_of(segment: str) -> dict[str, Tensor]:
        return read_segment(folder, segment)

    where = {tensor: segment for segment in names for tensor in tensors_of(segment)}

    def made(segment: SegmentLayout) -> Bytes:
        found = {}
        for name in (entry.name for entry in segment.entries if entry.name != EXISTS):
            if name in where:
                found[name] = tensors_of(where[name])[name]
            elif not is_optimizer_state(name):
                raise ConfigurationError(f"the former shards have no {name!r}")
        return filled(segment, found)

    for shard in layout.shards:
        yield {"frozen": made(shard.frozen), "trainable": made(shard.trainable)}
