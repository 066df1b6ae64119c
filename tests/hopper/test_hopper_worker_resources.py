"""What a user may say of a worker's devices and memory, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.hopper.protocol.resources import (
    DEFAULT_RESOURCES,
    MachineFacts,
    WorkerResources,
    machine_facts,
)


def test_who_asks_for_nothing_gets_no_queues() -> None:
    for devices, gpus in ((None, 0), (1, 0), (None, 2)):
        given = WorkerResources.checked(devices, None, None, None, "auto", gpus)
        assert given == DEFAULT_RESOURCES
    assert DEFAULT_RESOURCES.computes_in_place


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        (5, 5),
        ("7", 7),
        ("2GiB", 2 << 30),
        ("1.5 gb", 1_500_000_000),
        ("64K", 64_000),
        ("3mib", 3 << 20),
    ],
)
def test_a_size_is_a_number_of_bytes_or_has_a_unit(size: int | str, nbytes: int) -> None:
    resources = WorkerResources.checked(2, size, size, "/disk", 3)
    assert resources == WorkerResources(2, nbytes, nbytes, "/disk", 3)
    assert not resources.computes_in_place


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("devices_per_worker", 0),
        ("devices_per_worker", True),
        ("device_memory", "2GX"),
        ("device_memory", 0),
        ("host_memory", -1),
        ("host_memory", "many"),
        ("scratch", "relative/folder"),
        ("scratch", 7),
        ("residents", 0),
        ("residents", "many"),
        ("pick", "sequential"),
        ("pick", None),
    ],
)
def test_what_can_not_be_used_is_named_with_its_value(name: str, value: Any) -> None:
    given = {
        "devices_per_worker": 1, "device_memory": None, "host_memory": None, "scratch": None,
        "residents": "auto",
    }  # fmt: skip
    with pytest.raises(ConfigurationError, match=f"{name} is {value!r}"):
        WorkerResources.checked(**{**given, name: value})


@pytest.mark.parametrize("digits", [20, 400, 5000])
@pytest.mark.parametrize("kind", [str, "{}GiB".format, int])
def test_more_bytes_than_any_machine_has_are_refused(
    digits: int, kind: Callable[[Any], Any]
) -> None:
    value = 10**digits if kind is int else kind("1" + "0" * digits)
    for given in ((value, None), (1, value)):
        with pytest.raises(ConfigurationError, match="_memory is more than 9,223,372,036,854,775,"):
            WorkerResources.checked(1, *given, None, "auto")


def test_a_pick_alone_leaves_a_trial_in_the_memory_of_its_agent() -> None:
    given = WorkerResources.checked(None, None, None, None, "auto", pick="sharp")
    assert given.pick == "sharp" != DEFAULT_RESOURCES.pick
    assert given.computes_in_place


def test_dram_that_nobody_speaks_of_is_half_of_what_a_machine_has_shared_by_its_workers() -> None:
    hosts = [MachineFacts("a", 64 << 30), MachineFacts("a", 64 << 30), MachineFacts("b", 24 << 30)]
    asks = WorkerResources(device_memory=1 << 30)
    assert asks.measured(lambda: hosts).host_memory == 12 << 30
    assert asks.measured(lambda: hosts[:2]).host_memory == 16 << 30
    unknown = [MachineFacts("c", math.inf)]
    assert asks.measured(lambda: unknown).host_memory is None
    assert WorkerResources(host_memory=5).measured(lambda: hosts).host_memory == 5
    assert DEFAULT_RESOURCES.measured(lambda: hosts) is DEFAULT_RESOURCES, "no budget, no cost"


@pytest.mark.parametrize("gpus", [0.5, 1, 4])
def test_who_is_given_gpus_and_asks_for_devices_has_these(gpus: float) -> None:
    given = WorkerResources.checked(1, None, None, None, "auto", gpus)
    assert (given.devices, given.device_kind) == (1, "cuda")
    assert not given.computes_in_place


def test_the_memory_of_gpus_is_that_of_the_least() -> None:
    hosts = lambda: [MachineFacts("a", 8 << 30)]  # noqa: E731
    gpus = lambda: [9 << 30, 5 << 30]  # noqa: E731
    asks = WorkerResources.checked(1, None, None, None, "auto", 1)
    measured = asks.measured(hosts, gpus)
    assert (measured.device_memory, measured.host_memory) == (5 << 30, 4 << 30)
    small = WorkerResources.checked(2, "2GiB", "1GiB", None, "auto", 2).measured(hosts, gpus)
    assert (small.device_memory, small.host_memory) == (2 << 30, 1 << 30)
    large = WorkerResources.checked(1, "6GiB", None, None, "auto", 1)
    with pytest.raises(ConfigurationError, match=r"is 6\.00 GiB, and a GPU has 5\.00 GiB"):
        large.measured(hosts, gpus)
    on_cpu = WorkerResources.checked(1, "6GiB", None, None, "auto", 0)
    assert on_cpu.measured(hosts, gpus).device_memory == 6 << 30


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"host_memory": "9GiB"},
            "host_memory is 9.00 GiB, and a has 16.0 GiB for 2 worker(s); lower it, or take None "
            "for half of what there is",
        ),
        (
            {"devices_per_worker": 3, "device_memory": "3GiB"},
            "device_memory is 3.00 GiB for each of 3 CPU device(s), and a has 16.0 GiB for "
            "2 worker(s); lower it, or take None for no limit",
        ),
    ],
)
def test_more_than_a_machine_has_is_refused_with_both_numbers(
    given: dict[str, Any], said: str
) -> None:
    asked = {
        "devices_per_worker": 1, "device_memory": None, "host_memory": None, "scratch": None,
        "residents": "auto",
    }  # fmt: skip
    machines = [MachineFacts("a", 16 << 30)] * 2
    with pytest.raises(ConfigurationError) as refused:
        WorkerResources.checked(**asked | given).measured(lambda: machines)
    assert str(refused.value) == said
    assert WorkerResources.checked(**asked | given).measured(lambda: machines[:1])


def test_a_scratch_folder_is_looked_at_and_its_room_shared(tmp_path: Path) -> None:
    asked = WorkerResources.checked(None, None, None, str(tmp_path), "auto")
    facts = machine_facts(str(tmp_path))
    assert facts.disk is not None and facts.disk > 0
    assert list(tmp_path.iterdir()) == []
    two = asked.measured(lambda: [facts._replace(disk=100), facts._replace(disk=90)])
    assert (two.disk, two.host_memory) == (45, None), "DRAM is not measured without queues"


@pytest.mark.parametrize(
    ("folder", "problem"), [("nowhere", "is not there"), ("file", "is a file")]
)
def test_a_scratch_folder_that_is_none_is_named(tmp_path: Path, folder: str, problem: str) -> None:
    (tmp_path / "file").touch()
    scratch = str(tmp_path / folder)
    asked = WorkerResources.checked(2, None, None, scratch, "auto")
    with pytest.raises(ConfigurationError) as refused:
        asked.measured(lambda: [machine_facts(scratch)])
    said = str(refused.value)
    assert said.startswith(f"scratch is {scratch!r}, which {problem} on ")
    assert said.endswith("; give the path of a folder that every worker can write to")


def test_a_scratch_folder_that_takes_no_file_is_named() -> None:
    assert "can't be written to (" in machine_facts("/proc").problem


@pytest.mark.parametrize(
    ("resources", "replicas", "said"),
    [
        (DEFAULT_RESOURCES, 5, "replicas is 5, and there are 4 partitions; take at most so many"),
        (DEFAULT_RESOURCES, 4, r"replicas is 4, and the backend has 3 worker\(s\); take at most"),
        (WorkerResources(devices=2), 2, "replicas is 2, and a replica needs a worker with one CPU"),
        (WorkerResources(devices=2), "tail", "replicas is 'tail', and a replica needs a worker"),
        (WorkerResources(device_memory=99), 2, "leave devices_per_worker, device_memory, host_mem"),
        (WorkerResources(residents=2), 2, "residents of the backend out, or replicas"),
    ],
)
def test_workers_that_can_not_train_a_trial_together(
    resources: WorkerResources, replicas: int | str, said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        resources.check_replicas(replicas, partitions=4, workers=3)
    resources.check_replicas(1, partitions=4, workers=3)
