"""Says at which epochs trials are compared, and how many begin: rungs, and brackets of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Bracket:
    """Says how many trials begin together, and the epochs after which the best of them go on.

    The last of the ascending `rungs` is where the last trials end; nothing is decided there.
    """

    trials: int
    rungs: tuple[int, ...]


def rungs_from(grace_epochs: int, num_epochs: int, eta: int) -> tuple[int, ...]:
    """Return `grace_epochs`, and `eta` times as many each time, below `num_epochs`; then that."""
    rungs, epochs = list[int](), grace_epochs
    while epochs < num_epochs:
        rungs.append(epochs)
        epochs *= eta
    return (*rungs, num_epochs)


def hyperband_brackets(grace_epochs: int, num_epochs: int, eta: int) -> list[Bracket]:
    """Return the brackets of Hyperband, the one with the most trials first.

    With s from the most brackets that begin with at least `grace_epochs` down to 0, bracket s
    begins with ceil((s_max + 1) / (s + 1) * eta^s) trials, which end num_epochs / eta^s epochs
    first; parts of an epoch are left out.
    """
    most = 0
    while grace_epochs * eta ** (most + 1) <= num_epochs:
        most += 1
    return [
        Bracket(
            -(-(most + 1) * eta**s // (s + 1)),
            tuple(num_epochs // eta**down for down in range(s, -1, -1)),
        )
        for s in range(most, -1, -1)
    ]


def shared_out(brackets: Sequence[Bracket], trials: int) -> list[Bracket]:
    """Give brackets so many trials in all, in the proportions that they have.

    What can't be parted goes to the largest remainders, and of equal ones to the first. A bracket
    that gets no trial is left out.
    """
    whole = sum(bracket.trials for bracket in brackets)
    exact = [Fraction(bracket.trials * trials, whole) for bracket in brackets]
    counts = [int(share) for share in exact]
    order = sorted(range(len(brackets)), key=lambda at: counts[at] - exact[at])
    for at in order[: trials - sum(counts)]:
        counts[at] += 1
    return [
        Bracket(count, bracket.rungs)
        for count, bracket in zip(counts, brackets, strict=True)
        if count
    ]


def dealt(brackets: Sequence[Bracket]) -> list[int]:
    """Return the bracket of each trial, such that every bracket is begun evenly from the start."""
    places = [
        (Fraction(2 * place + 1, 2 * bracket.trials), index)
        for index, bracket in enumerate(brackets)
        for place in range(bracket.trials)
    ]
    return [index for _, index in sorted(places)]
