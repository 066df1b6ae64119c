"""Chooses a cut: it turns what `shards=` asks for into unit calls, each with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.plan.balance import balance
from cerebro_hydra.shards.cut_spec import CutMode, CutSpec


@dataclass(frozen=True)
class CutPoints:
    """Lists the places where a model may be cut.

    Args:
        mode: how the model would be cut.
        allowed: the unit calls at which a shard may begin, in order.
        units: every unit call of the model, in order.
        overwritten: the units whose input the forward overwrites.
        written: the buffers and frozen parameters to which training writes.
        rows: the numbers of rows for each of which a graph is exported, if one does not do.
    """

    mode: CutMode
    allowed: tuple[str, ...]
    units: tuple[str, ...]
    overwritten: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()

    def spec(self, at: tuple[str, ...]) -> CutSpec:
        """Return the spec of a cut at some of these places."""
        if self.mode == "export":
            return CutSpec("export", at, overwritten=self.overwritten, rows=self.rows)
        return CutSpec("modules", at, self.units, self.overwritten, self.written)


@dataclass(frozen=True)
class CutChoice:
    """Holds a cut, the reason for the start of each shard, and a note on what was asked in vain."""

    spec: CutSpec
    why: tuple[str, ...]
    note: str | None = None


def choose_whole(points: CutPoints) -> CutChoice:
    """Keep the model as one shard."""
    return CutChoice(points.spec(()), ("it is the whole model",))


def choose_by_time(points: CutPoints, seconds: Sequence[float], number: int) -> CutChoice:
    """Choose shards that take times as equal as possible.

    Args:
        seconds: measured times between the allowed cuts, one more than there are cuts.
        number: how many shards were asked for. There are fewer if the model has fewer places.
    """
    count = min(number, len(seconds))
    note = None
    if count < number:
        note = f"{number} shards were asked for, the model has blocks with parameters for {count}"
    return choose_groups(points, seconds, balance(seconds, count), note)


def choose_groups(
    points: CutPoints, seconds: Sequence[float], groups: Sequence[range], note: str | None = None
) -> CutChoice:
    """Choose shards that have these parts of what lies between the allowed cuts."""
    at = tuple(points.allowed[group.start - 1] for group in groups[1:])
    total = sum(seconds) or 1.0
    parts = [sum(seconds[i] for i in group) for group in groups]
    why = tuple(
        f"{part / total:.0%} of a step's measured time, {1e3 * part:.1f} of {1e3 * total:.1f} ms"
        for part in parts
    )
    return CutChoice(points.spec(at), why, note)


def choose_by_name(points: CutPoints, names: Sequence[str]) -> CutChoice:
    """Let a shard begin at each named module.

    Raises:
        ConfigurationError: the model can't be cut at one of them.
    """
    starts = {_start(name, points): name for name in reversed(names)}
    at = tuple(unit for unit in points.allowed if unit in starts)
    why = ["it begins the model"]
    why += [_named(starts[unit], unit) for unit in at]
    return CutChoice(points.spec(at), tuple(why))


def choose_by_blocks(points: CutPoints, blocks: Sequence[Sequence[str]]) -> CutChoice:
    """Let each shard hold the blocks listed for it and begin with the first of them.

    Raises:
        ConfigurationError: the model can't be cut there, or runs its blocks in another order.
    """
    at = tuple(_start(shard[0], points) for shard in blocks[1:])
    bounds = [-1, *(points.units.index(unit) for unit in at), len(points.units)]
    for number, shard in enumerate(blocks):
        for name in shard:
            inside = [i for i, unit in enumerate(points.units) if _belongs(unit, name)]
            if inside and not bounds[number] <= inside[0] < bounds[number + 1]:
                raise ConfigurationError(
                    f"shards puts {name!r} into shard {number}, but the model runs it elsewhere; "
                    f"it runs in this order: {[_plain(unit) for unit in points.units]}"
                )
    why = ["it begins the model"]
    why += [_named(shard[0], unit) for shard, unit in zip(blocks[1:], at, strict=True)]
    return CutChoice(points.spec(at), tuple(why))


def _start(name: str, points: CutPoints) -> str:
    """Return the cut that a module name means: at the module itself or at its first unit."""
    inside = [unit for unit in points.allowed if _belongs(unit, name)]
    if not inside:
        raise ConfigurationError(
            f"shards names {name!r}, where this model can't be cut; choose among the places "
            f"{[_plain(unit) for unit in points.allowed]}"
        )
    return inside[0]


def _belongs(unit: str, name: str) -> bool:
    path = unit.rpartition("@")[0]
    return unit == name or path == name or path.startswith(f"{name}.")


def _named(name: str, unit: str) -> str:
    plain = _plain(unit)
    if plain == name:
        return f"{name!r} was named"
    return f"{name!r} was named, whose first place to cut is {plain!r}"


def _plain(unit: str) -> str:
    return unit.removesuffix("@0")
