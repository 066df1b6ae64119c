"""What the tasks of a trial need for its largest batch, as they were measured."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from cerebro_hydra.documents import decode
from cerebro_hydra.plan.queues.visit_spec import ShardSpec
from cerebro_hydra.shards.cut.torch_cond import is_of_cond, leave_cond, plain_branches

Needs = tuple[ShardSpec, ...]
"""What the tasks of each shard need; the bytes of its state are not among them."""


@dataclass(frozen=True, slots=True)
class CrossingBytes:
    """Says what a microbatch leaves for other devices where every device keeps its activations.

    Args:
        batch: the bytes of the batch, and of what is read while another shard than its own runs.
        values: of each value the shard that makes it, the last one that it comes to, its bytes.
        gradients: of each gradient the shard whose backward makes it, the last one that it leaves,
            its bytes.
    """

    batch: int
    values: tuple[tuple[int, int, int], ...]
    gradients: tuple[tuple[int, int, int], ...]

    def left(self, crossings: Collection[int], shards: int) -> tuple[int, ...]:
        """Return the bytes that tasks of each shard leave, if these begin other devices' ranges.

        What crosses several times is stored once.
        """
        left = [self.batch] + [0] * (shards - 1)
        for made, last, nbytes in self.values:
            if crossed := [k for k in crossings if made < k <= last]:
                left[min(crossed) - 1] += nbytes
        for made, last, nbytes in self.gradients:
            if crossed := [k for k in crossings if last <= k <= made]:
                left[max(crossed)] += nbytes
        return tuple(left)


UNWATCHED = 1 << 62
"""More bytes than a batch has, in place of those of the batch that was measured."""


@dataclass(frozen=True, slots=True)
class TaskProfile:
    """Holds what the tasks of a trial need for its largest batch, as they were measured.

    Args:
        evaluation: of the forwards of an evaluation.
        keep: of training that keeps activations; None if no device could have them.
        recompute: of training that computes them again; None if that was not asked for, or the
            model can't be run so.
        shared: the parameters that are read while another shard than theirs runs.
        batch: the bytes of that batch, as the model takes it.
        moving: the bytes that tasks of each shard leave for others in a microbatch that goes from
            device to device; None where it can't.
        evaluated: the same of a microbatch of an evaluation.
        crossing: what a microbatch leaves where activations are kept; None if nobody measured it.
    """

    evaluation: Needs
    keep: Needs | None
    recompute: Needs | None
    shared: tuple[str, ...]
    batch: int
    moving: tuple[int, ...] | None = None
    evaluated: tuple[int, ...] | None = None
    crossing: CrossingBytes | None = None

    def training(self, recompute: bool) -> Needs:
        """Return the needs of training; those of the other way where this one was not measured."""
        asked, other = self.keep, self.recompute
        if recompute:
            asked, other = other, asked
        found = other if asked is None else asked
        assert found is not None, "training was measured in one way at least"
        return found

    def joined(self, parts: Sequence[range]) -> TaskProfile:
        """Return what tasks of these ranges of shards need, each as one shard, about.

        The last shard's backward follows its forward at once, so that it computes nothing again.
        """
        by_modules = self.moving is None

        def needs(units: Needs | None, fused: Needs | None = None) -> Needs | None:
            if units is None:
                return None
            ends: list[float | None] = [None] * len(parts)
            if fused is not None:
                ends[-1] = sum(fused[k].backward for k in parts[-1])
            return tuple(
                ShardSpec.joined(units[part.start : part.stop], by_modules, backward)
                for part, backward in zip(parts, ends, strict=True)
            )

        evaluation = needs(self.evaluation)
        assert evaluation is not None
        last = [part[-1] for part in parts]
        return replace(
            self,
            evaluation=evaluation,
            keep=needs(self.keep),
            recompute=needs(self.recompute, self.keep),
            moving=None if self.moving is None else tuple(self.moving[k] for k in last),
            evaluated=None if self.evaluated is None else tuple(self.evaluated[k] for k in last),
        )

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(json.dumps(asdict(self)))  # lists for tuples
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> TaskProfile:
        found: TaskProfile = decode(cls, dict(document), "what the tasks of a trial need")
        return found


def watchable(measure: Callable[[], TaskProfile]) -> TaskProfile:
    """Return what is measured; of a model with torch.cond, the most that any branch needs.

    Batches are not watched later on whose model has one, because it can't run so.
    """
    try:
        return measure()
    except Exception as error:
        if not is_of_cond(error):
            raise
        leave_cond()
    with plain_branches():
        found = [measure()]
    for taken in (True, False):
        with suppress(Exception), plain_branches(taken):  # one may not take what the other one can
            found.append(measure())
    return replace(functools.reduce(_most, found), batch=UNWATCHED, moving=None, evaluated=None,
                   crossing=None)  # fmt: skip


def _most(one: TaskProfile, other: TaskProfile) -> TaskProfile:
    """Return needs in which both profiles have room."""

    def needs(a: Needs | None, b: Needs | None) -> Needs | None:
        if a is None or b is None:
            return None
        return tuple(itertools.starmap(_more, zip(a, b, strict=True)))

    evaluation = needs(one.evaluation, other.evaluation)
    assert evaluation is not None
    return replace(
        one,
        evaluation=evaluation,
        keep=needs(one.keep, other.keep),
        recompute=needs(one.recompute, other.recompute),
        shared=tuple(sorted({*one.shared, *other.shared})),
    )


def _more(a: ShardSpec, b: ShardSpec) -> ShardSpec:
    names = ("activations", "boundary", "forward", "backward", "update")
    return replace(a, **{name: max(getattr(a, name), getattr(b, name)) for name in names})
