"""Trains as PipeDream and 2BW do, in one process: forward and backward read older weights.

With lag 1 on every parameter, window t computes its gradients with what window t - 2 left, and
they update what window t - 1 left; the first two windows both read what a sub-epoch begins with.
Only parameters have versions: the optimizer's state and buffers go on from window to window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from cerebro_hydra.errors import ReplayError
from cerebro_hydra.recipe import PlainTrainer, SumOverRows, Window


def train_stale(
    trainer: PlainTrainer,
    windows: Iterable[Window],
    lags: Mapping[str, int],
    epoch_metrics: Mapping[str, float] | None = None,
) -> SumOverRows:
    """Train over a sub-epoch as `PlainTrainer.train` does, but read weights that are older.

    Args:
        lags: by parameter that trains, how many updates older the weights are that a window reads.

    Raises:
        ReplayError: `lags` does not name the parameters of the model that are trained.
    """
    named = dict(trainer.recipe.model.named_parameters())
    trained = {name: each for name, each in named.items() if each.requires_grad}
    if other := sorted(trained.keys() ^ lags.keys()):
        raise ReplayError(f"lags and trained parameters differ in {other}; give one for each")
    history = deque[dict[str, Tensor]](maxlen=max(lags.values()) + 1)  # the newest at the end

    def read(*_: Any, stale: bool = False) -> None:
        for name, parameter in trained.items():
            version = min(lags[name], len(history) - 1) if stale else 0
            parameter.data.copy_(history[-1 - version][name])  # it may be on the host in a step

    def reading_older() -> Iterator[Window]:
        for window in windows:
            history.append({name: each.detach().clone() for name, each in trained.items()})
            read(stale=True)
            yield window

    update = trainer.recipe.optimizer.register_step_pre_hook(read)
    try:
        return trainer.train(reading_older(), epoch_metrics)
    finally:
        update.remove()
