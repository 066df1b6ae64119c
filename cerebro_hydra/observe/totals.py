"""Sums up the hops of a run: their number, bytes moved and saved, seconds."""

from __future__ import annotations

from dataclasses import dataclass

from cerebro_hydra.plan.events import Hop


@dataclass
class Totals:
    """Sums over the hops from worker to worker, for training and for evaluation.

    First loads from the store are not hops.
    """

    hops: int = 0
    bytes_moved: int = 0
    bytes_saved: int = 0
    seconds: float = 0.0

    def add(self, hop: Hop) -> None:
        """Count one hop."""
        self.hops += 1
        self.bytes_moved += hop.bytes_moved
        self.bytes_saved += hop.bytes_saved
        self.seconds += hop.seconds

    @property
    def seconds_per_hop(self) -> float:
        """Mean seconds of one hop; 0 before the first."""
        return self.seconds / self.hops if self.hops else 0.0

    @property
    def saved_share(self) -> float:
        """Share of the bytes of all hops that the receiver had already."""
        total = self.bytes_moved + self.bytes_saved
        return self.bytes_saved / total if total else 0.0

    def __str__(self) -> str:
        """Describe the totals in one line."""
        return (
            f"{self.hops} hops: {human_bytes(self.bytes_moved)} moved, "
            f"{human_bytes(self.bytes_saved)} saved ({self.saved_share:.0%}), "
            f"{1000 * self.seconds_per_hop:.0f} ms per hop"
        )


def human_bytes(count: int) -> str:
    """Format a count of bytes in decimal units, as 12.3 MB."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
