"""The doctor command: checks this host, compares hosts, and measures the network between them and their speed."""

import sys
from collections.abc import Sequence

from hvdtrain.commands.doctor import checks
from hvdtrain.commands.doctor.checks import Finding
from hvdtrain.errors import UsageError
from hvdtrain.system import environment

_USAGE = """usage: python -m hvdtrain doctor

Checks whether a job can run on this machine and suggests fixes. Under a launcher, also compares the hosts of the ranks
and measures allreduce, network throughput and the speed of ranks."""


def main(arguments: Sequence[str]) -> int:
    """Prints the tables on rank 0.

    Returns:
        0 if a job can run here, 1 if not, 64 if arguments are passed, as there are none.
    """
    if any(argument in ("-h", "--help") for argument in arguments):
        print(_USAGE)
        return 0
    if arguments:
        print(f"hvdtrain: doctor takes no options. Received: {' '.join(arguments)}", file=sys.stderr)
        return UsageError.exit_code
    launcher = environment.launcher()
    findings = [
        *checks.checked("versions", checks.find_versions),
        *checks.checked("Horovod", checks.find_horovod),
        *checks.checked("Keras internals", checks.find_keras_internals),
        checks.find_mpirun(),
        Finding("launcher", f"{launcher.name}, {launcher.size} rank(s)"),
        *checks.checked("allreduce", checks.try_allreduce),
    ]
    comparison = ""
    if launcher.size > 1 and not any(finding.topic == "allreduce" and finding.remedy for finding in findings):
        # Imported late: TensorFlow and Horovod may be broken, and the checks above must still run.
        from hvdtrain.commands.doctor import hosts, network, speed, waiting
        from hvdtrain.distributed import runtime

        found, comparison = hosts.compare()
        findings += found
        comparison += "\n\n" + network.measure() + "\n" + speed.measure()
        collectives = runtime.current().collectives
        if (polling := waiting.advice(waiting.busy_cores(collectives), collectives)) is not None:
            comparison += "\n" + polling
    if launcher.rank == 0:
        print(checks.table(findings) + comparison, flush=True)
    return 1 if any(finding.remedy for finding in findings) else 0
