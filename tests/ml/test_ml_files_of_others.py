"""A saved stage of anybody runs no code and makes no folder; it is loaded or refused in words."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from optuna.samplers import TPESampler

from cerebro_hydra import (
    GridSearch,
    HDFSStore,
    LocalStore,
    OptunaSearch,
    SparkEstimator,
    SparkModel,
    TunedEstimator,
    hp_choice,
    hp_int,
    hp_log,
    hp_loguniform,
    hp_quniform,
    hp_uniform,
)
from cerebro_hydra.errors import CerebroHydraError, ConfigurationError, ReplayError, StoreError
from cerebro_hydra.recipe.objective.prediction_kind import PredictionKind
from cerebro_hydra.storage.digest import encode_document
from cerebro_hydra.tune import MedianStopping
from tests.examples import examples
from tests.forgeries import digested, forged_bytes, forged_json
from tests.ml import nets

pytestmark = [pytest.mark.slow, pytest.mark.spark(group=2)]


@pytest.fixture(scope="module")
def saved(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a saved model and a saved estimator."""
    folder = tmp_path_factory.mktemp("saved")
    model = nets.saved_model(
        nets.binary().recipe, torch.randn(4, 4), folder, PredictionKind.SIGMOID
    )
    model.save(str(folder / "model"))
    estimator = SparkEstimator.from_factory(
        nets.made, {"hidden": 8, "lr": 0.1}, num_epochs=1, store=LocalStore(folder / "store")
    )
    estimator.save(str(folder / "estimator"))
    tuned = TunedEstimator(
        nets.made,
        GridSearch,
        search_space=SPACE,
        stopping=MedianStopping(2, 3),
        num_epochs=1,
        store=LocalStore(folder / "store"),
    )
    tuned.save(str(folder / "tuned"))
    return folder


KINDS: dict[str, Any] = {
    "model": SparkModel, "estimator": SparkEstimator, "tuned": TunedEstimator
}  # fmt: skip
NESTED = hp_choice([{"name": "adam"}, {"name": "sgd", "momentum": hp_uniform(0, 0.9)}, [1, 2]])
SPACE = {"lr": hp_log(1e-3, 1), "n": hp_int(1, 8, log=True), "drop": hp_quniform(0, 1, 0.25),
         "decay": hp_loguniform(-4, -1.5), "optimizer": NESTED}  # fmt: skip


@pytest.fixture
def forged(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "saved")
    return tmp_path / "saved"


def metadata(stage: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(part(stage).read_text())
    return content


def part(stage: Path) -> Path:
    return stage / "metadata" / "part-00000"


def write(stage: Path, content: bytes) -> None:
    """Write a stage's metadata without Hadoop's checksum of the former."""
    part(stage).with_name(".part-00000.crc").unlink(missing_ok=True)
    part(stage).write_bytes(content)


def change(stage: Path, **changes: Any) -> None:
    content = {**metadata(stage), **changes}
    if "digest" in content:  # a model's; whoever means harm writes one that fits
        del content["digest"]
        write(stage, encode_document(content))
    else:
        write(stage, json.dumps(content).encode())


def test_loading_an_estimator_creates_nothing_where_its_file_says(
    forged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HADOOP_USER_NAME", "me")
    there = metadata(forged / "estimator")["paramMap"]
    for description, kind in (
        ({"type": "LocalStore", "prefix_path": str(tmp_path / "made" / "by a file")}, LocalStore),
        ({"type": "HDFSStore", "prefix_path": "hdfs://no-such-host:1/x"}, HDFSStore),
    ):
        change(forged / "estimator", paramMap={**there, "store": description})
        store = SparkEstimator.load(str(forged / "estimator")).getStore()
        assert (type(store), store.to_dict()) == (kind, description)
    assert not (tmp_path / "made").exists()


def test_factory_of_a_loaded_estimator_is_not_imported_unasked(
    forged: Path, tmp_path: Path
) -> None:
    (forged / "of_an_attacker.py").write_text("raise SystemExit('it ran')\n")
    change(forged / "estimator", factory="of_an_attacker:build")
    estimator = SparkEstimator.load(str(forged / "estimator"))
    sys.path.insert(0, str(forged))
    try:
        for use in (estimator.factory, estimator.copy().factory):
            with pytest.raises(ConfigurationError, match=r"setFactory\('of_an_attacker:build'\)"):
                use()
        estimator.save(str(tmp_path / "again"))
        again = SparkEstimator.load(str(tmp_path / "again"))
        assert again.recorded_factory == "of_an_attacker:build"
        with pytest.raises(ReplayError, match="it ran"):
            again.setFactory("of_an_attacker:build").factory()
    finally:
        sys.path.remove(str(forged))
    assert estimator.setFactory(nets.made).factory() is nets.made
    wrong: Any = 3
    with pytest.raises(ConfigurationError, match="estimator_gen_fn is 3"):
        estimator.setFactory(wrong)
    with pytest.raises(ConfigurationError, match="was not loaded from a file"):
        nets.binary().setFactory(nets.made)


@pytest.mark.parametrize("stage", KINDS)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"uid": "../../escaped"}, "uid"),
        ({"paramMap": {"network": 1}}, "a Param of .* can't be read from 'network'"),
        ({"paramMap": {"__class__": 1}}, "'__class__'"),
        ({"paramMap": {"predictionCol": 3}}, "predictionCol that can't be set"),
        ({"paramMap": []}, "paramMap"),
    ],
)
def test_forged_metadata_is_refused(
    forged: Path, stage: str, changes: dict[str, Any], said: str
) -> None:
    change(forged / stage, **changes)
    with pytest.raises(StoreError, match=said):
        KINDS[stage].load(str(forged / stage))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"searcher": "os"}, "the search in .* can't be read from 'os'"),
        ({"searcher": "Search"}, "the search in"),
        ({"searcher": "MedianStopping"}, "the search in"),
        ({"given": {"fit": 1}}, "an argument of the search in .* can't be read from 'fit'"),
        ({"given": {"eta": 1}}, "can't be read from 'eta'"),
        ({"arguments": ["_fit"]}, "can't be read from '_fit'"),
        ({"given": {"search_space": {"lr": {"Choice": []}}}}, "an argument of .*hp_choice got"),
        ({"given": {"search_space": {"lr": {"Uniform": {"low": 1}}}}}, "it is no search space"),
        ({"given": {"search_space": {"lr": {"Integer": {"low": 3, "high": 1}}}}}, "low is below"),
        ({"given": {"search_space": {"lr": 7}}}, "it is no search space"),
        ({"given": {"stopping": {"what": 1}}}, "an argument of the search"),
        ({"given": 3}, "given"),
    ],
)
def test_a_forged_search_is_refused(forged: Path, changes: dict[str, Any], said: str) -> None:
    change(forged / "tuned", **changes)
    with pytest.raises(StoreError, match=said):
        TunedEstimator.load(str(forged / "tuned"))


def test_a_saved_search_is_loaded_as_it_was(saved: Path, tmp_path: Path) -> None:
    estimator = TunedEstimator.load(str(saved / "tuned"))
    assert estimator.searcher is GridSearch
    assert estimator.getOrDefault("search_space") == SPACE
    assert estimator.getOrDefault("stopping") == MedianStopping(2, 3)
    assert (estimator.getNumEpochs(), estimator.getValidation()) == (1, 0.2)
    with pytest.raises(ConfigurationError, match=r"setFactory\('tests.ml.nets:made'\)"):
        estimator.factory()
    given = {"search_space": SPACE, "num_models": 3, "num_epochs": 1, "store": estimator.getStore()}
    sampled = TunedEstimator(nets.made, OptunaSearch, sampler=TPESampler(), **given)
    with pytest.warns(UserWarning, match=r"without \['sampler'\], which only Python holds"):
        sampled.save(str(tmp_path / "sampled"))
    again = TunedEstimator.load(str(tmp_path / "sampled"))
    with pytest.warns(UserWarning, match=r"without \['sampler'\]"):
        again.save(str(tmp_path / "again"))
    nothing: Any = None
    with pytest.raises(ConfigurationError, match=r"without sampler.*estimator.set\(estimator.sam"):
        TunedEstimator.load(str(tmp_path / "again")).setFactory(nets.made).fit(nothing)

    class Own(GridSearch):
        pass

    own = TunedEstimator(nets.made, Own, search_space=SPACE)
    with pytest.warns(UserWarning, match="its search, which is not of this package"):
        own.save(str(tmp_path / "own"))
    with pytest.raises(ConfigurationError, match="a file can't name; make it anew"):
        TunedEstimator.load(str(tmp_path / "own")).fit(nothing)


def test_path_without_a_stage_is_an_error_of_ours(saved: Path) -> None:
    for kind in KINDS.values():
        with pytest.raises(StoreError, match=r"(can't read|there is no) .*no-such-stage"):
            kind.load(str(saved / "no-such-stage"))


@settings(max_examples=examples(30), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
@pytest.mark.parametrize("stage", KINDS)
def test_damaged_metadata_is_read_or_refused_in_words(
    saved: Path, stage: str, data: st.DataObject
) -> None:
    before = part(saved / stage).read_bytes()
    document = json.loads(before)
    has_digest = document.pop("digest", None) is not None
    forged = forged_json(document).map(digested if has_digest else bytes) | forged_bytes(before)
    write(saved / stage, data.draw(forged))
    try:
        with contextlib.suppress(CerebroHydraError):
            KINDS[stage].load(str(saved / stage))
    finally:
        write(saved / stage, before)
