"""BERT, GPT-2, T5, LSTM, GRU and LoRA, small: every promise of the suite of models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from cerebro_hydra.recipe import Columns, Recipe
from cerebro_hydra.storage.digest import digest
from cerebro_hydra.testing.model_case import ModelCase, Shards
from tests.conformance import text

pytestmark = pytest.mark.kernels

Example = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
Batch = dict[str, Tensor]

WORDS, LENGTH = 50, 12
TEXT = Columns(("input_ids", "attention_mask"), ("label",))


def sentences(rows: int, seed: int, longest: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Padded token ids and their mask; the longest one has `longest` tokens."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, longest + 1, (rows, 1), generator=g)
    lengths[0] = longest
    mask = (torch.arange(LENGTH) < lengths).long()
    return torch.randint(1, WORDS, (rows, LENGTH), generator=g) * mask, mask


def classes(rows: int, seed: int) -> Tensor:
    return torch.randint(3, (rows,), generator=torch.Generator().manual_seed(seed))


def trimmed(batch: Batch, training: bool) -> Batch:
    """Without the columns that every row pads."""
    longest = int(batch["attention_mask"].sum(1).max())
    return {k: v[:, :longest] if v.dim() > 1 else v for k, v in batch.items()}


@pytest.mark.long
class TestBERTOfDynamicLength(ModelCase):
    """Inputs by the names of their columns, a dataclass as output, the model's own loss.

    Batches differ in length too, because `collate` trims what every row pads.
    """

    in_processes = False
    columns = TEXT

    def recipe(self, shards: Shards) -> Recipe:
        model = text.bert(16, 1, WORDS)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return Recipe(model, optimizer, "model", shards=shards, collate=trimmed)

    def batch(self, rows: int, seed: int) -> Example:
        return sentences(rows, seed, longest=LENGTH - seed % 5), (classes(rows, seed),)

    def test_batches_have_several_lengths(self) -> None:
        lengths = set()
        for batch in (b for windows in self.sub_epochs() for window in windows for b in window):
            features, _ = self.make(1).collated(batch.features, batch.labels, None)
            lengths.add(features[0].shape[1])
        assert len(lengths) > 1


@pytest.mark.long
class TestGPT2(ModelCase):
    """Its embeddings are the weights of its head; trained as it comes, with its own loss."""

    columns = Columns(("input_ids",), ("labels",))

    def recipe(self, shards: Shards) -> Recipe:
        model = text.gpt2(16, 2, WORDS)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return Recipe(model, optimizer, "model", shards=shards, clip_grad_norm=1.0)

    def batch(self, rows: int, seed: int) -> Example:
        g = torch.Generator().manual_seed(seed)
        tokens = torch.randint(WORDS, (rows, LENGTH), generator=g)
        return (tokens,), (tokens.clone(),)

    def test_first_and_last_shard_share_the_embeddings(self) -> None:
        trial = self.start(3)
        assert trial.cut_model.tied == {"transformer.wte.weight": (0, 2)}


@pytest.mark.long
class TestT5(ModelCase):
    """The encoder's output crosses every later cut; encoder, decoder and head share one table."""

    in_processes = False
    columns = Columns(("input_ids", "attention_mask", "decoder_input_ids"), ("labels",))
    cuts = (2, 4)

    def recipe(self, shards: Shards) -> Recipe:
        model = text.t5(16, 2, WORDS)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return Recipe(model, optimizer, "model", shards=shards)

    def batch(self, rows: int, seed: int) -> Example:
        labels = sentences(rows, seed + 1000)[0][:, :8].contiguous()
        begin = torch.zeros(rows, 1, dtype=torch.long)
        return (*sentences(rows, seed), torch.cat([begin, labels[:, :-1]], 1)), (labels,)

    def test_the_table_is_tied_thrice_and_the_encoders_output_crosses_every_later_cut(self) -> None:
        later = ["decoder.block.0", "decoder.block.1", "decoder.final_layer_norm"]
        trial = self.start(["encoder.block.1", *later], cut="export")
        assert trial.cut_model.tied == {"shared.weight": (0, 1, 4)}
        live_in = [set(graph.live_in) for graph in trial.cut_model.graphs.train]
        assert live_in[2] & live_in[3] & live_in[4]


class TestLSTM(ModelCase):
    """No fallback is needed: torch.export takes the recurrent layer as one operation, which no cut
    parts, and its graph is exact for any number of rows of one length."""

    in_processes = False
    kind: type[nn.RNNBase] = nn.LSTM

    def recipe(self, shards: Shards) -> Recipe:
        model = text.Recurrent(self.kind, WORDS, 16, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return Recipe(model, optimizer, nn.CrossEntropyLoss(), ["accuracy"], shards=shards)

    def batch(self, rows: int, seed: int) -> Example:
        return (sentences(rows, seed)[0],), (classes(rows, seed),)

    def test_the_recurrent_layer_is_in_one_shard(self) -> None:
        assert self.start(3, cut="export").admission.spec.at == ("recurrent@0", "head@0")


@pytest.mark.long
class TestGRU(TestLSTM):
    kind = nn.GRU


def shortened(batch: Batch, training: bool) -> Batch:
    """Without the tokens that every row pads."""
    longest = int((batch["tokens"] > 0).sum(1).max())
    return batch | {"tokens": batch["tokens"][:, :longest]}


@pytest.mark.long
class TestLSTMOfDynamicLength(TestLSTM):
    """Its graph holds for one length alone, so it is cut by modules only."""

    columns = Columns(("tokens",), ("label",))
    ways = ("modules",)

    def recipe(self, shards: Shards) -> Recipe:
        return replace(super().recipe(shards), collate=shortened)

    def batch(self, rows: int, seed: int) -> Example:
        return (sentences(rows, seed, LENGTH - seed % 5)[0],), (classes(rows, seed),)

    def test_the_recurrent_layer_is_in_one_shard(self) -> None:
        report = self.start(3, cut="export").admission.report
        assert report.mode == "modules"
        assert "its graph holds for batches of length" in report.text()

    def test_export_loads_without_its_source(self, tmp_path: Path) -> None:
        with pytest.raises(RuntimeError, match=r"shape \(4, 11\), .* shape\[1\] of 12"):
            super().test_export_loads_without_its_source(tmp_path)


@pytest.mark.long
class TestLoRA(ModelCase):
    """Adapters written by hand on a frozen BERT."""

    columns = TEXT

    def recipe(self, shards: Shards) -> Recipe:
        model = text.with_adapters(text.bert(16, 2, WORDS), rank=2)
        trained = [p for p in model.parameters() if p.requires_grad]
        return Recipe(model, torch.optim.AdamW(trained, lr=0.01), "model", shards=shards)

    def batch(self, rows: int, seed: int) -> Example:
        return sentences(rows, seed), (classes(rows, seed),)

    def test_only_adapters_and_the_head_move(self) -> None:
        trial = self.start(3)
        frozen = [digest(content["frozen"]) for content, _ in trial.shards]
        first = [digest(content["trainable"]) for content, _ in trial.shards]
        names = {
            entry.name.split(":")[1]
            for shard in trial.admission.layout.shards
            for entry in shard.trainable.entries
            if ":" in entry.name and not entry.name.startswith("pad:")
        }
        assert names
        assert all(n.endswith((".up", ".down")) or n.startswith("classifier.") for n in names)
        for windows in self.sub_epochs():
            trial.train(windows)
        assert frozen == [digest(content["frozen"]) for content, _ in trial.shards]
        now = [digest(content["trainable"]) for content, _ in trial.shards]
        # Where the cut lies depends on measured times, and a shard may be frozen as a whole.
        moves = [bool(shard.trainable.entries) for shard in trial.admission.layout.shards]
        assert any(moves)
        assert [before != after for before, after in zip(first, now, strict=True)] == moves
        sizes = [(len(c["trainable"]), len(c["frozen"])) for c, _ in trial.shards]
        assert sum(t for t, _ in sizes) < sum(f for _, f in sizes)
