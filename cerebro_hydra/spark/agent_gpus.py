"""Pins an agent to the GPUs that Spark gave its task."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from cerebro_hydra.agent.visible_gpus import BY_BUS, ORDER, VISIBLE
from cerebro_hydra.errors import SetupError
from cerebro_hydra.spark.places import environment

# What this process's CUDA was started with by an earlier agent; it can't be started again.
_started_with: str | None = None


def visible(addresses: Sequence[str], allowed: str | None) -> str:
    """Return the value of `CUDA_VISIBLE_DEVICES` that shows a task its GPUs.

    Args:
        addresses: the names that Spark's discovery script gave them: indices by bus, or uuids.
        allowed: the value of `CUDA_VISIBLE_DEVICES` that the cluster set; None if it set none.

    Raises:
        SetupError: the cluster allows other GPUs than Spark gives.
    """
    if allowed is not None:
        names = [name.strip() for name in allowed.split(",")]
        for address in addresses:
            if address not in names:
                raise SetupError(
                    f"Spark gave this task GPU {address!r}, but {VISIBLE} is {allowed!r}, which "
                    "lacks it; let the discovery script print what that variable lists, as "
                    "cerebro-hydra-gpus does"
                )
    return ",".join(addresses)


@contextmanager
def pinned(addresses: Sequence[str]) -> Iterator[None]:
    """Show CUDA only these GPUs, if there are any, and restore the environment afterwards.

    CUDA reads its variables once in a process, and Spark reuses Python workers. A worker whose
    CUDA was started for other GPUs is given up: the error ends it, and Spark starts the agent
    again in another one.

    Raises:
        SetupError: the cluster allows other GPUs, or CUDA was started for others here.
    """
    global _started_with
    if not addresses:
        yield
        return
    wanted = visible(addresses, os.environ.get(VISIBLE))
    if _cuda_has_started() and _started_with != wanted:
        raise SetupError(
            f"CUDA was started in this Python worker with {VISIBLE}={_started_with!r}, and this "
            f"agent has GPU {wanted!r}; Spark will start it again in another worker"
        )
    try:
        with environment(**{VISIBLE: wanted, ORDER: BY_BUS}):
            yield
    finally:
        if _cuda_has_started():
            _started_with = wanted


def _cuda_has_started() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())
