"""The examples of docs/results.md, run in order as they are printed."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest
import torch

from cerebro_hydra.tune import GridSearch
from tests.processes import WITHOUT_SPARK, run_python
from tests.tune import tune_models
from tests.tune.test_tune_search import arguments, rows

PAGE = Path(__file__).parents[2] / "docs" / "results.md"


@pytest.mark.long
@pytest.mark.slow
def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    search, data = GridSearch(**arguments(tmp_path / "store", num_epochs=1)), rows(80)
    names = {
        "search": search,
        "df": data,
        "estimator_gen_fn": tune_models.small,
        "features": torch.from_numpy(data.arrays["features"]),
        "array": data.arrays["features"],
        "pandas_df": pd.DataFrame({"features": list(data.arrays["features"])}),
        "prepared": search.backend.prepare(search.store, data, search.data_spec),
    }
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(examples) == 7
    for example in examples:
        exec(example, names)
    assert names["best"].result_epoch == 1
    program = """
import numpy as np, cerebro_hydra
print(cerebro_hydra.load_model("kept/best").predict(np.zeros((3, 16), "float32")).shape)
"""
    assert run_python("-c", WITHOUT_SPARK + program, cwd=tmp_path).stdout == "(3, 4)\n"
    assert torch.equal(names["outputs"][0], names["module"](names["features"]))
