"""Settings of a process: one frozen dataclass, and the only place that reads the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import Any

from mx_rl.errors import InvalidArgument

PREFIX = "MXRL_"


def _env(name: str, default: Any) -> Any:
    """A dataclass field whose default is ``MXRL_<NAME>`` where that is set."""

    def read() -> Any:
        text = os.environ.get(PREFIX + name.upper())
        if text is None:
            return default
        try:
            if isinstance(default, bool):
                return {"1": True, "true": True, "0": False, "false": False}[text.lower()]
            if isinstance(default, (int, float)):
                return type(default)(text)
        except (KeyError, ValueError):
            raise InvalidArgument(f"{PREFIX}{name.upper()}={text!r} is not a {type(default).__name__}") from None
        return text

    return field(default_factory=read)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Fifteen knobs at most; each has an environment variable ``MXRL_<FIELD>``. Times are seconds, sizes bytes."""

    lease_s: float = _env("lease_s", 30.0)
    """A member or reader that was silent so long is dropped. At least 15: an extension may hold the GIL for seconds."""
    beat_s: float = _env("beat_s", 3.0)
    """How often a member says that it lives."""
    grace_s: float = _env("grace_s", 1.0)
    """How long a publisher whose slots are all leased waits before the oldest reader loses its slot."""
    grace_max_s: float = _env("grace_max_s", 60.0)
    """Upper bound of the one hold given to a reader that lost two versions running."""
    stall_s: float = _env("stall_s", 5.0)
    """A source that moves nothing for so long is suspect, and another one is taken."""
    window_bytes: int = _env("window_bytes", 8 << 20)
    """The unit of moving, confirming and taking over: 1 to 16 MiB."""
    in_flight: int = _env("in_flight", 4)
    """Windows posted at one source at a time."""
    huge_pages: bool = _env("huge_pages", True)
    """Ask for huge pages for arenas: reads over shared memory are two to three times faster."""
    transport: str = _env("transport", "auto")
    """"auto" (NIXL where installed, else memory), "nixl" or "memory" (this process only)."""
    lane: str = _env("lane", "auto")
    """"auto", or "read" / "write" to force one-sided reads or requested writes where both are possible."""
    net_devices: str = _env("net_devices", "")
    """UCX network devices, e.g. "mlx5_0:1,mlx5_1:1"; empty lets UCX choose."""
    rails: int = _env("rails", 2)
    """Network devices that one transfer may use at a time."""
    require_rdma: bool = _env("require_rdma", False)
    """Refuse a source on another host that is not reached by RDMA, instead of falling to TCP."""

    def __post_init__(self) -> None:
        for name in ("lease_s", "beat_s", "grace_s", "grace_max_s", "stall_s"):
            if getattr(self, name) <= 0:
                raise InvalidArgument(f"Options.{name}={getattr(self, name)}: must be above 0 seconds")
        if self.beat_s * 2 > self.lease_s:
            raise InvalidArgument(f"Options.beat_s={self.beat_s} must be at most half of lease_s={self.lease_s}")
        if not 4096 <= self.window_bytes <= 64 << 20 or self.window_bytes % 4096:
            raise InvalidArgument(f"Options.window_bytes={self.window_bytes}: a multiple of 4096, at most 64 MiB")
        if not 1 <= self.in_flight <= 64:
            raise InvalidArgument(f"Options.in_flight={self.in_flight}: 1 to 64")
        if self.transport not in ("auto", "nixl", "memory"):
            raise InvalidArgument(f'Options.transport={self.transport!r}: "auto", "nixl" or "memory"')
        if self.lane not in ("auto", "read", "write"):
            raise InvalidArgument(f'Options.lane={self.lane!r}: "auto", "read" or "write"')

    def as_dict(self) -> dict[str, Any]:
        return {item.name: getattr(self, item.name) for item in fields(self)}


def registry_url() -> str | None:
    """What ``registry=None`` reads first."""
    return os.environ.get(PREFIX + "REGISTRY") or None


def ucx_tls() -> str | None:
    """The transports that UCX is limited to by ``UCX_TLS``, or None."""
    return os.environ.get("UCX_TLS") or None


def allocator_conf() -> str:
    """The settings of torch's CUDA allocator, under its old or its new name, or nothing."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""


def torchrun_seat() -> tuple[int, int, str] | None:
    """(rank, world size, launch name) that torchrun's variables state, or None."""
    env = os.environ
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    launch = env.get("TORCHELASTIC_RUN_ID") or "none"
    if launch == "none":  # torchrun's default id is the same for every launch: the rendezvous address is not
        launch = f"{env.get('MASTER_ADDR', 'local')}:{env.get('MASTER_PORT', '0')}"
    restart = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(env["RANK"]), int(env["WORLD_SIZE"]), f"{launch}/{restart}"
