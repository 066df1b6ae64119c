"""Estimators as Spark ML knows them: Params, copies, maps; no JVM."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyspark.ml import Estimator
from pyspark.ml.tuning import ParamGridBuilder
from torch import Tensor, nn

from cerebro_hydra import LocalStore, SparkEstimator, SparkModel
from cerebro_hydra.errors import ConfigurationError, ReplayError
from cerebro_hydra.ml.estimator import GRID_OPTIONS, RecipeCopier, optimizer_numbers
from cerebro_hydra.ml.factory_estimator import TrialEstimator, equal_settings
from cerebro_hydra.ml.params import OutputParams, RunParams
from cerebro_hydra.recipe import Columns, Recipe, build_recipe
from tests.ml import nets


def test_it_is_an_estimator_and_has_a_recipe() -> None:
    estimator = nets.binary(num_epochs=2)
    assert isinstance(estimator, Estimator) and not isinstance(estimator, Recipe)
    recipe = estimator.recipe
    assert isinstance(recipe, Recipe) and recipe.batch_size == 16
    assert (estimator.model, estimator.optimizer) == (recipe.model, recipe.optimizer)
    assert estimator.loss is recipe.loss
    assert estimator.getNumEpochs() == 2
    assert len({estimator, nets.binary()}) == 2
    assert repr(estimator) == estimator.uid


def test_an_estimator_can_be_pickled_as_those_of_spark_can() -> None:
    again = pickle.loads(pickle.dumps(nets.binary(num_epochs=2)))
    assert again.getNumEpochs() == 2 and again.recipe.batch_size == 16


def test_a_factory_returns_an_estimator_or_a_recipe() -> None:
    columns = Columns(("features",), ("label",))
    built = [
        build_recipe(factory, {"hidden": 3, "lr": 0.1}, 5, columns)
        for factory in (nets.made, lambda params: nets.made(params).recipe)
    ]
    assert [recipe.columns for recipe in built] == [columns, columns]
    one, other = (recipe.model.state_dict() for recipe in built)
    assert all(torch.equal(one[name], other[name]) for name in one)
    wrong = SparkEstimator.from_factory(nets.made, {})
    with pytest.raises(ConfigurationError, match="returned a FactoryEstimator; return a Spark"):
        build_recipe(lambda params: wrong, {}, 5, columns)


def test_the_signature_has_every_argument_with_the_default_that_holds() -> None:
    shown = inspect.signature(SparkEstimator).parameters
    recipe = inspect.signature(Recipe).parameters
    estimator = nets.binary()
    names = TrialEstimator.param_names()
    assert list(shown) == [*recipe, *(name for name in shown if name in names)]
    assert set(shown) == {*recipe, *names}
    for name, parameter in recipe.items():
        assert (shown[name].default, shown[name].kind) == (parameter.default, parameter.kind)
    for name in names:
        default = shown[name].default
        assert shown[name].kind == inspect.Parameter.KEYWORD_ONLY
        held = list(default) if isinstance(default, tuple) else default
        assert estimator.getOrDefault(name) == held and not estimator.isSet(name)
    assert {"num_epochs", "store", "backend", "predictionCol", "seed"} <= set(shown)


def test_the_table_says_which_class_has_a_param() -> None:
    run, output = RunParams.param_names(), OutputParams.param_names()
    assert sorted([*run, *output]) == TrialEstimator.param_names()
    assert SparkModel.param_names() == output
    estimator = nets.binary()
    for name in (*run, *output):
        assert f"{name}: {estimator.getParam(name).doc}" in estimator.explainParams()


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
        "Keep": "last",
        "Seed": 7,
        "Order": "seeded",
        "Verbose": 0,
        "Output": "raw",
        "PredictionCol": "p",
        "ProbabilityCol": "q",
        "RawPredictionCol": "r",
        "TransformBatchSize": 9,
    }
    assert len(values) == len(TrialEstimator.param_names())
    for name, value in values.items():
        setter, getter = getattr(estimator, f"set{name}"), getattr(estimator, f"get{name}")
        assert (setter.__name__, getter.__name__) == (f"set{name}", f"get{name}")
        assert setter.__doc__.startswith("Set ") and getter.__doc__.startswith("Return ")
        assert getattr(estimator, f"set{name}")(value) is estimator
        assert getattr(estimator, f"get{name}")() == value


UNUSABLE: list[Any] = ["seed", "copy", "fit", "not a name", 3]


def made_of(name: Any, value: Any = 1, **arguments: Any) -> SparkEstimator:
    return SparkEstimator.from_factory(nets.made, {name: value}, **arguments)


NOTHING: Any = None


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: nets.binary(num_epoch=2), "no argument 'num_epoch'; did you mean 'num_epochs'"),
        (lambda: nets.binary(metric=2), "no argument 'metric'; did you mean 'metrics'"),
        (lambda: nets.binary(predicted=2), r"argument 'predicted'; it has \['accumulate', 'auto"),
        (
            lambda: made_of("lr", batch_size=3),
            "SparkEstimator.from_factory has no argument 'batch_size",
        ),
        (lambda: made_of("lr", num_epoch=3), "did you mean 'num_epochs'"),
        (
            lambda: SparkEstimator(net := nn.Linear(2, 2), torch.optim.SGD(net.parameters())),
            "loss is None",
        ),
        (lambda: nets.binary(num_epochs="many"), "num_epochs"),
        (lambda: nets.binary(store="/tmp/x"), "store is '/tmp/x', a str; give a store"),
        (lambda: nets.binary(output="labels"), "output is 'labels'; it is one of"),
        (lambda: nets.binary(transform_batch_size=0), "transform_batch_size is 0"),
        (lambda: nets.binary().getParam("hidden"), "has no Param 'hidden'.*from_factory"),
        *((lambda name=name: made_of(name), "can't be a Param") for name in UNUSABLE),  # type: ignore[misc]
        (lambda: made_of("loss", nn.functional.mse_loss), r"loss is <function.*which JSON can't"),
        (lambda: nets.binary().fit(NOTHING), "has no num_epochs, which fit needs"),
        (
            lambda: nets.binary(num_epochs=1).fit(NOTHING),
            "has no store, which fit needs; give store=",
        ),
    ],
)
def test_what_can_not_be_used_is_named_when_it_is_given(
    use: Callable[[], object], message: str
) -> None:
    with pytest.raises((TypeError, ConfigurationError), match=message):
        use()


@pytest.mark.parametrize("name", ["output", "transform_batch_size", "sample_weight_column"])
def test_none_is_a_value_where_it_is_the_default(name: str) -> None:
    estimator = nets.binary()
    estimator.set(estimator.getParam(name), None)  # as loading does
    assert estimator.isSet(name) and estimator.getOrDefault(name) is None
    with pytest.raises(TypeError, match="Could not convert"):
        estimator.set(estimator.order, None)


def test_options_of_the_recipe_and_numbers_of_the_optimizer_can_vary() -> None:
    estimator = nets.binary()
    lr, batch_size = estimator.getParam("lr"), estimator.getParam("batch_size")
    assert estimator.getOrDefault(lr) == 0.5 and estimator.getOrDefault("batch_size") == 16
    assert estimator.trial_params() == {}
    grid = ParamGridBuilder().addGrid(lr, [0.1, 0.2]).addGrid(batch_size, [8, 32]).build()
    trials = [estimator.copy(params).trial_params() for params in grid]
    assert trials == [{"lr": x, "batch_size": b} for x in (0.1, 0.2) for b in (8, 32)]
    assert estimator.trial_params() == {} and estimator.recipe.batch_size == 16
    assert (estimator.lr, estimator.batch_size) == (lr, batch_size)
    for name in GRID_OPTIONS:
        assert estimator.getOrDefault(name) == getattr(estimator.recipe, name)
    assert {"lr", "momentum", "batch_size", "num_epochs"} <= {p.name for p in estimator.params}
    assert "momentum: can vary from trial to trial" in estimator.explainParams()


def test_a_number_in_which_param_groups_differ_does_not_vary() -> None:
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias]}]
    optimizer = torch.optim.SGD(groups, lr=0.2, momentum=0.5)
    numbers = optimizer_numbers(Recipe(model, optimizer, nn.functional.mse_loss))
    assert "lr" not in numbers and numbers["momentum"] == 0.5


def test_a_number_of_an_optimizer_does_not_hide_a_param() -> None:
    class Seeded(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.5)
            self.defaults["seed"] = self.param_groups[0]["seed"] = 7

    model = nn.Linear(2, 2)
    estimator = SparkEstimator(model, Seeded(model.parameters()), nn.MSELoss(), seed=3)
    assert estimator.getSeed() == 3 and "seed" not in estimator.trial_params()


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
    recipe = RecipeCopier(Recipe(model, optimizer, nn.MSELoss()))({})
    assert recipe.optimizer.extra == 3  # type: ignore[attr-defined]


def test_a_grid_may_vary_the_schedule_and_the_cut_follows_unless_one_is_asked_for() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    recipe = Recipe(model, torch.optim.SGD(model.parameters()), nn.MSELoss(), shards="auto")
    copied = RecipeCopier(recipe)
    assert not copied({}).cuts_graph
    pipelined = copied({"schedule": "gpipe"})
    assert pipelined.cuts_graph
    assert not RecipeCopier(pipelined)({"schedule": "sequential"}).cuts_graph


@given(st.lists(st.integers(0, 3)))
def test_equal_settings_become_one_run_in_the_order_of_the_maps(kinds: list[int]) -> None:
    groups = equal_settings([{"num_epochs": kind} for kind in kinds])
    assert sorted(i for group in groups for i in group) == list(range(len(kinds)))
    assert all(group == sorted(group) for group in groups)
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    assert [{kinds[i] for i in group} for group in groups] == [
        {kind} for kind in dict.fromkeys(kinds)
    ]


def test_hooks_of_a_copied_model_store_on_the_copy() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_forward_hook(lambda module, args, output: model.register_buffer("o", output))
    recipe = RecipeCopier(Recipe(model, torch.optim.SGD(model.parameters()), nn.MSELoss()))({})
    recipe.model(torch.ones(1, 2))
    assert "o" in recipe.model._buffers and "o" not in model._buffers


def test_functions_of_a_copied_recipe_refer_to_the_copy() -> None:
    model = nn.Linear(2, 2)

    def size() -> Tensor:
        return model.weight.square().sum()

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        return (outputs - labels).square().mean() + size()

    optimizer = torch.optim.SGD(model.parameters())
    recipe = RecipeCopier(Recipe(model, optimizer, [loss]))({})
    with torch.no_grad():
        recipe.model.weight.zero_()
    zeros = torch.zeros(1, 2)
    assert recipe.compute_loss(zeros, [zeros]) == 0
    assert loss(zeros, zeros) > 0
