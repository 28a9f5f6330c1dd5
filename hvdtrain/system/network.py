"""This host's name and addresses."""

import contextlib
import socket

import psutil


def host_name() -> str:
    """This host's name."""
    return socket.gethostname()


def host_addresses() -> list[str]:
    """This host's IPv4 addresses that other hosts may reach: those of its interfaces and of its name."""
    found = [
        each.address
        for addresses in psutil.net_if_addrs().values()
        for each in addresses
        if each.family == socket.AF_INET
    ]
    with contextlib.suppress(OSError):  # The name may not resolve; the interfaces have addresses all the same.
        found += [str(each[4][0]) for each in socket.getaddrinfo(host_name(), None, socket.AF_INET)]
    return list(dict.fromkeys(each for each in found if not each.startswith("127.")))
