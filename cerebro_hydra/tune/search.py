"""The base of all searches: checks the arguments, and runs the trials that a searcher proposes.

The first model is built and tried before any row is prepared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from cerebro_hydra.available_memory import available_memory
from cerebro_hydra.data.claim import forget_claims
from cerebro_hydra.data.manifest import Manifest
from cerebro_hydra.data.preparation.existing import existing_paths
from cerebro_hydra.data.preparation.prepared import choose_prepared
from cerebro_hydra.data.reader import reader_title
from cerebro_hydra.data.spec import DataSpec, require_dataframe
from cerebro_hydra.errors import AllTrialsFailed, ConfigurationError, Interrupted, StoreError
from cerebro_hydra.hopper.backend import Backend
from cerebro_hydra.keywords import named_init
from cerebro_hydra.observe import Observer
from cerebro_hydra.plan.messages.config import CHECKPOINTS, KEEPS, ORDERS
from cerebro_hydra.plan.seeds import seed_of
from cerebro_hydra.storage import RunFolder, Store, estimator_factories, require_store
from cerebro_hydra.storage.estimator_factories import refuse_while_imported
from cerebro_hydra.storage.names import new_run_id
from cerebro_hydra.storage.run_document import RUN_FILE, HeldOut, RunDocument
from cerebro_hydra.storage.run_folder import read_search, require_run, write_search
from cerebro_hydra.tune.decisions import AskAndTell, Target, checked_target
from cerebro_hydra.tune.searchers.searcher import SearchedRun, Searcher
from cerebro_hydra.tune.searchers.space import (
    Dimension,
    as_json,
    draws,
    duration,
    seconds,
    share,
    whole,
)
from cerebro_hydra.waits import Waiting, loading

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from cerebro_hydra.planning.biller import Biller
    from cerebro_hydra.planning.plan import Plan
    from cerebro_hydra.tune.admission import Admission
    from cerebro_hydra.tune.result import SearchResult
    from cerebro_hydra.tune.running import Surroundings
    from cerebro_hydra.tune.trials import EndOfRun

# What imports torch, which takes seconds, is imported by the methods of a fit that need it.


AT_ONCE_PER_PARTITION = 2
"""How many trials train at once, for each partition, in a search that begins some by what others
have measured: with one, workers would wait whenever two trials need the same partition next."""


class Search(ABC):
    """Trains what a searcher proposes over a DataFrame; all arguments by keyword.

    Args:
        backend: where it runs.
        store: where prepared data and the run's folder lie; every worker must see it.
        estimator_gen_fn: a function of the parameters that returns a `SparkEstimator`. What it
            refers to must be importable, or picklable, on the workers.
        num_epochs: passes of every trial over all rows; with a searcher of your own the most that
            a trial may take.
        evaluation_metric: "loss" or the name of a metric; decides which trial is best.
        validation: share of rows to hold out, or the name of a column that says which; None
            validates on nothing, and then the training loss decides.
        feature_columns: they go to the arguments of the model's forward that have their names, or
            by position if not all do.
        label_columns: what the loss takes after the model's outputs; None trains without labels,
            on what the loss takes by the names of feature columns.
        sample_weight_column: what a row's loss counts, in training and in the validation loss, or
            None.
        seed: of everything random.
        order: "dynamic" sends a trial to whichever worker is free, "seeded" fixes every trial's
            order of partitions beforehand, so that two runs give the same bits.
        batch_seconds: how long one batch may take, without the wait for shards; None allows any
            time. A trial that takes longer fails alone, and its agent is replaced. A batch that
            takes 20 times the median of its trial's batches is told of in any case. An audit may
            take ten times as long.
        keep: "best" takes the state after a trial's best epoch as its result, "last" that after its
            last one. None is "best" where there are validation rows or early stopping.
        sub_epoch_seconds: how long a sub-epoch, or the evaluation of one partition, may take from
            its first batch on; else like `batch_seconds`.
        admission_seconds: how long the admission of a candidate may take, in which its model is
            built, cut and tried on a few batches; None allows any time. One that takes longer
            fails alone, and the others go on.
        checkpoint: after what the newest state of every trial is written to the store, in the
            background: "epoch", "sub-epoch", or only at the "end" of the trial. A run that is
            resumed goes on from there.
        audit_share: how much of the training time may go into audits, which take single steps also
            with the uncut model and compare every bit; 0 makes none. A trial that differs is
            trained again as one piece, or fails if it is one already.
        time_budget: how long the trials of one call of `fit` may train, in seconds or as "90s",
            "30m", "2h" or "1h30m"; None allows any time.
        target: what a trial shall measure in one epoch, such as `{"accuracy": 0.97}` or
            `{"val_loss": 0.1}`; None lets every trial train as far as its search does. When the
            time is over or a trial has reached the target, the run ends for now with the best so
            far: the trials that are not over rest, keep their best state so far as their result,
            and go on from their newest one when the run is resumed.
        verbose: 0 prints nothing, 1 shows progress.
        observers: are given every record of the run, such as a `TensorBoardTracker`; one that
            raises is left out, and the run goes on.

    Attributes:
        result: that of the last fit, also of one that was interrupted; None before the first.

    Raises:
        ConfigurationError: an argument can't be used; the message names it, its value and what to
            give.
    """

    @named_init
    def __init__(
        self,
        *,
        backend: Backend,
        store: Store,
        estimator_gen_fn: Callable[[Any], Any],
        num_epochs: int,
        evaluation_metric: str = "loss",
        validation: float | str | None = 0.2,
        feature_columns: Sequence[str] = ("features",),
        label_columns: Sequence[str] | None = ("label",),
        sample_weight_column: str | None = None,
        seed: int = 0,
        order: str = "dynamic",
        batch_seconds: float | None = None,
        sub_epoch_seconds: float | None = None,
        admission_seconds: float | None = None,
        checkpoint: str = "epoch",
        audit_share: float = 0.01,
        keep: str | None = None,
        time_budget: float | str | None = None,
        target: Mapping[str, float] | None = None,
        verbose: int = 1,
        observers: Sequence[Observer] = (),
    ) -> None:
        if not isinstance(backend, Backend):
            raise ConfigurationError(f"backend is {backend!r}; give a SparkBackend")
        require_store(store)
        if not callable(estimator_gen_fn):
            raise ConfigurationError(
                f"estimator_gen_fn is {estimator_gen_fn!r}; give a function of the parameters "
                "that returns a SparkEstimator"
            )
        self.backend = backend
        self.store = store
        self.estimator_gen_fn = estimator_gen_fn
        self.num_epochs = whole("num_epochs", num_epochs, least=1)
        self.evaluation_metric = _checked_metric(evaluation_metric, validation)
        self.seed = whole("seed", seed, least=0)
        self.data_spec = DataSpec.checked(
            feature_columns,
            label_columns,
            sample_weight_column,
            validation,
            seed,
        )
        if order not in ORDERS:
            raise ConfigurationError(f"order is {order!r}; it is one of {ORDERS}")
        self.order = order
        if checkpoint not in CHECKPOINTS:
            raise ConfigurationError(f"checkpoint is {checkpoint!r}; it is one of {CHECKPOINTS}")
        self.checkpoint = checkpoint
        self.batch_seconds = seconds("batch_seconds", batch_seconds)
        self.sub_epoch_seconds = seconds("sub_epoch_seconds", sub_epoch_seconds)
        self.admission_seconds = seconds("admission_seconds", admission_seconds)
        self.audit_share = share("audit_share", audit_share)
        if keep is not None and keep not in KEEPS:
            raise ConfigurationError(f"keep is {keep!r}; it is one of {KEEPS}, or None")
        self.keep = keep
        self.time_budget = duration("time_budget", time_budget)
        self.target = checked_target(target, validation)
        self.verbose = whole("verbose", verbose, least=0)
        if not isinstance(observers, Sequence):
            raise ConfigurationError(f"observers is {observers!r}; give a list: [{observers!r}]")
        for observer in observers:
            if not isinstance(observer, Observer):
                raise ConfigurationError(
                    f"observers holds {observer!r}, which has no on_record; give trackers such as "
                    "TensorBoardTracker(log_dir)"
                )
        self.observers = tuple(observers)
        self.result: SearchResult | None = None

    @abstractmethod
    def searcher(self, run: SearchedRun) -> Searcher:
        """Return a new searcher, which proposes the trials of one run."""

    def given(self, run: SearchedRun) -> dict[str, Any]:
        """Return as JSON what a searcher of a new run begins with, and a resumed one must have.

        The folder of a run keeps it, and `SearchedRun.given` has it again when the run is resumed.
        """
        return {}

    def first_candidates(self) -> Sequence[Mapping[str, Any]]:
        """Return parameters of trials that are looked at before rows are prepared.

        Where none of them can be built, no trial can; a search that can't tell has none.
        """
        return ()

    def check_direction(self, direction: str) -> None:  # noqa: B027
        """Refuse "min" or "max" of the metric that decides; most searches take both.

        Raises:
            ConfigurationError: the search can't use it.
        """

    def fit(self, df: Any, resume: str | None = None, recheck: bool = False) -> SearchResult:
        """Train every candidate on `df`.

        The first trials train while later ones are still built and tried. A trial whose model can't
        be built, or whose training raises or gives a NaN loss, fails alone: its traceback is in
        `result.trials`, which has the candidates in the order in which they were proposed. So does
        one that ends its agents' processes or
        locks Python: after three agents in a row, with what became of them. Ctrl-C, a notebook's
        stop button, SIGTERM and SIGHUP end the run and its agents within ten seconds; what was
        reached is in `result` of the error, and of this search.

        A run that was killed, interrupted or ended by an error goes on from its checkpoints, on as
        many workers as there are now. A run that is over is extended: finished trials go on if
        `num_epochs` is larger, and candidates that it does not have are added. A trial that had
        stopped early stays as it is; one that keeps its best state goes on from its last one where
        that was written, else from its best one.

        Args:
            df: the rows; for trying things, also a table of pandas or polars, or the path of a
                folder or file of Parquet, or of a CSV file. A run that goes on has those that it
                was begun with. They are compared with the run's by the sum of a hash of each row,
                for which they are read once, or by names, sizes and times of files that were
                prepared before.
            resume: the folder of a run to go on with, `<store>/runs/<run id>`; None begins one.
            recheck: read all rows again, even if those of these files were prepared before and no
                file has another name, size or time since.

        Raises:
            ConfigurationError: the data, the metric or the run does not fit the arguments, or `df`
                has other rows than the run that is to go on.
            SetupError: Spark can't run the agents.
            DataError: rows can't be used.
            StoreError: the store can't be read or written; says what to do.
            AllTrialsFailed: no trial was left; the message holds every reason.
            Interrupted: a KeyboardInterrupt; `result` holds what was reached.
        """
        refuse_while_imported(self.estimator_gen_fn)
        df = self.backend.rows(df)
        require_dataframe("fit", df)
        for name in (*self.data_spec.columns, self.data_spec.validation_column):
            if name is not None and name not in df.columns:
                raise ConfigurationError(
                    f"the DataFrame has no column {name!r}; its columns are {df.columns}"
                )
        folder = RunFolder(self.store, new_run_id()) if resume is None else self._folder_of(resume)

        from cerebro_hydra.tune.resume import RunToResume
        from cerebro_hydra.tune.running import interruptible

        with interruptible():
            if RunToResume.begun(folder):
                return self._resume(folder, df)
            with Waiting(self._surroundings.report) as waiting:
                waiting.now("checking the first model")
                self._look_first(df)
                rows = df, self.data_spec
                with loading("torch._dynamo"):  # a factory that compiles would import half of it
                    manifest = self.backend.prepare(self.store, *rows, waiting.now, recheck)
            return self._fit(manifest, folder, HeldOut.of(self.data_spec.validation))

    def fit_on_prepared_data(self, prepared: Manifest | str | None = None) -> SearchResult:
        """Train every candidate on data that is there already.

        The data is what `backend.prepare_data` has written to the store; or the Parquet files of
        the store's `train_path` and `val_path`, or of Cerebro in its folder, which are read as they
        lie: their validation rows are those of `val_path`, else the share `validation` of all rows.
        Prepared data keeps the rows that it holds out, whatever share or seed this search has.

        Args:
            prepared: what `backend.prepare_data` or `backend.existing_data` returned, or the name
                of prepared data, as `cerebro-hydra runs STORE` lists it. None takes the store's
                existing files, else the only prepared data that has the columns of this search and
                a partition for every worker.

        Raises:
            ConfigurationError: there is no such data, or several, or `prepared` is something else;
                lists what there is.
            DataError: rows of existing files can't be used.
            StoreError: the data is not as it was; and whatever `fit` raises.
        """
        from cerebro_hydra.tune.running import interruptible

        refuse_while_imported(self.estimator_gen_fn)
        if prepared is None and existing_paths(self.store) is not None:
            with interruptible():
                return self._fit(self.backend.describe(self.store, self.data_spec))
        if not isinstance(prepared, Manifest | str | None):
            raise ConfigurationError(
                f"fit_on_prepared_data got the type {type(prepared).__name__}; give what "
                "backend.prepare_data returned, the name of prepared data, or nothing; a DataFrame "
                "goes to fit"
            )
        workers = self.backend.num_workers
        with interruptible():
            return self._fit(choose_prepared(self.store, workers, self.data_spec, prepared))

    def plan(
        self,
        df: Any,
        *,
        workers: int | Sequence[int] | None = None,
        devices: int | Sequence[int] | None = None,
        device_memory: int | str | None = None,
        price_per_hour: float | None = None,
        from_run: str | None = None,
        metric: Callable[[int, int], float] | None = None,
    ) -> Plan:
        """Say what `fit` on `df` would take, without training: candidates are built and tried.

        Args:
            workers: one or several numbers of workers; None is the backend's.
            devices, device_memory: likewise, of each worker; a size such as "2GiB".
            price_per_hour: what an hour of a worker costs, if the cost shall be told.
            from_run: the folder of a run with a model of this search, whose events correct costs.
            metric: what the evaluation metric is, by trial and epoch; None lets each get better.

        Returns:
            a row for each kind of workers, as a table (docs/planning.md).

        Raises:
            ConfigurationError: an argument can't be used, or the run has other models; or as `fit`.
        """
        from cerebro_hydra.planning.biller import earlier_run_at
        from cerebro_hydra.planning.plan import Question
        from cerebro_hydra.tune.running import interruptible
        from cerebro_hydra.tune.trials import Sketches

        has = self.backend.resources, self.backend.num_workers
        question = Question.checked(*has, workers, devices, device_memory, price_per_hour)
        earlier = None if from_run is None else earlier_run_at(from_run)
        require_dataframe("plan", df := self.backend.rows(df))
        with interruptible(), Waiting(self._surroundings.report) as waiting:
            with loading("torch._dynamo"):
                manifest = self.backend.prepare(self.store, df, self.data_spec, waiting.now)
            sketches = Sketches(self._admission, manifest)

            def follower(number: int) -> AskAndTell:
                run = self._searched(manifest, lambda: sketches.metrics, {})
                searcher = self.searcher(replace(run, partitions=number))
                return AskAndTell(searcher, self.num_epochs, number)

            def document(partitions: int) -> RunDocument:
                named = self._document(new_run_id(), manifest, sketches.metrics)
                return replace(named, num_partitions=partitions)

            return sketches.plan(question, follower, document, metric, earlier)

    def _folder_of(self, run_path: str) -> RunFolder:
        folder = RunFolder.open(run_path)
        if folder.store.prefix != self.store.prefix:
            raise ConfigurationError(
                f"resume is {run_path!r}, which is not in the store {self.store.prefix!r}; give "
                "the search the store of the run"
            )
        require_run(folder)
        return RunFolder(self.store, folder.run_id)

    def _resume(self, folder: RunFolder, df: DataFrame) -> SearchResult:
        from cerebro_hydra.tune.resume import LIMITS, RunToResume

        run = RunToResume(folder)
        run.require_same(
            seed=self.seed,
            order=self.order,
            evaluation_metric=self.evaluation_metric,
            feature_columns=self.data_spec.feature_columns,
            label_columns=self.data_spec.label_columns,
            sample_weight_column=self.data_spec.sample_weight_column,
            checkpoint=self.checkpoint,
            keep=self.keep,
        )
        if run.manifest.source is None:
            held_out, partitions = run.document.held_out, run.manifest.num_partitions
            spec = self.data_spec
            if held_out is not None:
                spec = replace(spec, validation=held_out.validation)
            with Waiting(self._surroundings.report) as waiting:
                found = self.backend.identify(self.store, df, spec, partitions, waiting.now)
            self._surroundings.report(run.require_rows(found))
        limits = {name: getattr(self, name) for name in LIMITS}
        given = read_search(folder, run.document)
        searcher = self.searcher(self._searched(run.manifest, lambda: run.document.metrics, given))
        end = self._end(run.manifest.has_validation, lambda: run.document.metrics)
        end.check()
        go_on = partial(run.go_on, self._surroundings, searcher, self.num_epochs, end, **limits)
        return self._watched(folder, go_on)

    def _look_first(self, df: DataFrame) -> None:
        """Refuse what a model and the first rows show, however many rows there are."""
        import torch

        from cerebro_hydra.recipe import Columns, build_recipe, exclusive_generator, trial_seed
        from cerebro_hydra.shards.admission.admit import memory_needed
        from cerebro_hydra.shards.admission.compare import evaluate_once
        from cerebro_hydra.shards.admission.effects.isolated_factory import IsolatedFactory
        from cerebro_hydra.shards.admission.same_builds import SameBuilds
        from cerebro_hydra.tune.admission import directions_of, refusing, require_measured
        from cerebro_hydra.tune.example_batches import batch_of
        from cerebro_hydra.tune.trials import look_first

        self.backend.check_factory(self.estimator_gen_fn)
        columns = Columns.of(self.data_spec)

        def look(params: Mapping[str, Any]) -> dict[str, str]:
            isolated = IsolatedFactory(self.estimator_gen_fn)
            with exclusive_generator, torch.random.fork_rng(devices=[]), refusing(), isolated:
                build = partial(build_recipe, isolated, params, self.seed, columns)
                recipe, head = SameBuilds(isolated).first(build), None
                if memory_needed(recipe) <= available_memory():
                    head = self.backend.first_rows(df, self.data_spec, recipe.batch_size)
                if head is not None:
                    batch = batch_of(head, columns, recipe.batch_size)
                    evaluate_once(recipe, (batch.features, batch.labels), trial_seed(self.seed, 0))
                return directions_of(recipe)

        metrics = look_first(self.first_candidates(), look, self.admission_seconds)
        if metrics is not None:
            require_measured(self.evaluation_metric, metrics)
            self._end(self.data_spec.validation is not None, lambda: metrics).check()
            self.check_direction(metrics[self.evaluation_metric])

    def _fit(
        self,
        manifest: Manifest,
        folder: RunFolder | None = None,
        held_out: HeldOut | None = None,
    ) -> SearchResult:
        from cerebro_hydra.tune.resume import require_unbegun
        from cerebro_hydra.tune.running import run_claim, run_trials
        from cerebro_hydra.tune.trials import SearchTrials

        folder = folder or RunFolder(self.store, new_run_id())
        with run_claim(folder):
            require_unbegun(folder)
            with _removed_on_error(folder):
                admission = self._admission(folder, manifest)
                run = self._searched(manifest, lambda: admission.metrics, {})
                given = as_json("the search was given", self.given(run))
                begun_with = write_search(folder, given)
                searcher = self.searcher(replace(run, given=given))
                ask_and_tell = AskAndTell(searcher, self.num_epochs, manifest.num_partitions)
                report = self._surroundings.report
                end = self._end(manifest.has_validation, lambda: admission.metrics)
                trials = SearchTrials(
                    ask_and_tell, admission, folder, self.admission_seconds, report, end
                )
                trials.admit_first()
                end.check()
                self.check_direction(run.direction())
                self.backend.check_factory(self.estimator_gen_fn)
                self.backend.launcher()  # else a run of a Spark that was stopped would stay
                document = self._document(folder.run_id, manifest, admission.metrics)
                document = replace(document, held_out=held_out, search=begun_with)
                folder.write_json(RUN_FILE, document.to_json())
            parts = (folder, document, trials, manifest)
            return self._watched(folder, partial(run_trials, self._surroundings, *parts))

    def _watched(self, folder: RunFolder, run: Callable[[], SearchResult]) -> SearchResult:
        """Run it, and keep its result, also that of a run that is interrupted or has none left."""
        try:
            self.result = run()
        except Interrupted as interrupted:
            self.result = interrupted.result
            raise
        except AllTrialsFailed:
            from cerebro_hydra.tune.result import SearchResult

            self.result = SearchResult.open(folder.path)
            raise
        return self.result

    def _searched(
        self,
        manifest: Manifest,
        directions: Callable[[], Mapping[str, str]],
        given: Mapping[str, Any],
    ) -> SearchedRun:
        split, metric = "val" if manifest.has_validation else "train", self.evaluation_metric
        rows = [manifest.rows("train", number) for number in range(manifest.num_partitions)]
        return SearchedRun(
            f"{split}_{metric}", lambda: directions()[metric], len(rows), given, rows
        )

    def _end(self, validated: bool, directions: Callable[[], Mapping[str, str]]) -> EndOfRun:
        from cerebro_hydra.tune.trials import EndOfRun

        if self.target is None:
            return EndOfRun(self.time_budget)
        split = "val" if validated else "train"
        values = {
            name if name.startswith(("val_", "train_")) else f"{split}_{name}": value
            for name, value in self.target.items()
        }
        return EndOfRun(self.time_budget, Target(values, directions))

    @property
    def _surroundings(self) -> Surroundings:
        from cerebro_hydra.tune.running import Surroundings

        return Surroundings(self.backend, self.estimator_gen_fn, self.verbose, self.observers)

    def _admission(
        self, folder: RunFolder | None, manifest: Manifest, biller: Biller | None = None
    ) -> Admission:
        from cerebro_hydra.recipe import Columns
        from cerebro_hydra.tune.admission import Admission
        from cerebro_hydra.tune.example_batches import ExampleBatches

        columns = Columns.of(self.data_spec)
        return Admission(
            self.estimator_gen_fn,
            columns,
            ExampleBatches(manifest, self.store, columns),
            folder,
            self.seed,
            self.evaluation_metric,
            self._surroundings.report,
            biller or self._surroundings.biller,
            self.keep,
        )

    def _document(self, run_id: str, manifest: Manifest, metrics: Mapping[str, str]) -> RunDocument:
        return RunDocument(
            run_id=run_id,
            factory=estimator_factories.name_of(self.estimator_gen_fn),
            seed=self.seed,
            order=self.order,
            num_epochs=self.num_epochs,
            num_partitions=manifest.num_partitions,
            evaluation_metric=self.evaluation_metric,
            metrics=metrics,
            feature_columns=self.data_spec.feature_columns,
            label_columns=self.data_spec.label_columns,
            sample_weight_column=self.data_spec.sample_weight_column,
            store=self.store.to_dict(),
            fingerprint=manifest.fingerprint,
            validated=manifest.has_validation,
            threads=self.backend.resources.threads,
            device=self.backend.resources.device_kind,
            numerics=self.backend.resources.numerics,
            reader=reader_title(),
            batch_seconds=self.batch_seconds,
            sub_epoch_seconds=self.sub_epoch_seconds,
            audit_share=self.audit_share,
            checkpoint=self.checkpoint,
            keep=self.keep,
            admission_seconds=self.admission_seconds,
        )


def drawn(search: Search, space: Mapping[str, Dimension], count: int) -> list[dict[str, Any]]:
    """Return draws of a space by the search's seed; more of them begin with the same ones."""
    return draws(space, count, Random(seed_of(search.seed, "random search")))


def require_validation(search: Search, what: str) -> None:
    """Refuse a search without validation rows that compares trials while they train.

    Raises:
        ConfigurationError: its `validation` is None.
    """
    if search.data_spec.validation is None:
        raise ConfigurationError(
            f"validation is None, and {what} compares trials by validation rows while they train; "
            "give validation=0.2, or the name of a column that says which rows"
        )


def require_as_begun(given: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that a run was begun with otherwise, and whose trials follow from them.

    Args:
        given: what the run's folder has of the search, by name.
        arguments: what the search has now.

    Raises:
        ConfigurationError: the search that resumes the run has another value of one of them.
    """
    for name, value in arguments.items():
        if name in given and given[name] != value:
            raise ConfigurationError(
                f"{name} is {value!r}, and the run was begun with {given[name]!r}, by which its "
                "trials were compared or drawn; give that again, or begin a new run"
            )


def refuse_seeded(search: Search, what: str) -> None:
    """Refuse a seeded order for what is decided by who came first.

    Raises:
        ConfigurationError: the search's `order` is "seeded".
    """
    if search.order == "seeded":
        raise ConfigurationError(
            f"order is 'seeded', and {what} by who came first, which no seed repeats; give "
            "order='dynamic', or take SuccessiveHalvingSearch or HyperbandSearch, which wait at "
            "their rungs and decide alike in two runs"
        )


@contextmanager
def _removed_on_error(folder: RunFolder) -> Iterator[None]:
    """Remove what was written of a run that can't begin, which may have filled the disk.

    What others put into its folder stays.
    """
    try:
        yield
    except BaseException:
        with suppress(StoreError):
            forget_claims(folder.store, folder.path)
            folder.forget_begun()
        raise


def _checked_metric(metric: Any, validation: Any) -> str:
    if not isinstance(metric, str):
        raise ConfigurationError(f"evaluation_metric is {metric!r}; give 'loss' or a metric's name")
    metric = metric.removeprefix("val_")  # as histories name it
    if validation is None and metric != "loss":
        raise ConfigurationError(
            f"evaluation_metric is {metric!r} and validation is None, but metrics are measured on "
            "validation rows only; give validation=0.2, or evaluation_metric='loss' for the "
            "training loss"
        )
    return metric
