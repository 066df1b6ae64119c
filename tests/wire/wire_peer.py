"""The other process of a wire test: one role per run, spoken to by lines of JSON.

Started by `conftest.py` as `python wire_peer.py ROLE CREDENTIALS ARGUMENTS`; every line that it
prints is a JSON value, and it acts on lines of its standard input.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

from cerebro_hydra.wire.control import ControlClient, ControlServer
from cerebro_hydra.wire.credentials import Credentials
from cerebro_hydra.wire.shards import ShardClient, ShardServer
from tests.wire.owners import Published, fetch, noise


def say(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def agent(credentials: Credentials, uri: str, incarnation: str) -> None:
    """Connect; answer {"send": n} from the driver with n numbered messages; echo what comes."""
    lost = threading.Event()

    def on_message(message: dict[str, Any]) -> None:
        if "send" in message:
            for number in range(message["send"]):
                client.send({"number": number})
        else:
            say(message)

    def on_closed(reason: str) -> None:
        say({"closed": reason})
        lost.set()

    client = ControlClient(uri, credentials, {"incarnation": incarnation}, on_message, on_closed)
    say({"accepted": True})
    for line in sys.stdin:
        if line.strip() == "close":
            client.send({"last": "word"})
            client.close()
            say({"left": True})
            return
    lost.wait()


def driver(credentials: Credentials, silence: str = "10") -> None:
    """Serve agents until a line comes; "crash" ends the process without closing anything."""
    server = ControlServer(
        "127.0.0.1",
        credentials,
        lambda hello: None,
        lambda incarnation, message: say(message),
        lambda incarnation, reason: say({"closed": reason}),
        silence_seconds=float(silence),
    )
    say({"uri": server.uri})
    if sys.stdin.readline().strip() == "crash":
        sys.exit(3)
    server.close()
    say({"closed": "by itself"})


def owner(credentials: Credentials, nbytes: str) -> None:
    """Publish shard 0; any other shard when a line comes; shard 9 never."""
    shard = Published({"trainable": ("t", noise(int(nbytes)))}, {"step": 3})
    published = False

    def look(number: int) -> Published | None:
        if number and not published:
            say({"waiting": number})
        return shard if number == 0 or (published and number != 9) else None

    server = ShardServer("127.0.0.1", credentials, lambda request: look)
    say({"uri": server.uri})
    for line in sys.stdin:
        if line.strip() == "publish":
            published = True
            server.look_again()
        else:
            server.close()
            say({"closed": True})
            return


def receiver(credentials: Credentials, uri: str, shard: str = "1") -> None:
    """Ask for a shard and wait for it; stop when it is offered, until a line comes."""
    say({"asking": True})

    def held(digest: str) -> None:
        say({"offered": True})
        sys.stdin.readline()

    fetch(ShardClient(uri, credentials), int(shard), held=held)


if __name__ == "__main__":
    roles = {"agent": agent, "driver": driver, "owner": owner, "receiver": receiver}
    roles[sys.argv[1]](Credentials.from_json(json.loads(sys.argv[2])), *sys.argv[3:])
