"""Which code is the user's, for messages that show it first."""

import sys
from pathlib import Path

# This package, the environment, the standard library, and generated code.
_OTHERS = (str(Path(__file__).parents[1]), sys.prefix, sys.base_prefix, "<")


def is_of_the_user(file: str) -> bool:
    """Whether a source file belongs to the user's own program."""
    return not file.startswith(_OTHERS)
