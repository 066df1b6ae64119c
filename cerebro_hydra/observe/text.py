"""Writes the words, numbers and tables that the views share."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from cerebro_hydra.foreign_text import undecorated, visible
from cerebro_hydra.observe.records import (
    Decision,
    NotSaved,
    OutputLine,
    Record,
    SlowBatch,
    WorkersMissing,
)
from cerebro_hydra.observe.view import DeviceTotals, RunView, TrialView, human_bytes
from cerebro_hydra.plan.messages.events import CheckpointFailed, StateDiffers, WorkerGivenUp
from cerebro_hydra.plan.messages.instructions import ChangeCut, ExtensionFailed, TrainUncut
from cerebro_hydra.storage.names import trial_name

STYLES = {
    "waiting": "dim",
    "training": "cyan",
    "evaluating": "magenta",
    "paused": "dim",
    "finished": "green",
    "failed": "red",
    "stopped": "yellow",
    "interrupted": "yellow",
}
_OTHER_ENDS = ("stopped", "paused", "failed", "interrupted")
_ARROWS = {"min": "↓", "max": "↑"}
_SPELT = {"min": "lower is better", "max": "higher is better"}


def prefixed(output: OutputLine) -> str:
    """Return a line of a user's code with the trial, or else the worker, that it came from."""
    trial = output.trial
    source = f"worker-{output.worker}" if trial is None else f"trial-{trial:03d}"
    return f"[{source}] {undecorated(output.line)}"


def slowness(slow: SlowBatch) -> str:
    """Return which batch takes long, where, and what would end its trial."""
    usual = "it is the first" if slow.median is None else f"the median is {number(slow.median)} s"
    return (
        f"[trial-{slow.trial:03d}] a batch of epoch {slow.epoch + 1} on partition {slow.partition} "
        f"(worker {slow.worker}) has taken {duration(slow.seconds)} so far, and {usual}; if it "
        "hangs, batch_seconds= would fail the trial and replace the agent"
    )


def absence(missing: WorkersMissing) -> str:
    """Return which workers are waited for, and what happens if they don't come."""
    who = ", ".join(map(str, missing.workers))
    return (
        f"waiting for worker{'s' if len(missing.workers) > 1 else ''} {who} for "
        f"{duration(missing.seconds)}; after {duration(missing.limit)} (join_timeout) others take "
        "over their partitions"
    )


def taken_over(given_up: WorkerGivenUp) -> str:
    """Return which worker others stand in for, and why."""
    return f"others take over the partitions of worker {given_up.worker}: {given_up.reason}"


def failed_audit(uncut: TrainUncut) -> str:
    """Return what an audit found, and what becomes of the trial."""
    return (
        f"trial-{uncut.trial:03d} is trained again from its first state, in one piece, because its "
        f"training in shards differs from the uncut model: {uncut.difference}"
    )


def cut_finer(change: ChangeCut) -> str:
    """Return why a trial was cut finer, and from where it goes on."""
    why = "forks a trial that was cut finer" if change.inherited else "ran out of memory"
    return (
        f"{trial_name(change.trial)} {why}; it goes on from state {change.state}, cut into "
        f"{change.shards} shards instead of {change.shards_before}"
    )


def extension_failed(failed: ExtensionFailed) -> str:
    """Return what came of the extension of a trial."""
    return (
        f"{trial_name(failed.trial)} could not be trained up to epoch {failed.budget}, and keeps "
        f"what it has: {failed.error.rstrip()}"
    )


def troubles(record: Record) -> Iterator[str]:
    """Yield a line for each thing in a record that harms no result, and that people should know."""
    match record:
        case SlowBatch():
            yield slowness(record)
        case WorkersMissing():
            yield absence(record)
        case Decision(event=WorkerGivenUp() as given_up):
            yield taken_over(given_up)
        case NotSaved(what, error):
            yield f"{what} can't be written, which is tried again: {error}"
        case Decision(event=CheckpointFailed(trial, state, _, error)):
            yield f"{trial_name(trial)}: state {state} is not saved: {error}"
        case Decision(event=StateDiffers() as made):
            yield differing(made)
    if isinstance(record, Decision):
        for instruction in record.instructions:
            if isinstance(instruction, TrainUncut):
                yield failed_audit(instruction)
            elif isinstance(instruction, ChangeCut):
                yield cut_finer(instruction)
            elif isinstance(instruction, ExtensionFailed):
                yield extension_failed(instruction)


def differing(made: StateDiffers) -> str:
    """Return which state did not come out as before."""
    return (
        f"{trial_name(made.trial)}: state {made.state} was made again, and shards "
        f"{list(made.shards)} have other bytes than before the run was resumed"
    )


def not_saved(view: RunView) -> list[str]:
    """Return a line for each trial whose latest state is not in the run's folder."""
    return [
        f"not saved: {trial_name(trial)} ({error})"
        for trial, error in sorted(view.not_saved.items())
    ]


def utf8(text: str) -> str:
    """Return the text with "?" for halves of surrogate pairs, which UTF-8 can't hold."""
    return text.encode("utf-8", "replace").decode()


def without_addresses(error: str) -> str:
    """Return an error without the addresses of objects, which differ where nothing else does."""
    return re.sub(r" at 0x[0-9a-f]+\b", "", error)


def number(value: float | None) -> str:
    """Format a measured value in four significant digits, and a missing one as a dash."""
    return "–" if value is None else f"{value:.4g}"


def numbers(metrics: Mapping[str, float]) -> str:
    """Format measured values with their names."""
    return ", ".join(f"{name} {number(value)}" for name, value in metrics.items())


def parameter_names(view: RunView) -> list[str]:
    """Return the names of all trials' parameters, in the order of the search space."""
    return list(dict.fromkeys(name for trial in view.trials.values() for name in trial.params))


def value_text(value: Any) -> str:
    """Format a parameter's value, a float in four significant digits."""
    return number(value) if isinstance(value, float) else visible(str(value))


def parameters(params: Mapping[str, Any]) -> str:
    """Format parameter values with their names, in the order of the search space."""
    return ", ".join(f"{visible(name)}={value_text(value)}" for name, value in params.items())


def duration(seconds: float) -> str:
    """Format seconds as 7 s, 2 min 05 s or 1 h 20 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def metric_heading(view: RunView) -> str:
    """Return the metric and its direction for a narrow column, as "val_accuracy ↑"."""
    return f"{view.metric} {_ARROWS[view.direction]}"


def metric_title(view: RunView) -> str:
    """Return the metric and its direction, as "val_accuracy (higher is better)"."""
    return f"{view.metric} ({_SPELT[view.direction]})"


def summary(view: RunView) -> str:
    """Return what a finished run took, in one line."""
    took = "" if view.seconds is None else f" in {duration(view.seconds)}"
    audits = "" if not view.audits else f"; {audited(view.audits, view.audit_seconds)}"
    devices = f"; {devices_text(view, [*view.devices.values()])}" if view.devices else ""
    saved = f"; {saved}" if (saved := saved_work(view)) else ""
    return f"{counted(view)}{took}{saved}; {view.totals}{devices}{audits}"


def devices_text(view: RunView, devices: Sequence[DeviceTotals]) -> str:
    """Return how busy devices were, how full the fullest was, and what was moved, in one line."""
    computing = [each for each in devices if not each.is_dram]
    fullest = max(computing or devices, key=lambda each: each.peak / (each.budget or math.inf))
    disk = sum(each.spilled for each in devices if each.is_dram)
    return (
        f"{len(computing)} device{'s' if len(computing) > 1 else ''} "
        f"{view.busy(devices):.0%} busy, peak {memory(fullest)}, "
        f"{human_bytes(sum(each.promoted for each in computing))} promoted, "
        f"{human_bytes(sum(each.spilled for each in computing))} spilled"
        + (f", {human_bytes(disk)} to disk" if disk else "")
    )


def memory(device: DeviceTotals) -> str:
    """Return the most bytes that were in use on a device, and its budget if it has one."""
    limit = "" if device.budget is None else f" of {human_bytes(device.budget)}"
    return f"{human_bytes(device.peak)}{limit}"


def counted(view: RunView) -> str:
    """Return how many trials finished, and how many came to each other end or rest."""
    ends = Counter(trial.status for trial in view.trials.values())
    others = (f", {ends[end]} {end}" for end in _OTHER_ENDS if ends[end])
    so_far = "" if view.closed or view.seconds is not None else " so far"
    return f"{view.finished} of {len(view.trials)} trials{so_far} finished{''.join(others)}"


def saved_work(view: RunView) -> str:
    """Return how many epochs are not trained, of those that all trials have; empty if none."""
    whole = len(view.trials) * view.document.num_epochs
    return f"{view.untrained} of {whole} epochs not trained" if view.untrained else ""


def winner_line(view: RunView) -> str:
    """Return which trial is best, and the epoch whose state is its result, counted from 1."""
    best = view.winner
    if best is None or best.result_epoch is None:
        return no_winner(view)
    epochs = f"{best.result_epoch + 1} of {len(best.epochs)}"
    kept = "its last" if best.best_epoch is None else "its best"
    score = f"{view.metric} {number(view.score(best))}"
    return f"best: {best.trial_id} after {kept} epoch, {epochs}: {score}"


def no_winner(view: RunView) -> str:
    """Say why no trial is best; what trials have measured counts where the run ends for now."""
    if view.suspended:
        return f"no trial is best yet: none has a number as {view.metric}; a resume goes on"
    return f"no trial is best: none finished with a number as {view.metric}"


def audited(steps: int, seconds: float) -> str:
    """Return what audits have shown that found no difference, and what devices computed for it."""
    which = "1 audited step has" if steps == 1 else f"{steps} audited steps have"
    return f"{which} the bits of the uncut model, which took {1000 * seconds:.0f} ms"


def status_text(trial: TrialView) -> Text:
    """Return a status in its colour; at the end with the best epoch, if its state was kept."""
    words = trial.stage
    if trial.status in ("finished", "stopped") and trial.best_epoch is not None:
        words += f", best {trial.best_epoch + 1}"
    return Text(words, style=STYLES[trial.status])
