"""Models that copies, hooks or names may betray train as in plain PyTorch, or are refused."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Columns, Recipe
from cerebro_hydra.shards.admission.admit import admit
from cerebro_hydra.shards.export.program import load_exported, save_exported
from tests.shards import plain, zoo
from tests.shards.engine.test_shards_equivalence import mlp_recipe, two_sub_epochs
from tests.shards.hopping import assert_equal_to_plain, start


class Named(nn.Module):
    """Layers with several names, of which the first may lie inside of a unit or outside."""

    def __init__(self, outside_first: bool) -> None:
        super().__init__()
        body = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Linear(6, 6))
        if outside_first:
            self.alias = body[1]
        self.body = body
        self.again = body
        if not outside_first:
            self.alias = body[1]
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.alias(self.again(torch.tanh(self.body[0](x)))))


class Shares(nn.Module):
    """Its embedding is also another module's, as in prompt tuning."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleDict({"embed": nn.Embedding(50, 6), "body": nn.Linear(6, 6)})
        self.prompt = nn.Parameter(torch.randn(2, 6))
        self.embed = self.base["embed"]
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        tokens = self.embed((x.abs() * 9).long().clamp(max=49))
        return self.last(
            self.base["body"](torch.cat([tokens, self.prompt.expand(len(x), 2, 6)], 1)).mean(1)
        )


class KeepsActivations(nn.Module):
    """It computes on what hooks stored, and with a function that uses its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), nn.Tanh(), nn.Linear(6, 6))
        self.last = nn.Linear(12, 3)
        self.found: dict[str, torch.Tensor] = {}
        self.scaled = lambda x, by=self.last: x * by.weight.sum()
        for name in ("0", "3"):
            self.body.get_submodule(name).register_forward_hook(self._keeping(name))

    def _keeping(self, name):
        def hook(module, args, output):
            self.found[name] = output

        return hook

    def forward(self, x):
        self.body(x)
        return self.last(self.scaled(torch.cat([self.found["0"], self.found["3"]], 1)))


def normed() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        first, last = (nn.utils.weight_norm(nn.Linear(6, n)) for n in (6, 3))
    return nn.Sequential(first, nn.Dropout(0.2), last)


def pruned() -> nn.Module:
    model = zoo.mlp()
    for layer in (model[0], model[8]):
        prune.l1_unstructured(layer, "weight", amount=0.4)
    return model


class Mapped(nn.Module):
    """Runs layers row by row, and two of them as one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(6, 6), nn.Dropout(0.3), nn.Linear(6, 3)
        self.several = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, x):
        x = torch.vmap(lambda row: self.drop(self.first(row)), randomness="different")(x)
        stacked = torch.func.stack_module_state(list(self.several))
        both = torch.vmap(
            lambda params, buffers: torch.func.functional_call(
                self.several[0], (params, buffers), (x,)
            )
        )(*stacked)
        return torch.vmap(self.last)(both.mean(0))


class MaskedLinear(nn.Linear):
    """Keeps part of its weight at 0, by writing there."""

    def __init__(self, when: str, how: str = "in place") -> None:
        super().__init__(6, 6)
        self.register_buffer("mask", (torch.arange(36) % 2).view(6, 6).float())
        self.when, self.how = when, how

    def forward(self, x):
        if self.training or self.when == "always":
            if self.how == "in place":
                self.weight.data *= self.mask
            else:
                self.weight.data = self.weight.data * self.mask
        return super().forward(x)


def masked(when: str, how: str = "in place") -> nn.Module:
    return nn.Sequential(MaskedLinear(when, how), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))


class ArgumentTorch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, torch):
        return self.b(self.a(torch))


MODELS = {
    "names, inside first": lambda: Named(outside_first=False),
    "names, outside first": lambda: Named(outside_first=True),
    "shared embedding": Shares,
    "activations by hooks": KeepsActivations,
    "weight_norm": normed,
    "pruned": pruned,
    "vmap": Mapped,
    "a mask in training": lambda: masked("in training"),
    "an argument called torch": ArgumentTorch,
    "DataParallel": lambda: nn.DataParallel(zoo.mlp()),
    "double precision": lambda: zoo.mlp().double(),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_it_trains_as_plain_pytorch(name, mode):
    # The stacked weights of `several` are read before their own module runs.
    make = mlp_recipe(model=MODELS[name], shards=["last"] if name == "vmap" else 2)
    trial = assert_equal_to_plain(make, two_sub_epochs(), mode, cut="modules")
    assert trial.cut_model.num_shards == 2


@pytest.mark.parametrize("name", ["names, outside first", "weight_norm", "double precision"])
def test_its_graph_trains_as_plain_pytorch(name):
    assert_equal_to_plain(mlp_recipe(model=MODELS[name], shards=2), two_sub_epochs())


@pytest.mark.parametrize("name", ["vmap", "an argument called torch"])
def test_a_graph_that_does_not_run_gives_way_to_modules(name):
    make = mlp_recipe(model=MODELS[name], shards=2, cut="export")
    report = start(make(), two_sub_epochs()[0]).admission.report
    assert report.mode == "modules"
    assert report.fallback == "it is not cut by export, because a step failed"
    assert "\n    by export: a step failed: " in report.text()


@pytest.mark.parametrize("model", [normed, KeepsActivations])
def test_a_moving_average_of_it_is_the_same(model):
    make = mlp_recipe(model=model, shards=2, ema=0.9, metrics=["accuracy"])
    trial = assert_equal_to_plain(make, two_sub_epochs(), cut="modules")
    reference = make()
    _, training = plain.train(reference, two_sub_epochs())
    assert trial.evaluate(zoo.vectors(8)) == training.evaluate(zoo.vectors(8))


def test_shards_are_named_by_any_name_of_a_module():
    make = mlp_recipe(model=lambda: Named(outside_first=False), shards=["again.2", "last"])
    report = start(make(), two_sub_epochs()[0]).admission.report
    assert [shard.first_unit for shard in report.shards] == ["body.0", "body.2", "last"]


def test_a_model_in_double_precision_is_saved_to_take_single_columns(tmp_path):
    recipe = mlp_recipe(model=lambda: zoo.mlp().double())()
    (features,) = zoo.vectors(8)[0].features
    save_exported(recipe, (features,), tmp_path)
    (found,) = load_exported(tmp_path)(features)
    assert torch.equal(found, recipe.model.eval()(features.double()))


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_type_that_no_file_holds_is_refused_by_name(kind):
    def model():
        made = zoo.mlp()
        numbers = torch.ones(2, dtype=torch.complex128)
        if kind == "buffer":
            made.register_buffer("numbers", numbers)
        else:
            made.register_parameter("numbers", nn.Parameter(numbers))
        return made

    with pytest.raises(ConfigurationError, match=f"{kind} 'numbers' has .*complex128.* complex64"):
        start(mlp_recipe(model=model)(), two_sub_epochs()[0])


def test_regression_in_double_precision_on_single_columns():
    def model():
        return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1), nn.Flatten(0)).double()

    def make():
        torch.manual_seed(0)
        built = model()
        optimizer = torch.optim.SGD(built.parameters(), lr=0.1)
        return Recipe(built, optimizer, nn.BCEWithLogitsLoss(), ["mse", "accuracy"], shards=2)

    windows = [
        [replace(batch, labels=((batch.labels[0] > 0).float(),)) for batch in window]
        for window in two_sub_epochs()[0]
    ]
    trial = assert_equal_to_plain(make, [windows])
    assert {tensor.dtype for tensor in trial.tensors().values()} == {torch.float64}


def test_a_weight_that_the_forward_assigns_anew_trains_as_plain_pytorch():
    make = mlp_recipe(model=lambda: masked("in training", "anew"), shards=2)
    trial = assert_equal_to_plain(make, two_sub_epochs(), cut="modules")
    assert trial.cut_model.num_shards == 1, "a unit that is run again would assign it twice"


def test_a_forward_that_writes_to_its_weight_in_evaluation_is_refused():
    make = mlp_recipe(model=lambda: masked("always"), shards=2)
    said = r"writes to parameter '0\.weight' in evaluation.*`if self.training` only, or use .*mask$"
    with pytest.raises(ConfigurationError, match=said):
        start(make(), two_sub_epochs()[0])


class Late(nn.Module):
    """Some of its parameters have a gradient only when it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)
        self.vector, self.matrix = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, 2))
        self.told = False

    def forward(self, x):
        y = self.b(self.a(x))
        return y + self.vector * self.matrix.sum(1) if self.told else y


@pytest.mark.parametrize("kind", ["Adafactor", "Adagrad", "Adam", "Rprop"])
def test_a_first_gradient_may_come_after_admission(kind):
    optimizer = getattr(torch.optim, kind)
    make = mlp_recipe(lambda model: optimizer(model.parameters(), lr=0.1), 2, Late)
    reference = make()
    trial = start(make(), two_sub_epochs()[0])
    for told in (False, True):
        reference.model.told = trial.recipe.model.told = told
        plain.train(reference, [zoo.singly(zoo.vectors(8, 5))])
        trial.train(zoo.singly(zoo.vectors(8, 5)))
    assert plain.everything(trial.loaded()) == plain.everything(reference)


class Wrapped(nn.Module):
    """Gives a language model whatever else it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.language = zoo.Language()
        self.language.gpt.config.use_cache = True

    def forward(self, input_ids, **others):
        return self.language.gpt(input_ids, **others)


def test_a_cache_behind_keywords_is_off_while_the_recipe_computes():
    torch.manual_seed(0)
    model = Wrapped()
    recipe = Recipe(model, torch.optim.SGD(model.parameters(), lr=0.1), "model", shards=2)
    recipe.bind(Columns(("input_ids", "attention_mask"), ("labels",)))
    tokens = zoo.tokens(4)[0].features[0]
    example = ((tokens, torch.ones_like(tokens)), (tokens,))
    with recipe.precision():
        assert recipe.call(recipe.model, recipe.inputs(*example)).past_key_values is None
    assert recipe.model.language.gpt.config.use_cache is True
    assert len(admit(recipe, [example], 1).report.shards) == 2


class Doubled(nn.Linear):
    """A layer that is the whole model, with a forward of its own."""

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("kind", [Doubled, nn.Linear])
def test_a_model_that_is_one_layer_trains_as_in_plain_pytorch(kind: type[nn.Linear]) -> None:
    make = mlp_recipe(model=lambda: kind(6, 3), shards=1)
    assert_equal_to_plain(make, two_sub_epochs(), cut="modules")
