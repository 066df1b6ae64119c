"""Logs a run to TensorBoard: a run per trial, with parameters, a point per epoch, and its rungs."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from cerebro_hydra.errors import SetupError
from cerebro_hydra.observe.records import (
    Decision,
    Record,
    RunEnded,
    RunStarted,
    TrialAdmitted,
    unfolded,
)
from cerebro_hydra.observe.text import utf8
from cerebro_hydra.observe.view import RunView, TrialView
from cerebro_hydra.plan.messages.events import TrialPaused, TrialRefused
from cerebro_hydra.plan.messages.instructions import (
    EndEpoch,
    FinishTrial,
    ForkState,
    Instruction,
    Redo,
)


class TensorBoardTracker:
    """Writes `<log_dir>/<run id>/<trial id>` as the run goes on; an observer.

    Args:
        log_dir: the folder to give to `tensorboard --logdir`.

    Raises:
        SetupError: tensorboard is not installed.
    """

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        try:
            import tensorboard  # noqa: F401
        except ImportError as error:
            raise SetupError(
                "TensorBoardTracker needs tensorboard; install it with "
                "pip install 'cerebro-hydra[tensorboard]'"
            ) from error
        self.log_dir = os.fspath(log_dir)

    def on_record(self, record: Record) -> None:
        """Write the epochs and ends that a record tells of; close a trial's file at its end.

        Another search may follow.
        """
        for each in unfolded(record):
            self._take(each)

    def _take(self, record: Record) -> None:
        if isinstance(record, RunStarted):
            self._view, self._writers = RunView(), dict[int, Any]()
        self._view.apply(record)
        match record:
            case TrialAdmitted(spec):
                self._admit(self._view.trials[spec.trial])
            case Decision():
                match record.event:
                    case TrialRefused(index):
                        self._admit(self._view.trials[index])
                    case TrialPaused(index, int(rung)) if index in self._writers:
                        trial = self._view.trials[index]
                        self._measured(trial, rung - 1, {"rung": rung}, record.time)
                for instruction in record.instructions:
                    self._instruction(instruction, record.time)
            case RunEnded():
                for writer in self._writers.values():
                    writer.close()

    def _admit(self, trial: TrialView) -> None:
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = os.path.join(self.log_dir, self._view.document.run_id, trial.trial_id)
        self._writers[trial.trial] = EventFileWriter(folder)
        params = {utf8(name): _plain(value) for name, value in trial.params.items()}
        self._add(trial, time.time(), summary=hparams_pb(params, trial_id=trial.trial_id))

    def _instruction(self, instruction: Instruction, now: float) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        match instruction:
            case EndEpoch(index, epoch, metrics):
                self._measured(self._view.trials[index], epoch, metrics, now)
            case ForkState(index):
                fork = self._view.trials[index]
                for epoch, metrics in sorted(fork.epochs.items()):  # its parent's
                    self._measured(fork, epoch, metrics, now)
            case Redo(index):
                # Readers then forget the points of epochs that are trained again.
                trial = self._view.trials[index]
                log = SessionLog(status=SessionLog.START)
                self._add(trial, now, len(trial.epochs) + 1, session_log=log)
            case FinishTrial(index, status):
                self._add(self._view.trials[index], now, summary=_session_end(status, now))
                self._writers.pop(index).close()  # it has a thread and a file of its own

    def _measured(
        self, trial: TrialView, epoch: int, metrics: Mapping[str, float], now: float
    ) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=utf8(name), simple_value=value) for name, value in metrics.items()
        ]
        self._add(trial, now, epoch + 1, summary=Summary(value=values))

    def _add(self, trial: TrialView, now: float, step: int = 0, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writers[trial.trial].add_event(Event(wall_time=now, step=step, **content))


def _session_end(status: str, now: float) -> Any:
    """Return the summary of a trial's end; tensorboard's own helper asks for tensorflow."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    ends = {"finished": "STATUS_SUCCESS", "failed": "STATUS_FAILURE"}
    info = plugin_data_pb2.SessionEndInfo(
        status=api_pb2.Status.Value(ends.get(status, "STATUS_UNKNOWN")), end_time_secs=now
    )
    value = Summary.Value(
        tag=metadata.SESSION_END_INFO_TAG,
        metadata=metadata.create_summary_metadata(
            plugin_data_pb2.HParamsPluginData(session_end_info=info)
        ),
        tensor=metadata.NULL_TENSOR,
    )
    return Summary(value=[value])


def _plain(value: Any) -> bool | int | float | str:
    return value if isinstance(value, bool | int | float) else utf8(str(value))
