"""Joins the state machine and a policy: every event is handled, then what is open is assigned."""

from __future__ import annotations

from typing import Protocol

from cerebro_hydra.plan.events import Assigned, Assignment, Event
from cerebro_hydra.plan.hop_config import HopConfig
from cerebro_hydra.plan.hop_state import HopState
from cerebro_hydra.plan.instructions import Instruction
from cerebro_hydra.plan.policy import Policy
from cerebro_hydra.plan.view import View

Decision = tuple[Event, list[Instruction]]


class Chooser(Protocol):
    """Proposes which open tasks to begin; :class:`~cerebro_hydra.plan.policy.Policy` is one."""

    def choose(self, view: View) -> list[Assignment]:
        """Return the tasks to begin now."""


class Scheduler:
    """Decides for one run; the coordinator, the in-process driver and the simulator drive it."""

    def __init__(
        self, config: HopConfig, state: HopState | None = None, policy: Chooser | None = None
    ) -> None:
        self.state = state or HopState(config)
        self._policy = policy or Policy(config)
        self._view = View(self.state.tables)

    def handle(self, event: Event) -> list[Decision]:
        """Handle one event, and the choices that it made possible as events of their own.

        A choice has one task for a worker, so where workers hold several there may be more of them.
        """
        decisions = [(event, self.state.handle(event))]
        while tasks := self._policy.choose(self._view):
            assigned = Assigned(tuple(tasks))
            decisions.append((assigned, self.state.handle(assigned)))
            if not self._view.holds_several:
                break
        return decisions
