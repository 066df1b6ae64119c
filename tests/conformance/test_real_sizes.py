"""Models as large as people use them: each is cut into four both ways and admitted, bit for bit."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cerebro_hydra.recipe import Columns, Recipe
from cerebro_hydra.shards.admission.admit import AdmittedCut, admit
from tests.conformance import tables, text, vision

pytestmark = pytest.mark.long

ROWS, LENGTH, SHARDS = 2, 16, 4
MIB = 2**20


@pytest.fixture(autouse=True)
def freed() -> Iterator[None]:
    """The next model is not built before the last one is gone."""
    yield
    gc.collect()


def admitted(
    model: nn.Module, features: tuple[Tensor, ...], targets: tuple[Tensor, ...], columns: Columns,
    loss: Any = "model", shards: int = SHARDS, **rules: Any,
) -> AdmittedCut:  # fmt: skip
    """Admit both ways with plain SGD, which needs no memory beside the weights."""
    trained = [p for p in model.parameters() if p.requires_grad]
    for cut in ("modules", "export"):
        optimizer = torch.optim.SGD(trained, lr=1e-3)
        recipe = Recipe(model, optimizer, loss, shards=shards, cut=cut, **rules)
        admission = admit(recipe.bind(columns), [(features, targets)], trial_seed=1)
        report = admission.report
        assert report.mode == cut, report.text()
        assert report.fallback is None, report.text()
        assert len(report.shards) == shards, report.text()
    return admission


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def tokens(vocabulary: int) -> Tensor:
    return torch.randint(1, vocabulary, (ROWS, LENGTH))


def classes() -> tuple[Tensor]:
    return (torch.randint(3, (ROWS,)),)


def sentences(vocabulary: int) -> tuple[Tensor, Tensor]:
    return tokens(vocabulary), torch.ones(ROWS, LENGTH, dtype=torch.long)


TEXT = Columns(("input_ids", "attention_mask"), ("label",))
ONE = Columns(("features",), ("label",))


def test_lora_on_bert_base_moves_a_hundredth_of_it() -> None:
    model = text.with_adapters(text.bert(768, 12, 30522, positions=512), rank=8)
    assert parameters(model) > 109e6
    layout = admitted(model, sentences(30522), classes(), TEXT).layout
    trainable = sum(shard.trainable.nbytes for shard in layout.shards)
    frozen = sum(shard.frozen.nbytes for shard in layout.shards)
    assert frozen > 400 * MIB
    assert trainable < frozen / 100


def test_gpt2() -> None:
    model = text.gpt2(768, 12, 50257, positions=1024)
    assert 124e6 < parameters(model) < 125e6
    ids = tokens(50257)
    layout = admitted(model, (ids,), (ids.clone(),), Columns(("input_ids",), ("labels",))).layout
    nbytes = sum(shard.trainable.nbytes for shard in layout.shards)
    assert nbytes < 4 * parameters(model) + MIB, "tied embeddings are held once"


def test_t5_small() -> None:
    model = text.t5(512, 6, 32128, heads=8)
    assert 60e6 < parameters(model) < 61e6
    columns = Columns(("input_ids", "attention_mask", "decoder_input_ids"), ("labels",))
    admitted(model, (*sentences(32128), tokens(32128)), (tokens(32128),), columns)


def test_vit_b16_at_224() -> None:
    model = vision.vit(768, 12, 224, 16, 3)
    assert 85e6 < parameters(model) < 87e6
    images = torch.randn(ROWS, 3, 224, 224)
    columns = Columns(("pixel_values",), ("label",))
    admitted(model, (images,), classes(), columns, nn.CrossEntropyLoss())


def test_resnet18_at_224() -> None:
    model = vision.ResNet18(64, 1000)
    assert 11.6e6 < parameters(model) < 11.7e6
    images = torch.randn(ROWS, 3, 224, 224)
    admitted(model, (images,), classes(), ONE, nn.CrossEntropyLoss())


def test_lstm_of_two_times_512_is_cut_around_its_recurrent_layers() -> None:
    model = text.Recurrent(nn.LSTM, 20_000, 512, 3)
    loss = nn.CrossEntropyLoss()
    # There are three units, of which the recurrent layers are one.
    admitted(model, (tokens(20_000),), classes(), ONE, loss, shards=3)


def test_recommender_of_fifty_million() -> None:
    model = tables.Recommender(600_000, 90_000, 64)
    assert parameters(model) > 49e6
    features = (
        torch.randint(600_000, (ROWS,)),
        torch.randint(90_000, (ROWS,)),
        torch.randint(90_000, (ROWS, 5)),
    )
    columns = Columns(("user", "item", "seen"), ("rating",))
    admitted(model, features, (torch.rand(ROWS),), columns, nn.MSELoss())


def test_mlp_of_twelve_million() -> None:
    model = vision.mlp(64, 3500, 10)
    assert parameters(model) > 12e6
    admitted(model, (torch.randn(ROWS, 64),), classes(), ONE, nn.CrossEntropyLoss(), shards=3)


def test_image_and_table() -> None:
    model = tables.ImageAndTable(256, 64, 3)
    features = (torch.randn(ROWS, 3, 64, 64), torch.randn(ROWS, 64))
    columns = Columns(("image", "table"), ("label",))
    admitted(model, features, classes(), columns, nn.CrossEntropyLoss())


def test_two_tasks() -> None:
    model = tables.TwoTasks(64, 1024, 8, 3)
    targets = (torch.randint(3, (ROWS,)), torch.randn(ROWS))
    admitted(
        model,
        (torch.randn(ROWS, 64),),
        targets,
        Columns(("features",), ("kind", "amount")),
        [nn.CrossEntropyLoss(), nn.MSELoss()],
        loss_weights=[1.0, 0.25],
    )
