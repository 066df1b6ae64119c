"""Writes where each worker's latest agent runs, and what its bits depend on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cerebro_hydra.hopper.agent_spec import AgentInfo
from cerebro_hydra.hopper.run_writer import RunWriter
from cerebro_hydra.storage.run_document import NUMERIC_FILE, WORKERS_FILE


class WorkerDocuments:
    """Holds two documents of a run, by worker; both are written anew for each agent.

    Args:
        numeric: what the bits of each worker depended on before the run was resumed.
    """

    def __init__(self, writer: RunWriter, numeric: Mapping[str, Any]) -> None:
        self._writer = writer
        self._numeric = dict(numeric)
        self._places: dict[str, Any] = {}

    def note(self, agent: AgentInfo) -> None:
        """Write what an agent is that has come."""
        worker = str(agent.worker)
        self._numeric[worker] = agent.numeric
        self._places[worker] = {"host": agent.host, "pid": agent.pid, "gpus": list(agent.gpus)}
        self._writer.write_document(NUMERIC_FILE, self._numeric)
        self._writer.write_document(WORKERS_FILE, self._places)
