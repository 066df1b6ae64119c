"""Runs a model's own forward and backward, and stops at the boundaries between its shards.

Nothing is added to autograd's graph, so the bits are those of the uncut model. A shard begins when
the forward enters the first of its units. In backward, autograd runs the node that was made last
among those that are ready, so the node that made a unit's input runs after every node of that unit
and of all later ones; a hook before it tells that their shards are done.

A paused pass lets F and B be taken one by one, though one Python call makes them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from cerebro_hydra.errors import Cancelled, NonFiniteLoss, StepDiffers
from cerebro_hydra.foreign_text import is_error
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.recipe.placement import CPU
from cerebro_hydra.recipe.randomness import (
    generators,
    generators_kept,
    unit_hooks,
)
from cerebro_hydra.shards.cut.choice import content_of, same_content
from cerebro_hydra.shards.cut.crossings import boundary_hooks, output_hooks
from cerebro_hydra.shards.cut.model import CutModel
from cerebro_hydra.shards.cut.spec import module_of
from cerebro_hydra.shards.engine.bound_model import BoundModel
from cerebro_hydra.shards.engine.differences import (
    BY_OTHERS,
    HOOK_OF_ABSENT,
    has_hooks,
    sums,
    tensor_used_elsewhere,
    told_writes_to_absent,
    used_elsewhere,
)
from cerebro_hydra.shards.engine.microbatch import (
    Microbatch,
    Reach,
    Scale,
    UsesElsewhere,
    first_read_elsewhere,
)
from cerebro_hydra.shards.places import BoundMark

_BY_ITSELF = "its own layer writes to it in each forward"


def _unasked(kind: Literal["F", "B"], shard: int) -> None:
    """Allow F and B while no microbatch runs."""


class ModuleTasks:
    """Runs microbatches of one trial whose model is cut by modules.

    Args:
        recipe: its model is run, with the tensors that its parameters are bound to.
        bound: binds the recipe's model to the trial's shards.
        recompute: drops the activations of all shards but the last after F, and computes them again
            in B, unit by unit.
        scaled: gives what backward begins from.
    """

    def __init__(
        self, cut_model: CutModel, recipe: Recipe, bound: BoundModel, recompute: bool, scaled: Scale
    ) -> None:
        self._recipe, self._scaled = recipe, scaled
        self._bound = bound
        self._last = cut_model.num_shards - 1
        self._shard_of = cut_model.shard_of_unit
        spec = cut_model.spec
        self._run_again = {module_of(u) for u in spec.units if u not in spec.overwritten}
        self._modules = dict(recipe.model.named_modules())
        self._recompute = recompute
        self._owners = {p.name: p.owner for p in cut_model.params}
        self._counters: dict[int, list[str]] = {}  # of each shard, buffers of a single element
        for each in cut_model.buffers:
            if recipe.model.get_buffer(each.name).numel() == 1:
                self._counters.setdefault(each.owner, []).append(each.name)
        self._counted: dict[str, Tensor] = {}  # those of an unseen forward, as it found them
        self._inside = False  # of a unit that is run under a checkpoint
        self._noisy: dict[nn.Module, bool] = {}
        self._runs: list[_UnitRun] = []  # of the shard that runs forward, which run again
        self._notes = False  # whether shards are away while no operation is looked at
        self._unseen = False  # whether that was so in any microbatch
        self._batch: Microbatch
        self._reach: Reach = _unasked
        self._unit = ""
        self._forward_at = self._backward_at = 0

    @contextmanager
    def attached(self) -> Iterator[ModuleTasks]:
        """Install hooks on the model for a while."""
        with ExitStack() as stack:
            stack.callback(setattr, self, "_reach", _unasked)  # it refers to what drives the tasks
            stack.enter_context(self._recipe.compiled(self._recipe.model))
            self._calls = stack.enter_context(unit_hooks(self._recipe.model, self._entered))
            stack.callback(delattr, self, "_calls")  # a circle would keep optimizers and tensors
            stack.enter_context(boundary_hooks(self._modules, self._shard_of, self._cross))
            if self._recompute:  # else no shard leaves between F and B
                units = (self._modules[name] for name in self._shard_of)
                stack.enter_context(output_hooks(units if self._last else (), self._left))
                stack.enter_context(self._recomputed_units())
            yield self

    def run(self, batch: Microbatch, reach: Reach) -> None:
        """Run F and B of every shard, after `reach` has allowed each of them."""
        recipe = self._recipe
        self._batch, self._reach = batch, reach
        self._runs.clear()
        self._counted.clear()
        self._notes = not batch.looks and bool(self._bound.absent())
        self._unseen |= self._notes
        self._forward_at, self._backward_at = -1, self._last + 1
        with self._told_uses_elsewhere(), torch.enable_grad(), recipe.precision():
            self._go_forward(0)
            outputs = recipe.call(recipe.model, batch.inputs)
            self._go_forward(self._last)
            loss = batch.loss_of(outputs)
        try:
            batch.finish_forward(loss, outputs)
        except NonFiniteLoss as error:
            if self._bound.elsewhere.used is not None:
                raise StepDiffers(self._bound.elsewhere.used) from error
            if (name := self._read_elsewhere()) is not None:
                raise StepDiffers(used_elsewhere(batch.key.step, name)) from error
            if self._unseen and has_hooks(self._recipe.model):
                raise StepDiffers(f"{error}; {HOOK_OF_ABSENT}") from error
            raise
        self._go_backward(self._last)
        loss = self._scaled(loss if batch.weight is None else loss * batch.weight)
        with self._told_uses_elsewhere():
            loss.backward()  # type: ignore[no-untyped-call]
        self._go_backward(0)
        self._bound.collect_written()

    @contextmanager
    def _told_uses_elsewhere(self) -> Iterator[None]:
        """Note the first operation that uses a tensor whose shard is away, or was updated already.

        Raises:
            StepDiffers: it fails, as torch refuses what stands for that tensor.
        """
        if not self._last:
            with told_writes_to_absent():
                yield
            return
        uses = UsesElsewhere(self._bound.elsewhere, self._batch.looks)
        reach, self._reach = self._reach, uses.at_rest(self._reach)
        try:
            with told_writes_to_absent(), uses:
                yield
        except RuntimeError as error:
            if is_error(error, torch.OutOfMemoryError):
                raise
            step = self._batch.key.step
            if uses.found is not None:
                raise StepDiffers(tensor_used_elsewhere(step, uses.found)) from error
            if (name := self._read_elsewhere()) is not None:
                raise StepDiffers(used_elsewhere(step, name)) from error
            raise
        finally:
            self._reach = reach
        if uses.found is not None and self._bound.elsewhere.used is None:
            step = self._batch.key.step
            self._bound.elsewhere.used = tensor_used_elsewhere(step, uses.found)

    def _read_elsewhere(self) -> str | None:
        """Return a parameter that the forward reads while its shard is not here, if there is one.

        It runs again without any values, and only for this, because what follows is an error. What
        counts steps is as it was, since it may decide what is read.
        """
        recipe, batch = self._recipe, self._batch
        self._reach, self._forward_at, self._notes = _unasked, 0, False

        def forward() -> None:
            with recipe.precision(), self._bound.replaced_buffers(self._counted):
                outputs = recipe.call(recipe.model, batch.inputs)
                self._go_forward(self._last)
                batch.loss_of(outputs)

        return first_read_elsewhere(
            recipe.model, self._owners, self._bound.absent(), lambda: self._forward_at, forward
        )

    def _entered(self, unit: str) -> None:
        self._unit = unit
        name = module_of(unit)
        elsewhere = self._shard_of.get(name, self._forward_at) != self._forward_at
        if elsewhere and self._reach is not _unasked:
            self._bound.check_here(self._modules[name], unit)
        self._batch.key.reseed(unit)

    def _cross(self, shard: int, arguments: Iterable[Any]) -> None:
        """Begin a shard before the forward enters one of its units for the first time."""
        if shard <= self._forward_at:
            return
        self._go_backward_before(arguments, shard - 1)
        self._go_forward(shard)

    def _left(self, outputs: Iterable[Any]) -> None:
        """Begin B of a shard before autograd enters one of its units, whatever it came from.

        Autograd goes back in the order of the forward, so B of all later shards is over by then.
        """
        if self._forward_at < self._last:
            self._go_backward_before(outputs, self._forward_at)

    def _go_backward_before(self, values: Iterable[Any], shard: int) -> None:
        for value in values:
            if isinstance(value, Tensor) and value.grad_fn is not None:
                value.grad_fn.register_prehook(lambda _: self._go_backward(shard))

    def _go_forward(self, shard: int) -> None:
        while self._forward_at < shard:
            for run in self._runs:
                run.look()
            self._runs.clear()
            self._forward_at += 1
            self._reach("F", self._forward_at)
            for name in self._counters.get(self._forward_at, ()) if self._notes else ():
                self._counted[name] = self._bound.current(("buffer", name)).clone()

    def _go_backward(self, shard: int) -> None:
        while self._backward_at > shard:
            self._backward_at -= 1
            self._reach("B", self._backward_at)

    @contextmanager
    def _recomputed_units(self) -> Iterator[None]:
        """Run units under a checkpoint, except in the last shard, whose B follows at once.

        A unit whose hooks never ran, because its forward was called by name, has no key to restart.
        """
        wrapped = [
            self._modules[name]
            for name, shard in self._shard_of.items()
            if shard < self._last and name in self._run_again
        ]
        before = {module: vars(module).get("forward") for module in wrapped}
        for module in wrapped:
            module.forward = self._checkpointed(module, module.forward)
        try:
            yield
        finally:
            for module, forward in before.items():
                del module.forward
                if forward is not None:
                    module.forward = forward

    def _checkpointed(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        modules, names = list(module.modules()), self._bound.parameters_in(module)

        def run(*args: Any, **kwargs: Any) -> Any:
            # A checkpoint can't run under torch.vmap and torch.func.grad, nor while torch compiles.
            if (
                self._inside
                or not torch.is_grad_enabled()
                or torch._C._are_functorch_transforms_active()
                or torch.compiler.is_dynamo_compiling()
            ):
                return forward(*args, **kwargs)
            unit, key, calls = self._unit, self._batch.key, self._calls.made
            begin = len(calls)
            arguments = (args, kwargs)
            content = list(content_of(arguments))
            training = [each.training for each in modules]
            # B runs on the buffers as they were before F, so that statistics don't move twice.
            buffers = {n: b.clone() for n, b in self._bound.buffers_in(module).items()}
            again, this = False, _UnitRun(self._bound, unit, names, self._batch)

            def body(*args: Any, **kwargs: Any) -> Any:
                nonlocal again
                if not again:
                    again = True
                    with self._in_a_unit(), this.first():
                        out = forward(*args, **kwargs)
                    self._runs.append(this)
                    if module not in self._noisy:
                        self._noisy[module] = _draws_what_it_saves(arguments, out)
                    if self._noisy[module]:
                        _save_another()
                    return out
                if not same_content(content, list(content_of(arguments))):
                    raise StepDiffers(
                        f"the forward changed an argument of unit {unit!r} after it was used, so "
                        "that the unit can't run again in backward"
                    )
                with (
                    generators_kept(key.device),  # a backward may draw numbers, too
                    self._in_a_unit(),
                    this.again(),
                    self._calls.again(calls[begin:]),
                    _modes(modules, training),
                    self._bound.replaced_buffers({n: b.clone() for n, b in buffers.items()}),
                ):
                    key.reseed(unit)
                    out = forward(*args, **kwargs)
                if self._noisy[module]:
                    _save_another()
                return out

            return checkpoint(body, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

        return run

    @contextmanager
    def _in_a_unit(self) -> Iterator[None]:
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before


class _UnitRun:
    """Knows the parameters of a unit as it left them, because it runs again in backward.

    What others write there by `.data` or NumPy is found in the last step of a sub-epoch.
    """

    def __init__(
        self, bound: BoundModel, unit: str, names: Sequence[str], batch: Microbatch
    ) -> None:
        self._bound, self._unit, self._names = bound, module_of(unit), names
        self._step, self._closely = batch.key.step, batch.in_last_step
        self._marks: Mapping[str, BoundMark] = {}
        self._written: str | None = None  # by others, since it ran
        self._sums: tuple[list[str], Tensor | None] = [], None  # of parameters that are compared

    @contextmanager
    def first(self) -> Iterator[None]:
        """Note what there is before and after the unit's forward."""
        before = self._bound.marks_of(self._names)
        yield
        self._marks = self._bound.marks_of(self._names)
        own = [name for name, each in before.items() if each.mark.is_written]
        self._sums = self._sums_of(self._marks if self._closely else own)

    def look(self) -> None:
        """Note whether somebody has written to them since, while they have been there."""
        for name, each in self._marks.items():
            if self._bound.is_there_still(name, each) and each.mark.is_written:
                self._written = name

    @contextmanager
    def again(self) -> Iterator[None]:
        """Check, before and after the unit runs again, that its parameters are what they were.

        Raises:
            StepDiffers: they are not.
            ConfigurationError: one was frozen meanwhile, or trains since then.
        """
        self._bound.check_trains(self._names)
        self.look()
        if self._written is not None:
            raise StepDiffers(self._told(self._written, BY_OTHERS))
        names, is_there = self._sums[0], self._bound.is_there_still
        before = self._sums_of(n for n in names if self._closely and is_there(n, self._marks[n]))
        try:
            yield
        finally:  # a checkpoint leaves the forward once it has what it needs
            if names:
                self._check_sums(before)

    def _check_sums(self, before: tuple[list[str], Tensor | None]) -> None:
        """Compare with what was there before the unit ran again, and with what is here now."""
        after = self._sums_of(self._bound.marks_of(self._sums[0]))
        sums = [each for _, each in (self._sums, before, after) if each is not None]
        found = iter(torch.cat(sums).tolist())
        first, begun, ended = (
            dict(zip(n, found, strict=False)) for n, _ in (self._sums, before, after)
        )
        for told, now in ((BY_OTHERS, begun), (_BY_ITSELF, ended)):
            for name in now:
                if now[name] != first[name]:
                    raise StepDiffers(self._told(name, told))

    def _sums_of(self, names: Iterable[str]) -> tuple[list[str], Tensor | None]:
        """Return parameters and their checksums; a device is not waited for."""
        listed = list(names)
        values = [self._bound.current(("parameter", name)) for name in listed]
        return listed, sums(values) if values else None

    def _told(self, name: str, who: str) -> str:
        return (
            f"in step {self._step}, parameter {name!r} was written to after unit {self._unit!r} "
            f"had run, so that the unit can't run again in backward; {who}"
        )


@contextmanager
def _modes(modules: Sequence[nn.Module], training: Sequence[bool]) -> Iterator[None]:
    """Let modules be in training or not, as they were once, for a while."""
    now = [module.training for module in modules]
    _set_modes(modules, training)
    try:
        yield
    finally:
        _set_modes(modules, now)


def _set_modes(modules: Sequence[nn.Module], training: Sequence[bool]) -> None:
    for module, mode in zip(modules, training, strict=True):
        if module.training != mode:
            module.training = mode


def _draws_what_it_saves(arguments: Any, result: Any) -> bool:
    """Tell whether an operation between these values fills what it has saved for its backward.

    That is the noise of rrelu.
    """
    seen = {t.grad_fn for t in tree_leaves(arguments) if isinstance(t, Tensor)}
    nodes = [t.grad_fn for t in tree_leaves(result) if isinstance(t, Tensor)]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if node.name().startswith("RreluWithNoise"):
            return True
        seen.add(node)
        nodes += [before for before, _ in node.next_functions]
    return False


def _save_another() -> None:
    """Save a value for a backward that never comes.

    A checkpoint that runs again stops where the last value is saved, and not before the operation
    that had saved the one before is over.
    """
    torch.zeros(1, requires_grad=True).exp()


class ModulePredictor:
    """Lets a recipe's model evaluate, which is bound to the trial's shards.

    Args:
        waits: whether a forward begins when all shards are there.
    """

    def __init__(
        self, cut_model: CutModel, recipe: Recipe, bound: BoundModel, waits: bool = False
    ) -> None:
        self._recipe = recipe
        self._bound = bound
        self._waits = waits
        self._shard_of = cut_model.shard_of_unit
        self._owners = {p.name: p.owner for p in cut_model.params}
        self._last = cut_model.num_shards - 1
        self._reach: Reach = _unasked
        self._at = -1

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Install hooks on the model for a while."""
        model = self._recipe.model
        modules = dict(model.named_modules())
        cross = boundary_hooks(modules, self._shard_of, lambda shard, _: self._go_to(shard))
        with self._recipe.compiled(model), ExitStack() as stack:
            for name in self._shard_of:
                stack.callback(modules[name].register_forward_pre_hook(self._check_of(name)).remove)
            stack.enter_context(cross)
            yield

    def _check_of(self, name: str) -> Callable[[nn.Module, Any], None]:
        """Return a hook that checks that a unit's shard has not left; first forwards may run it."""

        def check(module: nn.Module, args: Any) -> None:  # a function, which deepcopy leaves alone
            passed = self._shard_of[name] < self._at and self._reach is not _unasked
            if passed and (away := self._bound.away(module)) is not None:
                raise StepDiffers(
                    f"in evaluation, the forward enters {name!r} in another order than in the "
                    f"trial's first steps, when parameter {away!r} had left with its shard"
                )

        return check

    def run(self, inputs: Sequence[Tensor], reach: Reach) -> Any:
        """Return the model's outputs, after `reach` has allowed F of each shard."""
        self._reach, self._at = reach, -1
        self._go_to(self._last if self._waits else 0)
        outputs = self._recipe.call(self._recipe.model, inputs)
        self._go_to(self._last)  # the loss may use any parameter
        return outputs

    def read_elsewhere(
        self, inputs: Sequence[Tensor], targets: Sequence[Tensor], gone: Collection[str]
    ) -> str | None:
        """Return a parameter that forward or loss read while its shard was away, if there is one.

        Args:
            gone: the parameters whose shards have left.
        """
        recipe = self._recipe
        self._reach, self._at = _unasked, 0

        def forward() -> None:
            outputs = recipe.call(recipe.model, inputs)
            self._go_to(self._last)
            recipe.compute_loss(outputs, targets)

        return first_read_elsewhere(recipe.model, self._owners, gone, lambda: self._at, forward)

    def _go_to(self, shard: int) -> None:
        while self._at < shard:
            self._at += 1
            self._reach("F", self._at)


Step = tuple[Literal["F", "B"], int]


class PausedPass:
    """Runs microbatches on a thread of its own, which stops before F and B of every shard.

    Between two steps other passes may take theirs: the generators of random numbers, which there is
    one of for a device in a process, go on where this pass left them. Autograd stays on the thread,
    for a CUDA device too, whose one thread of autograd would otherwise wait with the pass. All
    microbatches share the thread, because OpenMP starts its own threads anew for each.

    Args:
        device: where the pass computes, in the stream of the thread that makes it.
    """

    def __init__(self, device: torch.device = CPU) -> None:
        self._generators = generators(device)
        self._stream = None
        if device != CPU:
            self._stream = torch.get_device_module(device).current_stream(device)
        self._threads = torch.get_num_threads()
        self._thread: threading.Thread | None = None
        self._run: Callable[[Reach], object] | None = None
        self._between: Callable[[], object] | None = None
        self._resumed, self._stopped = _closed_gate(), _closed_gate()
        self._next: Step | None = None
        self._error: BaseException | None = None
        self._closed = False

    def begin(self, run: Callable[[Reach], object]) -> Step | None:
        """Begin what makes F and B of all shards, and return its first step; see `advance`.

        Args:
            run: calls what it is given before each step; the `run` of tasks.
        """
        assert self._next is None, "a pass begins after the one before"
        self._run = run
        if self._thread is None:
            target = copy_context().run
            self._thread = threading.Thread(
                target=target, args=(self._work,), name="paused-pass", daemon=True
            )
            self._thread.start()
        return self._resume()

    def advance(self) -> Step | None:
        """Make the step that was returned before; return the next one, None at the end.

        Whatever the step raises is raised here.
        """
        return None if self._next is None else self._resume()

    def call(self, work: Callable[[], object]) -> None:
        """Do work on the pass's thread, before its next step; whatever it raises is raised here.

        What a step has left in the cache of its core is still there.
        """
        if self._thread is None:
            work()
        else:
            self._between = work
            self._resume()

    def close(self) -> None:
        """End the pass where it stands, and its thread."""
        self._closed = True
        if self._thread is not None:
            self._resumed.release()
            self._thread.join()
            self._thread = None
        self._error = self._run = None  # they refer to the pass's memory

    def _resume(self) -> Step | None:
        self._resumed.release()
        self._stopped.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._next

    def _work(self) -> None:
        torch.set_num_threads(self._threads)  # OpenMP keeps their number per thread
        torch.autograd.set_multithreading_enabled(False)
        if self._stream is not None:  # a thread begins in the default stream of the first device
            torch.get_device_module(self._stream.device).set_stream(self._stream)
        while not self._closed:
            self._wait()
            if self._run is None:
                return
            try:
                self._run(self._reach)
            except BaseException as error:
                self._error = error
            self._next = self._run = None
            self._stopped.release()

    def _wait(self) -> None:
        """Wait for the next step, and do what comes between."""
        self._resumed.acquire()
        while self._between is not None:
            try:
                self._between()
            except BaseException as error:
                self._error = error
            self._between = None
            self._stopped.release()
            self._resumed.acquire()

    def _reach(self, kind: Literal["F", "B"], shard: int) -> None:
        self._check_open(kind, shard)  # the trial's code may catch that, and come again
        states = [generator.get_state() for generator in self._generators]
        self._next = (kind, shard)
        self._stopped.release()
        self._wait()
        self._check_open(kind, shard)
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def _check_open(self, kind: Literal["F", "B"], shard: int) -> None:
        if self._closed:
            raise Cancelled(f"a visit was cancelled before {kind} of shard {shard}")


def _closed_gate() -> threading.Lock:
    """Return a lock that one thread waits for and another one releases."""
    gate = threading.Lock()  # twice as fast as a Semaphore
    gate.acquire()
    return gate
