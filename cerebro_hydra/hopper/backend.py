"""Defines where searches run and how they get agents: on Spark, or on this machine in tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from cerebro_hydra.data.manifest import Manifest, RowsFound
from cerebro_hydra.data.partition import CachedPartition
from cerebro_hydra.data.spec import DataSpec
from cerebro_hydra.hopper.protocol.agent_spec import AgentSpec, LossLimits
from cerebro_hydra.hopper.protocol.resources import WorkerResources
from cerebro_hydra.storage import Store
from cerebro_hydra.wire.credentials import TLS

Factory = Callable[..., Any]
"""The user's `estimator_gen_fn`."""


@runtime_checkable
class Backend(Protocol):
    """Offers what a search needs of the place where it runs.

    `num_workers` is the number of agents, and of partitions of the data; `resources` is what each
    of them may train with.
    """

    num_workers: int
    resources: WorkerResources

    def rows(self, given: Any) -> Any:
        """Return what this backend takes for a DataFrame, from what may stand in its place.

        Raises:
            ConfigurationError: there is nothing at a path, or it can't be read.
            DataError: a column of a table can't be used.
        """
        ...

    def prepare(
        self,
        store: Store,
        df: Any,
        spec: DataSpec,
        tell: Callable[[str], None],
        recheck: bool = False,
    ) -> Manifest:
        """Write rows to the store as prepared data, or find them prepared there already.

        `df` is what this backend takes for a DataFrame; `tell` is given what is done. `recheck`
        asks for a look at all rows, even where the files that they come from have not changed.

        Raises:
            ConfigurationError: the rows don't have the columns of the spec.
            DataError: rows can't be used (null, NaN, ragged); names column and row.
        """
        ...

    def check_factory(self, factory: Factory) -> None:
        """Refuse an `estimator_gen_fn` that can't travel to the agents.

        Raises:
            ConfigurationError: says what it refers to, and what to change.
        """
        ...

    def first_rows(self, df: Any, spec: DataSpec, count: int) -> CachedPartition | None:
        """Return as many rows as are at hand at once, to try a model on before rows are prepared.

        None if there are fewer, if finding them could take long, or if they are at fault, which
        `prepare` tells of all rows.

        Raises:
            ConfigurationError: the rows don't have the columns of the spec.
            DataError: a column is of a type that can't be used.
        """
        ...

    def identify(
        self,
        store: Store,
        df: Any,
        spec: DataSpec,
        num_partitions: int,
        tell: Callable[[str], None],
    ) -> RowsFound:
        """Find out which prepared data the rows would become in so many partitions.

        Nothing is written; rows whose files have not changed are not read either.

        Raises:
            ConfigurationError: the rows don't have the columns of the spec.
            DataError: a column can't be used as it is.
        """
        ...

    def describe(self, store: Store, spec: DataSpec) -> Manifest:
        """Make the existing Parquet files of the store its data, as they lie.

        Raises:
            ConfigurationError: the paths of the store, or the spec, can't be used.
            DataError: rows can't be used (null, NaN, ragged); names column, file and row.
        """
        ...

    def launcher(self) -> Launcher:
        """Return what starts and stops the agents of one run."""
        ...


OnExit = Callable[[BaseException | None], None]


class Launcher(Protocol):
    """Starts agents and keeps their number up.

    `num_workers` is how many agents there are. `host` is the address of this machine on which the
    coordinator listens and which agents dial; `tls` says whether they do so with TLS, and `limits`
    which losses the run outlasts.
    """

    num_workers: int
    host: str
    tls: bool | TLS
    limits: LossLimits

    def start(self, spec: AgentSpec, factory: Factory, on_exit: OnExit) -> None:
        """Start the agents and return at once.

        Each runs `agent.main.run_agent(spec, start, factory)`, with an `AgentStart` that the
        launcher makes, `in_own_group`. A dead agent is started again for the same worker.

        Args:
            spec: what every agent is told.
            factory: the user's function; travels once, inside the launcher's closure.
            on_exit: called once, from any thread, when no agent will be started any more: with
                None after a regular end, else with the reason.
        """
        ...

    def replace(self, worker: int, start: int) -> None:
        """End what may be left of a start whose agent was given up, so that a new one can begin.

        It does nothing if that start is over: most agents are lost because they died.
        """
        ...

    def stop(self, timeout: float) -> None:
        """Wait `timeout` seconds for agents that were told to stop, then end them."""
        ...
