"""Digests tensors by content, so that equal segments are sent and kept once."""

from __future__ import annotations

from torch import Tensor, uint8

from cerebro_hydra.storage.digest import digest


def tensor_digest(tensor: Tensor) -> str:
    """Return the digest of the bytes of a tensor."""
    return digest(tensor.detach().contiguous().reshape(-1).view(uint8).cpu().numpy())
