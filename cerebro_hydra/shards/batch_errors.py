"""Tells the errors that the user's code raises on a batch with the columns of that batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from cerebro_hydra.errors import ConfigurationError, NonFiniteLoss
from cerebro_hydra.recipe import PlainTrainer
from cerebro_hydra.shards.sample import Example

_REMEDIES = {
    "forward": "; give the model inputs of that shape, or reshape the columns with collate",
    "loss": "; give the model outputs that fit these labels, or a loss that fits both",
}
_OF_TYPE = "; cast the columns there, or with collate"
_OF_CODE = "; correct it, and try it on such a batch alone"


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
        raise ConfigurationError(
            f"on the first rows {error}; check the data, the loss function and the learning rate"
        ) from error
    except Exception as error:
        columns = trainer.recipe.columns
        features, labels = (None, None) if columns is None else (columns.features, columns.targets)
        raise ConfigurationError(
            f"the {trainer.phase} failed on a batch with features ({_forms(example[0], features)}) "
            f"and labels ({_forms(example[1], labels)}): {type(error).__name__}: {error}"
            f"{_remedy(trainer.phase, error)}"
        ) from error


def _remedy(phase: str, error: Exception) -> str:
    # torch raises these for what a batch holds; any other is about the code that raised it.
    if phase not in _REMEDIES or not isinstance(error, RuntimeError | ValueError | IndexError):
        return _OF_CODE
    about_type = "dtype" in str(error) or "scalar type" in str(error)
    return _OF_TYPE if about_type else _REMEDIES[phase]


def _forms(tensors: Sequence[Tensor], names: Sequence[str] | None) -> str:
    """Describe tensors, such as `tokens: int64[32, 128] from 0 to 20411`."""
    forms = []
    for number, tensor in enumerate(tensors):
        form = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        if not tensor.is_floating_point() and tensor.numel():
            form += f" from {tensor.min().item()} to {tensor.max().item()}"
        forms.append(form if names is None else f"{names[number]}: {form}")
    return ", ".join(forms)
