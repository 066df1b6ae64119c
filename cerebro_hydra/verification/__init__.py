"""Verifies that what lies in a store is what was written there, without training."""

from __future__ import annotations

from cerebro_hydra.verification.report import VerificationReport, VerifiedPart
from cerebro_hydra.verification.verify import verify

__all__ = ["VerificationReport", "VerifiedPart", "verify"]
