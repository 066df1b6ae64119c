"""What one optimizer step gave, so that the same step can be compared which is taken otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cerebro_hydra.shards.layout import EXISTS, Memory, ShardLayout
from cerebro_hydra.storage.digest import digest

TensorDigests = Mapping[str, str]
"""The digest of each tensor of a shard that trains, by its name in the segment."""

_KINDS = {"param": "parameter", "buffer": "buffer", "ema": "moving average of"}


def tensor_digests(layout: ShardLayout, trainable: Memory) -> TensorDigests:
    """Return the digests of the tensors in a trainable segment."""
    content = trainable.cpu().numpy()
    return {
        entry.name: digest(content[entry.offset : entry.offset + entry.nbytes])
        for entry in layout.trainable.entries
    }


@dataclass
class StepResult:
    """Holds the mean loss of a step, and the digests of the state after it, shard by shard."""

    loss: float = float("nan")
    shards: dict[int, TensorDigests] = field(default_factory=dict)

    def difference(self, uncut: StepResult) -> str | None:
        """Return what is otherwise in the uncut model's step, None if no bit is."""
        if self.loss != uncut.loss:
            return f"the loss is {self.loss!r}, not {uncut.loss!r}"
        for shard, digests in sorted(self.shards.items()):
            for name, found in digests.items():
                if found != uncut.shards[shard][name]:
                    return _described(name)
        return None


def _described(name: str) -> str:
    kind, _, rest = name.partition(":")
    if kind == "optim":
        parameter, _, key = rest.rpartition(":")
        return f"optimizer state {key!r} of {parameter!r}"
    return "which optimizer state exists" if name == EXISTS else f"{_KINDS[kind]} {rest!r}"
