"""Replays the trials of a run and prints a line for each."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.text import Text

from cerebro_hydra.errors import ReplayError, StoreError
from cerebro_hydra.replay.replay_trial import replay
from cerebro_hydra.tune.result import SearchResult


def print_replays(
    console: Console,
    run_path: str,
    *,
    trial_id: str | None = None,
    factory: Callable[[Any], Any] | str | None = None,
    trust: bool = False,
) -> bool:
    """Replay one trial of a run, or all that have a result, and print a line for each.

    Args:
        console: where to print.
        run_path: the run's folder.
        trial_id: the trial; None takes all.
        factory: the run's `estimator_gen_fn`, or its "module:name".
        trust: whether the name that the run records may be imported; it is printed.

    Returns:
        Whether every replayed trial was identical, bit for bit.

    Raises:
        ConfigurationError: the factory is known only by the name that the run records, and `trust`
            is False.
        ReplayError: the trial is unknown or has no result, or no trial has one.
    """
    result = SearchResult.open(run_path)
    chosen = [t for t in result.trials if trial_id in (None, t.trial_id)]
    if not chosen:
        raise ReplayError(
            f"there is no trial {trial_id!r}; trials are {[t.trial_id for t in result.trials]}"
        )
    trained = [trial for trial in chosen if trial.has_result]
    if not trained:
        raise ReplayError(
            f"nothing to replay in {run_path!r}: "
            + ", ".join(f"{trial.trial_id} is {trial.status}" for trial in chosen)
        )
    if trust and factory is None:
        console.print(Text(f"factory: {result.document.factory!r}, as the run records it"))
    identical = 0
    for trial in chosen:
        if not trial.has_result:
            console.print(Text.assemble(trial.trial_id, (f"  {trial.status}, not replayed", "dim")))
            continue
        begun = time.perf_counter()
        try:
            report = replay(run_path, trial.trial_id, factory, trust)
        except StoreError as error:  # the files of one trial say nothing of the others'
            line = Text.assemble(trial.trial_id, ("  NOT REPLAYED", "bold red"), f"  {error}")
            console.print(line, soft_wrap=True)
            continue
        seconds = time.perf_counter() - begun
        for warning in report.warnings:
            console.print(Text(f"           warning: {warning}", style="yellow"))
        if report.identical:
            identical += 1
            line = Text.assemble(trial.trial_id, ("  identical, every bit", "green"))
        else:
            line = Text.assemble(
                trial.trial_id, ("  DIFFERENT", "bold red"), f"  {report.first_difference}"
            )
        line.append(f"  ({len(trial.visit_log)} sub-epochs, {seconds:.1f} s)", "dim")
        console.print(line, soft_wrap=True)
    console.print(
        f"{identical} of {len(trained)} replayed trials are identical to the bit.",
        style="bold green" if identical == len(trained) else "bold red",
        highlight=False,
    )
    return identical == len(trained)
