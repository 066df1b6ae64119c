"""Holds a trial as data, as its author wrote it: model, optimizer, loss, metrics, training rules.

The engine and the plain reference both read a `Recipe`; what must mean the same to both (units,
random keys, how a loss is applied) lives in this package and nowhere else.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.plan.schedules.registry import check_schedule, is_pipelined
from cerebro_hydra.recipe.batch.collating import BatchForm, Collate, collated_batch, column_of
from cerebro_hydra.recipe.batch.columns import Columns, ForwardCall, predictions
from cerebro_hydra.recipe.batch.decoded_rows import DecodedRows
from cerebro_hydra.recipe.batch.decoding import Decoder, Decoding
from cerebro_hydra.recipe.batch.loss_arguments import LossArguments
from cerebro_hydra.recipe.checked_parts import (
    AUTO,
    Stages,
    check_collate,
    check_compile,
    check_no_pick,
    check_numbers,
    checked_model,
    checked_shards,
    checked_stages,
)
from cerebro_hydra.recipe.compiled_units import CompiledUnits, check_compilable
from cerebro_hydra.recipe.grad_scaling import SCALED, GradScaling, at_scale, checked_scaler
from cerebro_hydra.recipe.lr_schedule import LRSchedule
from cerebro_hydra.recipe.objective.known_metrics import resolve_metrics
from cerebro_hydra.recipe.objective.metrics import (
    BatchSum,
    Metric,
    StateMetric,
    SumOverRows,
    as_json,
    as_made,
    metric_arguments,
    sum_over_rows,
    told_with_metric,
)
from cerebro_hydra.recipe.objective.objective import MODEL, Objective
from cerebro_hydra.recipe.objective.step_module import (
    StepBatch,
    StepModule,
    configured,
    has_training_step,
    logged_values,
    step_by_hand,
    steps_by_hand,
)
from cerebro_hydra.recipe.own_step import OwnStep, check_own_step, joined_optimizers
from cerebro_hydra.recipe.placement import CPU, Placement
from cerebro_hydra.recipe.randomness import (
    RandomKey,
    autocasting,
    by_parts,
    leave_uncompiled,
)

_TWO_DEVICES = re.compile(r"same device|two different devices|expected device")

CUTS = ("export", "modules")
"""The ways to cut a model that a user may ask for."""


class HasState(Protocol):
    """Describes what has a state dict: a trained model, or a module."""

    def state_dict(self) -> Mapping[str, Any]: ...


WarmStart = Mapping[str, Tensor] | HasState | str
"""What a model begins with: a state dict, what has one, or the path of a safetensors file."""


@dataclass(eq=False)  # a recipe is itself alone: tensors have no one answer to ==
class Recipe:
    """Holds a model with everything that its training needs.

    Args:
        model: the module under training; a `DataParallel` stands for what it wraps. One that has a
            training step and configures its optimizer, as a `LightningModule`, needs neither
            optimizer nor loss; its model is a `StepModule` then. Feature columns
            go to the arguments of its forward that have their names, or by position if not all do;
            floating ones are float64 if all of its parameters are.
        optimizer: an instance over the model's parameters; cloned per shard, never stepped itself.
            With `training_step`, it may be a list of them.
        loss: `loss(outputs, *labels)` gives the mean over the rows of a batch, a scalar; or a list
            with one loss per output and label column; or "model": forward is given the labels too
            and returns an object with a `loss`, as models of `transformers` do. A parameter that
            is named like a feature column, or like what `collate` makes, is given that; without
            labels there is nothing else for it.
        loss_weights: what each loss of a list counts.
        metrics: names; or by name a metric of torchmetrics, or `(function, "min"|"max")` where
            `function(outputs, *labels)` is a mean over rows or a `StateMetric`, or "min" or "max"
            for what a model with a training step logs in validation. The parameters of a function
            are given columns as the loss's are.
        batch_size: rows per batch.
        shards: how many to cut into, balanced by measured time; "auto" for the fewest that fit the
            `device_memory` of the workers, one without; or the names of the modules to cut at; or a
            list of lists of names (or modules), the blocks of each shard.
        lr_scheduler: a function of the optimizer, or of (optimizer, steps_per_epoch). For several
            optimizers it is called for each, or a list has one for each, or None.
        lr_interval: "step" steps it after every optimizer step, "epoch" at the end of an epoch, as
            one that steps on a metric (ReduceLROnPlateau) always does.
        lr_metric: what such a one is given, as measured on validation rows.
        clip_grad_norm: largest global 2-norm of the gradients, or None.
        clip_grad_value: largest magnitude of any gradient's element, or None.
        accumulate: batches per optimizer step; gradients are weighted by rows.
        autocast: "bfloat16" or "float16" runs forward and loss in mixed precision, None in the
            model's own. Losses are scaled in float16, and steps that overflow are skipped.
        ema: decay of an exponential moving average of the parameters, such as 0.999, that is
            evaluated and kept as the trained model, or None.
        early_stopping: epochs without a better evaluation metric after which the trial ends;
            None trains all epochs.
        collate: `collate(batch, training)` takes a dict of column to tensor, rows first, and
            returns one with the same names (padding, augmentation) or with others: those of
            forward's arguments, and what forward doesn't take are labels. Its random numbers must
            come from torch.
        warm_start: what to begin with: a trained model, such as `result.get_best_model()`, or a
            module; a state dict; or the path of a safetensors file with one.
        cut: "modules" lets the model's own forward run and stops it between modules; "export" cuts
            the graph of `torch.export`, or by modules where that can't be had. None is "export" for
            a schedule that has several microbatches under way, which needs a graph, and "modules"
            for others.
        schedule: the order of the trial's own shard tasks over the devices of a worker:
            "sequential" does one after the other; "gpipe", "1f1b" and "interleaved" let each device
            do ranges of shards, for one of the `accumulate` batches of a step after the other.
            Results are the same. "pipedream" and "2bw" don't wait for updates, so that tasks read
            older weights (docs/schedules.md): results depend on the number of devices that a
            worker has when the trial is admitted, and are the same whatever happens later.
        vertical_sync: whether, by "pipedream", every device reads the version of the weights that
            the first one reads.
        stages: which shards each device does in a pipeline: "auto" groups them by their measured
            times, into as many stages as a worker has devices; or a number of stages; or how many
            shards each has, such as [2, 1, 1]. By "pipedream" and "2bw" results depend on them.
        recompute: whether a backward computes its shard's activations again, so that a device needs
            only the shard at hand; "auto" does so where a device can't hold the whole trial.
        grad_scaler: how the scale of float16 begins and changes; a copy is used. None is torch's.
        decode: what columns of bytes become, by name: "jpeg" or "png" gives uint8 of shape
            (channels, height, width), or a function of bytes returns an array or tensor of uint8,
            the same for equal bytes. `collate` is given a list with a tensor for each row, or with
            bytes where nothing is decoded; without it they are stacked, and have one shape.
            Columns of Spark's images are decoded without being named.
        training_step: `training_step(model, batch, optimizers)` trains on a batch by itself, as of
            a GAN: it calls backward and the optimizers' step, and returns the loss that is told, or
            a dict with it under "loss". A batch is a tuple of the columns, read by name, too. It
            begins without gradients; `loss` and metrics measure validation rows. The trial is one
            shard.
        replicas: workers that train it at once, with a batch each in each of `accumulate` rounds;
            or "tail" for as many as there are to each trial that is left at the end of its search.
        optimizer_on: "host" keeps optimizer state and moving averages in DRAM, where the CPU
            updates parameters, so that a device needs no room for them; on a GPU bits are others.
        compile: whether `torch.compile` makes faster code of each block. Bits are not those of the
            plain model, but equal in every run. The model is cut by modules.

    Raises:
        ConfigurationError: an argument can't be used; the message names it and its value.
    """

    model: nn.Module
    optimizer: Any = None  # then the model makes it; joined, if there are several
    loss: Any = None
    metrics: Any = ()
    batch_size: int = 32
    shards: int | Sequence[Any] = 1
    lr_scheduler: Any = None
    clip_grad_norm: float | None = None
    accumulate: int = 1
    loss_weights: Sequence[float] | None = None
    lr_interval: str = "step"
    lr_metric: str = "loss"
    clip_grad_value: float | None = None
    autocast: str | None = None
    ema: float | None = None
    early_stopping: int | None = None
    collate: Collate | None = None
    warm_start: WarmStart | None = None
    cut: str | None = None
    schedule: str = "sequential"
    recompute: bool | str = "auto"
    vertical_sync: bool = False
    stages: Stages = AUTO
    grad_scaler: torch.amp.GradScaler | None = None
    decode: Mapping[str, Decoder] | None = None
    training_step: OwnStep | None = None
    replicas: int | Literal["tail"] = 1
    optimizer_on: Literal["device", "host"] = "device"
    compile: bool = False
    columns: Columns | None = field(default=None, init=False, repr=False)
    device: torch.device = field(default=CPU, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.loss is None and has_training_step(self.model):
            self._take_steps()
        if self.training_step is not None:
            check_own_step(self.training_step, vars(self))
            self.shards = 1
        self.model = checked_model(self.model)
        self.uncompiled = leave_uncompiled(self.model)
        self._compiled = CompiledUnits(check_compilable(self.model) if self.compile else ())
        given, step = self.optimizer, self.training_step
        self.optimizer = joined_optimizers(given, self.model, step, self.loss)
        self._objective = Objective(self.loss, self.loss_weights)
        self.metric_list = resolve_metrics(self.metrics)
        self.lr_schedule = LRSchedule(self.lr_scheduler, self.lr_interval, self.lr_metric)
        check_collate(self.collate)
        self._decoding = Decoding(self.decode)
        self.shards = checked_shards(self.shards, self.model)
        self._configured: tuple[nn.Module | None, list[nn.Module]] = (None, [])
        kinds = {p.dtype for p in self.model.parameters() if p.is_floating_point()}
        self._in_double = kinds == {torch.float64}
        check_numbers(vars(self))
        self._check_cut()
        self.scaler = checked_scaler(self.grad_scaler, self.autocast, self.model)
        self.call = ForwardCall.of(self.model, None, takes_labels=False)
        self._form: BatchForm | None = None  # with a collate, that of the first batch
        self._by_name: tuple[str, ...] = ()  # what loss and metrics take beside the labels
        self._metric_arguments: dict[str, LossArguments] = {}

    def _take_steps(self) -> None:
        """Take a module's training step in place of forward and loss, and what it configures."""
        module = self.model
        if self.training_step is not None:
            raise ConfigurationError(
                f"training_step is given, and {type(module).__name__} has one; leave it out, or "
                "give loss= for an ordinary model"
            )
        self.model = StepModule.of(module)
        self.loss = MODEL
        self.training_step = step_by_hand if steps_by_hand(module) else None
        if self.optimizer is not None:
            return
        made = configured(module)
        self.optimizer = made.optimizer
        if self.lr_scheduler is None and made.scheduler is not None:
            self.lr_scheduler, self.lr_interval = made.scheduler, made.interval
            self.lr_metric = made.monitor or self.lr_metric

    @property
    def cuts_graph(self) -> bool:
        """Return whether the model's graph is to be cut, rather than between its modules."""
        # `cut` stays None, so that a copy with another schedule has that schedule's default.
        return is_pipelined(self.schedule) if self.cut is None else self.cut == "export"

    @property
    def barrier(self) -> bool:
        """Return whether no update may come before every backward of its window.

        So it is where one norm clips all, all skip an update, or gradients are those of replicas.
        """
        return self.clip_grad_norm is not None or self.scaler is not None or self.replicas != 1

    def scaling(self, state: Mapping[str, Any] | None = None) -> GradScaling | None:
        """Return what scales losses, None if nothing does; see `GradScaling`."""
        return None if self.scaler is None else GradScaling(self.scaler, self.device, state)

    def at_scale(self, scale: float) -> Recipe:
        """Return the same recipe with losses that are scaled by this or less, if at all."""
        twin = copy.copy(self)
        twin.scaler = None if self.scaler is None else at_scale(self.scaler, scale)
        return twin

    def _check_cut(self) -> None:
        if not isinstance(self.vertical_sync, bool):
            raise ConfigurationError(
                f"vertical_sync is {self.vertical_sync!r}; it is True or False"
            )
        check_no_pick(self.schedule)
        settings = self.vertical_sync, self.autocast == SCALED, self.replicas
        check_schedule(self.schedule, self.clip_grad_norm is not None, self.accumulate, *settings)
        self.stages = checked_stages(self.stages, self.schedule, self.shards)
        if self.cut not in (None, *CUTS):
            raise ConfigurationError(f"cut is {self.cut!r}; it is one of {list(CUTS)}, or None")
        check_compile(self.compile, self.schedule, self.cut)
        if not is_pipelined(self.schedule):
            return
        if not self.cuts_graph:
            raise ConfigurationError(
                f"schedule is {self.schedule!r} and cut is {self.cut!r}, which keeps a batch on "
                "one device; leave cut out, or take schedule='sequential'"
            )
        if self.shards in (1, [], [[]]):
            raise ConfigurationError(
                f"schedule is {self.schedule!r} and shards is {self.shards!r}, and each device is "
                "to have a shard at least; give shards='auto', or their number"
            )

    def bind(self, columns: Columns) -> Recipe:
        """Take the names of the columns that batches will have, and return the recipe itself.

        Raises:
            ConfigurationError: the model, the loss or the LR schedule doesn't fit them.
        """
        self.columns = columns
        self._decoding.check((*columns.features, *columns.targets))
        if self.collate is None:
            self._take(BatchForm.given(columns))
        else:  # its first batch says what loss, forward and metrics are given
            self.metric_list = resolve_metrics(self.metrics, columns.labels or ("label",))
        return self

    def _take(self, form: BatchForm) -> BatchForm:
        """Prepare model, loss and metrics for batches of this form.

        Raises:
            ConfigurationError: one of them doesn't fit it.
        """
        columns = self.columns or Columns(form.inputs, form.labels, form.weight)
        own = self._objective
        own.bind(form.labels, form.weight, form.others)
        self._call(form, columns)
        self.metric_list = resolve_metrics(self.metrics, form.labels, own.losses)
        self._metric_arguments = {
            metric.name: metric_arguments(metric, form.labels, form.others)
            for metric in self.metric_list
        }
        taken = {name for each in self._metric_arguments.values() for name in each.names}
        taken.update(own.names)
        self._by_name = tuple(name for name in form.others if name in taken)
        for name in form.kept:
            if name not in taken:
                raise ConfigurationError(
                    f"collate returned the feature column {name!r}, which "
                    f"{type(self.model).__name__}.forward, the loss and the metrics have no "
                    f"argument for; forward takes {list(form.inputs)}: leave it out, or name an "
                    "argument so"
                )
        measured = ["loss", *(metric.name for metric in self.metric_list)]
        if self.lr_metric not in measured:
            raise ConfigurationError(
                f"lr_metric is {self.lr_metric!r}, which is not measured; measured are {measured}"
            )
        self._form = form
        return form

    def _call(self, form: BatchForm, columns: Columns) -> None:
        """Let forward be called with batches of this form."""
        if isinstance(self.model, StepModule):
            self.model.bind(columns)
        else:
            self.call = form.call(self.model, columns, self._objective.is_models_own)

    def keep_decoded(self, rows: DecodedRows) -> Recipe:
        """Keep what is decoded among these rows, which recipes share; return the recipe itself."""
        self._decoding.keep_in(rows)
        return self

    def to(self, device: torch.device) -> Recipe:
        """Let the recipe train on a device, and return it: batches will come there.

        Its model and losses are moved with every tensor that their attributes hold.

        Raises:
            ConfigurationError: its averages would be the CPU's, and those of a replay the device's.
        """
        if device != self.device:
            if self.optimizer_on == "host" and self.ema is not None:
                raise ConfigurationError(
                    f"optimizer_on is 'host' and ema is {self.ema}, and a replay on {device.type} "
                    "would average there, with other bits; leave one of them out"
                )
            placement = Placement(device)
            placement.place_module(self.model)
            for loss in self.losses:
                if isinstance(loss, nn.Module):
                    placement.place_module(loss)
            placement.place_optimizer(self.optimizer)
            self.device = device
        return self

    # ------------------------------------------------------------------ one batch

    def inputs(self, features: Sequence[Tensor], targets: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return what forward takes of a batch: the features, and the labels if it asks."""
        if not self._objective.is_models_own:
            return tuple(features)
        return (*features, *self._objective.split(targets, self._by_name).labels)

    def collated(
        self, features: tuple[Tensor, ...], targets: tuple[Tensor, ...], key: RandomKey | None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Decode a batch, and apply `collate` to it on the CPU, seeded by the key.

        No key is for evaluation.

        Columns come in the precision of the model, and on its device. What loss and metrics take
        beside labels and sample weight follows these in the targets.

        Args:
            features: the stored feature columns.
            targets: the stored labels, then the sample weight; none where they are not known.

        Raises:
            ConfigurationError: collate lost a column, changed the number of rows, or returned what
                forward, loss or metrics can't take; or a column can't be decoded as asked.
            DataError: a row can't be decoded.
        """
        if self.collate is not None:
            features, targets = self._made(self.collate, features, targets, key)
        else:
            named = self._named(features, targets)
            given = tuple(self._decoding.stacked(name, each) for name, each in named.items())
            features, targets = given[: len(features)], given[len(features) :]
            form = self._form
            if form is not None and (targets or not (form.labels or form.weight)):
                shared = (features[form.inputs.index(name)] for name in self._by_name)
                targets = (*targets, *shared)
        features, targets = self.cast(features), self.cast(targets)
        return self._placed(features), self._placed(targets)

    def take_form(self, example: tuple[tuple[Tensor, ...], tuple[Tensor, ...]]) -> None:
        """Collate a batch, if none was yet, so that the names of all metrics are known.

        Random numbers go on as if it had not been.

        Raises:
            ConfigurationError: as `collated` does.
        """
        if self._form is None and self.collate is not None:
            features, targets = example
            with torch.random.fork_rng(devices=[]):
                self.collated(
                    tuple(t.clone() for t in features), tuple(t.clone() for t in targets), None
                )

    def _made(
        self,
        collate: Collate,
        features: tuple[Tensor, ...],
        targets: tuple[Tensor, ...],
        key: RandomKey | None,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        named = self._named(features, targets)
        names = tuple(named)
        columns = self.columns or Columns(names[: len(features)], names[len(features) :])
        given = {name: self._decoding.given(name, column) for name, column in named.items()}
        made = collated_batch(collate, given, None if key is None else key.reseed)
        form = self._form
        if form is None:
            form = BatchForm.of(self.model, columns, list(made), names)
            if len(targets) < len(columns.targets):  # a model that predicts knows no labels
                self._call(form, columns)
                return tuple(column_of(made, name) for name in form.inputs), ()
            self._take(form)
        inputs = tuple(column_of(made, name) for name in form.inputs)
        if len(targets) < len(columns.targets):
            return inputs, ()
        weight = () if form.weight is None else (form.weight,)
        wanted = (*form.labels, *weight, *self._by_name)
        return inputs, tuple(column_of(made, name) for name in wanted)

    def _named(self, features: Sequence[Tensor], targets: Sequence[Tensor]) -> dict[str, Tensor]:
        columns = self.columns or Columns(
            tuple(f"feature_{i}" for i in range(len(features))),
            tuple(f"label_{i}" for i in range(len(targets))),
        )
        names = (*columns.features, *columns.targets[: len(targets)])
        return dict(zip(names, (*features, *targets), strict=True))

    def _placed(self, columns: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(column.to(self.device) for column in columns)

    def cast(self, columns: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return columns as a model takes them whose parameters are all in double precision."""
        if not self._in_double:
            return columns
        return tuple(c.double() if c.is_floating_point() else c for c in columns)

    @contextmanager
    def precision(self) -> Iterator[None]:
        """Run forward and loss as `autocast` says, without attention's fast path and any cache.

        The fast path's kernels of evaluation are in no exported graph, and round otherwise. A cache
        of keys and values serves generation alone; `config` tells models whether to keep one.
        """
        caching = [config for config in self._cache_configs() if config.use_cache is True]
        for config in caching:
            config.use_cache = False
        try:
            with by_parts(), autocasting(self.autocast, self.device.type), self._on_one():
                yield
        finally:
            for config in caching:
                config.use_cache = True

    @property
    def compiled_units(self) -> tuple[str, ...]:
        """Return the names of the blocks that run compiled."""
        return self._compiled.names

    def compiled(self, model: nn.Module) -> AbstractContextManager[None]:
        """Let blocks of the model, or of a copy of it, run compiled for a while, if asked."""
        return self._compiled.of(model)

    @contextmanager
    def _on_one(self) -> Iterator[None]:
        """Say what to do where an operation takes tensors of the CPU and of the device."""
        try:
            yield
        except RuntimeError as error:
            # torch has no type for this error.
            if self.device == CPU or not _TWO_DEVICES.search(str(error)):
                raise
            raise ConfigurationError(
                f"an operation of the forward or the loss takes tensors of the CPU and of "
                f"{self.device}; give the device where the code makes a tensor, as in "
                "torch.arange(n, device=x.device)"
            ) from error

    def _cache_configs(self) -> list[Any]:
        """Return the configs that the model's modules have now, which admission exchanges."""
        model, configured = self._configured
        if model is not self.model:  # a copied recipe may have another one
            configured = [module for module in self.model.modules() if "config" in vars(module)]
            self._configured = (self.model, configured)
        found = {id(config): config for config in (vars(m).get("config") for m in configured)}
        return [config for config in found.values() if hasattr(config, "use_cache")]

    def compute_loss(self, outputs: Any, targets: Sequence[Tensor]) -> Tensor:
        """Return the mean loss of one batch, a scalar with its graph."""
        return self._objective.compute(outputs, targets, self._by_name)

    def named(self, features: Sequence[Tensor], targets: Sequence[Tensor]) -> StepBatch:
        """Return a batch that is read by name; see `collated`."""
        form = self._form
        if form is None:
            return StepBatch.of(tuple(self._named(features, targets)), (*features, *targets))
        names = (*form.inputs, *form.labels, *(() if form.weight is None else (form.weight,)))
        kept = tuple(name for name in self._by_name if name not in names)
        columns = dict(zip((*names, *self._by_name), (*features, *targets), strict=True))
        return StepBatch.of((*names, *kept), [columns[name] for name in (*names, *kept)])

    def predictions(self, outputs: Any) -> list[Tensor]:
        """Return the tensors of an output that are predictions; see `columns.predictions`."""
        known = self._form or self.columns
        return predictions(outputs, known.labels if known else ())

    # ------------------------------------------------------------------ measuring

    @property
    def losses(self) -> tuple[Any, ...]:
        """Return the losses: one, or one per label column."""
        return self._objective.losses

    @property
    def state_metrics(self) -> tuple[Metric, ...]:
        """Return the metrics that keep a state."""
        return tuple(m for m in self.metric_list if isinstance(m.function, StateMetric))

    def compute_metrics(
        self,
        outputs: Any,
        targets: Sequence[Tensor],
        rows: int,
        metrics: Sequence[Metric] | None = None,
    ) -> dict[str, SumOverRows]:
        """Return what each averaged metric adds up to over one batch of so many rows.

        Args:
            metrics: those that are computed, all by default.

        Raises:
            ConfigurationError: a metric fails; the message names it.
        """
        batch = self._batch(outputs, targets)
        sums: dict[str, SumOverRows] = {}
        for metric in self.metric_list if metrics is None else metrics:
            if not isinstance(metric.function, StateMetric):
                function = as_made(metric.function, self.model)
                with told_with_metric(metric):
                    args, kwargs = self._seen_by(metric, outputs, *batch)
                    found = function(*args, **kwargs)
                    if isinstance(found, BatchSum):
                        sums[metric.name] = found.over()
                    else:
                        sums[metric.name] = sum_over_rows(found, rows)
        if metrics is None and isinstance(self.model, StepModule):
            known = sums.keys() | {metric.name for metric in self.metric_list}
            for name, value in logged_values(outputs).items():
                if name not in known:
                    sums[name] = sum_over_rows(value, rows)
        return sums

    def update_states(
        self,
        states: dict[str, Any],
        outputs: Any,
        targets: Sequence[Tensor],
        metrics: Sequence[Metric] | None = None,
    ) -> None:
        """Update, in place, the state of each custom metric, or of these, by one batch."""
        metrics = self.state_metrics if metrics is None else metrics
        if not metrics:
            return
        batch = self._batch(outputs, targets)
        for metric in metrics:
            function = cast(StateMetric, as_made(metric.function, self.model))
            with told_with_metric(metric):  # a state is of the host
                if metric.name not in states:  # a copy: update may write into what start gave
                    states[metric.name] = as_json(metric.name, function.start())
                state = states[metric.name]
                seen = self._seen_by(metric, outputs, *batch)
                args, kwargs = tree_map_only(Tensor, Tensor.cpu, seen)
                updated = function.update(state, *args, **kwargs)
            states[metric.name] = as_json(metric.name, updated)

    def _batch(
        self, outputs: Any, targets: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Return the labels as the losses take them, and all that may be taken by name."""
        found = self._objective.split(targets, self._by_name)
        labels = self._objective.prepare(outputs, found.labels)
        names = self._form.labels if self._form else ()
        return labels, dict(zip(names, labels, strict=False)) | found.others

    def _seen_by(
        self,
        metric: Metric,
        outputs: Any,
        labels: Sequence[Tensor],
        columns: Mapping[str, Tensor],
    ) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
        """Return the positional and keyword arguments of a metric."""
        if metric.label is None:
            takes = self._metric_arguments.get(metric.name, LossArguments())
            args, kwargs = takes.of(labels, columns)
            return (outputs, *args), kwargs
        given = self.predictions(outputs)
        if len(labels) == 1 and len(given) == 1:
            return (given[0], labels[0]), {}
        if len(given) != len(labels):
            raise ConfigurationError(
                f"metric {metric.name!r} needs one output per label column; forward gives "
                f"{len(given)} tensors for {len(labels)} columns: give "
                "{name: (function, 'min'|'max')}"
            )
        return (given[metric.label], labels[metric.label]), {}
