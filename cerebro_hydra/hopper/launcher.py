"""How a run gets its agents: Spark in production, local processes in tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from cerebro_hydra.wire.credentials import TLS


class Launcher(Protocol):
    """Starts agents and keeps their number up.

    `start` returns at once; each agent runs `agent.main.run_agent(worker, spec, factory)` and a
    dead one is started again with the same worker number. `on_exit` is called once, from any
    thread, when no agent will be started any more: with None after a regular end.

    Each start gets a number of its own in `spec["task"]`. `host` is the address of this machine
    on which the driver listens and which agents dial; `tls` says whether they do so with TLS.
    """

    num_workers: int
    host: str
    tls: bool | TLS

    def start(
        self,
        spec: dict[str, Any],
        factory: Callable[..., Any],
        on_exit: Callable[[BaseException | None], None],
    ) -> None: ...

    def replace(self, worker: int, task: int | None) -> None:
        """End what may be left of a start whose agent was given up, so that a new one can begin.

        Does nothing if that start is over: most agents are lost because they died.
        """
        ...

    def stop(self, timeout: float) -> None:
        """Wait `timeout` seconds for agents that were told to stop, then end them."""
        ...
