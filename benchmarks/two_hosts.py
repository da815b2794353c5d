"""Two hosts on one machine: network namespaces joined by a link of a given rate and delay."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ADDRESSES = "10.231.78.1", "10.231.78.2"


class Unavailable(Exception):
    """The system does not allow it, or lacks what it needs; the message says which."""


@dataclass(frozen=True)
class Link:
    """Rate in Gbit/s, and delay of one direction in milliseconds; 0: what the kernel takes by
    itself.
    """

    rate: float
    delay: float = 0.0

    def __str__(self) -> str:
        return f"{self.rate:g} Gbit/s" + (f", {self.delay:g} ms" if self.delay else "")


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """The names of two namespaces with a link between them, which are removed afterwards.

    Raises
    ------
    Unavailable
    """
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc"))):
        raise Unavailable("network namespaces need root and iproute2")
    names = f"flux{os.getpid()}a", f"flux{os.getpid()}b"
    # so that they are removed then, too
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _run(
            "ip",
            "-n",
            names[0],
            "link",
            "add",
            "eth0",
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            names[1],
        )
        for name, address in zip(names, ADDRESSES, strict=True):
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        signal.signal(signal.SIGTERM, before)


def set_link(names: Sequence[str], link: Link) -> None:
    """Give the link between two hosts a rate and a delay.

    Raises
    ------
    Unavailable
        If the kernel has no netem, which delays need.
    """
    for name in names:
        subprocess.run(
            ["tc", "-n", name, "qdisc", "del", "dev", "eth0", "root"], capture_output=True
        )
        rate = f"{link.rate:g}gbit"
        if link.delay:
            _run(
                "tc",
                "-n",
                name,
                "qdisc",
                "add",
                "dev",
                "eth0",
                "root",
                "netem",
                "delay",
                f"{link.delay}ms",
                "rate",
                rate,
            )
        else:
            tbf = ["tbf", "rate", rate, "burst", "256k", "latency", "50ms"]
            _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", *tbf)


def start_pair(names: Sequence[str], command: Sequence[object], port: int = 29511) -> None:
    """Run a program on both hosts, as ranks 0 and 1 of torch.distributed, to its end."""
    processes = []
    try:
        for rank, name in enumerate(names):
            env = {
                **os.environ, "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(port), "RANK": str(rank),
                "WORLD_SIZE": "2", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "two hosts", "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "eth0",
            }  # fmt: skip
            full = ["ip", "netns", "exec", name, *map(str, command)]
            processes.append(subprocess.Popen(full, env=env, stderr=subprocess.PIPE, text=True))
        for process in processes:
            _, err = process.communicate(timeout=600)
            if process.returncode:
                raise RuntimeError(f"a host ended with {process.returncode}: {err[-2000:]}")
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        kind = next(
            (word for word in command if word in ("netns", "link", "addr", "netem", "tbf")),
            command[0],
        )
        raise Unavailable(f"this system does not make it ({kind}: {done.stderr.strip()})")
