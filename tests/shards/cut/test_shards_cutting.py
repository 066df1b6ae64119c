"""Cuts of models: where they lie, what each shard holds, and what becomes of other models."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cerebro_hydra.data.batches import Batch
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.shards.admission.admit import admit
from cerebro_hydra.shards.cut.spec import CutSpec
from cerebro_hydra.shards.engine.optimizer import StateTemplate
from tests.shards import plain, zoo
from tests.shards.cut.cut_recipes import owned, seeded
from tests.shards.engine.test_shards_equivalence import mlp_recipe, two_sub_epochs
from tests.shards.hopping import assert_equal_to_plain, start


def test_cuts_are_where_the_names_say():
    trial = assert_equal_to_plain(mlp_recipe(shards=["3", "6"]), two_sub_epochs())
    assert trial.admission.spec == CutSpec("export", ("3@0", "6@0"), overwritten=("4@0",))
    assert [owned(trial, k) for k in range(3)] == [
        ("0.weight", "0.bias"), ("3.weight", "3.bias"),
        ("6.weight", "6.bias", "8.weight", "8.bias"),
    ]  # fmt: skip


def test_a_container_stands_for_its_first_unit():
    def build():
        return nn.Sequential(
            nn.Sequential(nn.Linear(6, 6), nn.ReLU()), nn.Sequential(nn.Linear(6, 3), nn.Dropout())
        )

    trial = assert_equal_to_plain(seeded(build, ["1"]), two_sub_epochs())
    assert trial.admission.spec.at == ("1.0@0",)


@pytest.mark.parametrize(
    ("name", "cut", "places"),
    [
        ("0", "export", "'1', '2', '3', '5'"),  # 0 begins shard 0 anyway
        ("4", "export", "'1', '2', '3', '5'"),  # a ReLU that writes over what came before
        ("0", "modules", "'1', '2', '3', '4', '5'"),
    ],
)
def test_a_name_that_is_no_place_to_cut_is_refused_with_the_places(name, cut, places):
    with pytest.raises(ConfigurationError, match=rf"'{name}'.*places \[{places}"):
        start(mlp_recipe(shards=[name], cut=cut)(), two_sub_epochs()[0])


@pytest.mark.parametrize("cut", ["modules", "export"])
def test_more_shards_than_units_are_clamped_and_the_report_says_so(cut):
    trial = start(mlp_recipe(shards=50, cut=cut)(), two_sub_epochs()[0])
    assert trial.cut_model.num_shards == 4, "a shard without parameters is nothing but overhead"
    assert "50 shards were asked for" in trial.admission.report.text()


def test_a_balanced_cut_isolates_the_heaviest_layer():
    def build():
        return nn.Sequential(
            nn.Linear(6, 999), nn.ReLU(), nn.Linear(999, 999), nn.Linear(999, 99), nn.Linear(99, 3)
        )

    trial = start(seeded(build, 3)(), two_sub_epochs()[0])
    assert owned(trial, 1) == ("2.weight", "2.bias")


def test_the_report_counts_what_each_shard_holds_and_receives():
    recipe = mlp_recipe(shards=["3"], cut="export")()
    report = start(recipe, two_sub_epochs()[0]).admission.report
    first, second = report.shards
    assert (first.first_unit, first.last_unit) == ("0", "2")
    assert (second.first_unit, second.last_unit) == ("3", "8")
    assert first.trainable_params == 6 * 16 + 16
    assert first.receives == ()
    (value,) = second.receives
    assert (value.dtype, value.shape, value.nbytes) == ("float32", (None, 16), 8 * 16 * 4)
    assert json.loads(json.dumps(report.to_json()))["fallback"] is None


class Inputs(nn.Module):
    """It has two inputs, a mask from one of them, constants of every kind, and a dict as output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.last = nn.Linear(6, 3)
        self.register_buffer("scale", torch.full((6,), 0.5))
        self.register_buffer("shift", torch.arange(6.0), persistent=False)
        self.plain = torch.ones(6) * 0.25

    def forward(self, x, kind):
        mask = (kind > 1).unsqueeze(1).to(x.dtype) * self.shift
        y = x + self.embed(kind)
        for layer in self.layers:
            y = torch.tanh(layer(y)) * self.scale + mask + self.plain
        return {"logits": self.last(y), "mask": mask}


def two_inputs(*rows):
    g = torch.Generator().manual_seed(0)
    return [
        Batch(
            (torch.randn(n, 6, generator=g), torch.randint(5, (n,), generator=g)),
            (torch.randint(3, (n,), generator=g),), n,
        )
        for n in rows
    ]  # fmt: skip


def dict_loss(outputs, labels):
    return nn.functional.cross_entropy(outputs["logits"], labels) + outputs["mask"].mean()


def test_values_of_inputs_alone_are_made_again_instead_of_shipped():
    make = seeded(Inputs, 4, loss=dict_loss)
    trial = assert_equal_to_plain(make, [zoo.singly(two_inputs(8, 5))] * 2, "recompute")
    for shard_graph in trial.cut_model.graphs.train[1:]:
        assert len(shard_graph.live_in) == 1, "only the activation crosses"
    frozen = {e.name for s in trial.layout.shards for e in s.frozen.entries}
    assert frozen == {"buffer:scale"}, "what no checkpoint holds, the factory makes again"


class Counts(nn.Module):
    """Counts its calls in a buffer that no checkpoint holds, and uses the count."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        y = self.a(x)
        self.calls.add_(1)
        return self.b(y * self.calls)


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_a_buffer_that_training_writes_to_hops(mode):
    trial = assert_equal_to_plain(seeded(Counts), two_sub_epochs(), mode)
    held = {e.name for s in trial.layout.shards for e in s.trainable.entries}
    assert "buffer:calls" in held


class SharedNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        return self.c(self.norm(self.b(self.norm(self.a(x)))))


def test_no_cut_parts_two_writers_of_one_buffer():
    trial = assert_equal_to_plain(seeded(SharedNorm, 9), two_sub_epochs(), "recompute")
    assert trial.admission.spec.at == ("norm@0", "c@0")


def test_a_model_that_writes_into_its_input_is_cut_by_modules():
    def build():
        return nn.Sequential(nn.Hardtanh(-0.5, 0.5, inplace=True), *zoo.mlp())

    def sub_epochs():
        return [zoo.singly(zoo.vectors(8, 5)), zoo.singly(zoo.vectors(8, seed=1))]

    make = seeded(build, 3, cut="export")
    reference = make()
    plain.train(reference, sub_epochs())
    trial = start(make(), [w for s in sub_epochs() for w in s])
    assert trial.admission.spec.mode != "export"
    assert "writes into its own input" in trial.admission.report.fallback
    for windows in sub_epochs():
        trial.train(windows)
    assert plain.everything(trial.loaded()) == plain.everything(reference)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 6)
        self.lstm = nn.LSTM(6, 6, num_layers=2, dropout=0.3, batch_first=True)
        self.last = nn.Linear(6, 3)

    def forward(self, tokens):
        return self.last(self.lstm(self.embed(tokens))[0][:, -1])


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_a_recurrent_layer_is_one_unit(mode):
    def batches(*rows):
        return [
            Batch(t.features, labels.labels, t.rows)
            for t, labels in zip(zoo.tokens(*rows), zoo.vectors(*rows), strict=True)
        ]

    trial = assert_equal_to_plain(seeded(Recurrent, 3), [zoo.singly(batches(8, 5))] * 2, mode)
    assert trial.admission.spec.at == ("lstm@0", "last@0")


class TwoPrecisions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(6, 6), nn.Linear(6, 3)
        self.b = nn.Linear(6, 6).double()

    def forward(self, *inputs):
        return self.c(self.b(torch.tanh(self.a(inputs[0])).double()).float())


def test_two_precisions_are_clipped_together():
    make = seeded(TwoPrecisions, 3, clip_grad_norm=0.1)
    trial = assert_equal_to_plain(make, two_sub_epochs())
    assert trial.cut_model.num_shards == 3


def test_a_sequential_that_cannot_be_exported_is_cut_by_modules():
    def build():
        return nn.Sequential(zoo.Decides(), zoo.Decides(), nn.Dropout(0.2), nn.Linear(6, 3))

    make = seeded(build, 3)
    trial = assert_equal_to_plain(
        make, two_sub_epochs(), "recompute", cut="modules", asked="export"
    )
    assert trial.cut_model.num_shards == 3
    assert "torch.export failed" in trial.admission.report.fallback


def test_layers_with_batch_norm_agree_too():
    def build():
        return nn.Sequential(zoo.Decides(), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 3))

    for mode in ("keep", "recompute"):
        assert_equal_to_plain(seeded(build, ["1", "3"]), two_sub_epochs(), mode, cut="modules")


@pytest.mark.parametrize("shards", [1, 3])
def test_layers_and_whole_models_evaluate_as_plain_ones_do(shards):
    def build():
        return nn.Sequential(zoo.Decides(), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 3))

    make = seeded(build, shards, metrics=["accuracy"])
    windows = zoo.singly(zoo.vectors(8, 5))
    reference = make()
    _, training = plain.train(reference, [windows])
    trial = assert_equal_to_plain(make, [windows], cut="modules")
    before = [content for content, _ in trial.shards]
    found = trial.evaluate(zoo.vectors(8, 7, seed=3))
    assert found == training.evaluate(zoo.vectors(8, 7, seed=3))
    assert before == [content for content, _ in trial.shards]


def test_any_model_that_cannot_be_exported_is_cut_by_modules():
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.last = zoo.Decides(), nn.Linear(6, 3)

        def forward(self, x):
            return self.last(self.body(x))

    make = seeded(Wrapped, 3)
    trial = assert_equal_to_plain(make, two_sub_epochs(), cut="modules", asked="export")
    assert trial.cut_model.num_shards == 2
    assert "torch.export failed" in trial.admission.report.fallback


def test_admission_changes_neither_model_nor_optimizer():
    recipe = mlp_recipe(lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1))()
    before = plain.everything(recipe)
    groups = repr(recipe.optimizer.param_groups)
    start(recipe, two_sub_epochs()[0])
    assert plain.everything(recipe) == before
    assert repr(recipe.optimizer.param_groups) == groups
    assert recipe.model.training


def test_spec_and_template_travel_as_json():
    recipe = mlp_recipe()()
    features = [(b.features, b.labels) for b in zoo.vectors(8)]
    admission = admit(recipe, features, 1)
    for value, cls in ((admission.spec, CutSpec), (admission.template, StateTemplate)):
        assert cls.from_json(json.loads(json.dumps(value.to_json()))) == value


class Checkpointed(nn.Module):
    """Drops activations of its blocks and computes them again in backward, if it is told to."""

    def __init__(self, again: bool, twice: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4)) for _ in range(3)
        )
        self.last = nn.Linear(6, 3)
        self.again, self.twice = again, twice

    def forward(self, x):
        for block in (*self.blocks, *self.blocks[: int(self.twice)]):
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.last(x)


def test_checkpoints_around_dropout_draw_the_same_numbers_again():
    trial = assert_equal_to_plain(
        seeded(lambda: Checkpointed(True), 3), two_sub_epochs(), cut="modules"
    )
    assert trial.cut_model.num_shards == 3
    other = assert_equal_to_plain(
        seeded(lambda: Checkpointed(False), 3), two_sub_epochs(), cut="modules"
    )
    assert plain.everything(trial.loaded()) == plain.everything(other.loaded())


def test_a_checkpoint_around_a_unit_that_runs_twice_is_refused():
    with pytest.raises(ConfigurationError, match=r"backward runs 'blocks.0.0' again.* 2 times"):
        start(seeded(lambda: Checkpointed(True, twice=True), 3)(), two_sub_epochs()[0])
