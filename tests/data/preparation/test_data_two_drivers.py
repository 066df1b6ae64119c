"""Two drivers, each with a Spark of its own, that prepare the same rows in one store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cerebro_hydra.data.partition import check_partitions
from cerebro_hydra.data.preparation.prepared import find_prepared, prepared_in
from cerebro_hydra.storage import LocalStore

pytestmark = pytest.mark.long

DRIVER = """
import sys
from pyspark.sql import functions as F
import cerebro_hydra
from cerebro_hydra.data.preparation import prepared
from cerebro_hydra.data.spec import DataSpec
from cerebro_hydra.data.preparation.prepare import prepare
from cerebro_hydra.storage import LocalStore

prepared.CLAIM_SECONDS = 10.0
spark = cerebro_hydra.local_spark(workers=1)
x = F.col("id").cast("float")
rows = spark.range(1000).select(F.array(x, x / 3).alias("x"), (F.col("id") % 4).alias("y"))
print("ready", flush=True)
sys.stdin.readline()
spec = DataSpec.checked(["x"], ["y"], validation=0.2)
print(prepare(rows, LocalStore(sys.argv[1]), 2, spec).partitions[0].path, flush=True)
"""


def start(store: LocalStore) -> subprocess.Popen[str]:
    """Start a driver, in a process group of its own with its JVM."""
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, store.prefix],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_both_succeed_and_when_one_is_killed_the_other_does(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    drivers = [start(store) for _ in range(3)]
    try:
        for driver in drivers:
            assert driver.stdout is not None
            while driver.stdout.readline() != "ready\n":
                assert driver.poll() is None
        killed, *others = drivers
        assert killed.stdin is not None
        killed.stdin.write("go\n")
        killed.stdin.flush()
        data = Path(store.prefix, "data")
        while not any(data.glob("*/attempt-*")):  # it has claimed the rows and writes them
            assert killed.poll() is None
            time.sleep(0.01)
        os.killpg(killed.pid, signal.SIGKILL)
        for driver in others:
            assert driver.stdin is not None
            driver.stdin.write("go\n")
            driver.stdin.flush()
        said = [driver.communicate(timeout=300) for driver in others]
    finally:
        for driver in drivers:
            if driver.poll() is None:
                os.killpg(driver.pid, signal.SIGKILL)
    assert [driver.returncode for driver in others] == [0, 0], said
    (manifest,) = prepared_in(store)
    assert {out.splitlines()[-1] for out, _ in said} == {manifest.partitions[0].path}
    assert any("prepares the same rows: waiting" in err for _, err in said)
    assert not any("Py4J" in err for _, err in said)
    assert find_prepared(store, manifest.fingerprint) == manifest
    checks = check_partitions(manifest, store, str(tmp_path))
    assert [each.problem for each in checks] == [None] * 4
    attempt = manifest.partitions[0].path.partition("/")[0]
    assert store.list(store.data_path(manifest.fingerprint)) == [attempt, "manifest.json"]
