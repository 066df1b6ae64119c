"""Agents that die, come late or never come: who does their work, and when a run ends."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from cerebro_hydra.agent.main import run_agent
from cerebro_hydra.errors import SetupError
from cerebro_hydra.hopper import agents
from cerebro_hydra.hopper.protocol.agent_spec import AgentSpec, AgentStart, LossLimits
from cerebro_hydra.observe import (
    WorkersMissing,
)
from cerebro_hydra.plan.messages.events import WorkerGivenUp
from cerebro_hydra.plan.messages.instructions import FinishTrial, StartSubEpoch
from cerebro_hydra.replay.record import read_trial
from cerebro_hydra.storage import LocalStore
from cerebro_hydra.storage.run_document import WORKERS_FILE
from tests.hopper.scripted_agents import DiesOnce, ScriptedLauncher
from tests.hopper.scripted_runs import described, restored, run
from tests.journals import comparable


def test_an_agent_that_dies_is_replaced_and_its_work_done_again(tmp_path: Any) -> None:
    script = DiesOnce()
    launcher = ScriptedLauncher(2, script=script)
    folder, _, _ = run(tmp_path, launcher, described(3, 2, 3))
    assert script.died
    assert launcher.given_up in ([(0, 0)], [(1, 10)])  # the start that was lost, and no other
    workers = folder.read_json(WORKERS_FILE)
    assert workers == {k: {"host": "here", "pid": 7, "gpus": [k]} for k in ("0", "1")}
    for trial in range(3):
        record = read_trial(folder, trial)
        assert (record.status, record.problem(2)) == ("finished", None)
        assert len(record.visit_log) == 6


def test_a_worker_whose_agents_are_lost_again_and_again_ends_the_run(tmp_path: Any) -> None:
    starts: list[str] = []

    def script(instruction: Any, incarnation: str) -> Any:
        if isinstance(instruction, StartSubEpoch):
            starts.append(incarnation)
            return None if len(starts) == 4 else "die"
        return None

    launcher = ScriptedLauncher(1, script=script)
    said = r"worker 0 on here lost 8 agents in a row, none of which began a task.*because: "
    with pytest.raises(SetupError, match=said):
        run(tmp_path, launcher, described(1, 1, 2))
    assert len(starts) >= 12  # one that finished a task came between
    assert len(launcher.given_up) == len(starts) - 2


def test_trials_that_kill_agents_fail_alone_and_their_losses_end_no_run(tmp_path: Any) -> None:
    lethal = {0, 1, 3, 4}

    def script(instruction: Any, incarnation: str) -> Any:
        trains = isinstance(instruction, StartSubEpoch) and instruction.trial in lethal
        return "perish" if trains else None

    launcher = ScriptedLauncher(1, script=script)
    folder, state, tape = run(tmp_path, launcher, described(6, 1, 2))
    assert len(launcher.given_up) == 12 > LossLimits().max_failures  # all of the same worker
    for trial in range(6):
        assert read_trial(folder, trial).status == ("failed" if trial in lethal else "finished")
    (reason,) = (each.reason for each in tape.of(FinishTrial) if each.trial == 3)
    assert "3 agents in a row were lost while trial 3 ran on them" in reason
    assert reason.count("worker 0 on here, training of epoch 1 on partition 0: ") == 3
    assert restored(folder) == comparable(state)


def test_one_worker_that_came_does_the_work_of_all_and_waits_are_told(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "TELL_SECONDS", 0.3)
    launcher = ScriptedLauncher(3, present=1, limits=LossLimits(join_timeout=1.0))
    _, state, tape = run(tmp_path, launcher, described(2, 3, 2))
    assert [trial.status for trial in state.trials.values()] == ["finished"] * 2
    waits = tape.of(WorkersMissing)
    assert {(wait.workers, wait.limit) for wait in waits} == {((1, 2), 1.0)}
    assert len(waits) == 3


def test_a_worker_whose_agents_are_lost_again_and_again_is_given_up_and_the_others_go_on(
    tmp_path: Any,
) -> None:
    broken: set[str] = set()
    lost_thrice = threading.Event()

    def script(instruction: Any, incarnation: str) -> Any:
        dies = isinstance(instruction, StartSubEpoch) and instruction.worker == 1
        broken.update({incarnation} if dies else ())
        if len(broken) == 3:
            lost_thrice.set()
        elif not dies:
            assert lost_thrice.wait(60), "the other one would do all the work before"
        return "die" if dies else None

    launcher = ScriptedLauncher(2, script=script, limits=LossLimits(max_failures=3))
    _, state, tape = run(tmp_path, launcher, described(2, 2, 2))
    assert [trial.status for trial in state.trials.values()] == ["finished"] * 2
    # The other one may get further, which clears a suspect, before the third loss is heard of.
    assert len(broken) in (3, 4)
    # An agent that came before its worker was given up may still join, and be lost as well.
    first, *_ = tape.of(WorkerGivenUp)
    assert "worker 1 on here lost 3 agents in a row" in first.reason


class LateLauncher(ScriptedLauncher):
    """Starts a real agent, in place of a lost one, when the run is over already."""

    def stop(self, timeout: float) -> None:
        assert self.spec is not None
        before = set(threading.enumerate())
        run_agent(self.spec, AgentStart(1, 99, "/nowhere"), lambda params: None)
        self.threads_left = set(threading.enumerate()) - before
        super().stop(timeout)


def test_an_agent_that_comes_when_the_run_is_over_leaves_at_once_and_quietly(
    tmp_path: Any, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    launcher = LateLauncher(2)
    began = time.monotonic()
    doc, trials = described(2, 2, 1)
    doc = replace(doc, store=LocalStore(str(tmp_path)).to_dict())
    _, state, _ = run(tmp_path, launcher, (doc, trials))
    assert time.monotonic() - began < 10
    assert [trial.status for trial in state.trials.values()] == ["finished"] * 2
    for thread in launcher.threads_left:
        thread.join(5)
        assert not thread.is_alive(), thread
    assert capfd.readouterr() == ("", "") and not caplog.records


class RefusedLauncher(ScriptedLauncher):
    """Its agents' job ends before any of them has come."""

    def start(self, spec: AgentSpec, factory: Any, on_exit: Any) -> None:
        on_exit(RuntimeError("no control connection"))


def test_a_job_that_ends_without_some_workers_names_them_and_why(tmp_path: Any) -> None:
    said = r"workers \[0, 1\] are missing; run `cerebro-hydra doctor`.*no control connection"
    with pytest.raises(SetupError, match=said):
        run(tmp_path, RefusedLauncher(2), described(1, 2, 1))


def test_a_worker_without_a_compiler_ends_a_run_that_needs_one_before_it_trains(
    tmp_path: Any,
) -> None:
    launcher = ScriptedLauncher(2)
    said = r"trial-000 has compile=True, and worker . on here can't compile: install g\+\+"
    with pytest.raises(SetupError, match=said):
        run(tmp_path, launcher, described(1, 2, 1, compiles=True))
