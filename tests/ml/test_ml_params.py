"""Estimators as Spark ML knows them: Params, copies, maps; no JVM."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyspark.ml import Estimator
from pyspark.ml.tuning import ParamGridBuilder
from torch import nn

from cerebro_hydra import LocalStore, SparkEstimator
from cerebro_hydra.errors import ConfigurationError, ReplayError
from cerebro_hydra.ml.copies import Copies, numbers_of
from cerebro_hydra.ml.trial_estimator import TrialEstimator, grouped
from cerebro_hydra.recipe import Recipe
from tests.ml import nets


def test_it_is_a_recipe_and_an_estimator() -> None:
    estimator = nets.binary(num_epochs=2)
    assert isinstance(estimator, Recipe) and isinstance(estimator, Estimator)
    assert estimator.batch_size == 16 and estimator.getNumEpochs() == 2
    assert len({estimator, nets.binary()}) == 2
    assert repr(estimator) == estimator.uid


def test_every_argument_of_a_recipe_and_every_param_is_in_the_signature() -> None:
    shown = inspect.signature(SparkEstimator).parameters
    assert set(shown) == {*inspect.signature(Recipe).parameters, *TrialEstimator.names()}
    assert {"num_epochs", "store", "backend", "predictionCol", "seed"} <= set(shown)


def test_an_unknown_argument_is_refused() -> None:
    with pytest.raises(TypeError, match="num_epoch"):
        nets.binary(num_epoch=2)
    with pytest.raises(TypeError, match="no argument 'batch_size'"):
        SparkEstimator.from_factory(nets.made, {"lr": 0.1}, batch_size=3)


@pytest.mark.parametrize("estimator", [nets.binary(), SparkEstimator.from_factory(nets.made, {})])
def test_setters_and_getters_say_the_same(estimator: Any, tmp_path: Any) -> None:
    values = {
        "NumEpochs": 3,
        "Store": LocalStore(str(tmp_path)),
        "Backend": object(),
        "FeatureColumns": ["x", "y"],
        "LabelColumns": ["z"],
        "SampleWeightColumn": "w",
        "Validation": "held_out",
        "EvaluationMetric": "accuracy",
        "Seed": 7,
        "Order": "seeded",
        "Verbose": 0,
        "Output": "raw",
        "PredictionCol": "p",
        "ProbabilityCol": "q",
        "RawPredictionCol": "r",
        "TransformBatchSize": 9,
    }
    assert len(values) == len(TrialEstimator.names())
    for name, value in values.items():
        assert getattr(estimator, f"set{name}")(value) is estimator
        assert getattr(estimator, f"get{name}")() == value


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_epochs": "many"}, TypeError, "num_epochs"),
        ({"store": "/tmp/x"}, ConfigurationError, "store is '/tmp/x', a str; give a store"),
        ({"output": "labels"}, ConfigurationError, "output is 'labels'; it is one of"),
        ({"transform_batch_size": 0}, ConfigurationError, "transform_batch_size is 0"),
    ],
)
def test_a_wrong_value_is_refused_when_it_is_given(
    arguments: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        nets.binary(**arguments)


def test_what_a_fit_needs_is_asked_for_before_anything_else(tmp_path: Any) -> None:
    nothing: Any = None
    with pytest.raises(ConfigurationError, match="has no num_epochs, which fit needs"):
        nets.binary().fit(nothing)
    with pytest.raises(ConfigurationError, match="has no store, which fit needs; give store="):
        nets.binary(num_epochs=1).fit(nothing)


def test_options_of_the_recipe_and_numbers_of_the_optimizer_can_vary() -> None:
    estimator = nets.binary()
    lr, batch_size = estimator.getParam("lr"), estimator.getParam("batch_size")
    assert estimator.getOrDefault(lr) == 0.5 and estimator.getOrDefault("batch_size") == 16
    assert estimator.trial_params() == {}
    grid = ParamGridBuilder().addGrid(lr, [0.1, 0.2]).addGrid(batch_size, [8, 32]).build()
    trials = [estimator.copy(params).trial_params() for params in grid]
    assert trials == [{"lr": x, "batch_size": b} for x in (0.1, 0.2) for b in (8, 32)]
    assert estimator.trial_params() == {} and estimator.batch_size == 16
    assert {"lr", "momentum", "batch_size", "num_epochs"} <= {p.name for p in estimator.params}
    assert "momentum of every trial" in estimator.explainParams()


def test_a_param_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"has no Param 'hidden'.*from_factory"):
        nets.binary().getParam("hidden")


def test_a_number_in_which_param_groups_differ_does_not_vary() -> None:
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias]}]
    optimizer = torch.optim.SGD(groups, lr=0.2, momentum=0.5)
    assert "lr" not in numbers_of(optimizer) and numbers_of(optimizer)["momentum"] == 0.5


def test_a_copy_shares_the_instances_and_has_params_of_its_own() -> None:
    estimator = nets.binary(num_epochs=2)
    changed = estimator.copy({estimator.num_epochs: 5, estimator.getParam("lr"): 0.25})
    assert changed.model is estimator.model and changed.optimizer is estimator.optimizer
    assert changed.uid == estimator.uid
    assert (changed.getNumEpochs(), estimator.getNumEpochs()) == (5, 2)
    assert changed.trial_params() == {"lr": 0.25}
    again = changed.copy()
    assert again.trial_params() == {"lr": 0.25} and again.getNumEpochs() == 5


def test_every_parameter_of_a_factory_is_a_param() -> None:
    estimator = SparkEstimator.from_factory(nets.made, {"lr": 0.1, "hidden": 3}, num_epochs=1)
    assert estimator.trial_params() == {"lr": 0.1, "hidden": 3}
    changed = estimator.copy({estimator.getParam("hidden"): 5})
    assert changed.trial_params() == {"lr": 0.1, "hidden": 5}
    assert changed.factory()(changed.trial_params()).model[0].out_features == 5


def test_a_factory_by_name_is_imported_when_it_is_needed() -> None:
    estimator = SparkEstimator.from_factory("tests.ml.nets:made", {"lr": 0.1})
    assert estimator.factory() is nets.made
    absent = SparkEstimator.from_factory("no_such_module:made", {"lr": 0.1})
    with pytest.raises(ReplayError, match="can't import 'no_such_module'"):
        absent.factory()


@pytest.mark.parametrize("name", ["seed", "copy", "fit", "not a name", 3])
def test_a_parameter_that_cannot_be_a_param_is_refused(name: Any) -> None:
    with pytest.raises(ConfigurationError, match="can't be a Param"):
        SparkEstimator.from_factory(nets.made, {name: 1})


def test_a_value_that_is_no_json_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"loss is <function.*which JSON can't"):
        SparkEstimator.from_factory(nets.made, {"loss": nn.functional.mse_loss})


def test_instances_are_copied_together_and_stay_as_they_are() -> None:
    estimator = nets.binary()
    before = copy.deepcopy(estimator.model.state_dict())
    recipe = estimator.factory()({"lr": 0.125, "batch_size": 4})
    ours = {id(p) for p in recipe.model.parameters()}
    assert {id(p) for g in recipe.optimizer.param_groups for p in g["params"]} == ours
    assert ours.isdisjoint({id(p) for p in estimator.model.parameters()})
    assert recipe.optimizer.param_groups[0]["lr"] == 0.125 and recipe.batch_size == 4
    assert recipe.optimizer.param_groups[0]["momentum"] == 0.9
    assert estimator.optimizer.param_groups[0]["lr"] == 0.5
    with torch.no_grad():
        recipe.model[0].weight.zero_()
    assert all(torch.equal(before[n], t) for n, t in estimator.model.state_dict().items())


class Tuned(torch.optim.SGD):
    """An optimizer with an attribute that torch's own copies of optimizers leave out."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.extra = 3


def test_an_optimizers_own_attributes_are_copied() -> None:
    model = nn.Linear(2, 2)
    optimizer = Tuned(model.parameters(), lr=0.1)
    assert not hasattr(copy.deepcopy(optimizer), "extra")
    recipe = Copies({"model": model, "optimizer": optimizer, "loss": nn.MSELoss()})({})
    assert recipe.optimizer.extra == 3  # type: ignore[attr-defined]


@given(st.lists(st.integers(0, 3)))
def test_equal_settings_become_one_run_in_the_order_of_the_maps(kinds: list[int]) -> None:
    groups = grouped([{"num_epochs": kind} for kind in kinds])
    assert sorted(i for group in groups for i in group) == list(range(len(kinds)))
    assert all(group == sorted(group) for group in groups)
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    assert [{kinds[i] for i in group} for group in groups] == [
        {kind} for kind in dict.fromkeys(kinds)
    ]
