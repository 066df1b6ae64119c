"""The assignment rule: which of the possible tasks to give out now."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from random import Random
from typing import TYPE_CHECKING

from cerebro_hydra.plan.hop_config import HopConfig
from cerebro_hydra.plan.seeds import seed_of
from cerebro_hydra.plan.visits import Agent, Kind

if TYPE_CHECKING:
    from cerebro_hydra.plan.hop_state import HopState


@dataclass(frozen=True, slots=True)
class Choice:
    """A task that could be given to an agent now."""

    trial: int
    kind: Kind
    partition: int
    agent: Agent


def visit_order(config: HopConfig, trial: int, epoch: int) -> tuple[int, ...]:
    """The order in which a trial visits the partitions of an epoch when ``order="seeded"``.

    Rows of a seeded Latin square: the partitions are shuffled per epoch, and each trial starts
    one further, so that trials spread over the workers.
    """
    order = _shuffled(config.seed, epoch, config.partitions)
    start = trial % config.partitions
    return order[start:] + order[:start]


@cache
def _shuffled(seed: int, epoch: int, partitions: int) -> tuple[int, ...]:
    order = list(range(partitions))
    Random(seed_of(seed, "visit order", epoch)).shuffle(order)
    return tuple(order)


def choose(state: HopState, choices: list[Choice]) -> list[Choice]:
    """Longest remaining work first, then most bytes already there, then a seeded tie-break."""
    return [max(choices, key=lambda choice: _rank(state, choice))]


def _rank(state: HopState, choice: Choice) -> tuple[float, float, int]:
    trial = state.trials[choice.trial]
    config = state.config
    left = config.epochs * config.partitions - trial.newest
    seconds = left * state.estimates.seconds("train", choice.trial, choice.partition)
    there = state.holders.share(choice.trial, trial.newest, choice.agent.incarnation)
    tie = seed_of(config.seed, "tie", choice.trial, choice.partition, trial.newest)
    return seconds, there * trial.config.nbytes, tie
