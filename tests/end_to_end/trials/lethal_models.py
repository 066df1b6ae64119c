"""Factories of trials that end, lock or hang their agent's process, or change its settings."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from cerebro_hydra.observe import OutputLine
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.wire.shards import ShardServer
from tests.end_to_end.models import counting, feed_forward
from tests.end_to_end.runs import Tape
from tests.end_to_end.trials.hooked_models import FIRST_LATE, Counted

LAST_WORDS = "here it comes"


def _hang() -> None:
    while True:
        time.sleep(60)


def _kill_parent() -> None:
    parent = os.getppid()
    if b"forkserver" in Path(f"/proc/{parent}/cmdline").read_bytes():  # once, and no stranger
        os.kill(parent, signal.SIGKILL)
    _hang()


FAULTS: dict[str, Callable[[], Any]] = {
    "exits": lambda: os._exit(1),
    "ends": lambda: os._exit(0),
    "ends by another code": lambda: os._exit(7),
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),  # as when memory runs out
    "kills its parent": _kill_parent,
    "crashes": lambda: ctypes.string_at(0),
    "stops itself": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "takes a GiB": lambda: np.ones(1 << 27),
    "locks Python": lambda: ctypes.PyDLL(None).sleep(20),
    "hangs": _hang,
    "is slow": lambda: time.sleep(8),
    "fills memory": lambda: torch.empty(1 << 50, dtype=torch.uint8),
    "handles a signal": lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN),  # on main alone
    "none": lambda: None,
}


def lethal(params: dict[str, Any]) -> Recipe:
    """A small net with dropout; on agents, its loss does what `fault` says in the third batch.

    One that fills memory does so in later batches, too, because the sub-epoch is done once more.
    Before, its process enters the control group that `params["group"]` names, if there is one.
    """
    recipe = feed_forward({"lr": 0.01, "dropout": 0.2})
    plain, lives = recipe.loss, params["fault"] == "none"

    def loss(seen: int, outputs: Tensor, labels: Tensor) -> Tensor:
        late = seen - params.get("batch", 3)
        on_agent = os.getpid() != params["driver"]
        if (
            on_agent
            and not lives
            and (late == 0 or (late > 0 and params["fault"] == "fills memory"))
        ):
            print(LAST_WORDS)
            time.sleep(params.get("pause", 0.0))
            if "group" in params:
                Path(params["group"], "cgroup.procs").write_text(str(os.getpid()))
            FAULTS[params["fault"]]()
        return plain(outputs, labels)

    return replace(recipe, loss=counting(loss))


def deaf(params: dict[str, Any]) -> Recipe:
    """The same net; the first agent that builds it stops to serve shards, as if cut off."""
    if os.getpid() != params["driver"]:
        with contextlib.suppress(FileExistsError):
            Path(params["marker"]).touch(exist_ok=False)
            for each in gc.get_objects():
                if isinstance(each, ShardServer):
                    each.close()
    return feed_forward({"lr": params["lr"], "dropout": 0.2})


class Interrupter:
    """Watches a run, and sends the driver a signal when a trial does its worst."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        self.tape = Tape(self._watch)
        self._number = number
        self.hung = 0
        self.interrupted = 0.0

    def _watch(self, tape: Tape) -> None:
        if isinstance(tape.last, OutputLine) and tape.last.line == LAST_WORDS:
            self.hung = tape.pids[tape.last.worker][-1]
            threading.Timer(2.0, self._interrupt).start()

    def _interrupt(self) -> None:
        self.interrupted = time.monotonic()
        os.kill(os.getpid(), self._number)


class Depends(nn.Module):
    """Gives other numbers in double precision, and where subnormal numbers are zero."""

    def forward(self, x: Tensor) -> Tensor:
        tiny = torch.tensor(1e-39, dtype=torch.float32) * torch.tensor(1.0, dtype=torch.float32)
        return x * (torch.tensor(1.0) / 3 + (tiny != 0)).to(x.dtype)


class Changes(Counted):
    """Changes a setting late, or in evaluation, or registers a hook for all modules."""

    what = "nothing"

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.steps.item() >= FIRST_LATE:
            if self.what == "flushes":
                torch.set_flush_denormal(True)
            elif self.what == "double" or (self.what == "evaluates" and not self.training):
                torch.set_default_dtype(torch.float64)
            elif self.what == "hooks":
                register_module_forward_hook(halve)
        return x


def halve(module: nn.Module, inputs: Any, output: Any) -> Any:
    """Give half of what a module gives."""
    return output / 2 if isinstance(output, Tensor) else output


def settings(params: dict[str, Any]) -> Recipe:
    """A small net; `what` is what it does: nothing, or a change in factory or forward."""
    if params["what"] == "factory":
        torch.set_default_dtype(torch.float64)
    recipe = feed_forward({"lr": 0.01, "dropout": 0.2})
    first = Changes(16, 32)
    first.what = params["what"]
    recipe.model[0] = first
    recipe.model.insert(1, Depends())
    recipe.optimizer = torch.optim.AdamW(recipe.model.parameters(), lr=0.01)
    return recipe
