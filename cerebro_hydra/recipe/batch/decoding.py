"""Turns bytes of a batch into tensors of uint8, by names of formats or by the user's functions."""

from __future__ import annotations

import difflib
import io
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cerebro_hydra.errors import (
    CerebroHydraError,
    ConfigurationError,
    DataError,
    SetupError,
    kind_of,
)
from cerebro_hydra.foreign_text import named_error_text
from cerebro_hydra.recipe.batch.cells import Cells, Pool
from cerebro_hydra.recipe.batch.decoded_rows import DecodedRows

Decoder = str | Callable[[bytes], Any]

FORMATS = {"jpeg": "JPEG", "png": "PNG"}
"""The formats that are decoded by name, and Pillow's names of them."""

_MODES = {"L": 1, "RGB": 3, "RGBA": 4}
_HEADER = 12


class Decoding:
    """Decodes the cells of batches.

    Args:
        decoders: by the name of a column "jpeg", "png" or a function of bytes; None decodes none.

    Raises:
        ConfigurationError: it is something else.
        SetupError: Pillow is missing, and a column is to be decoded by the name of a format.
    """

    def __init__(self, decoders: Mapping[str, Decoder] | None) -> None:
        if decoders is not None and not isinstance(decoders, Mapping):
            raise ConfigurationError(
                f"decode is {decoders!r}; give a dict from the name of a column to 'jpeg', 'png' "
                "or a function of bytes"
            )
        self._decoders = dict(decoders or {})
        self._kept: DecodedRows | None = None
        self._tried: set[str] = set()
        self._keys: dict[str, Hashable | None] = {}
        for name, decoder in self._decoders.items():
            if not callable(decoder) and decoder not in FORMATS:
                raise ConfigurationError(
                    f"decode[{name!r}] is {decoder!r}; give one of {sorted(FORMATS)}, or a "
                    "function that takes bytes and returns an array or tensor of uint8"
                )
            if isinstance(decoder, str):
                _pillow()

    def check(self, columns: Sequence[str]) -> None:
        """Compare the names with the columns that batches will have.

        Raises:
            ConfigurationError: one is not among them.
        """
        for name in self._decoders:
            if name not in columns:
                near = difflib.get_close_matches(name, columns, n=1, cutoff=0.4)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                raise ConfigurationError(
                    f"decode names column {name!r}{hint}, and the columns are {list(columns)}"
                )

    def keep_in(self, kept: DecodedRows) -> None:
        """Keep decoded rows, as far as there is space, so that later epochs decode them no more."""
        self._kept = kept

    def given(self, name: str, column: Tensor) -> Tensor | list[bytes] | list[Tensor]:
        """Return a column as collate is given it: of cells a list with an entry for each row.

        Raises:
            ConfigurationError: it is to be decoded and has no bytes, or its function misbehaves.
            DataError: a row can't be decoded.
        """
        decoder = self._decoders.get(name)
        if not isinstance(column, Cells):
            if decoder is not None:
                raise ConfigurationError(
                    f"decode names column {name!r}, which holds {_form(column)} per row, and only "
                    "columns of bytes are decoded; leave it out"
                )
            return column
        pool = column.pool
        if pool.image and decoder is not None:
            raise ConfigurationError(
                f"decode names column {name!r}, which holds Spark's images, and these are decoded "
                "already; leave it out"
            )
        if pool.image:
            return [_spark_image(pool.cell(row)) for row in column.positions]
        if decoder is None:
            return [pool.cell(row) for row in column.positions]
        self._try(name, decoder, pool, column.positions)
        return [self._decoded(name, decoder, pool, row) for row in column.positions]

    def stacked(self, name: str, column: Tensor) -> Tensor:
        """Return a column as forward takes it where there is no collate: cells as one tensor.

        Raises:
            ConfigurationError: rows are bytes, or have several shapes.
            DataError: a row can't be decoded.
        """
        given = self.given(name, column)
        if isinstance(given, Tensor):
            return given
        tensors = [each for each in given if isinstance(each, Tensor)]
        if len(tensors) < len(given):
            raise ConfigurationError(
                f"column {name!r} holds bytes, which forward can't take; give decode="
                f"{{{name!r}: 'jpeg'}} (or 'png', or a function of bytes), or a collate that makes "
                "tensors of them"
            )
        sizes = sorted({tuple(each.shape) for each in tensors})
        if len(sizes) > 1:
            raise ConfigurationError(
                f"column {name!r} has rows of {len(sizes)} sizes in one batch, such as {sizes[0]} "
                f"and {sizes[-1]}; give a collate that resizes or crops them to one, or let "
                "decode's function do so"
            )
        return torch.stack(tensors)

    def _decoded(self, name: str, decoder: Decoder, pool: Pool, row: int) -> Tensor:
        def make() -> Tensor:
            return _called(name, decoder, pool, row)

        if self._kept is None or pool.key is None:
            return make()
        if name not in self._keys:  # once: what a function holds may change by its calls
            self._keys[name] = self._kept.key_of(decoder)
        key = self._keys[name]
        if key is None:
            return make()
        return self._kept.get((pool.key, key), len(pool), row, make)

    def _try(self, name: str, decoder: Decoder, pool: Pool, rows: Sequence[int]) -> None:
        """Decode the first row that is met twice: what is kept must be what comes again."""
        if name in self._tried or not rows:
            return
        first, again = (_called(name, decoder, pool, rows[0]) for _ in range(2))
        if not torch.equal(first, again):
            raise ConfigurationError(
                f"decode[{name!r}] gives other values for the same bytes when it is called again; "
                "draw random numbers in collate, where replay draws the same"
            )
        self._tried.add(name)


def _called(name: str, decoder: Decoder, pool: Pool, row: int) -> Tensor:
    """Decode one row; the tensor's memory is its own."""
    cell = pool.cell(row)
    told = f"column {name!r}: {pool.where(row)}"
    if isinstance(decoder, str):
        return _decoded_by_pillow(cell, decoder, told)
    try:
        made = decoder(cell)
    except CerebroHydraError:
        raise
    except Exception as error:
        raise DataError(
            f"{told} can't be decoded: the function of decode[{name!r}] fails on its {len(cell)} "
            f"bytes ({named_error_text(error)}); write the row again, or drop it"
        ) from error
    if isinstance(made, np.ndarray) and made.dtype == np.uint8:
        made = torch.from_numpy(made.copy())
    if not isinstance(made, Tensor) or made.dtype != torch.uint8 or not made.dim():
        known = isinstance(made, Tensor | np.ndarray)
        got = f"{made.dtype} of shape {tuple(made.shape)}" if known else kind_of(made)
        raise ConfigurationError(
            f"decode[{name!r}] returned {got} for {pool.where(row)}; return an array or tensor of "
            "uint8 with a dimension at least, such as (channels, height, width)"
        )
    return made.detach().cpu().clone(memory_format=torch.contiguous_format)


def _decoded_by_pillow(cell: bytes, format: str, told: str) -> Tensor:
    """Decode an image to shape (channels, height, width), as it is stored: no mode is changed."""
    image_type, unidentified = _pillow()
    try:
        with image_type.open(io.BytesIO(cell), formats=[FORMATS[format]]) as image:
            if image.mode not in _MODES:
                raise DataError(
                    f"{told} is an image of mode {image.mode!r}, and {format!r} decodes "
                    f"{sorted(_MODES)} (gray, colour, colour with alpha); convert it before, or "
                    "give decode a function that does, as by PIL.Image.convert('RGB')"
                )
            pixels = np.array(image)
    except unidentified as error:
        begins = cell[:8].hex(" ")
        raise DataError(
            f"{told} is no {FORMATS[format]} image: its {len(cell)} bytes begin with {begins!r}; "
            "write the row again, drop it, or give decode a function that knows its format"
        ) from error
    except DataError:
        raise
    except Exception as error:  # of a damaged file Pillow raises what its codec does
        raise DataError(
            f"{told} is a damaged {FORMATS[format]} image of {len(cell)} bytes "
            f"({named_error_text(error)}); write the row again, or drop it"
        ) from error
    return torch.from_numpy(pixels.reshape(*pixels.shape[:2], -1)).permute(2, 0, 1).contiguous()


def _pillow() -> tuple[Any, type[Exception]]:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise SetupError(
            f"decoding images needs Pillow, which can't be imported here ({error}): install "
            "'cerebro-hydra[images]' on the driver and every worker, or give decode a function"
        ) from error
    return Image, UnidentifiedImageError


def _spark_image(cell: bytes) -> Tensor:
    """Return an image of Spark as (channels, height, width), red first where it has colours."""
    height, width, channels = np.frombuffer(cell, ">u4", 3).astype(np.int64)
    pixels = np.frombuffer(cell, np.uint8, offset=_HEADER).reshape(height, width, channels)
    order = {1: [0], 3: [2, 1, 0], 4: [2, 1, 0, 3]}[int(channels)]
    return torch.from_numpy(np.ascontiguousarray(pixels[:, :, order].transpose(2, 0, 1)))


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape[1:])}"
