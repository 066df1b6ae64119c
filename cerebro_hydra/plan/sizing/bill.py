"""The bill says before training what each trial needs of a worker, what there is, and what spills.

The needs are those by which the queues of a worker accept a visit (``plan/queues/worker.py``), and
the spilled bytes and their seconds come from the same queues on a virtual clock.

`bill_text` writes it for the console.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.plan.costs.moves import MoveRates
from cerebro_hydra.plan.human_units import bytes_text, needed_text, numbers_text, seconds_text
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.queues.pick import DEFAULT_PICK, PICKS, Rule
from cerebro_hydra.plan.queues.visit_spec import VisitSpec
from cerebro_hydra.plan.simulate.worker import WorkerSimulation, WorkerTimeline

LOAD, SPILL = ActionKind.LOAD, ActionKind.SPILL
MICROBATCHES = 4  # of a sub-epoch are simulated, then twice as many; the rest goes on like these


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """Holds what a worker has; None means no limit.

    Args:
        devices: the bytes of each device.
        host: the bytes of DRAM for shards.
        disk: the free bytes of its scratch folder.
        residents: how many sub-epochs it holds at once.
        rates: how long moves take.
        copies_beside: whether a device copies while it computes, as GPUs do. For CPU devices both
            are done by the same cores, so that all seconds of copies are lost.
    """

    devices: tuple[int | None, ...]
    host: int | None
    disk: int | None
    residents: int
    rates: MoveRates
    copies_beside: bool = False

    @property
    def largest_device(self) -> float:
        """Return the bytes of its largest device."""
        return max(_limit(budget) for budget in self.devices)


@dataclass(frozen=True, slots=True)
class BillLine:
    """Says what one trial needs of one worker, in bytes, and what that one has.

    Args:
        device_least: what a device must have for the largest shard and its task.
        device_all: what a device needs if nothing is to be spilled.
        host: the DRAM for the trial and for the largest others that may be resident with it, with
            the states that are kept until their sub-epochs are committed.
        disk: the part of ``host`` that does not fit DRAM.
        moved: the bytes of the trial that are loaded and spilled in one sub-epoch, disk included.
        seconds: how much longer that makes the sub-epoch.
        refusal: why the worker can't train the trial, and what to change; "" if it can.
    """

    trial: int
    worker: int
    device_least: int
    device_all: int
    device_has: float
    host: int
    host_has: float
    disk: int
    disk_has: float
    moved: int
    seconds: float
    refusal: str = ""

    @property
    def fits(self) -> bool:
        """Return whether the worker can train the trial."""
        return not self.refusal


@dataclass(frozen=True, slots=True)
class Bill:
    """Holds a line for every trial and worker."""

    lines: tuple[BillLine, ...]

    def check(self) -> None:
        """Refuse what can't fit.

        Raises:
            ConfigurationError: a trial does not fit a worker; the message says why.
        """
        if reasons := refusals(self.lines):
            raise ConfigurationError("\n".join(reasons))


def bill(
    trials: Sequence[VisitSpec], workers: Sequence[WorkerMemory], rule: Rule = PICKS[DEFAULT_PICK]
) -> Bill:
    """Return the bill of trials, each as its longest sub-epoch with its number as ``visit``."""
    lines = []
    for trial in trials:
        for worker, memory in enumerate(workers):
            others = [t for t in trials if t.visit != trial.visit and _is_accepted(t, memory)]
            others.sort(key=lambda other: (-other.state_bytes, other.visit))
            # The numbers of trials are no part of the work, so equal work is simulated once.
            beside = tuple(
                replace(other, visit=number)
                for number, other in enumerate(others[: memory.residents - 1], start=1)
            )
            lines.append(_line(trial, beside, worker, memory, rule))
    return Bill(tuple(lines))


def _line(
    trial: VisitSpec, beside: tuple[VisitSpec, ...], worker: int, memory: WorkerMemory, rule: Rule
) -> BillLine:
    host = sum(2 * visit.state_bytes + visit.host_boundary_bytes for visit in (trial, *beside))
    host_has = _limit(memory.host)
    line = BillLine(
        trial.visit,
        worker,
        trial.device_need,
        trial.whole_need,
        memory.largest_device,
        host,
        host_has,
        max(0, math.ceil(host - host_has)) if host_has < math.inf else 0,
        _limit(memory.disk),
        moved=0,
        seconds=0.0,
    )
    if refusal := _refusal(trial, line):
        return replace(line, refusal=refusal)
    moved, seconds = _spilling(replace(trial, visit=0), beside, memory, rule)
    return replace(line, moved=moved, seconds=seconds)


def refusals(lines: Iterable[BillLine]) -> list[str]:
    """Return each reason for which trials are refused, with the trials and workers."""
    workers_of: dict[str, dict[int, list[int]]] = {}
    for line in lines:
        if line.refusal:
            workers_of.setdefault(line.refusal, {}).setdefault(line.trial, []).append(line.worker)
    return [
        f"trial {trials} on worker {workers}: {reason}"
        for reason, each in workers_of.items()
        for trials, workers in grouped(each)
    ]


def grouped(workers_of: Mapping[int, Sequence[int]]) -> list[tuple[str, str]]:
    """Return the numbers of trials and of their workers, as text; trials of equal workers are one.

    ``workers_of`` has the workers by trial.
    """
    trials_of: dict[tuple[int, ...], list[int]] = {}
    for trial, workers in workers_of.items():
        trials_of.setdefault(tuple(workers), []).append(trial)
    return [(numbers_text(trials), numbers_text(w)) for w, trials in trials_of.items()]


def _is_accepted(trial: VisitSpec, memory: WorkerMemory) -> bool:
    fits_device = trial.device_need <= memory.largest_device
    return fits_device and trial.host_need <= _limit(memory.host)


def _refusal(trial: VisitSpec, line: BillLine) -> str:
    if line.device_least > line.device_has:
        what, finer = "the largest shard", "more shards, smaller microbatches"
        if trial.keeps_all:
            what, finer = "all shards, whose activations are kept", "recompute=True"
        return (
            f"a device needs {needed_text(line.device_least)} for {what}, and the largest device "
            f"has {bytes_text(line.device_has)}; use {finer}, or raise device_memory"
        )
    if trial.host_need > line.host_has:
        hundredths = -(-100 * trial.host_need // max(1, int(line.host_has)))  # rounded up
        return (
            f"DRAM needs {needed_text(trial.host_need)} for a shard and the boundary values, and "
            f"host_memory leaves {bytes_text(line.host_has)} for them; use more shards, smaller "
            f"microbatches, or {hundredths / 100:.2f} times this host_memory"
        )
    if line.disk > line.disk_has:
        return (
            f"disk needs {needed_text(line.disk)} beside {bytes_text(line.host_has)} of DRAM, and "
            f"scratch has {bytes_text(line.disk_has)} free; use a larger scratch, raise "
            "host_memory, or lower residents"
        )
    return ""


@lru_cache(maxsize=4096)
def _spilling(
    trial: VisitSpec, beside: tuple[VisitSpec, ...], memory: WorkerMemory, rule: Rule
) -> tuple[int, float]:
    """Return the bytes of the trial that move in a sub-epoch, and the seconds that this costs."""
    total = trial.graph.microbatches
    plenty = replace(memory, devices=(None,) * len(memory.devices), host=None)

    def measure(microbatches: int) -> tuple[float, float]:
        visits = [_shortened(visit, microbatches) for visit in (trial, *beside)]
        spilling, resident = (_simulated(visits, each, rule) for each in (memory, plenty))
        moves, needed = _moves(spilling), _moves(resident)
        moved = sum(trial.shards[move.shard].moved(move) for move in moves)
        moved -= sum(trial.shards[move.shard].moved(move) for move in needed)
        if not memory.copies_beside:
            seconds = sum(memory.rates.seconds(move, trial.shards[move.shard]) for move in moves)
            seconds -= sum(memory.rates.seconds(move, trial.shards[move.shard]) for move in needed)
            more = spilling.units[0] + len(moves) - resident.units[0] - len(needed)
            return moved, seconds + memory.rates.dispatch * more
        at_once = min(len(memory.devices), len(visits)) / len(visits)
        return moved, (spilling.makespan - resident.makespan) * at_once

    few, more = min(total, MICROBATCHES), min(total, 2 * MICROBATCHES)
    first, second = measure(few), measure(more)
    repeats = (total - few) / (more - few) if more > few else 0.0
    moved, seconds = (a + (b - a) * repeats for a, b in zip(first, second, strict=True))
    return max(0, round(moved)), max(0.0, seconds)


def _simulated(visits: Sequence[VisitSpec], memory: WorkerMemory, rule: Rule) -> WorkerTimeline:
    def seconds(action: Action) -> float:
        return memory.rates.seconds(action, visits[action.trial].shards[action.shard])

    return WorkerSimulation(visits, memory.devices, memory.host, rule, seconds).run()


def _shortened(visit: VisitSpec, microbatches: int) -> VisitSpec:
    graph = visit.graph
    window = min(graph.window, MICROBATCHES)
    graph = replace(graph, microbatches=min(graph.microbatches, microbatches), window=window)
    return replace(visit, graph=graph)


def _moves(timeline: WorkerTimeline) -> list[Action]:
    """Return what loaded and spilled shards of visit 0."""
    actions = (each.action for each in timeline.done)
    return [each for each in actions if each.trial == 0 and each.kind in (LOAD, SPILL)]


def _limit(nbytes: int | None) -> float:
    return math.inf if nbytes is None else nbytes


def bill_text(lines: Sequence[BillLine]) -> str:
    """Return a line for trials and workers with the same numbers; reasons of refusals are below.

    What is copied, and what that costs, is of one sub-epoch.
    """
    by_words: dict[str, dict[int, list[int]]] = {}
    for line in lines:
        if line.fits:
            by_words.setdefault(_words(line), {}).setdefault(line.trial, []).append(line.worker)
    told = [
        f"trial {trials} on worker {workers}: {words}"
        for words, workers_of in by_words.items()
        for trials, workers in grouped(workers_of)
    ]
    return "\n".join([*told, *refusals(lines)])


def _words(line: BillLine) -> str:
    device = needed_text(line.device_all)
    if line.device_least != line.device_all:
        device = f"{needed_text(line.device_least)} for the largest shard, {device} for all"
    words = [
        f"a device needs {device}, and has {bytes_text(line.device_has)}",
        f"DRAM needs {needed_text(line.host)}, and has {bytes_text(line.host_has)}",
    ]
    if line.disk:
        free = bytes_text(line.disk_has)
        words.append(f"{needed_text(line.disk)} of that are for the disk, which has {free} free")
    if line.moved:
        words.append(
            f"a sub-epoch copies {bytes_text(line.moved)} between device, DRAM and disk, which "
            f"makes it about {seconds_text(line.seconds)} longer"
        )
    else:
        words.append("nothing has to be copied between them")
    return "; ".join(words)
