"""What this machine lets the weight plane do, what follows from it, and the cure for what is missing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mx_rl.clusters import find_registries, join_cluster
from mx_rl.config import Options, allocator_conf, registry_url, ucx_tls
from mx_rl.deadline import within
from mx_rl.errors import MissingExtra, MxRLError
from mx_rl.loopback import measure
from mx_rl.status import Connection, connect
from mx_rl.transport.place import rdma_devices

_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_SHM = "/dev/shm"
_SHM_WANTED_BYTES = 1 << 30
_CAP_SYS_PTRACE = 19


@dataclass(frozen=True, kw_only=True)
class Finding:
    """``state``: "ok", "note" (a fact that limits nothing needed), "warn" (works, but worse), "fail" (does not work)."""

    name: str
    state: str
    found: str
    cure: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def examine(registry: str | None = None, *, timeout: float = 60.0) -> list[Finding]:
    """All findings, in the order in which they are read. Only a registry that was asked for can fail."""
    checks: list[Callable[[], list[Finding]]] = [
        _python,
        lambda: [_package("torch", "2.6"), _package("ray", "2.40"), _package("nixl", "1.0")],
        lambda: _data_plane(timeout),
        lambda: [_huge_pages(), _ptrace(), _memlock(), _rdma(), _shared_memory(), _allocator()],
        lambda: [_gpu(timeout)],
        lambda: _control_plane(registry or registry_url(), timeout),
    ]
    return [finding for check in checks for finding in check()]


# ---- software


def _python() -> list[Finding]:
    fine = sys.version_info >= (3, 10)
    found = f"{platform.python_version()} on {platform.system()} {platform.release()}, {platform.machine()}"
    return [_finding("python", fine, found, "fail", "mx-rl needs Python 3.10 or newer")]


def _package(name: str, least: str) -> Finding:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name=name, state="fail", found="not installed", cure=f"pip install '{name}>={least}'")
    fine = _numbers(version) >= _numbers(least)
    return _finding(name, fine, version, "fail", f"{least} or newer is needed: pip install '{name}>={least}'")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())


# ---- data plane


def _data_plane(timeout: float) -> list[Finding]:
    kind = Options().transport
    if kind == "memory":
        return [
            Finding(
                name="transfer",
                state="warn",
                found="MXRL_TRANSPORT=memory: versions do not leave a process",
                cure="unset MXRL_TRANSPORT",
            )
        ]
    try:
        loop = measure(timeout=timeout)
    except MxRLError as exc:
        cure = "check that `python -c 'import nixl._api'` works and that UCX_TLS leaves a lane"
        return [Finding(name="transfer", state="fail", found=str(exc), cure=cure)]
    limits = f", UCX_TLS={ucx_tls()}" if ucx_tls() else ""
    moved = f"{loop.nbytes >> 20} MiB between two processes at {loop.rate:.1f} GB/s, lane {loop.lane}{limits}"
    cure = "processes of this machine talk over sockets, several times slower: see `ptrace` below, and unset UCX_TLS"
    return [
        Finding(name="ucx", state="ok", found=loop.ucx or "not found among the loaded libraries"),
        _finding("transfer", loop.lane == "shm", moved, "warn", cure),
    ]


def _huge_pages() -> Finding:
    text = _read(_THP)
    chosen = text.partition("[")[2].partition("]")[0]
    cure = (
        "reads over shared memory run two to three times slower on 4 KiB pages: "
        f"echo madvise | sudo tee {_THP}, on every node"
    )
    if not Options().huge_pages:
        return Finding(name="huge pages", state="warn", found="MXRL_HUGE_PAGES=0", cure="unset it: " + cure)
    return _finding("huge pages", chosen in ("always", "madvise"), chosen or "not offered by this kernel", "warn", cure)


def _ptrace() -> Finding:
    scope = _read(_PTRACE_SCOPE)
    free = scope in ("", "0") or _capable(_CAP_SYS_PTRACE)
    found = f"kernel.yama.ptrace_scope={scope or 'absent'}" + (", CAP_SYS_PTRACE" if _capable(_CAP_SYS_PTRACE) else "")
    cure = "processes may not copy each other's memory: sysctl kernel.yama.ptrace_scope=0, or grant CAP_SYS_PTRACE"
    return _finding("ptrace", free, found, "warn", cure)


def _capable(number: int) -> bool:
    for line in _read(Path("/proc/self/status")).splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False


def _memlock() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding(name="memlock", state="ok", found="unlimited")
    found = f"{soft >> 10} KiB"
    if not rdma_devices():
        return Finding(name="memlock", state="note", found=f"{found}; matters with RDMA devices only")
    cure = "arenas cannot be pinned for RDMA: ulimit -l unlimited, or --ulimit memlock=-1 for containers"
    return Finding(name="memlock", state="warn", found=found, cure=cure)


def _rdma() -> Finding:
    devices = rdma_devices()
    if devices:
        return Finding(name="rdma", state="ok", found=", ".join(devices))
    if Options().require_rdma:
        cure = "MXRL_REQUIRE_RDMA is set: give the container /dev/infiniband, or unset it"
        return Finding(name="rdma", state="fail", found="no devices", cure=cure)
    return Finding(name="rdma", state="note", found="no devices: other hosts are reached by TCP")


def _shared_memory() -> Finding:
    try:
        stat = os.statvfs(_SHM)
    except OSError as exc:
        return Finding(name=_SHM, state="warn", found=str(exc), cure=f"mount a tmpfs at {_SHM}: Ray and UCX use it")
    size, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    found = f"{size / 2**30:.1f} GiB, {free / 2**30:.1f} free"
    cure = "Ray's object store falls back to disk and UCX may fail: give the container --shm-size=8g"
    return _finding(_SHM, free >= _SHM_WANTED_BYTES, found, "warn", cure)


def _allocator() -> Finding:
    text = allocator_conf()
    bad = "expandable_segments:true" in text.replace(" ", "").lower()
    cure = "such memory registers for RDMA and then crawls (0.3 GB/s seen): take expandable_segments out"
    return _finding("cuda allocator", not bad, text or "default", "warn", cure)


def _gpu(timeout: float) -> Finding:
    code = (
        "import torch; n = torch.cuda.device_count(); "
        "print('; '.join(torch.cuda.get_device_name(i) for i in range(n)) if torch.cuda.is_available() else '')"
    )
    try:  # in a process of its own: a context would stay in this one
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, check=False, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        cure = "the driver hangs: look at nvidia-smi and dmesg"
        return Finding(name="gpu", state="warn", found=f"torch does not answer within {timeout:g} s", cure=cure)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["torch ended without a word"]
        return Finding(name="gpu", state="fail", found=last[0], cure="torch does not import: install it anew")
    names = done.stdout.strip()
    return Finding(name="gpu", state="ok" if names else "note", found=names or "none: weights live in host memory")


# ---- control plane


def _control_plane(url: str | None, timeout: float) -> list[Finding]:
    """Ray and the registry; what was not asked for is only noted."""
    wanted = url is not None
    url = url or "ray"
    if not url.startswith("ray"):
        return [Finding(name="ray cluster", state="note", found="not asked for"), _registry(lambda: [connect(url)])]
    try:
        address = join_cluster(timeout=min(timeout, 20.0))
    except MissingExtra:  # the package's own line says so
        return []
    except MxRLError as exc:
        cure = "start it first (ray start --head), or name another registry"
        return [Finding(name="ray cluster", state="fail" if wanted else "note", found=str(exc), cure=cure)]
    cluster = Finding(name="ray cluster", state="ok", found=address)

    def found() -> list[Connection]:
        return [Connection(door) for door in within(timeout, lambda: find_registries(url), what="Ray")]

    return [cluster, _registry(found)]


def _registry(find: Callable[[], list[Connection]]) -> Finding:
    try:
        doors = find()
        policies = [name for door in doors for name in door.policies(timeout=10.0)]
    except (MxRLError, TimeoutError) as exc:
        cure = "it does not answer; its clients try again by themselves, and Ray restarts it"
        return Finding(name="registry", state="fail", found=str(exc), cure=cure)
    if not doors:
        return Finding(name="registry", state="note", found="none runs: the first publisher or subscriber starts one")
    count = f"{len(policies)} polic{'y' if len(policies) == 1 else 'ies'}"
    return Finding(name="registry", state="ok", found=f"{len(doors)} answering, {count}")


# ---- small things


def _finding(name: str, fine: bool, found: str, otherwise: str, cure: str) -> Finding:
    return Finding(name=name, state="ok" if fine else otherwise, found=found, cure="" if fine else cure)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:  # no Linux, or hidden by the container: the caller says what follows
        return ""
