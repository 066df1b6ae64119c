from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cerebro_hydra.data.rows import ContentDigest, row_hashes

RANDOM = np.random.default_rng(0)
ROWS = 300
COLUMNS = {
    "floats": RANDOM.normal(size=(ROWS, 5)).astype(np.float32),
    "ints": RANDOM.integers(-(2**63), 2**63 - 1, ROWS),
    "flags": RANDOM.integers(0, 2, (ROWS, 3)).astype(bool),
    "grid": RANDOM.integers(0, 9, (ROWS, 2, 3)),
}
IDS = np.arange(5, 5 + 3 * ROWS, 3)


def digest(values: NDArray, ids: NDArray = IDS) -> int:
    total = ContentDigest(1)
    total.add(ids, [values])
    return total.digests[0]


@pytest.mark.parametrize("name", COLUMNS)
def test_neither_order_nor_blocks_of_rows_matter(name: str) -> None:
    values, order = COLUMNS[name], RANDOM.permutation(ROWS)
    total = ContentDigest(2)
    for part in np.array_split(order, 7):
        total.add(IDS[part], [values[part], COLUMNS["ints"][part]])
    assert total.digests == (digest(values), digest(COLUMNS["ints"]))


@pytest.mark.parametrize("name", COLUMNS)
@given(st.data())
def test_every_flipped_bit_shows(name: str, data: st.DataObject) -> None:
    flipped = COLUMNS[name].copy()
    byte = data.draw(st.integers(0, flipped.nbytes - 1))
    bit = 1 if name == "flags" else 1 << data.draw(st.integers(0, 7))
    flipped.view(np.uint8).reshape(-1)[byte] ^= bit
    assert digest(flipped) != digest(COLUMNS[name])


@pytest.mark.parametrize("name", ["floats", "ints", "grid"])
def test_exchanges_show(name: str) -> None:
    values = COLUMNS[name]
    rows = values.copy()
    rows[[3, 200]] = rows[[200, 3]]
    assert digest(rows) != digest(values)
    flat = values.reshape(ROWS, -1).copy()
    if flat.shape[1] > 1:
        places = np.flatnonzero(flat[7] != flat[7, 0])[:1]
        flat[7, 0], flat[7, places] = flat[7, places[0]], flat[7, 0]
        assert digest(flat) != digest(values)


def test_rows_without_their_ids_show() -> None:
    shifted = IDS.copy()
    shifted[-1] += 1
    assert digest(COLUMNS["floats"], shifted) != digest(COLUMNS["floats"])


def test_sign_of_zero_and_two_signs_show() -> None:
    zeros = np.zeros((2, 64), np.float32)
    negative = zeros.copy()
    negative[0, 3] = -0.0
    assert digest(negative, IDS[:2]) != digest(zeros, IDS[:2])
    hashes = set()
    for first in range(64):
        for second in range(first):
            both = zeros.copy()
            both[0, [first, second]] = -0.0
            hashes.add(int(row_hashes(both)[0]))
    assert len(hashes) == 64 * 63 // 2


def test_hash_of_a_row_is_the_same_everywhere() -> None:
    """Manifests outlive versions: another hash needs another FORMAT."""
    values = np.array([[1.5, -2.0], [0.0, 3.0]], np.float32)
    assert digest(values, np.array([0, 7])) == 0xF2A32945CB1DFEEA


def test_wide_rows_are_hashed_in_blocks() -> None:
    wide = RANDOM.normal(size=(3, 40_000)).astype(np.float32)
    assert [int(each) for each in row_hashes(wide)] == [
        int(row_hashes(row[None])[0]) for row in wide
    ]
