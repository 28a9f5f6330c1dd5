"""``python -m hvdtrain``."""

import sys

from hvdtrain.system import interrupts


def main() -> None:
    """Runs the command line and ends with its exit code."""
    with interrupts.exit_on_interrupt():
        from hvdtrain.commands.cli import main as run_command
        from hvdtrain.system.terminal import discard_unwritable_output, write
    try:
        code = run_command()
    except BaseException as error:
        if not _is_interrupt(error):
            raise
        write(interrupts.MESSAGE)
        code = interrupts.EXIT_CODE
    finally:
        discard_unwritable_output()
    sys.exit(code)


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether an error is Ctrl-C, or was caused by it: classes that are being made raise a RuntimeError from it."""
    return error is not None and (isinstance(error, KeyboardInterrupt) or _is_interrupt(error.__cause__))


if __name__ == "__main__":
    main()
