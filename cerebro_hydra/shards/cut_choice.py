"""Where to cut: from what `shards=` asks for to unit calls, each with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.plan.balance import balance
from cerebro_hydra.shards.cut_spec import CutMode, CutSpec


@dataclass(frozen=True)
class Places:
    """Where a model may be cut.

    Args:
        mode: how it would be.
        legal: the unit calls at which a shard may begin, in order.
        order: every unit call, in order.
    """

    mode: CutMode
    legal: tuple[str, ...]
    order: tuple[str, ...]


@dataclass(frozen=True)
class CutChoice:
    """A cut, why each shard begins where it does, and what could not be had as asked."""

    spec: CutSpec
    why: tuple[str, ...]
    note: str | None = None


def whole() -> CutChoice:
    """The model as one shard."""
    return CutChoice(CutSpec("whole"), ("it is the whole model",))


def by_time(places: Places, seconds: Sequence[float], number: int) -> CutChoice:
    """As many shards of as equal time as can be.

    Args:
        seconds: measured between legal cuts, one more than there are.
        number: of shards; fewer where the model has fewer places.
    """
    count = min(number, len(seconds))
    groups = balance(seconds, count)
    at = tuple(places.legal[group.start - 1] for group in groups[1:])
    total = sum(seconds) or 1.0
    parts = [sum(seconds[i] for i in group) for group in groups]
    why = tuple(
        f"{part / total:.0%} of a step's measured time, {1e3 * part:.1f} of {1e3 * total:.1f} ms"
        for part in parts
    )
    note = None
    if count < number:
        note = f"{number} shards were asked for, the model has blocks with parameters for {count}"
    return CutChoice(CutSpec(places.mode, at), why, note)


def by_name(places: Places, names: Sequence[str]) -> CutChoice:
    """A shard begins at each module named.

    Raises:
        ConfigurationError: a model can't be cut there.
    """
    starts = {_start(name, places): name for name in reversed(names)}
    at = tuple(unit for unit in places.legal if unit in starts)
    why = ["it begins the model"]
    why += [_named(starts[unit], unit) for unit in at]
    return CutChoice(CutSpec(places.mode, at), tuple(why))


def by_blocks(places: Places, blocks: Sequence[Sequence[str]]) -> CutChoice:
    """Each shard holds the blocks listed for it, and begins with the first of them.

    Raises:
        ConfigurationError: a model can't be cut there, or runs its blocks in another order.
    """
    at = tuple(_start(shard[0], places) for shard in blocks[1:])
    bounds = [-1, *(places.order.index(unit) for unit in at), len(places.order)]
    for number, shard in enumerate(blocks):
        for name in shard:
            inside = [i for i, unit in enumerate(places.order) if _belongs(unit, name)]
            if inside and not bounds[number] <= inside[0] < bounds[number + 1]:
                raise ConfigurationError(
                    f"shards puts {name!r} into shard {number}, but the model runs it elsewhere; "
                    f"it runs in this order: {[_plain(unit) for unit in places.order]}"
                )
    why = ["it begins the model"]
    why += [_named(shard[0], unit) for shard, unit in zip(blocks[1:], at, strict=True)]
    return CutChoice(CutSpec(places.mode, at), tuple(why))


def _start(name: str, places: Places) -> str:
    """The legal cut that a module name means: its own, or that of its first unit."""
    inside = [unit for unit in places.legal if _belongs(unit, name)]
    if not inside:
        raise ConfigurationError(
            f"shards names {name!r}, where this model can't be cut; places are "
            f"{[_plain(unit) for unit in places.legal]}"
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
