"""``hvdtrain elastic``: starts processes that train together, and continues when some die, leave or join."""

from collections.abc import Sequence
from pathlib import Path

from hvdtrain.config.fields import broken_rule
from hvdtrain.errors import UsageError
from hvdtrain.fault_tolerance.elastic.host_list import HostList
from hvdtrain.fault_tolerance.elastic.job import ElasticJob
from hvdtrain.fault_tolerance.elastic.membership import Membership
from hvdtrain.system import environment

_FLAGS_WITH_VALUE = ("--np", "--hosts", "-H", "--hostfile", "--address", "--port", "--env", "--timeout")


def split_command(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divides arguments into the options of ``elastic`` with MIN:MAX, and the command, the second other word."""
    own: list[str] = []
    rest = list(arguments)
    num_words = 0
    while rest and not (num_words == 1 and not rest[0].startswith("-")):
        word = rest.pop(0)
        if word == "--":
            break
        own.append(word)
        if word in _FLAGS_WITH_VALUE and rest:
            own.append(rest.pop(0))
        num_words += not word.startswith("-")
    return own, rest


def run(
    command: Sequence[str],
    *,
    members: str,
    np: int | None = None,
    hosts: str | None = None,
    hostfile: Path | None = None,
    address: str = "",
    port: int = 0,
    env: Sequence[str] | None = None,
    timeout: float = 600.0,
) -> int:
    """Returns the exit code of the job.

    Args:
        members: ``MIN:MAX``.
        np: number of processes to start (default: MAX, or the sum of all slots).
        hosts, hostfile: where to start them; see :class:`HostList`.
        address, port: where to listen.
        env: names of variables to forward to other hosts.
        timeout: seconds that fewer than MIN members wait for others.

    Raises:
        UsageError: an option breaks its rule.
        HvdtrainError: a host is not ready.
    """
    least, _, most = members.partition(":")
    if not (least.isdigit() and most.isdigit() and 1 <= int(least) <= int(most)):
        raise UsageError(f"MIN:MAX must be two whole numbers, 1 <= MIN <= MAX. Received: {members!r}")
    if timeout < 0:
        raise broken_rule("timeout", "at least 0", timeout)
    if not 0 <= port < 65536:
        raise broken_rule("port", "from 0 to 65535", port)
    if absent := [name for name in env or [] if environment.get(name) is None]:
        raise broken_rule("env", "the name of a variable that is set", absent[0])
    num_processes = int(most) if np is None else np
    if not 0 <= num_processes <= int(most):
        raise broken_rule("np", f"from 0 to MAX, {most}", np)
    if num_processes and not command:
        raise UsageError("a command is missing. For example: hvdtrain elastic 2:4 python -m hvdtrain")
    host_list = HostList(hosts, hostfile, here=num_processes)
    if np is not None and np > host_list.num_slots:
        raise broken_rule("np", f"at most the sum of all slots, {host_list.num_slots}", np)
    return ElasticJob(
        Membership(int(least), int(most)),
        command,
        host_list,
        num_processes=num_processes,
        timeout_s=timeout,
        address=address,
        port=port,
        env_names=env or [],
    ).run()
