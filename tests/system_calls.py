"""What a folder holds whenever a program is about to change it: what a kill at that call leaves."""

import contextlib
import ctypes
import os
import platform
import shutil
import signal
import traceback

TRACEME, SYSCALL, SETOPTIONS, GET_SYSCALL_INFO = 0, 24, 0x4200, 0x420E
GOOD, CLONE, EXITKILL = 1, 8, 0x100000
ALL_THREADS = 0x40000000
CALLS = {
    "x86_64": {
        1: "write", 18: "pwrite64", 20: "writev", 26: "msync", 74: "fsync", 75: "fdatasync",
        76: "truncate", 77: "ftruncate", 82: "rename", 83: "mkdir", 84: "rmdir", 86: "link",
        87: "unlink", 88: "symlink", 90: "chmod", 91: "fchmod", 257: "openat", 258: "mkdirat",
        263: "unlinkat", 264: "renameat", 265: "linkat", 268: "fchmodat", 285: "fallocate",
        296: "pwritev", 316: "renameat2",
    },
    "aarch64": {
        34: "mkdirat", 35: "unlinkat", 36: "symlinkat", 37: "linkat", 38: "renameat", 45: "truncate",
        46: "ftruncate", 47: "fallocate", 52: "fchmod", 53: "fchmodat", 56: "openat", 64: "write",
        66: "writev", 68: "pwrite64", 70: "pwritev", 82: "fsync", 83: "fdatasync", 227: "msync",
        276: "renameat2",
    },
}  # fmt: skip


class Info(ctypes.Structure):
    """``struct ptrace_syscall_info`` at the entry of a call."""

    _fields_ = [
        *(("op", ctypes.c_uint8), ("pad", ctypes.c_uint8 * 3), ("arch", ctypes.c_uint32)),
        *(("ip", ctypes.c_uint64), ("sp", ctypes.c_uint64), ("nr", ctypes.c_uint64)),
        ("args", ctypes.c_uint64 * 6),
    ]


def folders_at_every_call(program, folder, copies):
    """Run ``program()`` in a child, and copy the folder to ``copies/000``, ``copies/001``, ...
    before every system call that writes. Return the names of the calls; None where the system does
    not let one look.
    """
    reader, writer = os.pipe()
    tracer = os.fork()  # which waits for all of its children, and has no others
    if tracer == 0:
        os.close(reader)
        try:
            os.write(writer, " ".join(_trace(program, folder, copies)).encode())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as file:
        said = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(tracer, 0)[1])
    assert status == 0, "the program or its tracer has failed; see above"
    return said.split() or None


def _trace(program, folder, copies):
    names = CALLS.get(platform.machine())
    library = ctypes.CDLL(None, use_errno=True)
    library.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    if names is None:
        return []
    child = os.fork()
    if child == 0:
        status = 1
        if library.ptrace(TRACEME, 0, None, None):
            os._exit(77)
        os.kill(os.getpid(), signal.SIGSTOP)
        try:
            program()
            status = 0
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    found, info = [], Info()
    _, status = os.waitpid(child, ALL_THREADS)
    if os.WIFEXITED(status):
        return []
    library.ptrace(SETOPTIONS, child, None, GOOD | CLONE | EXITKILL)
    library.ptrace(SYSCALL, child, None, None)
    while True:
        thread, status = os.waitpid(-1, ALL_THREADS)
        if os.WIFEXITED(status) or os.WIFSIGNALED(status):
            if thread == child:
                if os.waitstatus_to_exitcode(status):
                    raise RuntimeError(f"the program has ended with {status}")
                return found
            continue
        number = os.WSTOPSIG(status)
        if number == signal.SIGTRAP | 0x80:
            library.ptrace(GET_SYSCALL_INFO, thread, ctypes.sizeof(info), ctypes.addressof(info))
            name = names.get(info.nr) if info.op == 1 else None
            if name == "openat" and not info.args[2] & os.O_CREAT:
                name = None
            if name is not None and not (name == "write" and info.args[0] <= 2):
                _copy(folder, f"{copies}/{len(found):03d}")
                found.append(name)
        passed = 0 if number in (signal.SIGTRAP | 0x80, signal.SIGTRAP, signal.SIGSTOP) else number
        library.ptrace(SYSCALL, thread, None, passed)


def _copy(folder, copy):
    for _ in range(100):  # another thread of the program may change it meanwhile
        with contextlib.suppress(FileNotFoundError, shutil.Error):
            shutil.copytree(folder, copy, symlinks=True)
            return
        shutil.rmtree(copy)
    raise RuntimeError("the folder keeps changing")
