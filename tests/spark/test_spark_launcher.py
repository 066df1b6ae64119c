"""The job of agents, with a stand-in for the agent that dials this test and waits for its word."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cerebro_hydra.data.manifest import ColumnSpec, Manifest
from cerebro_hydra.errors import Cancelled, ConfigurationError, SetupError
from cerebro_hydra.hopper.protocol.agent_spec import AgentSpec
from cerebro_hydra.spark import SparkLauncher, launcher
from cerebro_hydra.spark.launcher import PickledFactory
from cerebro_hydra.storage.run_document import RunDocument
from cerebro_hydra.wire.credentials import Credentials
from tests.processes import run_python

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark(group=2)

WAIT = 60.0  # seconds until a test gives up on something that must happen


@dataclass
class Caller:
    """One stand-in agent that has dialled in."""

    hello: dict[str, Any]
    connection: socket.socket

    def tell(self, word: str) -> None:
        self.connection.sendall(word.encode())

    def has_ended(self) -> bool:
        """Wait for the end of its process, which closes the connection."""
        try:
            return self.connection.recv(1) == b""
        except ConnectionResetError:
            return True


class Job:
    """A job of stand-in agents, which dial in here, and how it ended."""

    def __init__(self, spark: SparkSession, workers: int, agent: Callable[..., None]) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(WAIT)
        self.launcher = SparkLauncher(spark.sparkContext, workers, agent)
        self.exits: queue.Queue[BaseException | None] = queue.Queue()

    def start(self, factory: Callable[..., Any] | None = None) -> AgentSpec:
        """Start the job; return the spec that its agents are given."""
        document = RunDocument(
            run_id="r1", factory=None, seed=0, order="dynamic", num_epochs=1, num_partitions=3,
            evaluation_metric="loss", metrics={"loss": "min"}, feature_columns=("x",),
            label_columns=("y",), store={}, fingerprint="f" * 32, validated=False, threads=1,
        )  # fmt: skip
        manifest = Manifest("f" * 32, (ColumnSpec("x", "float32", ()),), ())
        port = str(self._server.getsockname()[1])
        spec = AgentSpec(port, Credentials("a secret"), 3, document, manifest)
        self.launcher.start(spec, factory or make_factory(), self.exits.put)
        return spec

    def accept(self) -> Caller:
        connection, _ = self._server.accept()
        connection.settimeout(WAIT)
        return Caller(json.loads(connection.makefile().readline()), connection)

    def accept_all(self, number: int) -> dict[int, Caller]:
        callers = [self.accept() for _ in range(number)]
        return {caller.hello["worker"]: caller for caller in callers}

    def end(self, *agents: Caller) -> None:
        """Let agents end; the job has then ended well, and once."""
        for agent in agents:
            agent.tell("end")
        assert self.exits.get(timeout=WAIT) is None
        self.launcher.stop(WAIT)
        assert self.exits.empty()

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def make_job(spark: SparkSession) -> Iterator[Callable[..., Job]]:
    """Make a job that has not begun: `make_job(workers, agent)`."""
    made: list[Job] = []

    def make(workers: int, agent: Callable[..., None] | None = None) -> Job:
        made.append(Job(spark, workers, agent or make_agent()))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def begin(make_job: Callable[..., Job]) -> Callable[[int], tuple[Job, dict[int, Caller]]]:
    """Begin a job, of so many workers, and wait for its agents."""

    def begun(workers: int) -> tuple[Job, dict[int, Caller]]:
        job = make_job(workers)
        job.start()
        return job, job.accept_all(workers)

    return begun


Begin = Callable[[int], tuple[Job, dict[int, Caller]]]


def make_agent() -> Callable[..., None]:
    # Nested, so that it travels by value: tests are no module of the workers.
    def agent(spec: Any, start: Any, factory: Callable[..., Any]) -> None:
        import json
        import os
        import socket
        from dataclasses import asdict

        connection = socket.create_connection(("127.0.0.1", int(spec.control)))
        hello = {
            "worker": start.worker,
            "pid": os.getpid(),
            "start": asdict(start),
            "spec": spec.to_json(),
            "built": factory({"x": 2}),
        }
        connection.sendall(json.dumps(hello).encode() + b"\n")
        if connection.recv(16) == b"fail":
            raise ValueError("the stand-in was told to fail")

    return agent


def make_factory() -> Callable[..., Any]:
    def factory(params: dict[str, Any]) -> Any:
        return params["x"] * 3

    return factory


def test_every_worker_gets_its_number_the_spec_the_factory_and_a_scratch_folder(
    spark: SparkSession, make_job: Callable[..., Job]
) -> None:
    job = make_job(3)
    assert job.launcher.host == "127.0.0.1", "the address that executors know the driver by"
    spec = job.start()
    agents = job.accept_all(3)
    assert sorted(agents) == [0, 1, 2]
    for worker, agent in agents.items():
        start = agent.hello["start"]
        assert AgentSpec.from_json(agent.hello["spec"]) == spec
        assert (agent.hello["built"], start["gpus"]) == (6, [])
        assert Path(start["scratch"]).is_dir() and start["scratch"].endswith(f"worker-{worker}")
    assert job.exits.empty()
    assert spark.range(100).count() == 100, "other jobs run while agents hold their slots"
    job.end(*agents.values())
    assert not any(
        Path(agent.hello["start"]["scratch"]).parent.exists() for agent in agents.values()
    )


def test_a_killed_worker_comes_back_with_its_scratch_folder_and_the_others_stay(
    begin: Begin,
) -> None:
    job, agents = begin(3)
    cached = Path(agents[1].hello["start"]["scratch"]) / "cached"
    cached.write_text("kept")
    os.kill(agents[1].hello["pid"], signal.SIGKILL)
    again = job.accept()
    assert again.hello["worker"] == 1 and again.hello["pid"] != agents[1].hello["pid"]
    assert again.hello["start"]["scratch"] == str(cached.parent) and cached.read_text() == "kept"
    job.end(agents[0], agents[2], again)


def test_a_hung_agent_that_was_given_up_is_killed_and_replaced(begin: Begin) -> None:
    job, agents = begin(2)
    number = agents[0].hello["start"]["number"]
    os.kill(agents[0].hello["pid"], signal.SIGSTOP)
    job.launcher.replace(0, number)
    again = job.accept()
    assert again.hello["worker"] == 0 and again.hello["start"]["number"] != number
    assert agents[0].has_ended()  # a stopped process ends by SIGKILL alone
    job.launcher.replace(0, number)  # over already: nothing happens
    job.end(agents[1], again)


def test_stop_cancels_agents_that_do_not_end_and_their_processes_are_gone(begin: Begin) -> None:
    job, agents = begin(2)
    job.launcher.stop(timeout=0.0)
    assert isinstance(job.exits.get(timeout=WAIT), Cancelled)
    assert all(agent.has_ended() for agent in agents.values())
    assert job.exits.empty()


def test_stop_before_start_and_after_the_end_does_nothing(make_job: Callable[..., Job]) -> None:
    job = make_job(1)
    job.launcher.stop(0.0)
    job.start()
    job.end(job.accept())
    job.launcher.stop(0.0)
    assert job.exits.empty()


def test_an_agent_that_fails_again_and_again_ends_the_job_with_its_error(
    make_job: Callable[..., Job],
) -> None:
    def agent(spec: Any, start: Any, factory: Callable[..., Any]) -> None:
        raise ValueError("always")

    job = make_job(1, agent)
    job.start()
    error = job.exits.get(timeout=WAIT)
    assert "ValueError: always" in str(error) and "failed 8 times" in str(error)


def test_a_job_that_failures_ended_begins_anew_if_its_agents_had_joined(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "NEWS_SECONDS", WAIT)
    job, agents = begin(2)
    for failures in range(8):
        agents[0].tell("fail")
        if failures < 7:
            agents[0] = job.accept()
            assert agents[0].hello["worker"] == 0
    assert agents[1].has_ended()  # its job is over
    # As the coordinator does, here one that was stopped until now.
    job.launcher.replace(0, agents[0].hello["start"]["number"])
    job.end(*job.accept_all(2).values())


@pytest.mark.long
def test_more_deaths_than_a_task_may_have_failures_cost_no_other_agent(begin: Begin) -> None:
    job, agents = begin(2)
    for _ in range(11):
        os.kill(agents[0].hello["pid"], signal.SIGKILL)
        assert agents[0].has_ended()
        job.launcher.replace(0, agents[0].hello["start"]["number"])
        agents[0] = job.accept()
        assert agents[0].hello["worker"] == 0
    os.kill(agents[0].hello["pid"], signal.SIGSTOP)  # one that hangs dies with its task
    job.launcher.replace(0, agents[0].hello["start"]["number"])
    assert agents[0].has_ended()
    agents[0] = job.accept()
    job.end(*agents.values())  # the other one is the first of its worker


def test_a_module_that_workers_lack_is_named(make_job: Callable[..., Job]) -> None:
    def agent(spec: Any, start: Any, factory: Callable[..., Any]) -> None:
        __import__("a_module_of_the_driver")

    job = make_job(1, agent)
    job.start()
    error = job.exits.get(timeout=WAIT)
    assert isinstance(error, SetupError)
    assert "can't import a_module_of_the_driver" in str(error)


def test_a_factory_that_can_not_be_sent_is_refused_by_name(
    spark: SparkSession, make_job: Callable[..., Job]
) -> None:
    context, lock = spark.sparkContext, threading.Lock()

    def my_factory(params: dict[str, Any]) -> Any:
        return context.defaultParallelism

    def locking(params: dict[str, Any]) -> Any:
        return lock

    for factory, said in (
        (my_factory, r"my_factory.*can't be sent.*SparkContext"),
        (locking, r"locking.*create what it needs inside"),
    ):
        job = make_job(1)
        with pytest.raises(ConfigurationError, match=said):
            job.start(factory)
        assert job.exits.empty()


SCRIPT = """
import dataclasses, functools, sys, threading
import torch
from pathlib import Path
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.spark.launcher import pickle_factory

LOCK = threading.Lock()

@functools.lru_cache(maxsize=7)
def steps(n):
    return n if n < 2 else steps(n - 1) + steps(n - 2)

steps.scale = 2

@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    width: int = 8

OPTIONS = Options(16)

class Config:
    @functools.cached_property
    def depth(self):
        return steps(9)

def seed_everything():
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.matmul.allow_tf32 = False

def factory(params):
    seed_everything()
    found = [Config().depth, steps.cache_parameters()["maxsize"], steps.scale]
    return [*found, dataclasses.asdict(OPTIONS), torch.backends.cudnn.deterministic]

def locked():
    with LOCK:
        return 1

def locking(params):
    return locked()

Path(sys.argv[1]).write_bytes(pickle_factory(factory))
try:
    pickle_factory(locking)
except ConfigurationError as error:
    print(error)
"""


def test_what_a_script_defines_travels_whatever_functools_and_torch_make_of_it(
    tmp_path: Path,
) -> None:
    """No worker can import it: it is `__main__`, as a notebook is."""
    script, pickled = tmp_path / "train.py", tmp_path / "factory"
    script.write_text(SCRIPT)
    told = run_python(script, pickled).stdout
    assert "the global variable 'LOCK' lives only in this process" in told
    assert PickledFactory(pickled.read_bytes())({}) == [34, 7, 2, {"width": 16}, True]
