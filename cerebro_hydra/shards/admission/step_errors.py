"""Turns what a user's code raises on a batch into an error that names phase, columns and remedy."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from cerebro_hydra.errors import ConfigurationError, NonFiniteLoss
from cerebro_hydra.foreign_text import error_text, is_error, named_error_text, traceback_of
from cerebro_hydra.recipe import PlainTrainer
from cerebro_hydra.recipe.plain_trainer import FINITE_OUTPUTS
from cerebro_hydra.shards.cut.sample import Example
from cerebro_hydra.shards.cut.torch_cond import is_of_cond, leave_cond

_ABOUT_SHAPES = re.compile(
    r"shape|size|dimension|\bdims?\b|\brank\b|channel|broadcast|elements|out of range in self"
    r"|out of bounds|index \d+ is"
)
_ABOUT_INFERENCE = re.compile(r"[Ii]nference tensor")
_ABOUT_SPARSE = re.compile(r"[Ss]parse")
_REMEDIES = {
    "forward": "; give the model inputs of that shape, or reshape the columns with collate",
    "loss": "; give the model outputs that fit these labels, or a loss that fits both",
}
_OF_INFERENCE = "; take torch.no_grad() in place of torch.inference_mode(), or clone what it gives"
_OF_SPARSE = "; set sparse=False in the embedding, or leave clipping out"
_OF_TYPE = "; cast the columns there, or with collate"
_OF_CODE = "; correct it, and try it on such a batch alone"

_HOOKS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}


@contextmanager
def told_with_batch(trainer: PlainTrainer, example: Example) -> Iterator[None]:
    """Turn whatever training on an example raises into an error that names phase and columns.

    Raises:
        ConfigurationError: the user's model, loss, metric or optimizer failed, or the loss is NaN.
    """
    try:
        yield
    except ConfigurationError:
        raise
    except NonFiniteLoss as error:
        text = error_text(error)
        if FINITE_OUTPUTS not in text:
            told, *_ = text.partition(";")
            text = f"{told}; check the data, the loss function and the learning rate"
        raise ConfigurationError(f"on the first rows {text}") from error
    except Exception as error:
        if is_of_cond(error):
            leave_cond()
        columns = trainer.recipe.columns
        features, labels = (None, None) if columns is None else (columns.features, columns.targets)
        hook = _hook_that_raised(trainer.recipe.model, error)
        raise ConfigurationError(
            f"{hook or f'the {trainer.phase}'} failed on a batch with features "
            f"({forms_of(example[0], features)}) and labels ({forms_of(example[1], labels)}): "
            f"{named_error_text(error)}"
            f"{_OF_CODE if hook else _remedy(trainer.phase, error)}"
        ) from error


def _remedy(phase: str, error: Exception) -> str:
    words = error_text(error)
    if _ABOUT_INFERENCE.search(words):
        return _OF_INFERENCE
    if is_error(error, NotImplementedError) and _ABOUT_SPARSE.search(words):
        return _OF_SPARSE
    # torch raises these for what a batch holds; any other is about the code that raised it.
    if phase not in _REMEDIES or not is_error(error, RuntimeError, ValueError, IndexError):
        return _OF_CODE
    if "dtype" in words or "scalar type" in words:
        return _OF_TYPE
    return _REMEDIES[phase] if _ABOUT_SHAPES.search(words) else _OF_CODE


def _hook_that_raised(model: nn.Module, error: Exception) -> str | None:
    """Return the module's hook in which an error was raised, in words, if it was in one."""
    hooks = {
        getattr(hook, "__code__", None): f"a {kind} of {_named(name)}"
        for name, module in model.named_modules()
        for attribute, kind in _HOOKS.items()
        for hook in getattr(module, attribute).values()
    }
    for frame, _ in traceback.walk_tb(traceback_of(error)):
        if frame.f_code in hooks:
            return hooks[frame.f_code]
    return None


def _named(module: str) -> str:
    return f"module {module!r}" if module else "the model"


def forms_of(tensors: Sequence[Tensor], names: Sequence[str] | None) -> str:
    """Describe tensors, such as `tokens: int64[32, 128] from 0 to 20411`."""
    forms = []
    for number, tensor in enumerate(tensors):
        form = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        if not tensor.is_floating_point() and tensor.numel():
            form += f" from {tensor.min().item()} to {tensor.max().item()}"
        forms.append(form if names is None else f"{names[number]}: {form}")
    return ", ".join(forms)
