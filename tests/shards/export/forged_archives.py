"""Archives of torch.export that run code in whoever loads them with torch."""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch

from tests.shards import zoo

Forge = Callable[[Path, Path], None]


class _Wrapped(torch.nn.Module):
    """Names its model as exported models do."""

    def __init__(self) -> None:
        super().__init__()
        self.model = zoo.mlp()

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.model(features),)


class _Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.marker,)


def with_expression(target: Path, marker: Path) -> None:
    """Put code in the place of a size, which torch hands to sympy."""
    code = f"__import__('pathlib').Path({str(marker)!r}).touch()"
    entries = _entries(target)
    name = next(name for name in entries if name.endswith("models/model.json"))
    text = entries[name].decode()
    entries[name] = re.sub(r'"expr_str": "[^"]*"', f'"expr_str": "{code}"', text).encode()
    _write(target, entries)


def with_opaque_object(target: Path, marker: Path) -> None:
    """Put a pickle among the constants that says it is none."""
    entries = _entries(target)
    name = next(name for name in entries if name.endswith("model_constants_config.json"))
    pickled = pickle.dumps(_Touch(marker))
    described = {
        "dtype": 1, "sizes": [{"as_int": len(pickled)}], "requires_grad": False,
        "device": {"type": "cpu", "index": None}, "strides": [{"as_int": 1}],
        "storage_offset": {"as_int": 0}, "layout": 7,
    }  # fmt: skip
    payload = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": False}
    entries[name] = json.dumps({"config": {"x": payload | {"tensor_meta": described}}}).encode()
    entries[f"{name.rsplit('/', 1)[0]}/opaque_obj_0"] = pickled
    _write(target, entries)


FORGERIES: tuple[Forge, ...] = (with_expression, with_opaque_object)


def _entries(target: Path) -> dict[str, bytes]:
    """Return the entries of an honest archive without sample inputs."""
    (batch,) = zoo.vectors(4)
    rows = {0: torch.export.Dim.AUTO}
    program = torch.export.export(
        _Wrapped().eval(), batch.features, dynamic_shapes=(rows,), strict=False
    )
    program.example_inputs = None
    torch.export.save(program, target.with_suffix(".pt2"), extra_files={"autocast": ""})
    with zipfile.ZipFile(target.with_suffix(".pt2")) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def _write(target: Path, entries: dict[str, bytes]) -> None:
    with zipfile.ZipFile(target, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
