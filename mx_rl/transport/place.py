"""Where this process is, level by level, so that two processes can tell which lane reaches from one to the other."""

from __future__ import annotations

import functools
import os
import platform

from mx_rl.records import Place


def here() -> Place:
    """The Place of the calling process."""
    return _place(os.getpid())


@functools.lru_cache(maxsize=1)
def _place(pid: int) -> Place:  # by pid, so that a forked child does not answer with its parent's
    host = platform.node()
    return Place(
        boot=_read("/proc/sys/kernel/random/boot_id") or f"host:{host}",
        pid_ns=_link("/proc/self/ns/pid"),
        net_ns=_link("/proc/self/ns/net"),
        pid=pid,
        host=host,
    )


def same_host(one: Place, other: Place) -> bool:
    """One kernel runs both; host names are never compared, since containers share and change them."""
    return one.boot == other.boot


def same_processes(one: Place, other: Place) -> bool:
    """Each can name the other by its pid: what a single shared-memory copy needs."""
    return same_host(one, other) and one.pid_ns == other.pid_ns != ""


def rdma_devices() -> tuple[str, ...]:
    """Names of the RDMA devices that this process can see."""
    try:
        return tuple(sorted(os.listdir("/sys/class/infiniband")))
    except OSError:
        return ()


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read().strip()
    except OSError:  # no Linux: one level fewer to compare
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
