"""Errors of any library in one line: many begin with a line that says nothing, and end with a stack or an operation."""

import re

_TERMINAL_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_NODE = re.compile(r"\{\{node (\S+)\}\}")
_OTHER_OPERATIONS = re.compile(r"\{\{.*?\}\}|\[Op:.*|\[\[.*")
_KERAS = re.compile(r"Exception encountered when calling |Error encountered:$")
_RAISED = re.compile(r"(\w+\.)*\w*(Error|Exception): ")


def class_and_message(error: BaseException) -> str:
    """``ValueError: what is wrong``."""
    name = type(error).__name__
    return f"{name}: {message(error)}".removesuffix(": ")


def message(error: BaseException) -> str:
    """The line of an error's message that says what is wrong, without the class."""
    line = _essential_line(_TERMINAL_COLORS.sub("", str(error)))
    return line.removeprefix(f"{type(error).__name__}: ")


def _essential_line(text: str) -> str:
    lines = [line for each in text.splitlines() if (line := each.strip())]
    if not lines:
        return ""
    if lines[0] == "Graph execution error:":  # TensorFlow: a stack, what is wrong, operations
        operations = (number for number, line in enumerate(lines) if line.startswith("[["))
        lines = lines[next(operations, len(lines)) - 1 :]
    elif lines[0] == "in user code:":  # AutoGraph: a stack, and the error itself
        raised = (number for number, line in enumerate(lines) if _RAISED.match(line))
        return _essential_line("\n".join(lines[next(raised, len(lines) - 1) :]))
    elif _KERAS.search(lines[0]) and len(lines) > 1:  # what is wrong, arguments of the layer
        return _essential_line("\n".join(lines[1:]))
    return _OTHER_OPERATIONS.sub("", _NODE.sub(r"\1", lines[0])).strip()
