"""Describes one trial of a search, as its result shows it, and says why all of them failed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

import cerebro_hydra
from cerebro_hydra.errors import AllTrialsFailed
from cerebro_hydra.observe.text import without_addresses
from cerebro_hydra.observe.view import TrialView

if TYPE_CHECKING:
    import pandas as pd

History = dict[str, list[float]]
"""Measured values by name, one per ended epoch."""

_FRAME = re.compile(
    r'^  File "(?P<file>.*)", line (?P<line>\d+), in (?P<name>.*)\n(    .*\n)*', re.M
)
_OUR_ERROR = re.compile(r"^cerebro_hydra\.errors\.\w+: ")
_PACKAGE = [str(Path(cerebro_hydra.__file__).parent)]
_ROOMS = "|".join(module.name for module in iter_modules(_PACKAGE) if module.ispkg)
_LIBRARY = re.compile(
    rf"^<|\b(site-packages|lib/python[\d.]+|cerebro_hydra/({_ROOMS}))/|cerebro_hydra/keywords\.py$"
)


@dataclass(frozen=True)
class Trial:
    """Describes one trial of a search.

    `status` is "finished", "failed", "stopped", or where an unfinished run left it; `error` is a
    failed trial's traceback, or that of a finished one that could not be trained further when its
    run was extended, and keeps what it had reached. `history` has one value per ended epoch,
    `visit_log` one (epoch, partition) per sub-epoch, both from 0 as in the journal, in the order in
    which the trial trained on them. `result_epoch` is the epoch, counted from 1, whose weights are
    the trial's result: its best or its last, as the search keeps; None before the first has ended.
    `rung` is the number of epochs after which its search compared it last with others; None if it
    never did. It `finished_early` if it finished before its last epoch because it had stopped
    improving. It `rests` if its run has ended for now and keeps what it has reached; it is "paused"
    then. `seconds` were spent in its sub-epochs, hops and evaluations, repeated ones too.
    """

    trial_id: str
    params: dict[str, Any]
    status: str
    history: History
    visit_log: list[tuple[int, int]]
    error: str | None = None
    result_epoch: int | None = None
    seconds: float = 0.0
    rung: int | None = None
    rests: bool = False
    finished_early: bool = False

    @property
    def has_result(self) -> bool:
        """Return whether the run keeps a state as its result: it has trained, and did not fail."""
        return self.rests or (self.status in ("finished", "stopped") and bool(self.visit_log))

    @property
    def result_metrics(self) -> dict[str, float]:
        """Return what was measured after `result_epoch`; empty before the first has ended."""
        return self.metrics_of(self.result_epoch) if self.result_epoch else {}

    def metrics_of(self, epoch: int) -> dict[str, float]:
        """Return what was measured after an epoch, counted from 1."""
        return {name: values[epoch - 1] for name, values in self.history.items()}

    @classmethod
    def of_view(cls, view: TrialView) -> Trial:
        """Return a trial of a run."""
        return cls(
            view.trial_id,
            view.params,
            view.status,
            view.history,
            view.visit_log,
            view.reason if view.status == "failed" else view.extension_error or None,
            None if view.result_epoch is None else view.result_epoch + 1,
            view.seconds,
            view.rung,
            view.rests,
            view.finished_early,
        )


def by_trial(trials: Iterable[Trial]) -> pd.DataFrame:
    """Return one row per trial, with the metrics of its result; absent values are missing."""
    import pandas as pd

    return pd.DataFrame(
        {
            "trial_id": trial.trial_id,
            "status": trial.status,
            "finished_early": trial.finished_early,
            **_params(trial),
            **trial.result_metrics,
            "epochs": len(next(iter(trial.history.values()), ())),
            "rung": trial.rung,
            "result_epoch": trial.result_epoch,
            "seconds": trial.seconds,
            "error": trial.error,
        }
        for trial in trials
    ).astype({"rung": "Int64", "result_epoch": "Int64"})


def by_epoch(trials: Iterable[Trial]) -> pd.DataFrame:
    """Return one row per trial and ended epoch, for plots and group-by."""
    import pandas as pd

    return pd.DataFrame(
        {"trial_id": trial.trial_id, "epoch": epoch, **_params(trial), **trial.metrics_of(epoch)}
        for trial in trials
        for epoch in range(1, 1 + len(next(iter(trial.history.values()), ())))
    )


def _params(trial: Trial) -> dict[str, Any]:
    return {f"param_{name}": value for name, value in trial.params.items()}


def all_failed(errors: Sequence[str], run_path: str | None = None) -> AllTrialsFailed:
    """Return the error of a search whose trials ended with these tracebacks.

    It begins with the most frequent reason. The whole tracebacks stay in the run's folder, if a
    trial was admitted.
    """
    who = f"all {len(errors)} trials" if len(errors) > 1 else "the only trial"
    lines = _counted(f"{who} failed", errors)
    if run_path is not None:
        lines.append(f"the tracebacks are in SearchResult.open({run_path!r}).trials")
    return AllTrialsFailed("\n".join(lines))


def none_extended(errors: Sequence[str], run_path: str) -> AllTrialsFailed:
    """Return the error of a run that was extended, whose trials could not be trained further."""
    who = f"none of {len(errors)} trials" if len(errors) > 1 else "the only trial"
    cannot = "could" if len(errors) > 1 else "could not"
    return AllTrialsFailed(
        "\n".join(
            [
                *_counted(f"{who} {cannot} be trained further", errors),
                "each keeps what it had reached, and the same call goes on from there; results and "
                f"tracebacks are in SearchResult.open({run_path!r})",
            ]
        )
    )


def _counted(what: str, errors: Sequence[str]) -> list[str]:
    counts = Counter(map(reason, errors)).most_common()
    others = [f"{count} of them: {text}" for text, count in counts[1:]]
    return [f"{what}: {counts[0][0]}", *others]


def reason(error: str) -> str:
    """Return the first line of a traceback's last error, and where the user's code raised it."""
    frames = list(_FRAME.finditer(error + "\n"))
    own = [frame for frame in frames if not _LIBRARY.search(frame["file"].replace("\\", "/"))]
    text = error[frames[-1].end() :] if frames else error
    text = without_addresses(_OUR_ERROR.sub("", text.strip().partition("\n")[0]))
    if own:
        text += f" ({own[-1]['file']}, line {own[-1]['line']}, in {own[-1]['name']})"
    return text
