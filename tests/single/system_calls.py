"""Follows the system calls of a process and all its threads, and kills it before one of them. Linux on x86-64."""

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable
from pathlib import Path

_SYSCALL, _SETOPTIONS, _SEIZE, _INTERRUPT, _GET_SYSCALL_INFO = 24, 0x4200, 0x4206, 0x4207, 0x420E
_TRACESYSGOOD, _TRACECLONE, _EXITKILL = 1, 1 << 3, 1 << 20
_WALL = 0x40000000

# Those by which a process changes files.
FILE_CALLS = {
    **{
        1: "write",
        18: "pwrite64",
        20: "writev",
        296: "pwritev",
        328: "pwritev2",
        2: "open",
        257: "openat",
        85: "creat",
    },
    **{74: "fsync", 75: "fdatasync", 76: "truncate", 77: "ftruncate", 82: "rename", 264: "renameat", 316: "renameat2"},
    **{83: "mkdir", 258: "mkdirat", 84: "rmdir", 87: "unlink", 263: "unlinkat", 86: "link", 88: "symlink", 3: "close"},
    **{285: "fallocate", 9: "mmap", 40: "sendfile", 326: "copy_file_range", 90: "chmod", 91: "fchmod"},
}
_GETPGID = 121
_BEGIN, _END = 0x5AFE0001, 0x5AFE0002

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


class _SyscallInfo(ctypes.Structure):
    _fields_ = [
        *[("op", ctypes.c_uint8), ("pad", ctypes.c_uint8 * 3), ("arch", ctypes.c_uint32)],
        *[("instruction_pointer", ctypes.c_uint64), ("stack_pointer", ctypes.c_uint64)],
        *[("number", ctypes.c_uint64), ("arguments", ctypes.c_uint64 * 6)],
    ]


def _allocates_memory(info: _SyscallInfo) -> bool:
    """Maps no file. How often depends on how far the threads have come, and so differs from run to run."""
    return FILE_CALLS[info.number] == "mmap" and info.arguments[4] & 0xFFFFFFFF == 0xFFFFFFFF


def _ptrace(request: int, pid: int, address: int = 0, data: int = 0) -> int:
    result = _libc.ptrace(request, pid, address, data)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


@contextlib.contextmanager
def watched_part():
    """What the followed process does inside is counted. The marks are calls that nobody else makes."""
    with contextlib.suppress(ProcessLookupError):
        os.getpgid(_BEGIN)
    yield
    with contextlib.suppress(ProcessLookupError):
        os.getpgid(_END)


def run_killed_before(action: Callable[[], None], number: int) -> list[str]:
    """Runs an action in a child process that is killed before its file call of that number, from 1, is made.

    Returns:
        The names of the calls that it made in its :func:`watched_part`; fewer than ``number`` if it ended by itself.
    """
    ready, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(ready, 1)
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    _ptrace(_SEIZE, pid, 0, _TRACESYSGOOD | _TRACECLONE | _EXITKILL)
    _ptrace(_INTERRUPT, pid)
    os.write(go, b"x")
    os.close(ready)
    os.close(go)
    calls: list[str] = []
    counts = False
    while True:
        thread, status = os.waitpid(-1, _WALL)
        if os.WIFEXITED(status) or os.WIFSIGNALED(status):
            if thread != pid:
                continue
            if os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0:
                raise AssertionError("the action failed")
            return calls
        passed_on = 0
        if os.WSTOPSIG(status) == signal.SIGTRAP | 0x80:
            info = _SyscallInfo()
            size = ctypes.sizeof(info)
            try:
                _ptrace(_GET_SYSCALL_INFO, thread, size, ctypes.addressof(info))
            except ProcessLookupError:
                continue
            if info.op == 1 and info.number == _GETPGID and info.arguments[0] in (_BEGIN, _END):
                counts = info.arguments[0] == _BEGIN
            elif info.op == 1 and counts and info.number in FILE_CALLS and not _allocates_memory(info):
                calls.append(FILE_CALLS[info.number])
                if len(calls) == number:
                    os.kill(pid, signal.SIGKILL)
        elif status >> 16 == 0 and os.WSTOPSIG(status) not in (signal.SIGTRAP, signal.SIGSTOP):
            passed_on = os.WSTOPSIG(status)
        with contextlib.suppress(ProcessLookupError):
            _ptrace(_SYSCALL, thread, 0, passed_on)


def entries(folder: Path) -> list[str]:
    """All paths below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
