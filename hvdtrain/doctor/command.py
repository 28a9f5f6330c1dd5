"""The command: checks this host, then what only several ranks can tell."""

import sys
from collections.abc import Sequence

from hvdtrain import process
from hvdtrain.doctor import checks
from hvdtrain.doctor.checks import Finding
from hvdtrain.errors import UsageError

_USAGE = """usage: python -m hvdtrain doctor

What matters for a job on this machine, and a remedy for what is wrong. Under a launcher, also the hosts of the ranks
and what their allreduce makes of the network."""


def main(arguments: Sequence[str]) -> int:
    """Prints the tables on rank 0.

    Returns:
        0 when a job could run here; 1 otherwise; 64 for arguments, of which it takes none.
    """
    if any(argument in ("-h", "--help") for argument in arguments):
        print(_USAGE)
        return 0
    if arguments:
        print(f"hvdtrain: doctor takes no options. Received: {' '.join(arguments)}", file=sys.stderr)
        return UsageError.exit_code
    launcher = process.find_launcher()
    findings = [
        *checks.checked("versions", checks.find_versions),
        *checks.checked("Horovod", checks.find_horovod),
        checks.find_mpirun(),
        Finding("launcher", f"{launcher.name}, {launcher.size} rank(s)"),
        *checks.checked("allreduce", checks.try_allreduce),
    ]
    together = ""
    if launcher.size > 1 and not any(finding.topic == "allreduce" and finding.remedy for finding in findings):
        # Only now: it imports TensorFlow and Horovod, which the checks do without where these are broken.
        from hvdtrain.doctor import hosts, network

        found, together = hosts.compare()
        findings += found
        together += "\n\n" + network.measure()
    if launcher.rank == 0:
        print(checks.table(findings) + together, flush=True)
    return 1 if any(finding.remedy for finding in findings) else 0
