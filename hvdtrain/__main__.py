"""``python -m hvdtrain``."""

import sys

from hvdtrain.cli import main as run_command


def main() -> None:
    """Runs the command line and ends with its exit code."""
    sys.exit(run_command())


if __name__ == "__main__":
    main()
