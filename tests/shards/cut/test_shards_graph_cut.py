"""Cuts of a graph keep regions without gradients, autocasts, and the form of every gradient."""

from __future__ import annotations

import functools
import itertools
import logging
import re
import warnings

import pytest
import torch
from torch import nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.cut.export import export_program
from cerebro_hydra.shards.cut.spec import CutSpec
from cerebro_hydra.shards.cut.trace import CutFailed, trace
from tests.shards import zoo
from tests.shards.cut.cut_recipes import owned, seeded
from tests.shards.engine.test_shards_equivalence import two_sub_epochs
from tests.shards.hopping import assert_equal_to_plain

MODES = ["keep", "recompute"]


class Regions(nn.Module):
    """Has units in both kinds of regions, and one in the other."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.drop = nn.Dropout(0.3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        with torch.no_grad():
            scale = self.drop(self.frozen(x)).abs()
            self.calls += 1
        y = self.layers[0](x * self.calls)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.layers[1](y)
            with torch.autocast("cpu", enabled=False):
                y = self.drop(self.layers[2](y.float()))
            y = self.layers[3](y)
            y = y + nn.functional.linear(y, self.layers[3].weight)
        y = y.float() * scale
        with torch.no_grad():
            y.mul_(1.5)  # writes into a value that has a gradient
        return self.last(y)


@pytest.mark.parametrize("mode", MODES)
def test_regions_without_gradients_and_of_a_precision_are_cut_as_all_else(mode):
    places = ["layers.0", "layers.1", "layers.3"]
    trial = assert_equal_to_plain(seeded(Regions, places), two_sub_epochs(), mode)
    assert owned(trial, 0) == ("frozen.weight", "frozen.bias")
    assert owned(trial, 2) == (
        "layers.1.weight", "layers.1.bias", "layers.2.weight", "layers.2.bias",
    )  # fmt: skip
    assert trial.cut_model.num_shards == 4


class Remembers(nn.Module):
    """Writes what it makes of a buffer into the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(6, dtype=torch.bool))

    def forward(self, x):
        self.seen.copy_(self.seen | (x > 1).any(0))
        return self.last(self.a(x * self.seen))


def test_a_buffer_is_overwritten_by_what_is_made_of_it():
    trial = assert_equal_to_plain(seeded(Remembers), two_sub_epochs())
    assert trial.tensors()["buffer:seen"].any()


class Scale(nn.Module):
    """Its gradient is a sum, which torch rounds by the order of what it sums in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(40))

    def forward(self, x):
        return x * self.weight


class Transposes(nn.Module):
    """Hands a value on whose gradient lies in memory in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(6, 40), Scale()
        self.mix, self.last = nn.Linear(32, 32), nn.Linear(40, 3)

    def forward(self, x):
        y = self.scale(self.first(x.unsqueeze(1) * torch.linspace(0, 1, 32)[:, None]))
        return self.last(torch.tanh(self.mix(y.transpose(1, 2))).mean(2))


@pytest.mark.parametrize("mode", MODES)
def test_a_gradient_keeps_the_strides_with_which_it_was_made(mode):
    assert_equal_to_plain(seeded(Transposes, ["scale", "mix"]), two_sub_epochs(), mode)


class Reads(nn.Module):
    """Makes a value without gradient, which several later shards read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        y = self.layers[0](x)
        positive = (y > 0).to(x.dtype)
        for layer in self.layers[1:]:
            y = layer(y * positive)
        return self.last(y)


@pytest.mark.parametrize("mode", MODES)
def test_a_value_without_gradient_is_read_by_several_shards(mode):
    trial = assert_equal_to_plain(seeded(Reads, 6), two_sub_epochs(), mode)
    assert sum(len(graph.live_in) == 2 for graph in trial.cut_model.graphs.train) > 1


class FixedRows(nn.Module):
    """Counts rows in Python, so an exported graph is right for one number of rows only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.b(self.a(x) * float(sum(1 for _ in range(x.shape[0]))))


@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_fixes_the_number_of_rows_has_a_graph_for_each(mode):
    sub_epochs = [zoo.singly(zoo.vectors(8, 5)), zoo.singly(zoo.vectors(1, 8, seed=1))]
    trial = assert_equal_to_plain(seeded(FixedRows), sub_epochs, mode)
    assert trial.admission.spec == CutSpec("export", ("b@0",), rows=(8, 5, 1))
    assert trial.evaluate(zoo.vectors(5)).sums["loss"][1] == 5
    with pytest.raises(ConfigurationError, match="has 7 rows, and the model was cut for"):
        trial.evaluate(zoo.vectors(7))


class AssumesRows(FixedRows):
    """Takes another number of rows for the one that it was traced with, unnoticed by torch."""

    def forward(self, x):
        rows = x.shape[0]
        return self.b(self.a(x) * (8 if isinstance(rows, torch.SymInt) else rows))


def test_a_graph_that_is_wrong_for_another_batch_size_is_noticed():
    make = seeded(AssumesRows)
    trial = assert_equal_to_plain(make, two_sub_epochs(), cut="modules", asked="export")
    assert "training differs from the uncut model" in trial.admission.report.fallback


class Checks(nn.Module):
    """Asks for values of constants: of a mask, of an attribute, and of what a prior is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)
        self.weights = torch.linspace(0, 1, 6)

    def forward(self, x):
        mask = torch.ones(6, 6).tril()
        mask[0, 1] += 1
        y = self.a(x)
        if not mask.bool().all() and self.weights.sum() > 2:
            y = y @ mask
        y = y * nn.functional.dropout(torch.ones(6), 0.5, self.training)
        prior = torch.distributions.Normal(torch.zeros(6), torch.ones(6))
        return self.b(y + prior.variance * self.weights.tolist()[1])


class ChangedMask(Checks):
    """Asks for the value of a mask into which it has written what is no constant."""

    def forward(self, x):
        mask = torch.zeros(6)
        view = mask[:3]
        view += x[0, :3]
        return self.b(self.a(x) * (2 if mask.sum() > 0 else 1))


def test_questions_about_constants_are_no_branches():
    trial = assert_equal_to_plain(seeded(Checks), two_sub_epochs(), "recompute")
    assert trial.admission.report.fallback is None


@pytest.mark.parametrize("kind", [ChangedMask, zoo.Decides])
def test_questions_about_other_values_are(kind):
    with pytest.raises(CutFailed, match="data-dependent"):
        trace(kind(), zoo.sample(zoo.vectors(4)[0]))


class Misfit(nn.Module):
    def forward(self, x):
        return x @ x


def test_a_failed_export_names_the_line_and_logs_no_traceback(caplog, capfd):
    with pytest.raises(CutFailed) as failed:
        trace(Misfit(), zoo.sample(zoo.vectors(4)[0]))
    assert re.search(r"test_shards_graph_cut\.py:\d+: return x @ x", str(failed.value))
    assert not [each for each in caplog.records if each.levelname in ("WARNING", "ERROR")]
    assert not capfd.readouterr().err


def decorated(forward):
    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        return forward(self, *args, **kwargs)

    return wrapper


class Decorated(zoo.Decides):
    @decorated
    def forward(self, x):
        return self.drop(self.a(x))


def test_a_decorated_forward_is_traced_by_its_own_arguments():
    assert trace(Decorated(), zoo.sample(zoo.vectors(4)[0])).train.markers.keys() == {
        "a@0",
        "drop@0",
    }


def rotary_recipe(name, shards=3):
    """Return a factory of language models whose rotary embedding lies in regions."""
    import transformers

    def make() -> Recipe:
        torch.manual_seed(5)
        config = getattr(transformers, f"{name}Config")(
            vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8, intermediate_size=24, pad_token_id=0, bos_token_id=1,
            eos_token_id=2, use_cache=False,
        )  # fmt: skip
        model = getattr(transformers, f"{name}ForCausalLM")(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return Recipe(model, optimizer, rotary_loss, shards=shards, clip_grad_norm=0.5)

    return make


def rotary_loss(outputs, tokens):
    return zoo.language_loss(outputs.logits, tokens)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("Llama", "recompute"),
        *(
            pytest.param(name, mode, marks=pytest.mark.long)
            for name, mode in [("Llama", "keep"), *itertools.product(["Gemma2", "GPTNeoX"], MODES)]
        ),
    ],
)
def test_models_with_a_rotary_embedding_without_gradients_are_cut(name, mode):
    sub_epochs = [zoo.singly(zoo.tokens(4, 3)), zoo.singly(zoo.tokens(4, seed=1))]
    trial = assert_equal_to_plain(rotary_recipe(name), sub_epochs, mode)
    assert trial.cut_model.num_shards == 3
    assert trial.admission.report.fallback is None


def test_torch_warns_of_nothing_while_it_traces(recwarn, caplog):
    class Warns(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            warnings.warn("a trace", stacklevel=1)
            logging.getLogger("torch.export").warning("a trace")
            return self.layer(x)

    export_program(Warns(), (torch.zeros(2, 4),), None, None)
    assert not [each for each in recwarn if "a trace" in str(each.message)]
    assert not [each for each in caplog.records if each.levelname == "WARNING"]
