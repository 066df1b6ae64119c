"""What an agent keeps per trial: a structure once for equal models, rows by epoch, no weights."""

from __future__ import annotations

from dataclasses import replace

import torch

from cerebro_hydra.agent.device.builder import TrialBuilder
from tests.agent.lone_agent import Agent


def test_equal_models_are_cut_once_and_each_epoch_has_an_order_of_its_own(agent: Agent) -> None:
    factory = lambda _: agent.make()  # noqa: E731 - which sets nothing for its trial
    builder = TrialBuilder(agent.document, factory, agent.partitions, {})
    for trial in range(3):
        builder.add(replace(agent.spec, trial=trial))
    built = [builder.get(trial) for trial in range(3)]
    assert len({id(each.runtime.cut_model) for each in built}) == 1
    for each in built:
        parameters = list(each.runtime.recipe.model.parameters())
        assert all(p.untyped_storage().nbytes() == p.element_size() for p in parameters)

    def rows_of(epoch: int) -> torch.Tensor:
        windows = builder.windows(0, epoch, 0)
        return torch.cat([batch.features[0] for window in windows for batch in window])

    assert torch.equal(rows_of(1), rows_of(1))
    assert not torch.equal(rows_of(1), rows_of(0))
