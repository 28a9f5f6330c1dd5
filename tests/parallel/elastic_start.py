"""Starts Horovod beside a rank that never connects, and cuts that. Argument: how far the other rank comes."""

import dataclasses
import os
import queue
import socket
import sys
import threading
import time

from hvdtrain.distributed.elastic import ElasticCollectives
from hvdtrain.distributed.rendezvous import Rendezvous
from hvdtrain.fault_tolerance.elastic.generation import ALONE, Place
from hvdtrain.system import environment

HOST = "127.0.0.1"
PORT_IN_ADDRESS = slice(2, 4)
"""Of a ``sockaddr_in``."""

kept_open: list[socket.socket] = []


class NotingRendezvous(Rendezvous):
    """Tells what rank 0 has put."""

    def __init__(self) -> None:
        super().__init__(HOST)
        self.addresses: queue.Queue[bytes] = queue.Queue()

    def put(self, scope: str, key: str, value: bytes) -> None:
        super().put(scope, key, value)
        # A rank that is alone has none.
        if (scope, key) == ("global", "0") and value:
            self.addresses.put(value)


def lost_rank(kind: str, rendezvous: NotingRendezvous, full: socket.socket) -> None:
    """What rank 1 does before it is lost: rank 0 waits for its address, or for it to connect, or connects to it.

    Of two ranks, that with the lower address listens.
    """
    address = bytearray(rendezvous.addresses.get())
    port = int.from_bytes(address[PORT_IN_ADDRESS], "big")
    if kind == "connects":
        address[PORT_IN_ADDRESS] = (port + 1).to_bytes(2, "big")
    elif kind == "listens":
        assert full.getsockname()[1] < port, "choose a port below those that the system gives"
        address[PORT_IN_ADDRESS] = full.getsockname()[1].to_bytes(2, "big")
    if kind != "silent":
        rendezvous.put("global", "rank_1", b"other")
        rendezvous.put("global", "1", bytes(address))


def listen_without_accepting() -> socket.socket:
    """A socket whose queue of connections is full: whoever connects waits."""
    listener = socket.socket()
    for port in range(20000, 30000):
        try:
            listener.bind((HOST, port))
            break
        except OSError:
            continue
    listener.listen(0)
    kept_open.append(listener)
    for _ in range(2):
        waiting = socket.socket()
        waiting.setblocking(False)
        waiting.connect_ex((HOST, listener.getsockname()[1]))
        kept_open.append(waiting)
    return listener


def main(kind: str) -> None:
    rendezvous = NotingRendezvous()
    rendezvous.start()
    environment.choose_settings_for_restarts(deterministic=False)
    # Without the cut, the test would take the launcher's time limit.
    environment.set_gloo_timeout_of_restarts = lambda _: os.environ.update(HOROVOD_GLOO_TIMEOUT_SECONDS="600")
    environment.set_place(dataclasses.asdict(ALONE), "lo", (HOST, rendezvous.port))
    collectives = ElasticCollectives(environment.launcher())

    def lose() -> None:
        lost_rank(kind, rendezvous, listen_without_accepting())
        time.sleep(0.5)
        rendezvous.fail()
        collectives.cut()

    threading.Thread(target=lose).start()
    try:
        collectives.restart(dataclasses.asdict(Place(0, 2, 0, 1, 0, 2)), "lo", (HOST, rendezvous.port))
    except Exception as error:
        print(f"failed: {error}")
    alone = Rendezvous(HOST)
    alone.start()
    collectives.restart(dataclasses.asdict(ALONE), "lo", (HOST, alone.port))
    print(f"{collectives.size} rank")


if __name__ == "__main__":
    main(sys.argv[1])
