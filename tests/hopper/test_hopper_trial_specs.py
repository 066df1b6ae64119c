"""An agent is told what a trial is with the first instruction about it, and when it is over."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

from cerebro_hydra.hopper.run_config import trial_config
from cerebro_hydra.observe import Decision, TrialAdmitted
from cerebro_hydra.plan.messages.events import TrialAdded
from cerebro_hydra.plan.messages.instructions import Evaluate
from cerebro_hydra.storage.run_document import TrialSpec
from tests.hopper.scripted_agents import DiesOnce, ScriptedLauncher
from tests.hopper.scripted_runs import described, run


class Listener(ScriptedLauncher):
    """Notes all that each agent is told of trials, in order."""

    def __init__(self, num_workers: int, script: Any = None) -> None:
        super().__init__(num_workers, script=script)
        self.specs: defaultdict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
        self.forgotten: defaultdict[str, list[int]] = defaultdict(list)

    def hear(self, incarnation: str, message: dict[str, Any]) -> None:
        if message["do"] == "forget":
            assert message["trial"] in self.specs[incarnation]
            self.forgotten[incarnation].append(message["trial"])
        elif message.get("spec") is not None:
            spec = message["spec"]
            assert spec["trial"] == message["do"]["trial"]
            assert spec["trial"] not in self.specs[incarnation], "told twice"
            self.specs[incarnation][spec["trial"]] = spec
        elif "trial" in message["do"]:
            assert message["do"]["trial"] in self.specs[incarnation], "never told"


def test_each_agent_hears_of_a_trial_once_before_it_uses_it_and_at_its_end(tmp_path: Any) -> None:
    script = DiesOnce()
    launcher = Listener(2, script)
    document, trials = described(5, 2, 2)
    run(tmp_path, launcher, (document, trials))
    assert len(launcher.specs) == 3  # two agents, and one in place of the dead one
    for incarnation, told in launcher.specs.items():
        for number, spec in told.items():
            assert TrialSpec.from_json(spec, "told") == trials[number]
        if incarnation not in script.died:
            assert sorted(launcher.forgotten[incarnation]) == sorted(told)


class Expecting(ScriptedLauncher):
    """Notes what each agent hears of tasks that may follow, which is nothing at first."""

    def __init__(self, num_workers: int) -> None:
        super().__init__(num_workers)
        self.expects: dict[str, bool] = {}

    def hear(self, incarnation: str, message: dict[str, Any]) -> None:
        if message["do"] == "expect":
            self.expects[incarnation] = message["tasks"]
        elif isinstance(message["do"], dict) and "attempt" in message["do"]:
            assert self.expects.setdefault(incarnation, True), "no task was to follow"


def test_agents_hear_when_no_task_follows_any_more(tmp_path: Any) -> None:
    launcher = Expecting(2)
    run(tmp_path, launcher, described(3, 2, 2))
    assert [*launcher.expects.values()] == [False, False]


class LosesAnIdleAgent(ScriptedLauncher):
    """Keeps an evaluation open until an agent has come in the place of one that was idle."""

    def __init__(self, num_workers: int) -> None:
        super().__init__(num_workers, script=self.answer)
        self.evaluates: list[str] = []
        self.told = threading.Event()

    def answer(self, instruction: Any, incarnation: str) -> Any:
        if isinstance(instruction, Evaluate):
            self.evaluates.append(incarnation)
            if incarnation == self.evaluates[0]:
                self.told.wait(20)
        return None

    def hear(self, incarnation: str, message: dict[str, Any]) -> object:
        if message["do"] == "expect" and not message["tasks"] and len(self.evaluates) == 2:
            if incarnation == self.evaluates[1]:
                return "die"
            if incarnation != self.evaluates[0]:
                self.told.set()
        return None


def test_an_agent_that_comes_when_no_task_follows_hears_so(tmp_path: Any) -> None:
    launcher = LosesAnIdleAgent(2)
    run(tmp_path, launcher, described(1, 2, 1))
    assert launcher.told.is_set()


def test_observers_are_told_what_a_trial_is_before_the_decision_that_adds_it(tmp_path: Any) -> None:
    _, _, tape = run(tmp_path, ScriptedLauncher(2), described(3, 2, 1))
    assert [each.spec for each in tape.of(TrialAdmitted)] == described(3, 2, 1)[1]
    for before, record in zip(tape.records, tape.records[1:], strict=False):
        if isinstance(record, Decision) and isinstance(record.event, TrialAdded):
            assert isinstance(before, TrialAdmitted)
            assert record.event.config == trial_config(before.spec)
