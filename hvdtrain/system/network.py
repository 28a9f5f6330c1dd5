"""This host's name, addresses and interfaces."""

import contextlib
import ipaddress
import socket

import psutil

from hvdtrain.errors import UsageError


def host_name() -> str:
    """This host's name."""
    return socket.gethostname()


def require_address_of_name() -> None:
    """Gloo looks up the name of this host when it starts, and crashes if it has no address.

    Raises:
        UsageError: it has none.
    """
    try:
        socket.getaddrinfo(host_name(), None)
    except OSError as error:
        raise UsageError(
            f"the name of this host must have an address. Received: {host_name()!r} ({error.strerror or error}). Add "
            f"it to /etc/hosts: 127.0.1.1 {host_name()}"
        ) from None


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


def network_to(name: str) -> str | None:
    """The network that connects this host to another: ``10.1.0.0/16``, or the interface if it leads to a router."""
    try:
        address_there = socket.gethostbyname(name)
    except OSError:
        return None
    own = address_towards(address_there)
    for interface, address, network in _interfaces():
        if address == own:
            return str(network) if ipaddress.ip_address(address_there) in network else interface
    return None


def address_towards(name: str) -> str | None:
    """This host's address on the route to another host; None if there is no route."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((name, 9))  # sends no packet
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_in(network: ipaddress.IPv4Network | ipaddress.IPv6Network) -> str | None:
    """The interface of this host whose address is in a network."""
    return next((name for name, address, _ in _interfaces() if ipaddress.ip_address(address) in network), None)


def interface_with(address: str) -> str | None:
    """The interface of this host that has an address."""
    return interface_in(ipaddress.IPv4Network(address))


def _interfaces() -> list[tuple[str, str, ipaddress.IPv4Network]]:
    """Name, IPv4 address and network of each interface that has them."""
    return [
        (name, each.address, ipaddress.IPv4Network(f"{each.address}/{each.netmask or 32}", strict=False))
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.family == socket.AF_INET
    ]
