"""Defines how a run gets its agents: Spark in production, local processes in tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from cerebro_hydra.hopper.agent_spec import AgentSpec
from cerebro_hydra.hopper.loss_limits import LossLimits
from cerebro_hydra.wire.credentials import TLS

Factory = Callable[..., Any]
"""The user's `estimator_gen_fn`."""

OnExit = Callable[[BaseException | None], None]


class Launcher(Protocol):
    """Starts agents and keeps their number up.

    `num_workers` is how many agents there are. `host` is the address of this machine on which the
    coordinator listens and which agents dial; `tls` says whether they do so with TLS, and `limits`
    which losses the run outlasts.
    """

    num_workers: int
    host: str
    tls: bool | TLS
    limits: LossLimits

    def start(self, spec: AgentSpec, factory: Factory, on_exit: OnExit) -> None:
        """Start the agents and return at once.

        Each runs `agent.main.run_agent(spec, start, factory)`, with an `AgentStart` that the
        launcher makes. A dead agent is started again for the same worker.

        Args:
            spec: what every agent is told.
            factory: the user's function; travels once, inside the launcher's closure.
            on_exit: called once, from any thread, when no agent will be started any more: with
                None after a regular end, else with the reason.
        """
        ...

    def replace(self, worker: int, start: int) -> None:
        """End what may be left of a start whose agent was given up, so that a new one can begin.

        It does nothing if that start is over: most agents are lost because they died.
        """
        ...

    def stop(self, timeout: float) -> None:
        """Wait `timeout` seconds for agents that were told to stop, then end them."""
        ...
