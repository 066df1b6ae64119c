"""Says how shards are asked for, offered and received."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from cerebro_hydra.errors import CerebroHydraError

Bytes = npt.NDArray[np.uint8]

RUN_OVER = "the run is over"
"""What a hello is refused with then."""


class ControlFailed(CerebroHydraError):
    """The control connection could not be opened: unreachable driver, secret or hello refused."""


class RunOver(ControlFailed):
    """The driver needs no more agents, because its run is over."""

    def __init__(self) -> None:
        super().__init__(RUN_OVER)


@dataclass(frozen=True)
class ShardRequest:
    """Asks the agent process that owns a state of a trial for some of its shards.

    With `verify` it asks what digests the bytes of these shards have there now, and for no bytes.
    With an `attempt` it asks for messages of a visit with replicas, which have numbers like shards,
    and come in the order in which they are asked for.
    """

    trial: int
    state: int
    incarnation: str
    shards: tuple[int, ...]
    verify: bool = False
    attempt: int | None = None

    def __str__(self) -> str:
        """Return the request as error messages show it."""
        numbers = ", ".join(map(str, self.shards))
        what = "shard" if self.attempt is None else f"attempt {self.attempt}, message"
        return (
            f"{what} {numbers} of trial {self.trial} at state {self.state} "
            f"(owner {self.incarnation})"
        )

    @classmethod
    def from_line(cls, line: bytes) -> ShardRequest:
        """Return the request that a receiver wrote.

        Raises:
            ValueError: it is none.
        """
        match json.loads(line):
            case {
                "fetch": {
                    "trial": int(trial),
                    "state": int(state),
                    "incarnation": str(incarnation),
                    "shards": [int(), *_] as shards,
                    **more,
                }
            } if all(type(number) is int and number >= 0 for number in shards):
                attempt = more.get("attempt")
                if attempt is None or type(attempt) is int:
                    verify = more.get("verify") is True
                    return cls(trial, state, incarnation, tuple(shards), verify, attempt)
        raise ValueError(
            f"{line[:200]!r} is no request for shards; run the same version everywhere"
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


@runtime_checkable
class Message(Protocol):
    """Holds what a replica gives to the one other that waits for it."""

    @property
    def memory(self) -> Bytes:
        """Return its bytes, which stay unchanged until they are sent."""

    def sent(self) -> None:
        """Take note that the bytes may change now."""


@dataclass(frozen=True)
class FetchedShard:
    """Holds a fetched shard, and what its transfer cost.

    `segments` maps a segment's name to its digest and its bytes: received, or held before.
    `seconds` runs from the arrival of the owner's offer to the last byte in place, without the
    wait for the owner to publish the shard.
    """

    number: int
    segments: dict[str, tuple[str, Bytes]]
    cursor: dict[str, Any]
    bytes_moved: int
    bytes_saved: int
    seconds: float
