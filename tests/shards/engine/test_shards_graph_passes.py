"""A unit that is done again in another process writes the same bytes to the same places."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cerebro_hydra.recipe import RandomKey, Recipe
from cerebro_hydra.shards.engine.graph_passes import StoredTensor, TensorLog, tensors_of
from cerebro_hydra.shards.engine.graph_tasks import GraphPass
from cerebro_hydra.shards.engine.microbatch import Microbatch

LENGTHS = {"running_mean": 100, "running_var": 200, "num_batches_tracked": 1}


def laid_out(names: Sequence[str]) -> dict[tuple[str, int | str], StoredTensor]:
    """Return where tensors lie whose names come in this order, as a set may give them."""
    model = torch.nn.Linear(1, 1)
    recipe = Recipe(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.MSELoss())
    going = GraphPass(Microbatch(recipe, (), (), None, RandomKey(0, 0, 0)))
    tensors = {name: torch.zeros(LENGTHS[name]) for name in names}
    going.buffers_before[0] = tensors
    log = TensorLog({}, 0)
    log.lay_out(tensors_of(going, {name: tensor.clone() for name, tensor in tensors.items()}))
    return log.stored


def test_places_do_not_depend_on_the_order_of_a_set() -> None:
    assert laid_out([*LENGTHS]) == laid_out([*reversed(LENGTHS)])
