"""The trained model of one trial gives its history, its weights and its predictions."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch import Tensor, nn

from cerebro_hydra.data.batches import Batch
from cerebro_hydra.data.manifest import Manifest
from cerebro_hydra.data.preparation.prepared import find_prepared
from cerebro_hydra.errors import ConfigurationError, ReplayError, StoreError
from cerebro_hydra.recipe import Columns, Recipe, build_keeping_random_state
from cerebro_hydra.recipe.objective.step_module import StepModule
from cerebro_hydra.replay.record import result_state
from cerebro_hydra.replay.states import load_model, read_saved
from cerebro_hydra.shards.export.archive import ModelArchive, archived
from cerebro_hydra.shards.export.program import save_exported
from cerebro_hydra.spark.launcher import pickle_factory
from cerebro_hydra.spark.outputs import RawOutputs
from cerebro_hydra.spark.transform import BuiltPredictor, Inference, feature_specs
from cerebro_hydra.storage import RunFolder, estimator_factories
from cerebro_hydra.storage.run_document import RunDocument, TrialSpec
from cerebro_hydra.storage.run_folder import read_document
from cerebro_hydra.tune.example_batches import ExampleBatches
from cerebro_hydra.tune.saved_model import (
    ModelFacts,
    PredictionKind,
    SavedModel,
    checked_outputs,
    output_names,
    write_archive,
)
from cerebro_hydra.tune.trial import History, Trial

if TYPE_CHECKING:
    pass


class TrainedModel:
    """The model of a finished trial, which reads its weights when they are asked for."""

    def __init__(
        self,
        folder: RunFolder,
        document: RunDocument,
        spec: TrialSpec,
        trial: Trial,
        factory: Callable[[], estimator_factories.Factory],
        sourceless: bool,
    ) -> None:
        """Use `SearchResult.get_best_model`, `get_model` or `get_all_models`.

        `sourceless` says whether the run's archive may take the place of an unknown factory.
        """
        self._folder = folder
        self._document = document
        self._spec = spec
        self._trial = trial
        self._find_factory = factory
        self._sourceless = sourceless
        self._output_columns = output_names(document.label_columns)

    def __repr__(self) -> str:
        return f"TrainedModel({self.trial_id!r}, {self.params})"

    @property
    def trial_id(self) -> str:
        """Return the id of the trial, such as "trial-000"."""
        return self._spec.trial_id

    @property
    def params(self) -> dict[str, Any]:
        """Return the parameters that the factory was called with."""
        return dict(self._spec.params)

    def get_history(self) -> History:
        """Return measured values by name, one per epoch."""
        return self._trial.history

    def torch(self) -> nn.Module:
        """Return the model with its trained weights, in eval mode.

        It is what the factory builds. Where the factory is unknown, it is the graph of the archive
        that the run keeps of its best model, whose forward gives the tuple of predictions.

        Raises:
            ConfigurationError: the factory is known only by the name that the run records, and the
                run has no archive.
            ReplayError: its factory can't be found; says how to give it.
            StoreError: a file of its weights is missing or damaged.
        """
        kept = self._kept
        if kept is not None:
            return kept.torch()
        model = self.recipe().model
        return model.module() if isinstance(model, StepModule) else model

    def state_dict(self) -> dict[str, Tensor]:
        """Return the trained parameters and buffers by name, for which no source is needed.

        Raises:
            StoreError: a file of its weights is missing or damaged.
        """
        tensors = saved_tensors(self._folder, self._spec.trial)
        return {name.partition(":")[2]: tensor for name, tensor in tensors.items()}

    def save(self, path: str, overwrite: bool = False) -> None:
        """Save the model so that it loads without its source and its run, and without pickle.

        `cerebro_hydra.load_model(path)` and `SparkModel.load(path)` load it. What `collate` does in
        evaluation becomes a part of it.

        Args:
            path: a folder on this machine, whose parents are made; or a URL of any file system that
                Spark knows, for which a Spark session must be active.
            overwrite: whether to replace what is there.

        Raises:
            ConfigurationError: `path` exists, or the model can't do without its source; says why.
            ReplayError: its factory can't be found; says how to give it.
            StoreError: it can't be written, or the prepared data is gone.
        """
        write_archive(self.archive(), path, overwrite)

    def archive(self) -> ModelArchive:
        """Return what `save` writes; raises as it does."""
        if (kept := self._kept) is not None:
            return kept.archive
        recipe, features = self.recipe(), self.batch().features
        if len(features[0]) < 2:
            features = tuple(torch.cat([column, column]) for column in features)
        try:
            with tempfile.TemporaryDirectory(prefix="cerebro-hydra-model-") as folder:
                save_exported(recipe, features, folder, collated=False)
                return ModelArchive.of(self._facts(recipe, features).metadata(), folder)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"{error}; keep its source, and load it from its run: SearchResult.open("
                f"{self._folder.path!r}, factory=estimator_gen_fn).torch({self.trial_id!r})"
            ) from error

    def _facts(self, recipe: Recipe, features: Sequence[Tensor]) -> ModelFacts:
        given, _ = recipe.collated(_two_of(features), (), None)
        with torch.no_grad(), recipe.precision():
            predictions = recipe.predictions(recipe.call(recipe.model, given))
        shapes = [tuple(tensor.shape) for tensor in predictions]
        return ModelFacts(
            head=PredictionKind.choose(None, recipe.loss, shapes),
            columns=tuple(feature_specs(self._manifest().columns, self._document.feature_columns)),
            label_columns=self._document.label_columns,
            batch_size=recipe.batch_size,
            trial=self._trial,
            run_path=self._folder.path,
        )

    @cached_property
    def _kept(self) -> SavedModel | None:
        """Return the archive of the run, if it has one and must do for an unknown factory."""
        try:
            self._find_factory()
        except (ConfigurationError, ReplayError) as error:
            if not self._sourceless:
                raise
            archive = archived(self._folder, self.trial_id)
            if archive is None:
                said = (
                    f"the run keeps no archive of {self.trial_id}, so it needs its source: {error}"
                )
                raise type(error)(said) from error
            return SavedModel(archive, f"{self._folder.path}/models/{self.trial_id}")
        return None

    def set_output_columns(self, output_columns: Sequence[str]) -> TrainedModel:
        """Name the columns that `transform` adds, one per label column; returns itself.

        A model that was trained without labels has one for each tensor that forward gives.

        Raises:
            ConfigurationError: they are not as many as label columns.
        """
        self._output_columns = checked_outputs(output_columns, self._document.label_columns)
        return self

    def transform(self, df: Any) -> Any:
        """Add the model's outputs to a DataFrame, by default in `<label>__output`, else `output`.

        A table of pandas or polars is predicted in this process, and comes back as such a table,
        with its index; a path is read by Spark.

        Raises:
            ConfigurationError: an output column is there already, or the factory is known only by
                the name that the run records.
            DataError: a feature column is missing, or has another type than in training.
            ReplayError: the factory can't be found; says how to give it.
            StoreError: the prepared data is gone, whose manifest says what the columns hold.
        """
        return self._inference.transform(df, RawOutputs(tuple(self._output_columns)))

    @cached_property
    def _inference(self) -> Inference:
        """Return what predicts, kept so that a second transform neither reads nor sends weights."""
        kept = self._kept
        return self.inference() if kept is None else kept.inference

    def inference(self, recipe: Recipe | None = None) -> Inference:
        """Return what predicts on executors; raises as `transform` does.

        Args:
            recipe: the result of `recipe()`, if it is at hand.
        """
        recipe = recipe or self.recipe()
        predictor = BuiltPredictor(
            factory=pickle_factory(self._find_factory()),
            params=self.params,
            seed=self._document.seed,
            columns=Columns.of(self._document),
            state={"model": weights_file(recipe.model)},
        )
        specs = feature_specs(self._manifest().columns, self._document.feature_columns)
        return Inference(
            predictor, specs, recipe.batch_size, lambda: _two_of(self.batch().features)
        )

    def recipe(self) -> Recipe:
        """Build the trial with its trained weights, in eval mode.

        Raises:
            ConfigurationError: the factory is known only by the name that the run records.
            ReplayError: its factory can't be found; says how to give it.
        """
        return trained_recipe(self._folder, self._document, self._spec, self._find_factory())

    def batch(self) -> Batch:
        """Return the first rows that it was trained on, as many as its batches have.

        Raises:
            StoreError: the prepared data is gone.
        """
        columns = Columns.of(self._document)
        examples = ExampleBatches(self._manifest(), self._folder.store, columns)
        return examples.batches(self._spec.batch_size)[0]

    def _manifest(self) -> Manifest:
        manifest = find_prepared(self._folder.store, self._document.fingerprint)
        if manifest is None:
            raise StoreError(
                f"the prepared data {self._document.fingerprint} of run {self._folder.path!r} is "
                "gone from its store; restore it from a copy"
            )
        return manifest


def _two_of(columns: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the first two rows; of a single one, two copies."""
    return tuple(torch.cat([column[:2], column[:2]])[:2] for column in columns)


def trained_recipe(
    folder: RunFolder, document: RunDocument, spec: TrialSpec, factory: Callable[[Any], Any]
) -> Recipe:
    """Build a trial and load its result into the model: moving averages, where they are kept.

    The model is in eval mode. The caller's random numbers go on as if nothing had been built.

    Raises:
        ReplayError: the factory builds another model than the run trained.
        StoreError: a file of the result is missing or damaged.
    """
    recipe = build_keeping_random_state(factory, spec.params, document.seed, Columns.of(document))
    where = f"{spec.trial_id} of run {folder.path!r}"
    load_model(recipe.model, saved_tensors(folder, spec.trial), where)
    recipe.model.eval()
    return recipe


def saved_tensors(folder: RunFolder, trial: int) -> dict[str, Tensor]:
    """Return `param:NAME` and `buffer:NAME` of the result, as evaluation used them."""
    run_id = read_document(folder).run_id
    tensors = read_saved(folder, trial, result_state(folder, trial), run_id).tensors
    tensors |= {
        f"param:{name.removeprefix('ema:')}": t
        for name, t in tensors.items()
        if name.startswith("ema:")
    }
    return {name: t for name, t in tensors.items() if name.startswith(("param:", "buffer:"))}


def weights_file(model: nn.Module) -> bytes:
    """Return the model's `state_dict` as one safetensors file, tied tensors once."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach().contiguous().clone()
    return bytes(safetensors.torch.save(tensors))
