"""Says when an agent trains in shard queues, and makes them for its devices."""

from __future__ import annotations

from cerebro_hydra.hopper.agent_spec import AgentSpec, AgentStart
from cerebro_hydra.hopper.worker_resources import WorkerResources
from cerebro_hydra.plan.schedules.candidate import oldest_first
from cerebro_hydra.plan.schedules.sharp import sharp
from cerebro_hydra.plan.worker_state import WorkerState
from cerebro_hydra.storage.run_document import RunDocument

QUEUED_SHARE = 0.75
"""The share of `host_memory` that the queues plan with; the rest is for transfers under way."""


def wants_queues(spec: AgentSpec, start: AgentStart) -> bool:
    """Return whether the user asked for more than trials that lie whole on one device."""
    sharp_trials = any(trial.schedule == "sharp" for trial in spec.document.trials)
    return start.resources.asks_for_queues or sharp_trials


def worker_state(document: RunDocument, resources: WorkerResources) -> WorkerState:
    """Return the queues of a worker with these devices and tiers."""
    any_sharp = any(trial.schedule == "sharp" for trial in document.trials)
    host = resources.host_memory
    return WorkerState(
        [resources.device_memory] * resources.devices,
        None if host is None else int(host * QUEUED_SHARE),
        sharp if any_sharp else oldest_first,
    )
