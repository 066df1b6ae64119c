"""Starts the devices of an agent: itself if one CPU is the only one, else a process for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch

from cerebro_hydra.agent.cuda_runtime import CudaRuntime
from cerebro_hydra.agent.device import Device
from cerebro_hydra.agent.device_memory import DeviceMemory
from cerebro_hydra.agent.device_messages import Answer, Order
from cerebro_hydra.agent.device_process import DeviceProcess, DeviceSettings, fork_server
from cerebro_hydra.agent.device_run import RunOpener
from cerebro_hydra.agent.slabs import Slabs
from cerebro_hydra.agent.visible_gpus import THE_GPU, show_gpu
from cerebro_hydra.agent.worker_devices import DeviceStart, WorkerDevice
from cerebro_hydra.hopper.loss_limits import DEFAULT_LIMITS, LossLimits
from cerebro_hydra.recipe import numeric_fingerprint
from cerebro_hydra.recipe.determinism import compute_deterministically


class OwnDevice:
    """Is a device in the agent's own process."""

    limits = None

    def __init__(
        self,
        opener: RunOpener,
        double_buffering: bool,
        end_process: Callable[[], object],
        begin: Callable[[int], object],
        on_answer: Callable[[WorkerDevice, Answer], object],
        on_gone: Callable[[WorkerDevice], object],  # with the agent
    ) -> None:
        self.memory = DeviceMemory()
        self._device = Device(
            opener,
            self.memory,
            lambda answer: on_answer(self, answer),
            double_buffering=double_buffering,
            begin=begin,
        )
        self._device.start()
        self._end_process = end_process

    def give(self, order: Order) -> None:
        """Take an order and return at once."""
        self._device.give(order)

    def kill(self) -> None:
        """End this process: nothing else ends a thread that hangs."""
        self._end_process()

    def close(self) -> None:
        """End the device after what it is doing."""
        self._device.close()


def device_starts(
    devices: int,
    opener: RunOpener,
    make_opener: Callable[[], RunOpener],
    slabs: Slabs,
    on_said: Callable[[Mapping[str, Any]], object],
    end_process: Callable[[], object],
    begin: Callable[[int], object],
    double_buffering: bool = True,
    limits: LossLimits = DEFAULT_LIMITS,
) -> Sequence[DeviceStart]:
    """Return what starts each CPU device.

    Args:
        opener: opens runs in this process.
        make_opener: makes what opens them in another process.
        on_said: takes what code in another process prints and logs.
        end_process: ends this process once all is sent that was reported.
        begin: is told of each attempt before code of its trial runs in this process.
        limits: for how long another process may be silent.
    """
    if devices == 1:
        return [partial(OwnDevice, opener, double_buffering, end_process, begin)]
    settings = DeviceSettings(fork_server(), make_opener, double_buffering, limits=limits)
    return [partial(DeviceProcess, settings, slabs, on_said)] * devices


def gpu_starts(
    gpus: Sequence[str],
    make_opener: Callable[[], RunOpener],
    slabs: Slabs,
    on_said: Callable[[Mapping[str, Any]], object],
    limits: LossLimits = DEFAULT_LIMITS,
) -> Sequence[DeviceStart]:
    """Return what starts each GPU in a process of its own, whose end gives all its memory back.

    So the agent's process never starts CUDA, and a GPU that is lost is started again.

    Args:
        gpus: their addresses.
        make_opener: makes what opens runs on `THE_GPU` of a process.
        limits: for how long a process may be silent.
        on_said: takes what code in another process prints and logs.
    """
    context = fork_server()
    settings = [
        DeviceSettings(context, make_opener, True, gpu_memory, partial(show_gpu, gpu), limits)
        for gpu in gpus
    ]
    return [partial(DeviceProcess, each, slabs, on_said) for each in settings]


def numeric_on_gpu(gpu: str, threads: int) -> Mapping[str, Any]:
    """Return what bits depend on where this GPU trains; a process that ends asks CUDA for it."""
    context = fork_server()
    with ProcessPoolExecutor(1, context, show_gpu, (gpu,)) as processes:
        return processes.submit(_numeric_here, threads).result()


def _numeric_here(threads: int) -> Mapping[str, Any]:
    torch.set_num_threads(threads)
    compute_deterministically(THE_GPU)
    return numeric_fingerprint(THE_GPU.type)


def gpu_memory(poison: bool = False) -> DeviceMemory:
    """Return the memory of the GPU that this process sees."""
    return DeviceMemory(poison, CudaRuntime(THE_GPU))
