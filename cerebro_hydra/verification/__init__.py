"""Verifies that what lies in a store is what was written there, without training."""

from __future__ import annotations

from cerebro_hydra.verification.verify import VerificationReport, VerifiedPart, verify

__all__ = ["VerificationReport", "VerifiedPart", "verify"]
