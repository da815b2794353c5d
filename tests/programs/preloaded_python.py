"""A Python that has imported the package already: it starts a program by a fork, without the
seconds of the imports.

    preloaded_python.py serve FD MODULE ...      imports; then forks a child for each program, until
    stdin is closed preloaded_python.py start PYTHON ARGUMENT ...    as ``python ARGUMENT ...``; the
    socket lies beside PYTHON

The second process gives the first its arguments, environment, folder and open files, passes signals
on to the child, and ends as the child ends. If it is killed, so is the child with its process
group. PYTHON, which calls it, is what the child starts as its Python: workers of joblib are forked
too.

A program that ends well, or by ``sys.exit``, ends after what is registered with ``atexit``, without
taking the modules apart, which takes longer than most programs; not if PYTHON is called
``finalized``.
"""

import atexit
import contextlib
import fcntl
import marshal
import os
import select
import signal
import socket
import sys


def start(executable, arguments):
    """Let the server run a program, and wait for its end."""
    if arguments[0][:1] == "-" and arguments[0] not in ("-c", "-m", "-u"):
        os.execv(sys.executable, [sys.executable, *arguments])
    files = [int(n) for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")]
    passed = set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, passed)
    server = socket.socket(socket.AF_UNIX)
    server.connect(os.path.join(os.path.dirname(executable), "socket"))
    request = marshal.dumps((executable, arguments, dict(os.environ), os.getcwd(), files))
    socket.send_fds(server, [len(request).to_bytes(8, "little")], files)
    server.sendall(request)
    child = int.from_bytes(server.recv(4), "little")
    for number in passed:
        signal.signal(number, lambda number, frame: os.kill(child, number))
    # of a signal that comes just before it waits, recv alone would not hear
    woken, wakes = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(wakes)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed)
    while server not in select.select([server, woken], [], [])[0]:
        os.read(woken, 512)
    told = server.recv(4)
    if not told:
        sys.exit("the preloaded Python has ended")
    status = int.from_bytes(told, "little")
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number in passed:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


def serve(listener):
    """Fork a child for each request; returns the request in the child."""
    woken, wakes = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    clients = {}  # by process number of the child; None when it is gone
    while True:
        waiting = {client: child for child, client in clients.items() if client is not None}
        ready, _, _ = select.select([0, woken, listener, *waiting], [], [])
        for client in waiting.keys() & set(ready):  # they say no more: this one was killed
            kill(waiting[client])
            clients[waiting[client]] = None
        if woken in ready:
            os.read(woken, 512)
            while clients and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                client = clients.pop(ended[0])
                if client is not None:
                    tell(client, ended[1])
                    client.close()
        if 0 in ready:
            for child in clients:
                kill(child)
            os._exit(0)
        if listener in ready:
            client, _ = listener.accept()
            if (request := receive(client)) is None:
                client.close()
                continue
            child = os.fork()
            if child == 0:
                os.setpgid(0, 0)
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for opened in (listener, client, *waiting):
                    opened.close()
                os.close(woken)
                os.close(wakes)
                return request
            with contextlib.suppress(OSError):  # it has ended
                os.setpgid(child, child)
            for file in request[-1]:
                os.close(file)
            tell(client, child)
            clients[child] = client


def tell(client, number):
    with contextlib.suppress(OSError):  # it was killed: select says so next
        client.sendall(number.to_bytes(4, "little"))


def kill(child):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)


def receive(client):
    """What a program is started with, and its open files; None if the client is gone."""
    size, body, files = 0, bytearray(), []
    with contextlib.suppress(OSError):
        head, files, _, _ = socket.recv_fds(client, 8, 253)  # no system passes more
        size = int.from_bytes(head, "little")
        while len(body) < size and (more := client.recv(size - len(body))):
            body += more
    if size and len(body) == size:
        return *marshal.loads(body), files
    for file in files:
        os.close(file)
    return None


def end_at_once():
    """End the process here if that changes nothing: the last function that runs at the end of
    Python.
    """
    if status is None or os.path.basename(sys.executable) == "finalized":
        return
    h5f = sys.modules.get("h5py.h5f")
    if h5f and h5f.get_obj_count(h5f.OBJ_ALL, h5f.OBJ_FILE):  # closed with the modules
        return
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi and mpi.Is_initialized() and not mpi.Is_finalized():
        if status:  # with which mpi4py may end all ranks
            return
        mpi.Finalize()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # none, or closed
            stream.flush()
    os._exit(status & 0xFF)


def become(request):
    """Turn this process into the program, as far as it is possible after the start of Python."""
    import gc
    import multiprocessing
    import runpy
    import types

    if "triton" in sys.modules:  # its extension reports objects that are left at the end
        atexit.register(gc.unfreeze)
    executable, arguments, environment, folder, numbers, files = request
    high = max(*numbers, *files) + 1
    files = [(fcntl.fcntl(file, fcntl.F_DUPFD, high), os.close(file))[0] for file in files]
    for number, file in zip(numbers, files, strict=True):
        os.dup2(file, number)
        os.close(file)
    sys.executable = executable
    multiprocessing.set_executable(executable)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    added = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in added if path and path not in sys.path]
    sys.stdout.reconfigure(line_buffering=os.isatty(1), write_through=arguments[0] == "-u")
    arguments = arguments[arguments[0] == "-u" :]
    if arguments[0] == "-m":
        sys.argv, sys.path[0] = arguments[1:], folder
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if arguments[0] == "-c":
        sys.argv, sys.path[0], name, source = ["-c", *arguments[2:]], "", "<string>", arguments[1]
    else:
        sys.argv, name = arguments, arguments[0]
        sys.path[0] = os.path.dirname(os.path.realpath(name))
        main.__file__ = name
        with open(name, "rb") as file:
            source = file.read()
    exec(compile(source, name, "exec", dont_inherit=True), vars(main))


if __name__ == "__main__":
    if sys.argv[1] == "start":
        start(sys.argv[2], sys.argv[3:])
    else:
        import gc
        import importlib

        status = None  # unless the program has ended well, or by sys.exit
        atexit.register(end_at_once)  # before all others, which run before it
        for module in sys.argv[3:]:
            importlib.import_module(module)
        gc.collect()
        gc.freeze()  # the children share what is there now
        try:
            become(serve(socket.socket(fileno=int(sys.argv[2]))))
            status = 0
        except SystemExit as end:
            status = 0 if end.code is None else end.code if isinstance(end.code, int) else None
            raise
