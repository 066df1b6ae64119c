"""Holds the state of one shard: its tensors, which are views into its two segments."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.shards.layout import EXISTS, Segments, ShardLayout


class ShardState:
    """Holds a shard's parameters (leaves), their moving averages, buffers and optimizer state.

    Training writes to the trainable segment; the frozen one may be shared.

    Attributes:
        values: where the parameters' values lie in the segments.
        constant: the names of what the frozen segment has.

    Args:
        parameters: a model's own parameters, by name, which are bound to the segments' memory and
            lose what they were bound to. Without them, new parameters are made.

    Raises:
        ValueError: a segment does not have this layout.
    """

    def __init__(
        self,
        layout: ShardLayout,
        segments: Segments,
        parameters: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        frozen, trainable = segments["frozen"], segments["trainable"]
        layout.frozen.check(frozen, "frozen")
        layout.trainable.check(trainable, "trainable")
        self._bound = parameters
        self.params: dict[str, nn.Parameter] = {}
        self.values: dict[str, Tensor] = {}
        self.constant: set[str] = set()
        self.buffers: dict[str, Tensor] = {}
        self.ema: dict[str, Tensor] = {}
        self._state: dict[str, dict[str, tuple[Tensor, int]]] = {}
        self._exists = torch.zeros(0, dtype=torch.uint8)
        for segment, memory, is_frozen in (
            (layout.frozen, frozen, True),
            (layout.trainable, trainable, False),
        ):
            for entry in segment.entries:
                self._add(entry.name, entry.view(memory), is_frozen)

    def _add(self, name: str, view: Tensor, is_frozen: bool) -> None:
        kind, _, rest = name.partition(":")
        if is_frozen:
            self.constant.add(rest)
        if kind == "param":
            self.values[rest] = view
            if self._bound is None:
                self.params[rest] = nn.Parameter(view, requires_grad=not is_frozen)
            else:
                self.params[rest] = self._bound[rest]
                self.params[rest].data = view
        elif kind == "buffer":
            self.buffers[rest] = view
        elif kind == "ema":
            self.ema[rest] = view
        elif kind == "optim":
            param, _, key = rest.rpartition(":")
            states = self._state.setdefault(param, {})
            states[key] = (view, sum(map(len, self._state.values())))
        elif name == EXISTS:
            self._exists = view

    def average(self, decay: float, first: bool) -> None:
        """Move the averages towards the parameters, as `torch.optim.swa_utils.AveragedModel` does.

        Args:
            first: whether it is the trial's first step, which sets the averages to the parameters.
        """
        averages = list(self.ema.values())
        current = [self.params[name].detach() for name in self.ema]
        if first:
            for average, parameter in zip(averages, current, strict=True):
                average.copy_(parameter)
        elif averages:
            torch._foreach_lerp_(averages, current, 1 - decay)

    def existing_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """Return the optimizer state that exists by now, by parameter name and key."""
        marks = self._exists.tolist()
        return {
            name: found
            for name, states in self._state.items()
            if (found := {key: view for key, (view, mark) in states.items() if marks[mark]})
        }

    def load_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the optimizer's state be the views of the state that exists, and nothing else."""
        optimizer.state.clear()
        for name, state in self.existing_optimizer_state().items():
            optimizer.state[self.params[name]] = state

    def keep_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy state that the optimizer made outside of the segment into the segment.

        Raises:
            ConfigurationError: the optimizer made state that its template does not have.
        """
        for name, parameter in self.params.items():
            state = optimizer.state.get(parameter)
            if not state:
                continue
            views = self._state.get(name, {})
            for key, value in state.items():
                if value is None:
                    continue
                if key not in views:
                    raise ConfigurationError(
                        f"optimizer {type(optimizer).__name__} made state {key!r} for parameter "
                        f"{name!r} after its first two steps, and such state can't hop; choose "
                        "another optimizer"
                    )
                view, mark = views[key]
                if value is not view:
                    view.copy_(value)
                    state[key] = view
                    self._exists[mark] = 1
