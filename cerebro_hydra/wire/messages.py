"""Names shards, encodes requests for them, and describes what was fetched."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cerebro_hydra.errors import CerebroHydraError

Bytes = npt.NDArray[np.uint8]


class ControlFailed(CerebroHydraError):
    """The control connection could not be opened: unreachable driver, secret or hello refused."""


class RunOver(ControlFailed):
    """The driver needs no more agents, because its run is over."""

    def __init__(self) -> None:
        super().__init__(RUN_OVER)


RUN_OVER = "the run is over"
"""What a hello is refused with then."""


@dataclass(frozen=True)
class ShardKey:
    """Names one shard of one state of one trial, at the agent process that owns it."""

    trial: int
    visit: int
    shard: int
    incarnation: str

    def __str__(self) -> str:
        """Return the key as error messages show it."""
        return (
            f"shard {self.shard} of trial {self.trial} after visit {self.visit} "
            f"(owner {self.incarnation})"
        )


class Publication(Protocol):
    """Holds a shard that its owner gives to whoever asks.

    `segments` maps a segment's name ("frozen", "trainable") to its digest and its bytes, any
    C-contiguous buffer. The bytes must stay unchanged for as long as the shard is published.
    """

    @property
    def segments(self) -> Mapping[str, tuple[str, Any]]:
        """Return the digest and the buffer of each segment, by its name."""

    @property
    def cursor(self) -> Mapping[str, Any]:
        """Return the JSON that travels with the trial."""


@dataclass(frozen=True)
class FetchedSegment:
    """Holds a segment as received; `buffer` (uint8, [nbytes]) is None if the receiver had it."""

    digest: str
    nbytes: int
    buffer: Bytes | None


@dataclass(frozen=True)
class FetchedShard:
    """Holds a fetched shard and what its transfer cost.

    `seconds` runs from the arrival of the reply's header to the last byte in place, without the
    wait for the owner to publish the shard.
    """

    segments: dict[str, FetchedSegment]
    cursor: dict[str, Any]
    bytes_moved: int
    bytes_saved: int
    seconds: float


def ticket_to_bytes(key: ShardKey, have: Collection[str]) -> bytes:
    """Encode the request for a shard by a receiver that holds the digests `have`."""
    return json.dumps({**vars(key), "have": sorted(have)}).encode()


def ticket_from_bytes(ticket: bytes) -> tuple[ShardKey, frozenset[str]]:
    """Decode what `ticket_to_bytes` made; raises KeyError, TypeError or ValueError on all else."""
    fields = json.loads(ticket)
    have = frozenset(fields.pop("have"))
    return ShardKey(**fields), have
