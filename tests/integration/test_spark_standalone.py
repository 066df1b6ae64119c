"""integration/spark_standalone as its README says it is run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "integration" / "spark_standalone"


@pytest.mark.long
def test_a_job_sent_to_a_cluster_trains_replays_and_leaves_nothing_behind() -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / "run.py")], capture_output=True, text=True, timeout=540
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout[done.stdout.index("{") : done.stdout.rindex("}") + 1])
    assert told["doctor"] == {"ok": True, "findings": []}
    origins = [told["driver_found_package_in"], *told["executors_found_package_in"]]
    assert all("cerebro_hydra.zip" in origin for origin in origins) and len(set(origins)) == 3
    assert "driver 127.0.0.1:" in told["network"]
    assert "127.0.0.2:" in told["network"] and "127.0.0.3:" in told["network"]
    assert told["status"] == ["finished"] * 2 and set(told["replay_identical"].values()) == {True}
    assert told["killed"] is not None and told["predicted_rows"] == 400
    assert sorted(told["workers"][k]["gpus"] for k in "01") == [["4"], ["5"]]
    assert told["workers"]["0"]["pid"] != told["killed"]
    assert told["cuda_was_shown"] == ["4", "5"]
    assert told["report"], "the package lies in a zip, and so does the report's page"
    assert "had to kill" not in done.stderr
    assert not Path(origins[0]).parents[1].exists()
