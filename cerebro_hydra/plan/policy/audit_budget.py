"""Keeps the time of audits within a share of the time of training."""

from __future__ import annotations

from dataclasses import dataclass

from cerebro_hydra.plan.seeds import seed_of

LATER_SHARE = 0.2
"""The part of the share that audits after a trial's first epoch may bring it to."""


@dataclass(slots=True)
class AuditBudget:
    """Decides from measured seconds whether one more audit may be made on an agent.

    Attributes:
        share: the seconds of all audits are at most this part of those of training.
        trained: the seconds of training so far, without audits.
        spent: the seconds of audits so far.
    """

    share: float
    trained: float = 0.0
    spent: float = 0.0

    def allows(self, seconds: float, first_epoch: bool) -> bool:
        """Return whether an audit that takes so long stays within the share.

        Audits of first epochs come first: later ones leave most of the share to trials that begin.
        """
        share = self.share if first_epoch else self.share * LATER_SHARE
        return self.spent + seconds <= share * self.trained


def drawn_window(trial: int, epoch: int, partition: int, windows: int) -> int:
    """Return which optimizer step of a sub-epoch is audited if one is: any is as likely."""
    return seed_of("audit", trial, epoch, partition) % windows
