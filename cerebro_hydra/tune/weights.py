"""Says where the weights of a trained model lie: in the folder of its run, or in an archive."""

from __future__ import annotations

import json
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Annotated, Any, Protocol

import safetensors.torch
import torch
from torch import Tensor, nn

from cerebro_hydra.data.batches import Batch
from cerebro_hydra.data.manifest import ColumnSpec, Manifest
from cerebro_hydra.data.preparation.prepared import find_prepared
from cerebro_hydra.documents import Positive, one_of, part_of
from cerebro_hydra.errors import ConfigurationError, ReplayError, StoreError
from cerebro_hydra.recipe import Columns, Recipe, build_keeping_random_state
from cerebro_hydra.recipe.batch.cells import Cells
from cerebro_hydra.recipe.objective.prediction_kind import PredictionKind
from cerebro_hydra.recipe.objective.step_module import StepModule
from cerebro_hydra.replay.record import result_state
from cerebro_hydra.replay.states import load_model, read_saved
from cerebro_hydra.shards.admission.effects.isolated_factory import IsolatedFactory, LeftSettings
from cerebro_hydra.shards.admission.effects.shared_values import shared_kept
from cerebro_hydra.shards.export.archive import ModelArchive, archived
from cerebro_hydra.shards.export.program import ExportedModel, save_exported
from cerebro_hydra.spark.launcher import pickle_factory
from cerebro_hydra.spark.transform import (
    BuiltPredictor,
    ExportedPredictor,
    Inference,
    feature_specs,
)
from cerebro_hydra.storage import RunFolder, estimator_factories
from cerebro_hydra.storage.run_document import RunDocument, TrialSpec
from cerebro_hydra.storage.run_folder import read_document
from cerebro_hydra.tune.example_batches import ExampleBatches
from cerebro_hydra.tune.trial import Trial

SPARK_CLASS = "cerebro_hydra.ml.model.SparkModel"
"""The stage of Spark ML that a saved model is when Spark loads it."""


_ROWS = 5  # of a batch to compare with; with one, torch.export would fix their number


class Weights(Protocol):
    """Gives a trained model in every form that is asked for; each is read when it is.

    `feature_columns` and `label_columns` are as the model was trained with; `run_path` is the
    folder of the run that `trial` was a part of.
    """

    @property
    def trial(self) -> Trial: ...
    @property
    def run_path(self) -> str: ...
    @property
    def feature_columns(self) -> tuple[str, ...]: ...
    @property
    def label_columns(self) -> tuple[str, ...]: ...
    @property
    def inference(self) -> Inference:
        """Return what predicts, kept so that a second transform neither reads nor sends weights."""
        ...

    def torch(self) -> nn.Module: ...
    def state_dict(self) -> dict[str, Tensor]: ...
    def archive(self) -> ModelArchive: ...
    def rows(self) -> tuple[Tensor, ...]:
        """Return a few rows that the model takes, at least 3, as a tensor per feature column."""
        ...

    def kind(self, output: str | None) -> PredictionKind:
        """Return what `output` asks for; if it is None, what the loss says."""
        ...


@dataclass(frozen=True)
class ModelFacts:
    """Holds what the metadata of a saved model say that Spark ML does not ask for."""

    head: Annotated[str, one_of(*PredictionKind)]
    columns: tuple[ColumnSpec, ...]
    """Type and shape of each feature column, in the order in which the model takes them."""
    label_columns: tuple[str, ...]
    batch_size: Positive
    trial: Trial
    run_path: str

    @classmethod
    def of(cls, archive: ModelArchive, where: str) -> ModelFacts:
        """Read them from an archive; StoreError if one is missing or of a wrong type."""
        facts: ModelFacts = part_of(cls, dict(archive.metadata), f"the metadata of {where!r}")
        return facts

    def metadata(self) -> dict[str, Any]:
        """Return the metadata of an archive, as JSON, with what Spark ML asks for."""
        stage = {"class": SPARK_CLASS, "uid": f"SparkModel_{uuid.uuid4().hex[:12]}"}
        fields = {**stage, "paramMap": {}, "defaultParamMap": {}, **asdict(self)}
        document: dict[str, Any] = json.loads(json.dumps(fields))
        return document


class ArchiveWeights:
    """Takes a model from an archive, which needs neither its source nor its run."""

    def __init__(self, archive: ModelArchive, where: str) -> None:
        """Read what the metadata say; `where` is what messages call the archive.

        Raises:
            StoreError: the metadata lack something, or have it in a wrong type.
        """
        self._archive = archive
        self._facts = facts = ModelFacts.of(archive, where)
        self.trial, self.run_path = facts.trial, facts.run_path
        self.label_columns = facts.label_columns
        self.feature_columns = tuple(spec.name for spec in facts.columns)

    def torch(self) -> ExportedModel:
        """Return the graph, whose forward gives the tuple of predictions."""
        return self._archive.module()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of the model that was saved, under its names and in its order."""
        return self._archive.module().original_state()

    def archive(self) -> ModelArchive:
        """Return it as it was given."""
        return self._archive

    def rows(self) -> tuple[Tensor, ...]:
        """Return random numbers, and zeros for whole numbers, which may be indices."""
        random = torch.Generator().manual_seed(0)
        return tuple(
            torch.randn((_ROWS, *spec.shape), generator=random)
            if spec.dtype == "float32"
            else torch.zeros((_ROWS, *spec.shape), dtype=getattr(torch, spec.dtype))
            for spec in self._facts.columns
        )

    def kind(self, output: str | None) -> PredictionKind:
        """Return what `output` asks for; if it is None, what the model was saved with."""
        saved = PredictionKind(self._facts.head)
        # The loss is not saved, so what it said of classes is kept.
        if output is None or (output == "classification" and saved.has_classes):
            return saved
        return PredictionKind.choose(output, None, _shapes(self.inference.sample))

    @cached_property
    def inference(self) -> Inference:
        """Return what predicts."""
        predictor = ExportedPredictor(self._archive.exported)
        return Inference(predictor, self._facts.columns, self._facts.batch_size)


class RunWeights:
    """Takes the model of a trial from the folder of its run; its factory builds it.

    Where the factory is unknown, the archive that a run keeps of its best model takes its place.
    """

    def __init__(
        self,
        folder: RunFolder,
        document: RunDocument,
        spec: TrialSpec,
        trial: Trial,
        factory: Callable[[], estimator_factories.Factory],
        sourceless: bool,
    ) -> None:
        """Read nothing yet.

        `sourceless` says whether the run's archive may take the place of an unknown factory.
        """
        self._folder = folder
        self._document = document
        self._spec = spec
        self._find_factory = factory
        self._sourceless = sourceless
        self.trial, self.run_path = trial, folder.path
        self.label_columns = document.label_columns
        self.feature_columns = document.feature_columns

    def __getstate__(self) -> dict[str, Any]:
        """Leave weights that were read out of copies, and of what travels to workers."""
        read = ("_kept", "_inference_and_loss")
        return {name: value for name, value in vars(self).items() if name not in read}

    def torch(self) -> nn.Module:
        """Return what the factory builds, with the trained weights; or the graph of the archive."""
        if (kept := self._kept) is not None:
            return kept.torch()
        _take_back()
        factory = IsolatedFactory(self._find_factory())
        model = trained_recipe(self._folder, self._document, self._spec, factory).model
        _left.append((factory, factory.left()))  # it stays, for the model to read
        return model.module() if isinstance(model, StepModule) else model

    def state_dict(self) -> dict[str, Tensor]:
        """Return the model's state dict; without source and archive in the order of its shards."""
        try:
            self._find_factory()
        except (ConfigurationError, ReplayError):
            archive = archived(self._folder, self._spec.trial_id)
            if archive is not None:
                return archive.module().original_state()
            saved = saved_tensors(self._folder, self._spec.trial)
            return {name.partition(":")[2]: tensor for name, tensor in saved.items()}
        with self._isolated_recipe() as recipe:
            state: dict[str, Tensor] = recipe.model.state_dict()
        return state

    def archive(self) -> ModelArchive:
        """Export the model, in evaluation's view of `collate`; or return the run's archive."""
        if (kept := self._kept) is not None:
            return kept.archive()
        with self._isolated_recipe() as recipe:
            return self._archived(recipe, self._batch().features)

    def _archived(self, recipe: Recipe, features: Sequence[Tensor]) -> ModelArchive:
        if len(features[0]) < 2:
            features = tuple(torch.cat([column, column]) for column in features)
        try:
            for name, column in zip(self.feature_columns, features, strict=True):
                if isinstance(column, Cells):
                    raise ConfigurationError(
                        f"feature column {name!r} holds bytes or images, which a graph of tensors "
                        "can't decode"
                    )
            with tempfile.TemporaryDirectory(prefix="cerebro-hydra-model-") as folder:
                shared = partial(shared_kept, recipe)
                save_exported(recipe, features, folder, collated=False, kept=shared)
                return ModelArchive.of(self._facts(recipe, features).metadata(), folder)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"{error}; keep its source, and load it from its run: SearchResult.open("
                f"{self.run_path!r}, factory=estimator_gen_fn).torch({self.trial.trial_id!r})"
            ) from error

    def rows(self) -> tuple[Tensor, ...]:
        """Return rows that it was trained on, some twice if there are few."""
        features = self._batch().features
        chosen = torch.arange(max(_ROWS, len(features[0]))) % len(features[0])
        return tuple(column[chosen] for column in features)

    def kind(self, output: str | None) -> PredictionKind:
        """Return what `output` asks for; if it is None, what the loss says."""
        if (kept := self._kept) is not None:
            return kept.kind(output)
        inference, loss = self._inference_and_loss
        return PredictionKind.choose(output, loss, _shapes(inference.sample))

    @property
    def inference(self) -> Inference:
        """Return what predicts, with the weights as they were when first read."""
        kept = self._kept
        return self._inference_and_loss[0] if kept is None else kept.inference

    @cached_property
    def _inference_and_loss(self) -> tuple[Inference, Any]:
        with self._isolated_recipe() as recipe:
            state = {"model": weights_file(recipe.model)}
        predictor = BuiltPredictor(
            factory=pickle_factory(self._find_factory()),
            params=dict(self._spec.params),
            seed=self._document.seed,
            columns=Columns.of(self._document),
            state=state,
        )
        specs = feature_specs(self._manifest().columns, self._document.feature_columns)
        rows = lambda: _two_of(self._batch().features)  # noqa: E731
        return Inference(predictor, specs, recipe.batch_size, rows), recipe.loss

    @cached_property
    def _kept(self) -> ArchiveWeights | None:
        """Return the archive of the run, if it has one and must do for an unknown factory."""
        try:
            self._find_factory()
        except (ConfigurationError, ReplayError) as error:
            if not self._sourceless:
                raise
            trial_id = self._spec.trial_id
            archive = archived(self._folder, trial_id)
            if archive is None:
                said = f"the run keeps no archive of {trial_id}, so it needs its source: {error}"
                raise type(error)(said) from error
            return ArchiveWeights(archive, f"{self.run_path}/models/{trial_id}")
        return None

    @contextmanager
    def _isolated_recipe(self) -> Iterator[Recipe]:
        """Yield the trained recipe, with what its factory has set, as long as the body runs."""
        _take_back()
        with IsolatedFactory(self._find_factory()) as factory:
            yield trained_recipe(self._folder, self._document, self._spec, factory)

    def _facts(self, recipe: Recipe, features: Sequence[Tensor]) -> ModelFacts:
        given, _ = recipe.collated(_two_of(features), (), None)
        with torch.no_grad(), recipe.precision():
            predictions = recipe.predictions(recipe.call(recipe.model, given))
        return ModelFacts(
            head=PredictionKind.choose(None, recipe.loss, _shapes(predictions)),
            columns=tuple(feature_specs(self._manifest().columns, self._document.feature_columns)),
            label_columns=self._document.label_columns,
            batch_size=recipe.batch_size,
            trial=self.trial,
            run_path=self.run_path,
        )

    def _batch(self) -> Batch:
        """Return the first rows that it was trained on, as many as its batches have."""
        columns = Columns.of(self._document)
        examples = ExampleBatches(self._manifest(), self._folder.store, columns)
        return examples.batches(self._spec.batch_size)[0]

    def _manifest(self) -> Manifest:
        manifest = find_prepared(self._folder.store, self._document.fingerprint)
        if manifest is None:
            raise StoreError(
                f"the prepared data {self._document.fingerprint} of run {self.run_path!r} is "
                "gone from its store; restore it from a copy"
            )
        return manifest


def _shapes(predictions: Sequence[Tensor]) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in predictions]


def _two_of(columns: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the first two rows; of a single one, two copies."""
    return tuple(torch.cat([column[:2], column[:2]])[:2] for column in columns)


_left: list[tuple[IsolatedFactory, LeftSettings]] = []
"""What the factory has set for the model that was given out last, in this process."""


def _take_back() -> None:
    """Let the next model find what there was before, but what the user has changed since then."""
    while _left:
        factory, left = _left.pop()
        factory.take_back(left)


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
    for tensor in (*recipe.model.parameters(), *recipe.model.buffers()):
        if tensor.layout is torch.strided and not tensor.untyped_storage().resizable():
            tensor.data = tensor.data.clone()  # else it may be an array of the user's
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
