"""Pickles the functions that :func:`hvdtrain.run` sends to ranks."""

import io
import types
from collections.abc import Callable
from typing import Any

import cloudpickle

_TABLE = cloudpickle.Pickler.dispatch_table


def dumps(call: object) -> bytes:
    """Like ``cloudpickle.dumps``, but keeps file names, so that tracebacks show a function's source lines.

    cloudpickle replaces them from 3.1.3 on.
    """
    stream = io.BytesIO()
    _Pickler(stream).dump(call)
    return stream.getvalue()


def make_code(make: Callable[..., types.CodeType], arguments: tuple[Any, ...], file_name: str) -> types.CodeType:
    """Called by the unpickler."""
    return make(*arguments).replace(co_filename=file_name)


def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    return make_code, (*_TABLE[types.CodeType](code), code.co_filename)


class _Pickler(cloudpickle.Pickler):
    dispatch_table = _TABLE.new_child({types.CodeType: _reduce_code})
