"""Links of the lab: forwards packets between network namespaces with a given rate, delay and loss.

    python links.py '{"namespaces": ["lab1", …], "prefix": "10.77.0.", "rate_bits": 1e8, "delay_s": 0.01, "loss": 0,
                      "mtu_bytes": 9000, "control": "/run/hvdtrain-lab/links.sock"}'

Each namespace gets a TUN device ``eth0``; its packets pass through a line of the given rate and arrive after
the delay. No kernel module for network emulation is needed. Accepts messages ``{"host": "lab2", "is_cut":
true}`` on the control socket.
"""

import collections
import contextlib
import ctypes
import fcntl
import itertools
import json
import math
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_QUEUE_S = 0.5
"""Packets that would queue for longer are dropped, as by a switch."""


def open_device(namespace: str) -> int:
    """Creates a TUN device in a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net") as own, open(f"/run/netns/{namespace}") as there:
        if libc.setns(there.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")
        try:
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", b"eth0", _IFF_TUN | _IFF_NO_PI))
        finally:
            libc.setns(own.fileno(), _CLONE_NEWNET)
    return device


class Line:
    """A host's outgoing line with fair queueing per connection; new connections go first, as in Linux' fq_codel."""

    def __init__(self, rate_bits: float, delay_s: float, loss: float):
        self._rate_bits = rate_bits
        self._delay_s = delay_s
        self._loss = loss
        self._free_at_s = 0.0
        self._waiting_bits = 0
        self._connections: dict[bytes, collections.deque[tuple[float, int, bytes]]] = {}
        self._turns: collections.deque[bytes] = collections.deque()
        self._in_flight: collections.deque[tuple[float, int, bytes]] = collections.deque()

    def send(self, now: float, to: int, packet: bytes) -> None:
        if random.random() < self._loss or self._waiting_bits > _QUEUE_S * self._rate_bits:
            return
        self._waiting_bits += 8 * len(packet)
        connection = packet[12:24]  # addresses and ports
        if connection not in self._connections:
            self._connections[connection] = collections.deque()
            self._turns.appendleft(connection)
        self._connections[connection].append((now, to, packet))

    def next_s(self) -> float:
        """The time of the next event."""
        times = [self._free_at_s] if self._turns else []
        return min([*times, *(each[0] for each in itertools.islice(self._in_flight, 1))], default=math.inf)

    def arrived(self, now: float) -> list[tuple[int, bytes]]:
        """Returns the destinations and packets that have arrived."""
        while self._turns and self._free_at_s <= now:
            connection = self._turns.popleft()
            sent_s, to, packet = self._connections[connection].popleft()
            # Even if this process is late, the simulated line is not.
            self._free_at_s = max(self._free_at_s, sent_s) + 8 * len(packet) / self._rate_bits
            self._in_flight.append((self._free_at_s + self._delay_s, to, packet))
            self._waiting_bits -= 8 * len(packet)
            if self._connections[connection]:
                self._turns.append(connection)
            else:
                del self._connections[connection]
        packets = []
        while self._in_flight and self._in_flight[0][0] <= now:
            packets.append(self._in_flight.popleft()[1:])
        return packets


def carry(devices: list[int], names: list[str], prefix: bytes, lines: list[Line], control: socket.socket) -> None:
    with contextlib.suppress(OSError):  # Not permitted in some containers.
        os.nice(-20)  # Ranks on the same cores must not slow down the network.
    sources = [*devices, control.fileno()]
    numbers = {device: i for i, device in enumerate(devices)}
    cut: set[int] = set()
    while True:
        next_s = min(line.next_s() for line in lines)
        timeout_s = None if next_s == math.inf else max(0.0, next_s - time.monotonic())
        # Not epoll, which waits for whole milliseconds: delays would be longer than set.
        for ready in select.select(sources, [], [], timeout_s)[0]:
            if ready == control.fileno():
                message = json.loads(control.recv(4096))
                (cut.add if message["is_cut"] else cut.discard)(names.index(message["host"]))
                continue
            while True:
                try:
                    packet = os.read(ready, 65536)
                except BlockingIOError:
                    break
                to = packet[19] - 1  # the last byte of the destination's address
                is_ours = packet[0] >> 4 == 4 and packet[16:19] == prefix and 0 <= to < len(devices)
                if is_ours and not cut & {to, numbers[ready]}:
                    lines[numbers[ready]].send(time.monotonic(), to, packet)
        now = time.monotonic()
        for line in lines:
            for to, packet in line.arrived(now):
                with contextlib.suppress(OSError):  # The device's queue is full or the host is gone: drop the packet.
                    os.write(devices[to], packet)


def main() -> None:
    spec = json.loads(sys.argv[1])
    names, devices = spec["namespaces"], []
    for i, namespace in enumerate(names):
        devices.append(open_device(namespace))
        address = f"{spec['prefix']}{i + 1}/24"
        for command in (
            f"addr add {address} dev eth0",
            f"link set eth0 mtu {spec['mtu_bytes']}",
            "link set eth0 up",
            "link set lo up",
        ):
            subprocess.run(["ip", "-n", namespace, *command.split()], check=True)
    prefix = bytes(int(part) for part in spec["prefix"].strip(".").split("."))
    lines = [Line(spec["rate_bits"], spec["delay_s"], spec["loss"]) for _ in devices]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as control:
        control.bind(spec["control"])
        print("ready", flush=True)
        carry(devices, names, prefix, lines, control)


if __name__ == "__main__":
    main()
