"""The files of a saved model: none of them runs code, and no byte of them changes unseen."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cerebro_hydra import SparkModel
from cerebro_hydra.errors import CerebroHydraError, ConfigurationError, StoreError
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.recipe.objective.prediction_kind import PredictionKind
from cerebro_hydra.shards.export.archive import FORMAT, METADATA_FILE
from cerebro_hydra.shards.export.program import EXPORTED_FILES, GRAPH_FILE
from cerebro_hydra.storage.digest import decode_format, encode_format
from cerebro_hydra.tune.model import load_model
from tests.ml import nets
from tests.shards.export import forged_archives

pytestmark = pytest.mark.spark(group=2)


@pytest.fixture(scope="module")
def original(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model of three numbers, which no test changes."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    recipe = Recipe(network, torch.optim.SGD(network.parameters(), lr=0.1), nn.MSELoss())
    (folder / "exported").mkdir()
    model = nets.saved_model(recipe, torch.randn(4, 6), folder / "exported", PredictionKind.RAW)
    model.write().save(str(folder / "saved"))
    return folder / "saved"


@pytest.fixture
def saved(original: Path, tmp_path: Path) -> Path:
    """A copy without the checksums of Hadoop, which other file systems don't keep."""
    shutil.copytree(original, tmp_path / "saved", ignore=shutil.ignore_patterns(".*.crc"))
    return tmp_path / "saved"


def test_a_saved_model_is_loaded_as_it_was(original: Path, saved: Path) -> None:
    for path in (original, saved):
        model, here = SparkModel.load(str(path)), load_model(str(path))
        row = torch.randn(2, 6)
        assert torch.equal(here.torch()(row)[0], model.torch()(row)[0])
        assert (here.trial, here.run_path) == (model.trial, model.run_path)
        assert model.trial.visit_log == [(0, 0)] and model.history["loss"][1] == 0.5
        assert [tuple(out.shape) for out in model.torch()(torch.randn(2, 6))] == [(2, 3)]


@pytest.mark.parametrize("forge", forged_archives.FORGERIES)
def test_an_archive_in_the_graphs_place_runs_no_code(
    spark: Any, saved: Path, tmp_path: Path, forge: forged_archives.Forge
) -> None:
    marker = tmp_path / "code ran"
    forge(saved / "model" / GRAPH_FILE, marker)
    with pytest.raises(CerebroHydraError):
        model = SparkModel.load(str(saved))
        model.torch()
        row = ([0.0] * 6,)
        model.transform(spark.createDataFrame([row], "features array<double>")).collect()
    assert not marker.exists()


@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("name", [METADATA_FILE, *(f"model/{name}" for name in EXPORTED_FILES)])
def test_a_flipped_bit_of_any_file_is_an_error_of_load(
    original: Path, saved: Path, name: str, checksums: bool
) -> None:
    if checksums:
        shutil.copytree(original, saved, dirs_exist_ok=True)
    path = saved / name
    content = path.read_bytes()
    for position in (0, len(content) // 3, len(content) // 2, len(content) - 2):
        flipped = bytearray(content)
        flipped[position] ^= 1
        path.write_bytes(flipped)
        with pytest.raises((StoreError, ConfigurationError)) as refused:
            SparkModel.load(str(saved))
        assert str(saved) in str(refused.value) or Path(name).name in str(refused.value)
    for shortened in (content[: len(content) // 2], b""):
        path.write_bytes(shortened)
        with pytest.raises((StoreError, ConfigurationError)):
            SparkModel.load(str(saved))
    path.unlink()
    with pytest.raises(StoreError, match="there is no"):
        SparkModel.load(str(saved))


def resealed(saved: Path, **changes: Any) -> None:
    """Change the metadata as somebody would who knows the format."""
    path = saved / METADATA_FILE
    metadata = decode_format(str(path), path.read_bytes(), FORMAT)
    path.write_bytes(encode_format(metadata | changes, FORMAT))


@pytest.mark.parametrize(
    "changes",
    [
        {"columns": [{"name": "features", "dtype": "load", "shape": [6]}]},
        {"columns": [{"name": "features", "dtype": "float32"}]},
        {"columns": 7},
        {"head": "eval"},
        {"trial": {"visit_log": []}},
        {"trial": None},
        {"batch_size": "many"},
        {"paramMap": {"torch": 1}},
        {"paramMap": None},
        {"uid": None, "sparkVersion": 7},
    ],
)
def test_metadata_that_no_model_writes_are_refused(saved: Path, changes: dict[str, Any]) -> None:
    resealed(saved, **changes)
    with pytest.raises(StoreError, match="the metadata of"):
        SparkModel.load(str(saved))


def test_a_graph_of_another_model_is_refused(saved: Path) -> None:
    resealed(saved, graph="0" * 32)
    with pytest.raises(StoreError, match=f"{GRAPH_FILE}.* is not the one that was saved"):
        SparkModel.load(str(saved))


def test_an_older_format_says_so(saved: Path) -> None:
    (saved / METADATA_FILE).write_bytes(encode_format({"class": "SparkModel"}, 1))
    with pytest.raises(ConfigurationError, match="has format 1, and this version loads 3"):
        SparkModel.load(str(saved))


def test_a_url_that_leads_nowhere_ends_in_one_sentence(saved: Path) -> None:
    url = "hdfs://no-such-host.invalid/model"
    sentence = rf"'{url}.* can't be (read|written) \(.*no-such-host.*\); check the path"
    with pytest.raises(StoreError, match=sentence):
        SparkModel.load(url)
    with pytest.raises(StoreError, match=sentence):
        load_model(url)
    with pytest.raises(StoreError, match=sentence):
        load_model(str(saved)).save(url)
