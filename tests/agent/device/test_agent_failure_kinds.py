"""What a task failed of follows from its exception's class, not from the name of that."""

from __future__ import annotations

import pytest

from cerebro_hydra.agent.device.messages import FailureKind
from cerebro_hydra.errors import NonFiniteLoss, ScratchFull, StepDiffers, TransferError


class Unreachable(TransferError):
    """Says more than its base."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TransferError("gone"), FailureKind.TRANSFER),
        (Unreachable("gone"), FailureKind.TRANSFER),
        (StepDiffers("at step 7"), FailureKind.DIFFERENCE),
        (NonFiniteLoss("nan"), FailureKind.NON_FINITE_LOSS),
        (ScratchFull("disk"), FailureKind.SCRATCH_FULL),
        (type("TransferError", (Exception,), {})("a user's own"), FailureKind.OTHER),
        (SystemExit(1), FailureKind.OTHER),
    ],
)
def test_an_exception_has_a_kind(error: BaseException, kind: FailureKind) -> None:
    assert FailureKind.of(error) is kind
