"""A trained model is one class, from a run or from its files: it predicts, exports and goes on."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import cerebro_hydra
from cerebro_hydra.errors import ConfigurationError, DataError, SetupError
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.storage import LocalStore
from cerebro_hydra.testing.local_backend import Arrays, LocalBackend
from cerebro_hydra.tune import GridSearch, SearchResult, hp_choice
from cerebro_hydra.tune.model import TrainedModel


class Net(nn.Module):
    """Two columns; a layer used twice, and a head that only training reads."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4)
        self.norm = nn.BatchNorm1d(3)
        self.mix = nn.Linear(7, 4)
        self.auxiliary = nn.Linear(4, 2)
        self.out = nn.Linear(4, 9)
        self.out.weight = self.words.weight

    def forward(self, pixels: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
        hidden = torch.cat([self.norm(pixels), self.words(word)], 1)
        hidden = torch.relu(self.mix(hidden))
        if self.training:
            hidden = hidden + 0 * self.auxiliary(hidden).sum()
        return self.out(hidden)


def build(params: dict[str, Any], start: Any = None) -> Recipe:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=params["lr"], momentum=0.9)
    return Recipe(model, optimizer, nn.CrossEntropyLoss(), batch_size=4, warm_start=start)


def rows(seed: int) -> Arrays:
    random = np.random.default_rng(seed)
    return Arrays(
        {
            "pixels": random.normal(size=(22, 3)).astype(np.float32),
            "word": random.integers(0, 9, 22),
            "label": random.integers(0, 9, 22),
        }
    )


def fitted(path: Path, seed: int, start: Any = None) -> SearchResult:
    search = GridSearch(
        backend=LocalBackend(1),
        store=LocalStore(str(path)),
        estimator_gen_fn=partial(build, start=start),
        search_space={"lr": hp_choice([0.1])},
        num_epochs=1,
        validation=None,
        feature_columns=["pixels", "word"],
        label_columns=["label"],
        verbose=0,
    )
    return search.fit(rows(seed))


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> SearchResult:
    return fitted(tmp_path_factory.mktemp("store"), 1)


@pytest.fixture(scope="module")
def loaded(result: SearchResult, tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    path = str(tmp_path_factory.mktemp("saved") / "model")
    result.get_best_model().save(path)
    return cerebro_hydra.load_model(path)


def given(count: int = 6) -> dict[str, Any]:
    return {name: rows(2).arrays[name][:count] for name in ("pixels", "word")}


def expected(model: TrainedModel, size: int, count: int = 6) -> np.ndarray:
    """Plain torch's predictions, `size` rows at a time."""
    pixels, word = (torch.from_numpy(each) for each in given(count).values())
    module = model.torch()
    with torch.no_grad():
        parts = [module(pixels[i : i + size], word[i : i + size]) for i in range(0, count, size)]
    return torch.cat(parts).numpy()


def test_a_model_is_the_same_from_its_run_and_from_its_files(
    result: SearchResult, loaded: TrainedModel
) -> None:
    best = result.get_best_model()
    unknown = SearchResult.open(result.run_path, factory="no_such_module:build").get_best_model()
    there = best.torch().state_dict()
    for model in (best, loaded, unknown):
        assert type(model) is TrainedModel and repr(model) == repr(best)
        assert (model.history, model.params) == (best.history, {"lr": 0.1})
        assert (model.trial, model.run_path) == (result.best_trial, result.run_path)
        assert model.feature_columns == ["pixels", "word"]
        state = model.state_dict()
        assert list(state) == list(there)  # tied, unread and counting ones among them
        assert all(torch.equal(state[name], tensor) for name, tensor in there.items())
    assert np.array_equal(best.predict(given()), expected(best, 4))
    assert np.array_equal(loaded.predict(given()), best.predict(given()))


def test_a_model_predicts_rows_in_every_form(result: SearchResult) -> None:
    model, columns = result.get_best_model(), given()
    pixels, word = columns["pixels"], columns["word"]
    answer = model.predict(columns)
    assert isinstance(answer, np.ndarray)
    assert answer.dtype == np.float32 and answer.shape == (6, 9)
    assert np.array_equal(model.predict(columns, batch_size=2), expected(model, 2))
    forms = [
        {"word": torch.from_numpy(word), "pixels": pixels.tolist(), "label": ["unused"] * 6},
        pd.DataFrame({"pixels": list(pixels), "id": range(6), "word": word}, index=range(9, 15)),
        [{"pixels": p, "word": int(w)} for p, w in zip(pixels, word, strict=True)],
        {"pixels": pixels.astype(np.float64), "word": word.astype(np.int32)},
    ]
    for form in forms:
        assert np.array_equal(model.predict(form), answer)
    pixels.setflags(write=False)
    assert np.array_equal(model.predict(columns), answer)


WRONG: dict[str, tuple[Any, str]] = {
    "a missing column": ({"pixel": 1, "word": 1}, "has no column 'pixels'; .* 'word'.*'pixel'"),
    "a row without one": ([given(1), {"word": 1}], "row 1 has no column 'pixels'"),
    "an array of several": (np.zeros((2, 4)), "one array of shape .*takes the columns"),
    "another shape": (given() | {"pixels": np.zeros((6, 4))}, r"shape \(4,\) .* where \(3,\)"),
    "ragged rows": (given(2) | {"pixels": [[1.0], [1.0, 2.0]]}, "rows of column 'pixels' have"),
    "another type": (given(2) | {"word": [0.5, 1.0]}, "'word' holds float64, .* with int64"),
    "texts": (given(2) | {"word": ["a", "b"]}, "'word' holds <U1, .* with int64"),
    "no number": (given(2) | {"pixels": [[1, 2, 3], [1, np.nan, 3]]}, "holds NaN.* in row 1"),
    "unequal columns": (given(2) | {"word": [1]}, "different numbers of rows"),
    "no rows": (given(0), "no rows; give at least one"),
    "a path": ("rows.csv", "rows is a str; give a pandas DataFrame"),
}


@pytest.mark.parametrize("what", WRONG)
def test_rows_that_a_model_cant_take_are_told_of(what: str, result: SearchResult) -> None:
    wrong, message = WRONG[what]
    with pytest.raises(DataError, match=message):
        result.get_best_model().predict(wrong)


def test_a_batch_of_nothing_is_refused(result: SearchResult) -> None:
    with pytest.raises(ConfigurationError, match="batch_size is 0; it is a whole number from 1"):
        result.get_best_model().predict(given(), batch_size=0)


def test_a_winner_goes_on_with_new_rows(result: SearchResult, tmp_path: Path) -> None:
    best = result.get_best_model()
    best.predict(given(2))  # what it has read does not travel
    second = fitted(tmp_path, 7, start=best)
    assert cerebro_hydra.replay(second.run_path, "trial-000").identical
    by_hand = fitted(tmp_path / "by hand", 7, start=best.torch())
    states = [each.get_best_model().state_dict() for each in (second, by_hand)]
    assert all(torch.equal(states[1][name], tensor) for name, tensor in states[0].items())
    anew = fitted(tmp_path / "anew", 7).get_best_model().state_dict()
    assert not torch.equal(anew["mix.weight"], states[0]["mix.weight"])


@pytest.mark.parametrize("format", ["torch", "onnx"])
def test_an_exported_model_predicts_elsewhere(
    format: str, result: SearchResult, loaded: TrainedModel, tmp_path: Path
) -> None:
    if format == "onnx":
        onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    for number, model in enumerate((result.get_best_model(), loaded)):
        path = tmp_path / str(number) / "model"
        model.export(str(path), format=format)
        assert [each.name for each in path.parent.iterdir()] == ["model"]
        for count in (1, 2, 6):
            columns, answer = given(count), model.predict(given(count), batch_size=count)
            if format == "torch":
                program = torch.export.load(path).module()
                found = program(*(torch.from_numpy(each) for each in columns.values()))
                assert torch.equal(found, torch.from_numpy(answer))
                continue
            session = onnxruntime.InferenceSession(str(path))
            (found,) = session.run(["label__output"], columns)
            assert np.abs(found - answer).max() <= 1e-4 * np.abs(answer).max()


def test_what_cant_be_exported_says_why_and_leaves_no_file(
    loaded: TrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match="format is 'pickle'; choose 'torch' or 'onnx'"):
        loaded.export(str(tmp_path / "model"), format="pickle")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(SetupError, match=r"needs onnx\w*; .*pip install 'cerebro-hydra\[onnx\]'"):
        loaded.export(str(tmp_path / "model"), format="onnx")
    assert not list(tmp_path.iterdir())
