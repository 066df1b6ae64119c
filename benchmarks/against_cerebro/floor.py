"""Measures the floor: two plain torch processes share the four trials, with rows in memory."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
from nets import make_adam, make_net
from torch import Tensor, nn
from work import EPOCHS, SEED, VALIDATION, WORKERS, digits, shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--net", required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    barrier, ended = context.Barrier(WORKERS + 1), context.SimpleQueue()
    net, rows = arguments.net, arguments.rows
    processes = [
        context.Process(target=train_share, args=(net, rows, share, barrier, ended))
        for share in shares()
    ]
    for process in processes:
        process.start()
    barrier.wait()
    started = time.time()
    told = [ended.get() for _ in processes]
    for process in processes:
        process.join()
    document = {
        "training": max(each["ended"] for each in told) - started,
        "cpu": sum(each["cpu"] for each in told),
        "val_accuracy": [value for each in told for value in each["val_accuracy"]],
    }
    arguments.json.write_text(json.dumps(document, indent=2) + "\n")


def train_share(
    net: str, rows: int, share: Sequence[dict[str, Any]], barrier: Barrier, ended: Any
) -> None:
    """Train some trials, one after the other; the clock starts when the rows are in memory."""
    torch.set_num_threads(1)
    pixels, labels = (torch.from_numpy(each) for each in digits(rows))
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(SEED))
    held_out, chosen = order.split([round(rows * VALIDATION), rows - round(rows * VALIDATION)])
    training = pixels[chosen], labels[chosen]
    validation = pixels[held_out], labels[held_out]
    barrier.wait()
    cpu = time.process_time()
    accuracies = [train(net, params, training, validation) for params in share]
    ended.put(
        {
            "ended": time.time(),
            "cpu": time.process_time() - cpu,
            "val_accuracy": accuracies,
        }
    )


def train(
    net: str,
    params: dict[str, Any],
    rows: tuple[Tensor, Tensor],
    validation: tuple[Tensor, Tensor],
) -> float:
    """Train one trial for all epochs, evaluate after each, and return the last accuracy."""
    torch.manual_seed(SEED)
    model = make_net(net)
    optimizer = make_adam(model, params["lr"])
    loss_of = nn.CrossEntropyLoss()
    size = params["batch_size"]
    hits = 0.0
    for _ in range(EPOCHS):
        model.train()
        for chosen in torch.randperm(len(rows[0])).split(size):
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(model(rows[0][chosen]), rows[1][chosen])
            loss.backward()
            optimizer.step()
            loss.item()
        model.eval()
        hits = 0.0
        with torch.no_grad():
            for pixels, labels in zip(*(each.split(size) for each in validation), strict=True):
                outputs = model(pixels)
                loss_of(outputs, labels).item()
                hits += (outputs.argmax(1) == labels).sum().item()
    return hits / len(validation[0])


if __name__ == "__main__":
    main()
