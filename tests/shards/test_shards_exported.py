"""Exported models keep their bits, hold no pickle, and are refused where they would differ."""

from __future__ import annotations

import pickle
import shutil
import zipfile

import pytest
import safetensors.torch
import torch
from torch import nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.differences import same_bits
from cerebro_hydra.shards.exported import GRAPH_FILE, WEIGHTS_FILE, load_exported, save_exported
from tests.shards import plain, zoo


def recipe_of(model, loss=None, **rules):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Recipe(model, optimizer, loss or nn.CrossEntropyLoss(), **rules)


def assert_same_predictions(recipe, folder, *batches):
    recipe.model.eval()
    loaded = load_exported(folder)
    for features in batches:
        with torch.no_grad():
            expected = recipe.model(*features)
        (found,) = loaded(*features)
        assert same_bits(found, expected)
        assert not found.requires_grad


@pytest.mark.parametrize(
    ("build", "batches"),
    [(zoo.mlp, zoo.vectors), (zoo.LongSkips, zoo.images), (zoo.Language, zoo.tokens)],
)
def test_every_number_of_rows_gives_the_bits_of_the_model(tmp_path, build, batches):
    recipe = recipe_of(build())
    save_exported(recipe, batches(4)[0].features, tmp_path)
    assert_same_predictions(recipe, tmp_path, *(b.features for b in batches(1, 2, 4, 9, seed=3)))


def test_a_model_of_mixed_precision_is_as_mixed_when_it_is_loaded(tmp_path):
    recipe = recipe_of(zoo.mlp(), autocast="bfloat16")
    save_exported(recipe, zoo.vectors(4)[0].features, tmp_path)
    (batch,) = zoo.vectors(3, seed=3)
    (found,) = load_exported(tmp_path)(*batch.features)
    recipe.model.eval()
    with torch.no_grad(), recipe.precision():
        expected = recipe.model(*batch.features)
    assert found.dtype == torch.bfloat16
    assert same_bits(found, expected)


def test_weights_in_another_order_of_memory_keep_their_bits_and_order(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten())
    recipe = recipe_of(model.to(memory_format=torch.channels_last))
    save_exported(recipe, [torch.randn(4, 3, 8, 8)], tmp_path)
    assert_same_predictions(recipe, tmp_path, [torch.randn(5, 3, 8, 8)])


def test_the_loaded_model_has_no_training_mode(tmp_path):
    recipe = recipe_of(zoo.mlp(dropout=0.5))
    (batch,) = zoo.vectors(4)
    save_exported(recipe, batch.features, tmp_path)
    loaded = load_exported(tmp_path).train()
    assert not loaded.training
    assert torch.equal(loaded(*batch.features)[0], loaded.eval()(*batch.features)[0])


def test_no_file_holds_a_pickle(tmp_path):
    save_exported(recipe_of(zoo.Language()), zoo.tokens(4)[0].features, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {GRAPH_FILE, WEIGHTS_FILE}
    with zipfile.ZipFile(tmp_path / GRAPH_FILE) as archive:
        contents = {info.filename: archive.read(info) for info in archive.infolist()}
    assert contents["graph/data/sample_inputs/model.pt"] == b""
    for name, content in contents.items():
        assert b"PK\x03\x04" not in content, name
        assert b'"use_pickle": true' not in content, name
        if content:
            with pytest.raises((pickle.UnpicklingError, ValueError, EOFError, KeyError)):
                pickle.loads(content)  # these are our own files


def test_weights_are_a_state_dict_with_tied_tensors_once(tmp_path):
    recipe = recipe_of(zoo.Language(), zoo.language_loss)
    save_exported(recipe, zoo.tokens(4)[0].features, tmp_path)
    weights = safetensors.torch.load_file(tmp_path / WEIGHTS_FILE)
    assert len({"gpt.transformer.wte.weight", "gpt.lm_head.weight"} & set(weights)) == 1
    torch.manual_seed(99)
    other = zoo.Language()
    missing, unknown = other.load_state_dict(weights, strict=False)
    assert len(missing) <= 1
    assert not unknown
    assert plain.everything(recipe_of(other)) == plain.everything(recipe)


def with_entry(folder, target, name, content):
    """Copy an export with one entry of its archive replaced."""
    shutil.copytree(folder, target)
    with (
        zipfile.ZipFile(folder / GRAPH_FILE) as archive,
        zipfile.ZipFile(target / GRAPH_FILE, "w") as changed,
    ):
        for info in archive.infolist():
            changed.writestr(info, content if info.filename == name else archive.read(info))
    return target


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("graph/data/sample_inputs/model.pt", pickle.dumps(((), {}))),
        (
            "graph/data/constants/model_constants_config.json",
            b'{"config": {"a": {"path_name": "opaque_obj_0", "use_pickle": true}}}',
        ),
    ],
)
def test_a_pickle_that_somebody_put_in_is_refused_unread(tmp_path, name, content):
    save_exported(recipe_of(zoo.mlp()), zoo.vectors(4)[0].features, tmp_path / "fine")
    load_exported(with_entry(tmp_path / "fine", tmp_path / "same", "no such", b""))
    with pytest.raises(ConfigurationError, match="is a pickle"):
        load_exported(with_entry(tmp_path / "fine", tmp_path / "bad", name, content))


def test_a_model_whose_flow_depends_on_values_is_refused_with_the_reason(tmp_path):
    with pytest.raises(ConfigurationError, match=r"Decides can't be exported.*Guard"):
        save_exported(recipe_of(zoo.Decides()), zoo.vectors(4)[0].features, tmp_path)


class FixedRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 3)

    def forward(self, x):
        return self.a(x) * float(sum(1 for _ in range(x.shape[0])))


class Restless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 3)

    def forward(self, x):
        return nn.functional.dropout(self.a(x), 0.5, training=True)


@pytest.mark.parametrize(
    ("build", "reason"), [(FixedRows, "does not run on 3 rows"), (Restless, "gives other bits")]
)
def test_a_graph_that_is_not_the_model_is_refused(tmp_path, build, reason):
    with pytest.raises(ConfigurationError, match=reason):
        save_exported(recipe_of(build()), zoo.vectors(4)[0].features, tmp_path)


def test_one_row_is_too_few_to_export_with(tmp_path):
    with pytest.raises(ConfigurationError, match=r"\(1, 6\).*at least 2 rows"):
        save_exported(recipe_of(zoo.mlp()), zoo.vectors(1)[0].features, tmp_path)


def test_saving_leaves_the_model_as_it_is(tmp_path):
    recipe = recipe_of(zoo.LongSkips())
    recipe.model.train()
    recipe.model.stem.eval()
    before = plain.everything(recipe)
    modes = [module.training for module in recipe.model.modules()]
    save_exported(recipe, zoo.images(4)[0].features, tmp_path)
    assert plain.everything(recipe) == before
    assert [module.training for module in recipe.model.modules()] == modes


def test_a_missing_or_foreign_file_is_named(tmp_path):
    save_exported(recipe_of(zoo.mlp()), zoo.vectors(4)[0].features, tmp_path)
    safetensors.torch.save_file({"other": torch.zeros(1)}, tmp_path / WEIGHTS_FILE)
    with pytest.raises(ConfigurationError, match=r"has no '0\.weight'"):
        load_exported(tmp_path)
    (tmp_path / WEIGHTS_FILE).unlink()
    with pytest.raises(ConfigurationError, match=rf"{WEIGHTS_FILE}' is no file"):
        load_exported(tmp_path)
