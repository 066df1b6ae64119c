"""Translates a run's documents into what decisions are made from."""

from __future__ import annotations

from cerebro_hydra.plan.messages.config import HopConfig, TrialConfig
from cerebro_hydra.storage.run_document import RunDocument, TrialSpec


def hop_config(document: RunDocument) -> HopConfig:
    """Return what decisions about all trials depend on."""
    return HopConfig(
        partitions=document.num_partitions,
        order=document.order,
        seed=document.seed,
        evaluate=document.validated,
        metric=("val_" if document.validated else "train_") + document.evaluation_metric,
        direction=document.metrics[document.evaluation_metric],
        checkpoint=document.checkpoint,
    )


def trial_config(spec: TrialSpec) -> TrialConfig:
    """Return what decisions about one trial depend on; its work is its rows times its bytes."""
    return TrialConfig(
        trial=spec.trial,
        cost=float(max(1, sum(spec.steps) * spec.batch_size * spec.accumulate * spec.nbytes)),
        nbytes=spec.nbytes,
        initial_digests=spec.shards,
        custom_metrics=spec.custom_metrics,
        patience=spec.patience,
        keep=spec.keep,
        finer=spec.finer,
        replicas=spec.replicas,
        tail=spec.tail,
    )
