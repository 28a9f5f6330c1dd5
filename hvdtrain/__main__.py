"""``python -m hvdtrain``."""

import sys

from hvdtrain.commands.cli import main as run_command
from hvdtrain.system.terminal import discard_unwritable_output


def main() -> None:
    """Runs the command line and ends with its exit code."""
    try:
        code = run_command()
    finally:
        discard_unwritable_output()
    sys.exit(code)


if __name__ == "__main__":
    main()
