"""Models of factories that use the meta device: only what a file has may be without values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cerebro_hydra.recipe import Columns, Recipe, build_recipe, load_warm_start
from tests.golden import assert_golden, refusal

COLUMNS = Columns(("x",), ("y",))


class Tables(nn.Module):
    """Keeps tables that no state dict has: computed, written in place, a view, of its own, tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4, padding_idx=0)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.head.weight.of_the_head = True
        self.register_buffer("counted", torch.zeros(3))
        mask = torch.empty(6, 6).fill_(-1.0)
        mask[2:, 1] = 7
        frequencies = 1 / 100 ** (torch.arange(0, 8, 2).float() / 8)
        for name, table in {
            "mask": mask, "corner": mask[2:4, 1:3], "frequencies": frequencies,
            "halved": frequencies.to(torch.bfloat16), "places": torch.arange(4).expand(2, -1),
        }.items():  # fmt: skip
            self.register_buffer(name, table, persistent=False)
        self.first_frequencies = self.frequencies


def factory(device: str, change: Callable[[nn.Module], object] = id, **rules: Any) -> Any:
    def build(params: dict[str, Any]) -> Recipe:
        with torch.device(device):
            model = Tables()
            change(model)
        optimizer = rules.get("optimizer", torch.optim.AdamW)(model.parameters())
        return Recipe(model, optimizer, nn.MSELoss(), warm_start=rules.get("weights", {"a": 1}))

    return build


def test_tables_that_are_computed_get_the_values_of_a_model_on_the_cpu():
    plain = build_recipe(factory("cpu"), {}, 1, COLUMNS).model
    recipe = build_recipe(factory("meta"), {}, 1, COLUMNS)
    found = dict(recipe.model.named_buffers())
    for name, buffer in plain.named_buffers():
        assert found[name].device.type == "cpu"
        assert found[name].stride() == buffer.stride()
        assert name == "counted" or torch.equal(found[name], buffer), name
    assert recipe.model.first_frequencies is recipe.model.frequencies
    load_warm_start(recipe.model, plain.state_dict())
    assert torch.equal(recipe.model.embedding.weight, plain.embedding.weight)


def test_the_optimizer_keeps_the_parameters_and_ties_stay():
    recipe = build_recipe(factory("meta"), {}, 1, COLUMNS)
    weight = recipe.model.head.weight
    assert weight is recipe.model.embedding.weight
    assert recipe.optimizer.param_groups[0]["params"][0] is weight
    assert weight.device.type == "cpu"
    assert weight.of_the_head


CHANGES: dict[str, Callable[[Any], object]] = {
    "a drawn buffer": lambda m: m.register_buffer("noise", torch.rand(3), persistent=False),
    "a table of a module": lambda m: setattr(m.head, "table", torch.tensor([1.0, 2.0])),
    "a computed attribute": lambda m: setattr(m, "turned", m.head.weight.detach().t() + 1),
}


def test_what_has_no_value_is_refused() -> None:
    rules: dict[str, dict[str, Any]] = {
        "no weights": {"weights": None},
        "an optimizer with a state": {"optimizer": torch.optim.Adagrad},
        **{what: {"change": change} for what, change in CHANGES.items()},
    }
    found = {
        what: refusal(partial(build_recipe, factory("meta", **rule), {}, 1, COLUMNS))
        for what, rule in rules.items()
    }
    assert_golden(Path(__file__).with_name("golden") / "refused_meta_models.txt", found)
