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
from cerebro_hydra.spark import SparkLauncher
from cerebro_hydra.storage.run_document import RunDocument
from cerebro_hydra.wire.credentials import Credentials

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


class Exchange:
    """Where stand-in agents dial in."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(WAIT)
        self.port: int = self._server.getsockname()[1]

    def accept(self) -> Caller:
        connection, _ = self._server.accept()
        connection.settimeout(WAIT)
        return Caller(json.loads(connection.makefile().readline()), connection)

    def accept_all(self, number: int) -> dict[int, Caller]:
        callers = [self.accept() for _ in range(number)]
        return {caller.hello["worker"]: caller for caller in callers}

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def exchange() -> Iterator[Exchange]:
    exchange = Exchange()
    yield exchange
    exchange.close()


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


def make_spec(exchange: Exchange | None = None) -> AgentSpec:
    """Return a spec whose coordinator is the exchange."""
    document = RunDocument(
        run_id="r1", factory=None, seed=0, order="dynamic", num_epochs=1, num_partitions=3,
        evaluation_metric="loss", metrics={"loss": "min"}, feature_columns=("x",),
        label_columns=("y",), store={}, fingerprint="f" * 32, validated=False, threads=1,
    )  # fmt: skip
    control = "" if exchange is None else str(exchange.port)
    return AgentSpec(
        control,
        Credentials("a secret"),
        3,
        document,
        Manifest("f" * 32, (ColumnSpec("x", "float32", ()),), ()),
    )


@pytest.fixture
def exits() -> queue.Queue[BaseException | None]:
    return queue.Queue()


Exits = queue.Queue[BaseException | None]


def make_factory() -> Callable[..., Any]:
    def factory(params: dict[str, Any]) -> Any:
        return params["x"] * 3

    return factory


def test_every_worker_gets_its_number_the_spec_the_factory_and_a_scratch_folder(
    spark: SparkSession, exchange: Exchange, exits: Exits
) -> None:
    launcher = SparkLauncher(spark.sparkContext, 3, make_agent())
    spec = make_spec(exchange)
    launcher.start(spec, make_factory(), exits.put)
    agents = exchange.accept_all(3)
    assert sorted(agents) == [0, 1, 2]
    for worker, agent in agents.items():
        start = agent.hello["start"]
        assert AgentSpec.from_json(agent.hello["spec"]) == spec
        assert (agent.hello["built"], start["gpus"]) == (6, [])
        assert Path(start["scratch"]).is_dir() and start["scratch"].endswith(f"worker-{worker}")
    assert exits.empty()
    for agent in agents.values():
        agent.tell("end")
    assert exits.get(timeout=WAIT) is None
    launcher.stop(WAIT)
    assert not any(Path(agent.hello["start"]["scratch"]).exists() for agent in agents.values())


def test_a_killed_worker_comes_back_with_its_scratch_folder_and_the_others_stay(
    spark: SparkSession, exchange: Exchange, exits: Exits
) -> None:
    launcher = SparkLauncher(spark.sparkContext, 3, make_agent())
    launcher.start(make_spec(exchange), make_factory(), exits.put)
    agents = exchange.accept_all(3)
    cached = Path(agents[1].hello["start"]["scratch"]) / "cached"
    cached.write_text("kept")
    os.kill(agents[1].hello["pid"], signal.SIGKILL)
    again = exchange.accept()
    assert again.hello["worker"] == 1 and again.hello["pid"] != agents[1].hello["pid"]
    assert again.hello["start"]["scratch"] == str(cached.parent) and cached.read_text() == "kept"
    for agent in (agents[0], agents[2], again):
        agent.tell("end")
    assert exits.get(timeout=WAIT) is None
    launcher.stop(WAIT)


def test_other_jobs_run_while_agents_hold_their_slots(
    spark: SparkSession, exchange: Exchange, exits: Exits
) -> None:
    launcher = SparkLauncher(spark.sparkContext, 3, make_agent())
    launcher.start(make_spec(exchange), make_factory(), exits.put)
    agents = exchange.accept_all(3)
    assert spark.range(100).count() == 100
    for agent in agents.values():
        agent.tell("end")
    assert exits.get(timeout=WAIT) is None


def test_a_hung_agent_that_was_given_up_is_killed_and_replaced(
    spark: SparkSession, exchange: Exchange, exits: Exits
) -> None:
    launcher = SparkLauncher(spark.sparkContext, 2, make_agent())
    launcher.start(make_spec(exchange), make_factory(), exits.put)
    agents = exchange.accept_all(2)
    os.kill(agents[0].hello["pid"], signal.SIGSTOP)
    launcher.replace(0, agents[0].hello["start"]["number"])
    again = exchange.accept()
    assert again.hello["worker"] == 0
    assert again.hello["start"]["number"] != agents[0].hello["start"]["number"]
    assert agents[0].has_ended()  # a stopped process ends by SIGKILL alone
    launcher.replace(0, agents[0].hello["start"]["number"])  # over already: nothing happens
    for agent in (agents[1], again):
        agent.tell("end")
    assert exits.get(timeout=WAIT) is None
    launcher.stop(WAIT)


def test_agents_dial_the_address_that_executors_know_the_driver_by(spark: SparkSession) -> None:
    assert SparkLauncher(spark.sparkContext, 1).host == "127.0.0.1"


def test_stop_cancels_agents_that_do_not_end_and_their_processes_are_gone(
    spark: SparkSession, exchange: Exchange, exits: Exits
) -> None:
    launcher = SparkLauncher(spark.sparkContext, 2, make_agent())
    launcher.start(make_spec(exchange), make_factory(), exits.put)
    agents = exchange.accept_all(2)
    launcher.stop(timeout=0.0)
    assert isinstance(exits.get(timeout=WAIT), Cancelled)
    assert all(agent.has_ended() for agent in agents.values())
    assert exits.empty()


def test_stop_before_start_and_after_the_end_does_nothing(
    spark: SparkSession, exchange: Exchange, exits: Exits
) -> None:
    launcher = SparkLauncher(spark.sparkContext, 1, make_agent())
    launcher.stop(0.0)
    launcher.start(make_spec(exchange), make_factory(), exits.put)
    exchange.accept().tell("end")
    assert exits.get(timeout=WAIT) is None
    launcher.stop(WAIT)
    launcher.stop(0.0)
    assert exits.empty()


def test_an_agent_that_fails_again_and_again_ends_the_job_with_its_error(
    spark: SparkSession, exits: Exits
) -> None:
    def agent(spec: Any, start: Any, factory: Callable[..., Any]) -> None:
        raise ValueError("always")

    SparkLauncher(spark.sparkContext, 1, agent).start(make_spec(), make_factory(), exits.put)
    error = exits.get(timeout=WAIT)
    assert "ValueError: always" in str(error) and "failed 8 times" in str(error)


def test_a_job_that_failures_ended_begins_anew_if_its_agents_had_joined(
    spark: SparkSession, exchange: Exchange, exits: Exits
) -> None:
    launcher = SparkLauncher(spark.sparkContext, 2, make_agent())
    launcher.start(make_spec(exchange), make_factory(), exits.put)
    agents = exchange.accept_all(2)
    for failures in range(8):
        launcher.replace(0, agents[0].hello["start"]["number"] - 1000)  # as the coordinator does
        agents[0].tell("fail")
        if failures < 7:
            agents[0] = exchange.accept()
            assert agents[0].hello["worker"] == 0
    assert agents[1].has_ended()  # its job is over
    for agent in exchange.accept_all(2).values():
        agent.tell("end")
    assert exits.get(timeout=WAIT) is None
    launcher.stop(WAIT)


@pytest.mark.long
def test_more_deaths_than_a_task_may_have_failures_cost_no_other_agent(
    spark: SparkSession, exchange: Exchange, exits: Exits
) -> None:
    launcher = SparkLauncher(spark.sparkContext, 2, make_agent())
    launcher.start(make_spec(exchange), make_factory(), exits.put)
    agents = exchange.accept_all(2)
    for _ in range(11):
        os.kill(agents[0].hello["pid"], signal.SIGKILL)
        assert agents[0].has_ended()
        launcher.replace(0, agents[0].hello["start"]["number"])
        agents[0] = exchange.accept()
        assert agents[0].hello["worker"] == 0
    os.kill(agents[0].hello["pid"], signal.SIGSTOP)  # one that hangs dies with its task
    launcher.replace(0, agents[0].hello["start"]["number"])
    assert agents[0].has_ended()
    agents[0] = exchange.accept()
    for agent in agents.values():  # the other one is the first of its worker
        agent.tell("end")
    assert exits.get(timeout=WAIT) is None
    launcher.stop(WAIT)


def test_a_module_that_workers_lack_is_named(spark: SparkSession, exits: Exits) -> None:
    def agent(spec: Any, start: Any, factory: Callable[..., Any]) -> None:
        __import__("a_module_of_the_driver")

    SparkLauncher(spark.sparkContext, 1, agent).start(make_spec(), make_factory(), exits.put)
    error = exits.get(timeout=WAIT)
    assert isinstance(error, SetupError)
    assert "can't import a_module_of_the_driver" in str(error)


def test_a_factory_that_captures_spark_is_refused_by_name(
    spark: SparkSession, exits: Exits
) -> None:
    context = spark.sparkContext

    def my_factory(params: dict[str, Any]) -> Any:
        return context.defaultParallelism

    with pytest.raises(ConfigurationError, match=r"my_factory.*can't be sent.*SparkContext"):
        SparkLauncher(context, 1, make_agent()).start(make_spec(), my_factory, exits.put)
    assert exits.empty()


def test_a_factory_that_captures_a_lock_is_refused_by_name(
    spark: SparkSession, exits: Exits
) -> None:
    lock = threading.Lock()

    def locking(params: dict[str, Any]) -> Any:
        return lock

    with pytest.raises(ConfigurationError, match=r"locking.*create what it needs inside"):
        SparkLauncher(spark.sparkContext, 1, make_agent()).start(make_spec(), locking, exits.put)
