"""What agents are told travels as JSON, and nobody changes it on the way."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.hopper.protocol.agent_spec import AgentInfo, AgentSpec
from cerebro_hydra.storage import LocalStore
from cerebro_hydra.wire.credentials import Credentials
from tests.hopper.scripted_runs import document, manifest

INFO = AgentInfo("abc", 1, 7, "tcp://there:2", "there", 42, ("0", "3"), {"threads": 1})


def spec() -> AgentSpec:
    return AgentSpec("tcp://here:1", Credentials("hush"), 2, document(5, 2), manifest(5))


def test_a_spec_and_an_introduction_come_back_from_json_as_they_were() -> None:
    assert AgentSpec.from_json(json.loads(json.dumps(spec().to_json()))) == spec()
    assert AgentInfo.of_hello(json.loads(json.dumps(INFO.to_json())), 2) == INFO


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"worker": 2}, r"worker 2 is not one of 0\.\.1"),
        ({"worker": "1"}, r"worker 1 is not one of 0\.\.1"),
        ({"worker": True}, r"worker True is not one of 0\.\.1"),
        ({"worker": [0]}, r"worker \[0\] is not one of 0\.\.1"),
        ({"worker": ...}, "the agent's hello can't be read: .*'worker'"),
        ({"uri": ...}, "the agent's hello can't be read: .*'uri'"),
        ({"pid": "7"}, "hello can't be read: pid is '7'; run the same version"),
        ({"uri": None}, "hello can't be read: uri is None; run the same version"),
        ({"numeric": [1]}, r"hello can't be read: numeric is \[1\]; run the same version"),
        ({"gpus": None}, "the agent's hello can't be read: .*run the same version"),
        ({"extra": 1}, "the agent's hello can't be read: .*'extra'.*run the same version"),
    ],
)
def test_a_hello_of_another_run_or_version_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        hello = {**INFO.to_json(), **changes}
        AgentInfo.of_hello({name: value for name, value in hello.items() if value is not ...}, 2)


def test_each_partition_is_one_workers_own() -> None:
    assert [list(spec().partitions(worker)) for worker in range(2)] == [[0, 2, 4], [1, 3]]


def test_the_run_folder_is_that_of_the_document(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path)).to_dict()
    given = replace(spec(), document=replace(spec().document, store=store))
    assert given.open_folder().path == f"{tmp_path}/runs/run"


def test_a_spec_can_not_be_changed_and_does_not_show_its_secret() -> None:
    with pytest.raises(FrozenInstanceError):
        spec().control = "elsewhere"  # type: ignore[misc]
    assert "hush" not in repr(spec())
