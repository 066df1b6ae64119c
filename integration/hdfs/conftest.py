"""Gives all tests of this folder one HDFS and one Spark session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

import cerebro_hydra
from integration.hdfs.cluster import HdfsCluster, hdfs_cluster

os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HdfsCluster]:
    """Yield a running name node with a data node."""
    with hdfs_cluster(tmp_path_factory.mktemp("hdfs")) as running:
        yield running


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """Yield a session with two workers."""
    session = cerebro_hydra.local_spark(workers=2)
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()
