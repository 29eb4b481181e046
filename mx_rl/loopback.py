"""Two processes and one arena: what the data plane really does on this machine. ``python -m mx_rl.loopback serve|read``.

serve: its endpoint record on stdout, then serves until stdin ends.  read: the record on stdin, its findings on stdout.
"""

from __future__ import annotations

import base64
import json
import secrets
import select
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import IO

from mx_rl.errors import MxRLError, PeerLost

NUM_BYTES = 64 << 20
ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class Loopback:
    """``seconds`` is the best of several moves of ``nbytes``; ``ucx`` is empty where it could not be told."""

    lane: str
    nbytes: int
    seconds: float
    ucx: str

    @property
    def rate(self) -> float:
        """GB/s."""
        return self.nbytes / self.seconds / 1e9


def measure(*, nbytes: int = NUM_BYTES, timeout: float = 60.0) -> Loopback:
    """Move ``nbytes`` between two new processes, checked byte for byte. Raises PeerLost with what they said last."""
    deadline = time.monotonic() + timeout
    command = [sys.executable, "-m", "mx_rl.loopback"]
    server = subprocess.Popen(
        [*command, "serve", str(nbytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert server.stdout is not None
        record = _line(server.stdout, deadline)
        if not record:
            server.kill()
            raise PeerLost(f"the serving process ended: {_last(server.communicate()[1])}", peer="loop-back")
        reader = subprocess.run(
            [*command, "read", str(nbytes)],
            input=record,
            capture_output=True,
            check=False,
            timeout=max(deadline - time.monotonic(), 1.0),
        )
        if reader.returncode != 0:
            raise PeerLost(f"the reading process ended: {_last(reader.stderr)}", peer="loop-back")
        return Loopback(**json.loads(reader.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        raise PeerLost(f"no transfer of {nbytes} bytes within {timeout:g} s", peer="loop-back") from None
    finally:
        server.kill()
        server.communicate()


def _line(stream: IO[bytes], deadline: float) -> bytes:
    """The first line, or nothing where the process ends or the time is over."""
    if not select.select([stream], [], [], max(deadline - time.monotonic(), 0.0))[0]:
        return b""
    return stream.readline()


def _last(text: bytes) -> str:
    lines = text.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "without a word"


def _serve(nbytes: int) -> None:
    from mx_rl.arena import Arena, num_windows
    from mx_rl.config import Options
    from mx_rl.endpoint import unique_name
    from mx_rl.records import EndpointRecord, encode
    from mx_rl.transport import make_transport
    from mx_rl.transport.place import here

    options = Options()
    transport = make_transport(options)
    name, nonce = unique_name("doctor-serve"), secrets.randbits(63)
    arena = Arena(1, nbytes, nonce=nonce, huge_pages=options.huge_pages)
    arena.blocks[0].fill_(0xA5)
    server = transport.serve(name, arena.regions())
    arena.headers[0].begin()
    arena.headers[0].confirm(num_windows(nbytes, options.window_bytes))
    record = EndpointRecord(
        agent=name,
        nonce=nonce,
        transport=transport.name,
        release=transport.release,
        place=here(),
        address=server.address,
        regions=arena.records(),
    )
    sys.stdout.write(base64.b64encode(encode(record)).decode() + "\n")
    sys.stdout.flush()
    while not select.select([sys.stdin], [], [], 0.0002)[0]:
        server.step()


def _read(nbytes: int) -> None:
    import numpy as np

    from mx_rl.arena import Arena, num_windows
    from mx_rl.config import Options
    from mx_rl.endpoint import unique_name
    from mx_rl.records import EndpointRecord, decode
    from mx_rl.transport import make_transport
    from mx_rl.transport.base import Windows

    options = Options()
    record = decode(base64.b64decode(sys.stdin.readline()), EndpointRecord)
    arena = Arena(1, nbytes, nonce=secrets.randbits(63), huge_pages=options.huge_pages)
    receiver = make_transport(options).receive(unique_name("doctor-read"), arena.regions())
    link = receiver.connect(record)
    count = num_windows(nbytes, options.window_bytes)
    low = np.arange(count, dtype=np.int64) * options.window_bytes
    size = np.minimum(low + options.window_bytes, nbytes) - low
    runs = np.stack([arena.address(0) + low, record.regions[0].address + low, size], axis=1)
    windows = Windows(
        runs=runs, starts=np.arange(count + 1, dtype=np.int64), needs=np.arange(1, count + 1, dtype=np.int64)
    )
    generation, _ = link.header(0, timeout=10.0)
    route = link.route(0, windows)
    best = float("inf")
    for _ in range(ROUNDS):
        arena.blocks[0].zero_()
        best = min(best, _move(route.start(generation, range(count))))
        if not bool((arena.blocks[0] == 0xA5).all()):
            raise PeerLost("what arrived is not what was sent", peer=record.agent)
    found = {"lane": link.lane, "nbytes": nbytes, "seconds": best, "ucx": _ucx_release()}
    route.close()
    link.close()
    receiver.close()
    sys.stdout.write(json.dumps(found) + "\n")


def _move(flow: object) -> float:
    from mx_rl.transport.base import Flow

    assert isinstance(flow, Flow)
    begun = time.perf_counter()
    while not flow.done:
        if not flow.step():
            time.sleep(0.0)
        if time.perf_counter() - begun > 30.0:
            raise PeerLost("a move that had begun did not end in 30 s", peer="loop-back")
    taken = time.perf_counter() - begun
    flow.close()
    return taken


def _ucx_release() -> str:
    """Asked of the library that this process really loaded, which is the one inside NIXL's wheel."""
    import ctypes

    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        paths = sorted({line.split()[-1] for line in maps if "/libucp" in line})
    if not paths:
        return ""
    library = ctypes.CDLL(paths[0])
    library.ucp_get_version_string.restype = ctypes.c_char_p
    text: bytes = library.ucp_get_version_string()
    return text.decode()


def main(arguments: list[str]) -> int:
    try:
        {"serve": _serve, "read": _read}[arguments[0]](int(arguments[1]))
    except MxRLError as exc:
        sys.stderr.write(f"{type(exc).__name__}: {exc}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
