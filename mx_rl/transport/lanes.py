"""Which lane reaches from this process to an endpoint, and whether its windows are read or requested."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import warnings
from dataclasses import dataclass

from mx_rl.config import Options, ucx_tls
from mx_rl.errors import InvalidArgument, PeerLost
from mx_rl.records import EndpointRecord
from mx_rl.transport.flow import check_header
from mx_rl.transport.place import here, rdma_devices, same_host, same_processes

_SHARED = frozenset({"all", "shm", "sm", "mm", "cma"})
_RC = frozenset({"rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "rc_gda"})
_UD = frozenset({"ud", "ud_v", "ud_x", "ud_verbs", "ud_mlx5"})
_RDMA = _RC | _UD | {"all", "ib", "dc", "dc_x", "dc_mlx5", "gdaki", "srd"}


@dataclass(frozen=True, kw_only=True)
class Lane:
    """``name``: "shm", "rdma" or "tcp". ``writes``: the source writes on request, because a READ is emulated there.

    ``fenced``: destroying the receiving agent ends every requested write into its memory. It does where the receiver's
    own threads store the bytes, not where the source's kernel does (shared memory).
    """

    name: str
    writes: bool
    fenced: bool


def choose_lane(record: EndpointRecord, options: Options, *, peer_rdma: bool) -> Lane:
    """Raises PeerLost where the process is seen to be gone, InvalidArgument where ``require_rdma`` forbids the lane."""
    place = here()
    name, emulated = "tcp", True
    if same_processes(record.place, place) and allows(_SHARED):
        if _can_copy(record):
            name, emulated = "shm", False
        else:
            _warn_forbidden(record.place.host)
    elif peer_rdma and rdma_devices() and allows(_RDMA):
        name, emulated = "rdma", False
    if options.require_rdma and name == "tcp" and not same_host(record.place, place):
        raise InvalidArgument(
            f"{record.agent} on {record.place.host} is reached by TCP only and Options.require_rdma is set: RDMA "
            f"devices here {list(rdma_devices()) or 'none'}, there {'some' if peer_rdma else 'none'}, "
            f"UCX_TLS={ucx_tls()!r}"
        )
    writes = emulated if options.lane == "auto" else options.lane == "write"
    return Lane(name=name, writes=writes, fenced=name == "tcp")


def allows(wanted: frozenset[str]) -> bool:
    """Whether UCX_TLS leaves any of these transports to UCX."""
    text = ucx_tls()
    if text is None:
        return True
    listed = {item.strip() for item in text.lstrip("^").split(",")}
    if text.startswith("^"):
        return not listed & wanted  # one of several may remain: then requested writes are taken, which suit every lane
    return bool(listed & wanted)


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def _can_copy(record: EndpointRecord) -> bool:
    """Read the first header of the record as UCX would, by ``process_vm_readv``: a container may forbid it."""
    if not record.regions:
        return False
    words = (ctypes.c_uint64 * 2)()
    mine = _Vector(ctypes.addressof(words), ctypes.sizeof(words))
    theirs = _Vector(record.regions[0].header, ctypes.sizeof(words))
    libc = _libc()
    if libc is None:
        return False
    one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
    done = libc.process_vm_readv(record.place.pid, ctypes.byref(mine), one, ctypes.byref(theirs), one, none)
    if done == ctypes.sizeof(words):
        check_header((int(words[0]), int(words[1])), nonce=record.nonce, peer=record.agent)
        return True
    problem = ctypes.get_errno()
    if problem in (errno.ESRCH, errno.EFAULT):
        raise PeerLost(
            f"{record.agent} (process {record.place.pid} on {record.place.host}) is gone: {os.strerror(problem)}",
            peer=record.agent,
        )
    return False


@functools.cache
def _libc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "process_vm_readv"):
        return None
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    return libc


@functools.cache
def _warn_forbidden(host: str) -> None:
    warnings.warn(
        f"processes on {host} may not copy each other's memory (process_vm_readv is forbidden): weights go over "
        "sockets, several times slower. Run the processes as one user in one container, with CAP_SYS_PTRACE or a "
        "seccomp profile that allows process_vm_readv, and kernel.yama.ptrace_scope=0",
        RuntimeWarning,
        stacklevel=4,
    )
