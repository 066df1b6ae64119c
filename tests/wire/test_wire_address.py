from __future__ import annotations

import pytest

from cerebro_hydra.errors import SetupError
from cerebro_hydra.wire.address import own_host


@pytest.mark.parametrize(
    "peer", ["tcp://127.0.0.1:4000", "grpc://localhost:4000", "grpc://127.0.0.9:4000"]
)
def test_a_peer_on_loopback_is_reached_from_loopback(peer: str) -> None:
    assert own_host(peer) in ("127.0.0.1", "::1")


def test_a_peer_on_this_machines_network_is_reached_from_there() -> None:
    own = own_host("tcp://192.0.2.1:4000") if _has_route() else None
    if own is None:
        pytest.skip("this machine has no network but loopback")
    assert not own.startswith("127.") and own_host(f"tcp://{own}:4000") == own


def _has_route() -> bool:
    try:
        own_host("tcp://192.0.2.1:4000")
    except SetupError:
        return False
    return True


def test_a_name_that_nobody_knows_is_explained() -> None:
    with pytest.raises(SetupError, match=r"no way to tcp://no-such-host\.invalid:1"):
        own_host("tcp://no-such-host.invalid:1")
