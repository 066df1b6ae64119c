"""What bits depend on beside code and data: kernels are chosen in time, and fingerprints tell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cerebro_hydra.kernels import KERNELS
from cerebro_hydra.recipe import (
    Recipe,
    exact_by_address,
    fingerprint_differences,
    numeric_fingerprint,
)
from cerebro_hydra.recipe.numerics import is_portable, same_at_every_offset
from cerebro_hydra.shards.cut.sample import Example
from cerebro_hydra.testing.model_case import ModelCase, Shards

CHECKOUT = Path(__file__).resolve().parents[2]
OLD_KERNELS = {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
"""Of MKL, which look at addresses on every CPU unless its mode says otherwise."""
TELL = (
    "from cerebro_hydra.recipe.numerics import exact_by_address, mkl_mode; "
    "print(mkl_mode(), exact_by_address())"
)

HASH_IN_A_FORK = """
import multiprocessing
import cerebro_hydra

with multiprocessing.get_context("forkserver").Pool(1) as pool:
    print(pool.apply(hash, ("a word",)))
"""

needs_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch has no MKL")


class Narrow(ModelCase):
    """A model of products that MKL has kernels of its own for: with one row or column."""

    rows = (17, 8)

    def recipe(self, shards: Shards) -> Recipe:
        model = nn.Sequential(nn.Linear(64, 10), nn.Tanh(), nn.Linear(10, 1))
        return Recipe(model, torch.optim.Adam(model.parameters()), nn.MSELoss(), shards=shards)

    def batch(self, rows: int, seed: int) -> Example:
        g = torch.Generator().manual_seed(seed)
        return (torch.randn(rows, 64, generator=g),), (torch.randn(rows, 1, generator=g),)


def in_new_process(code: str, **variables: str) -> str:
    """What the code prints where nothing was said of kernels, but for these variables."""
    chosen = ("MKL_", "ATEN_", "ONEDNN_", "PYTHONHASHSEED")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(chosen)}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=kept | variables,
        cwd=CHECKOUT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout.strip()


@needs_mkl
@pytest.mark.parametrize(
    ("before", "variables", "told"),
    [
        ("", {}, "AUTO,STRICT True"),
        ("import torch", {}, "AUTO,STRICT True"),
        ("import torch; torch.ones(9, 9) @ torch.ones(9, 9)", {}, "OFF False"),
        ("", {"MKL_CBWR": "COMPATIBLE"}, "COMPATIBLE True"),
    ],
    ids=["package-first", "torch-first", "product-first", "users-own"],
)
def test_importing_the_package_before_the_first_product_makes_addresses_irrelevant(
    before: str, variables: dict[str, str], told: str
) -> None:
    assert in_new_process(f"{before}\n{TELL}", **OLD_KERNELS, **variables) == told


@pytest.mark.long
@needs_mkl
def test_steps_of_a_model_differ_by_address_where_mkl_was_called_too_early() -> None:
    """The negative control of `ModelCase.test_bits_are_the_same_at_every_address`."""
    code = """
from tests.recipe.test_recipe_numerics import Narrow
try:
    Narrow().test_bits_are_the_same_at_every_address()
    print("same")
except AssertionError:
    print("differs")
"""
    assert in_new_process(code, **OLD_KERNELS, MKL_CBWR="") == "differs"
    assert in_new_process(code, **OLD_KERNELS) == "same"


def test_the_probe_sees_a_product_that_looks_at_one_operands_address() -> None:
    def biased(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left @ right + (1e-7 if right.data_ptr() % 16 else 0.0)

    assert not same_at_every_offset(biased)
    assert exact_by_address()


def test_a_fingerprint_tells_the_cpu_and_how_kernels_are_chosen() -> None:
    found = numeric_fingerprint()
    assert found["torch"] == torch.__version__
    assert found["addresses"] == "any"
    assert found["processor"] and isinstance(found["instructions"], str)
    if torch.backends.mkl.is_available():
        assert found["mkl"] and found["mkl_mode"]
    tell = (
        "from cerebro_hydra.recipe import numeric_fingerprint; found = numeric_fingerprint(); "
        "print(found['mkl_instructions'], found['onednn_limit'])"
    )
    limited = {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    assert in_new_process(tell, **limited) == "AVX2 AVX2"


def test_square_roots_of_a_portable_process_are_the_nearest_numbers() -> None:
    code = """
import torch
from cerebro_hydra.recipe.randomness import compute_as
compute_as("fast")
u = torch.rand(1 << 16)
wanted = u.double().sqrt().float()
before = int((u.sqrt() != wanted).sum())
compute_as("portable")
compute_as("portable")
into, halves = torch.empty(0), u.bfloat16()
torch.sqrt(u, out=into)
turned = u.reshape(-1, 256).t().sqrt().t().reshape(-1)
found = [u.sqrt(), u.clone().sqrt_(), into, *torch._foreach_sqrt([u]), turned]
x = u[1:].clone().requires_grad_()
x.sqrt().sum().backward()
print(
    before > 0,
    all(torch.equal(each, wanted) for each in found),
    torch.equal(x.grad, 1 / (2 * wanted[1:])),
    torch.equal(halves.sqrt(), halves.float().sqrt().bfloat16()),
    torch.tensor([4, -1]).sqrt().tolist(),
)
try:
    torch.arange(4).sqrt_()
except RuntimeError as error:
    print("can't be cast" in str(error))
"""
    told = "True True True True [2.0, nan]\nTrue"
    assert in_new_process(code, **KERNELS["portable"]) == told


def test_unlike_cpus_differ_unless_both_take_portable_kernels() -> None:
    wanted = KERNELS["portable"]
    portable: dict[str, Any] = {
        "cpu": wanted["ATEN_CPU_CAPABILITY"].upper(),
        "mkl_mode": wanted["MKL_CBWR"],
        "onednn_limit": wanted["ONEDNN_MAX_CPU_ISA"],
        "square_roots": "nearest",
        "processor": "one",
        "instructions": "avx2",
        "mkl": "2024.2",
    }
    other = portable | {"processor": "another", "instructions": "avx512f"}
    assert is_portable(portable)
    assert not list(fingerprint_differences(portable, other))
    newer = other | {"mkl": "2025.0"}
    assert list(fingerprint_differences(portable, newer)) == [("mkl", "2024.2", "2025.0")]
    for name in ("cpu", "mkl_mode", "onednn_limit", "square_roots"):
        fast = other | {name: "AVX512"}
        assert not is_portable(fast)
        differing = {name for name, _, _ in fingerprint_differences(portable, fast)}
        assert differing == {name, "processor", "instructions"}


@pytest.mark.long
def test_the_portable_variables_give_a_portable_process() -> None:
    code = """
from cerebro_hydra.recipe import has_portable_kernels, is_portable, numeric_fingerprint
from cerebro_hydra.recipe.randomness import compute_as
kernels = has_portable_kernels(numeric_fingerprint())
before = is_portable(numeric_fingerprint())
compute_as("portable")
print(kernels, before, is_portable(numeric_fingerprint()))
"""
    assert in_new_process(code, **KERNELS["portable"]) == "True False True"
    assert in_new_process(code) == "False False False"


def test_processes_of_devices_hash_texts_alike_unless_their_user_says_otherwise() -> None:
    # What a factory numbers by a set of texts follows from that.
    first, second = (in_new_process(HASH_IN_A_FORK) for _ in range(2))
    assert first == second != in_new_process(HASH_IN_A_FORK, PYTHONHASHSEED="7")
