"""Tests HDFSStore on a real HDFS: the contract of stores, and a whole run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cerebro_hydra
from cerebro_hydra import GridSearch, HDFSStore, LocalStore, SparkBackend, hp_choice
from cerebro_hydra.data.preparation.prepared import find_prepared
from cerebro_hydra.errors import StoreError
from cerebro_hydra.storage import RunFolder, Store
from cerebro_hydra.testing.stores import StoreCase
from integration.hdfs.cluster import HdfsCluster
from tests.end_to_end import models


class TestHDFSStore(StoreCase):
    """The conformance suite that every store passes."""

    @pytest.fixture(autouse=True)
    def _cluster(self, cluster: HdfsCluster) -> None:
        self.cluster = cluster

    def make_store(self, tmp_path: Path) -> Store:
        return HDFSStore(f"{self.cluster.url}/suite/{tmp_path.name}/a store")


def search(spark: Any, store: Store) -> Any:
    return GridSearch(
        backend=SparkBackend(spark_context=spark.sparkContext, num_workers=2),
        store=store,
        estimator_gen_fn=models.feed_forward,
        search_space={"lr": hp_choice([0.01, 0.001]), "dropout": hp_choice([0.2])},
        num_epochs=2,
        evaluation_metric="accuracy",
        order="seeded",
        verbose=0,
    )


def final_states(result: Any) -> list[Any]:
    """Return the digests of the segments of every trial's result."""
    folder = RunFolder.open(result.run_path)
    states = []
    for number in range(len(result.trials)):
        state = folder.read_state(number, max(folder.states(number)))
        states.append([(s["frozen"], s["trainable"]) for s in state["shards"]])
    return states


def test_a_whole_run_lives_on_hdfs(
    spark: Any, cluster: HdfsCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    random = np.random.default_rng(3)
    labels = random.integers(0, 4, 160)
    features = random.normal(size=(160, 16)) + labels[:, None] / 2
    rows = [(f.tolist(), int(y)) for f, y in zip(features, labels, strict=True)]
    df = spark.createDataFrame(rows, "features array<double>, label long")
    store = HDFSStore(f"{cluster.url}/user/me/cerebro")

    result = search(spark, store).fit(df)

    assert result.run_path.startswith(f"{cluster.url}/user/me/cerebro/runs/")
    assert [trial.status for trial in result.trials] == ["finished"] * 2
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    for trial in result.trials:
        report = cerebro_hydra.replay(result.run_path, trial.trial_id)
        assert report.identical, str(report)
    # An agent removes its copy of a partition once that is decoded.
    assert list(scratch.iterdir()) == []
    out = result.transform(df).toPandas()
    assert len(out) == len(rows)
    # A URL means the same files to Spark and to our client.
    (fingerprint,) = store.list(f"{store.prefix}/data")
    parts = f"{store.url(store.data_path(fingerprint))}/*/split=*/partition=*"
    assert spark.read.parquet(parts).count() == len(rows)

    again = search(spark, store).fit_on_prepared_data()
    local = search(spark, LocalStore(str(tmp_path / "local"))).fit(df)
    assert final_states(again) == final_states(result) == final_states(local)

    # Lost rows are noticed before anything trains on the rest.
    prepared = find_prepared(store, fingerprint)
    assert prepared is not None
    path = prepared.partition("train", 1).path
    folder = f"{store.data_path(fingerprint)}/{path}"
    store.delete(f"{folder}/{store.list(folder)[-1]}")
    with pytest.raises(StoreError, match=r"no Parquet files in 'hdfs://.*prepare the data again"):
        search(spark, store).fit_on_prepared_data()


def test_two_processes_create_one_file_once(cluster: HdfsCluster) -> None:
    store = HDFSStore(f"{cluster.url}/creators")
    code = (
        "import json, sys; from cerebro_hydra.storage import Store; "
        "from cerebro_hydra.errors import StoreError; import os; won = []\n"
        "store = Store.from_dict(json.loads(sys.argv[1]))\n"
        "for n in range(50):\n"
        "    try: store.create(f'{store.prefix}/data/{n}', str(os.getpid()).encode())\n"
        "    except StoreError: continue\n"
        "    won.append(n)\n"
        "print(os.getpid(), *won)"
    )
    command = [sys.executable, "-c", code, json.dumps(store.to_dict())]
    creators = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    won: dict[int, str] = {}
    for creator in creators:
        pid, *numbers = creator.communicate()[0].split()
        assert not set(map(int, numbers)) & set(won)
        won |= {int(n): pid for n in numbers}
    assert sorted(won) == list(range(50))
    for number, pid in won.items():
        assert store.read(f"{store.prefix}/data/{number}") == pid.encode()
    assert sorted(map(int, store.list(f"{store.prefix}/data"))) == list(range(50))


def test_unwritable_folder_is_refused_with_a_remedy(cluster: HdfsCluster) -> None:
    HDFSStore(f"{cluster.url}/mine")
    code = f"from cerebro_hydra import HDFSStore; HDFSStore('{cluster.url}/mine/theirs')"
    somebody = {**os.environ, "HADOOP_USER_NAME": "somebody"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=somebody, capture_output=True, text=True
    )
    last = done.stderr.splitlines()[-1]
    assert "StoreError: can't create" in last
    assert "user=somebody" in last and "this user may write" in last


def test_name_node_that_does_not_answer_is_named() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"hdfs://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(StoreError, match=rf"{url}.*check that the server runs"):
            HDFSStore(f"{url}/user/me")


def test_write_over_a_folder_is_refused_and_leaves_nothing(cluster: HdfsCluster) -> None:
    store = HDFSStore(f"{cluster.url}/over")
    store.write(f"{store.prefix}/data/folder/file", b"x")
    with pytest.raises(StoreError, match="can't write"):
        store.write(f"{store.prefix}/data/folder", b"y")
    assert store.list(f"{store.prefix}/data") == ["folder"]
    with pytest.raises(StoreError, match="can't write"):
        store.write(f"{store.prefix}/data/folder/file/below", b"y")
