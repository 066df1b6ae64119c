"""Decoding of bytes: equal to Pillow's by bits, told where it fails, kept while there is space."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from cerebro_hydra.data.cells import CellPool
from cerebro_hydra.errors import SetupError
from cerebro_hydra.recipe import Columns, RandomKey, Recipe
from cerebro_hydra.recipe.batch.cells import Cells
from cerebro_hydra.recipe.batch.decoded_rows import SHARE, DecodedRows
from cerebro_hydra.recipe.batch.decoding import Decoding
from cerebro_hydra.shards.cut.model_key import structure_key
from tests.golden import assert_golden, refusal
from tests.recipe.decoding import pictures
from tests.recipe.decoding.pictures import encoded, pixels


def cells(values: Sequence[bytes], image: bool = False, key: str | None = None) -> Cells:
    where = "row {} of train partition 2 in '/data'".format
    made = CellPool.of(values, "image", where, image)
    return Cells.of(range(len(values)), CellPool(made.data, made.ends, "image", where, image, key))


def decoded(decoder: Any, values: Sequence[bytes]) -> Any:
    return Decoding({"image": decoder}).given("image", cells(values))


@pytest.mark.parametrize("format", ["jpeg", "png"])
def test_formats_are_decoded_as_pillow_does(format: str) -> None:
    shapes = [(9, 12, 3), (8, 8, 1), (5, 16, 3)] + [(7, 6, 4)] * (format == "png")
    files = [encoded(pixels(i, *shape), format) for i, shape in enumerate(shapes)]
    for found, file, (height, width, channels) in zip(
        decoded(format, files), files, shapes, strict=True
    ):
        assert (found.dtype, found.shape) == (torch.uint8, (channels, height, width))
        pillows = np.array(Image.open(io.BytesIO(file))).reshape(height, width, channels)
        assert torch.equal(found, torch.from_numpy(pillows).permute(2, 0, 1))


def test_without_collate_pictures_of_one_size_are_stacked() -> None:
    files = [encoded(pixels(i)) for i in range(5)]
    model = pictures.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    recipe = Recipe(model, optimizer, lambda outputs: outputs.sum(), decode={"image": "jpeg"})
    recipe.bind(Columns(("image",), ()))
    (images,), _ = recipe.collated((cells(files),), (), None)
    assert torch.equal(images, torch.stack(decoded("jpeg", files)))
    assert images.shape == (5, 3, 16, 16)


def test_a_step_over_bytes_has_the_bits_of_plain_pytorch() -> None:
    """Decoding, cropping with drawn numbers, and a loss, beside the same lines without us."""
    table = pictures.table(8)
    recipe = pictures.searched({"by": "jpeg"}).bind(Columns(("image",), ("label",)))
    key, label = RandomKey(5, 1, 0), torch.from_numpy(table["label"])
    features, targets = recipe.collated((cells(table["image"]),), (label,), key)
    loss = recipe.compute_loss(recipe.model.eval()(*features), targets)

    key.reseed("collate")
    files = [np.array(Image.open(io.BytesIO(file))) for file in table["image"]]
    by_hand = pictures.cropped(
        {"image": [torch.from_numpy(file).permute(2, 0, 1) for file in files]}, True
    )
    assert torch.equal(features[0], by_hand["image"])
    assert torch.equal(loss, nn.functional.cross_entropy(recipe.model(by_hand["image"]), label))
    again, _ = recipe.collated((cells(table["image"]),), (label,), RandomKey(5, 2, 0))
    assert not torch.equal(again[0], features[0])


def saved(image: Image.Image, format: str) -> bytes:
    sink = io.BytesIO()
    image.save(sink, format)
    return sink.getvalue()


def numbered(cell: bytes, calls: list[int] = []) -> Tensor:  # noqa: B006  # it is to misbehave
    calls.append(1)
    return torch.full((2,), len(calls), dtype=torch.uint8)


def test_what_can_not_be_decoded_is_told_with_column_row_and_remedy() -> None:
    good, gray = pixels(1), Image.fromarray(pixels(1, channels=1).squeeze())
    jpeg, png = encoded(good), encoded(good, "PNG")
    torn = jpeg[: len(jpeg) // 2]
    flipped = png[:60] + bytes([png[60] ^ 255]) + png[61:]
    numbers = torch.ones(2, 3)

    def given(decode: Any, column: Tensor, stacked: bool = False) -> Callable[[], object]:
        decoding = Decoding(decode)
        return partial(decoding.stacked if stacked else decoding.given, "image", column)

    def fails(cell: bytes) -> Any:
        raise KeyError("no such tag")

    found = {
        "an unknown decoder": partial(Decoding, {"image": "tiff"}),
        "no dict": partial(Decoding, "jpeg"),
        "a column that is not there": partial(
            Decoding({"imgae": "jpeg"}).check, ("image", "label")
        ),
        "a column of numbers": given({"image": "jpeg"}, numbers),
        "an image of Spark": given({"image": "jpeg"}, cells([b""], image=True)),
        "a torn JPEG": given({"image": "jpeg"}, cells([jpeg, torn])),
        "a damaged PNG": given({"image": "png"}, cells([flipped])),
        "a PNG among JPEGs": given({"image": "jpeg"}, cells([jpeg, png])),
        "no bytes": given({"image": "jpeg"}, cells([jpeg, b""])),
        "CMYK": given({"image": "jpeg"}, cells([saved(gray.convert("CMYK"), "JPEG")])),
        "a palette": given({"image": "png"}, cells([saved(gray.convert("P"), "PNG")])),
        "a function that fails": given({"image": fails}, cells([b"abc"])),
        "a function of floats": given({"image": lambda _: numbers}, cells([jpeg])),
        "a function of lists": given({"image": lambda _: [1, 2]}, cells([jpeg])),
        "a function of one number": given(
            {"image": lambda _: np.uint8(3) * np.ones((), np.uint8)}, cells([jpeg])
        ),
        "a function that draws": given({"image": numbered}, cells([jpeg])),
        "bytes without collate": given(None, cells([jpeg]), stacked=True),
        "sizes without collate": given(
            {"image": "jpeg"}, cells([jpeg, encoded(pixels(1, 9, 7))]), stacked=True
        ),
        "a function of several sizes without collate": given(
            {"image": lambda cell: np.frombuffer(cell, np.uint8)},
            cells([b"ab", b"c"]),
            stacked=True,
        ),
    }
    told = {title: refusal(use) for title, use in found.items()}
    assert_golden(Path(__file__).with_name("golden") / "refused_decoding.txt", told)


def test_without_pillow_a_format_is_refused_and_a_function_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(SetupError, match=r"needs Pillow.*'cerebro-hydra\[images\]'.*a function"):
        Decoding({"image": "png"})
    decoding = Decoding({"image": lambda cell: np.frombuffer(cell, np.uint8)})
    assert decoding.given("image", cells([b"\1\2"]))[0].tolist() == [1, 2]


# ------------------------------------------------------------------ what is kept


KEY_OF = partial(structure_key, constants=True)  # as agents tell decoders from one another


def counting(calls: list[bytes]) -> Callable[[bytes], Any]:
    def decode(cell: bytes) -> Any:
        calls.append(cell)
        return np.frombuffer(cell, np.uint8)

    return decode


def test_kept_rows_are_decoded_once_and_have_the_same_bits(tmp_path: Path) -> None:
    calls: list[bytes] = []
    values = [bytes([i]) * (i + 1) for i in range(20)]
    column = cells(values, key="data/train-0/0")
    kept = DecodedRows(str(tmp_path), KEY_OF)
    decoding = Decoding({"image": counting(calls)})
    decoding.keep_in(kept)
    plain = Decoding({"image": counting([])}).given("image", column)
    for _ in range(3):
        assert all(map(torch.equal, decoding.given("image", column), plain))
    assert len(calls) == 20 + 2  # two of them to compare
    assert kept.nbytes == sum(map(len, values))
    assert list(tmp_path.iterdir()) == []  # its file has no name
    first = decoding.given("image", column)[5]
    first.zero_()
    assert torch.equal(decoding.given("image", column)[5], plain[5])


def crops(side: int) -> Callable[[bytes], Any]:
    return lambda cell: np.frombuffer(cell, np.uint8)[:side]


def test_a_decoder_is_known_again_by_what_it_does_and_holds(tmp_path: Path) -> None:
    """Each trial may make its own function: equal ones share what is kept, and others do not."""
    column = cells([b"abcd", b"efgh"], key="data/train-0/0")
    kept = DecodedRows(str(tmp_path), KEY_OF)
    sizes = []
    for side in (2, 2, 3, 2):
        decoding = Decoding({"image": crops(side)})
        decoding.keep_in(kept)
        assert [len(row) for row in decoding.given("image", column)] == [side, side]
        sizes.append(kept.nbytes)
    assert sizes == [4, 4, 10, 10]
    for anonymous in (cells([b"abcd"]), cells([b"abcd"], key="data/val-0/0")):
        decoding.given("image", anonymous)
    assert kept.nbytes == 12  # rows without a name are not kept, and those of another pool apart


class Disk:
    """Has a thousand bytes, of which others take some."""

    kept: DecodedRows | None = None
    others = 0

    def free(self, folder: str) -> int:
        return 1000 - self.others - (0 if self.kept is None else self.kept.nbytes)


def test_rows_beyond_the_space_are_decoded_again_with_the_same_bits(tmp_path: Path) -> None:
    """Others may take space, too: all of them together leave half of it."""
    calls: list[bytes] = []
    disk = Disk()
    disk.kept = DecodedRows(str(tmp_path), KEY_OF, disk.free)
    decoding = Decoding({"image": counting(calls)})
    decoding.keep_in(disk.kept)
    column = cells([bytes([i]) * 30 for i in range(20)], key="data/train-0/0")
    plain = Decoding({"image": counting([])}).given("image", column)
    decoding.given("image", column[:5])
    disk.others = 200
    for _ in range(2):
        assert all(map(torch.equal, decoding.given("image", column), plain))
    assert disk.kept.nbytes == 300 == 1000 * SHARE - 200
    assert len(calls) == 2 + 5 + 15 + 10


def test_threads_share_what_is_kept(tmp_path: Path) -> None:
    column = cells([bytes([i]) * 100 for i in range(50)], key="data/train-0/0")
    kept = DecodedRows(str(tmp_path), KEY_OF)
    found: list[list[Tensor]] = []

    def look() -> None:
        decoding = Decoding({"image": crops(90)})
        decoding.keep_in(kept)
        found.append([row for _ in range(3) for row in decoding.given("image", column)])

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and kept.nbytes == 50 * 90
    for rows in found:
        assert [row.tolist() for row in rows] == [[i] * 90 for i in range(50)] * 3
