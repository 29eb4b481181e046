"""A MemoryRegistry that other processes can reach through a Unix socket: the registry of multi-process tests without
Ray."""

from __future__ import annotations

import os
import socket
import struct
import tempfile
import threading
import time

from mx_rl.errors import RegistryLost
from mx_rl.records import Answer, AnyCommand, decode, encode
from mx_rl.registry.base import Registry
from mx_rl.registry.memory import MemoryRegistry


def _read(sock: socket.socket, nbytes: int) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        part = sock.recv(nbytes - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def _send(sock: socket.socket, data: bytes) -> None:
    sock.sendall(struct.pack("<I", len(data)) + data)


def _receive(sock: socket.socket) -> bytes:
    return _read(sock, struct.unpack("<I", _read(sock, 4))[0])


class RegistryServer:
    """Serves ``registry`` at ``path``; ``replace`` swaps in an empty one, as a restart of the registry's process
    would."""

    def __init__(self, registry: MemoryRegistry | None = None) -> None:
        self.registry = registry or MemoryRegistry()
        self._folder = tempfile.TemporaryDirectory(prefix="mxrl-test-")
        self.path = os.path.join(self._folder.name, "registry")
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.path)
        self._socket.listen(256)
        threading.Thread(target=self._accept, daemon=True).start()

    def replace(self, registry: MemoryRegistry) -> None:
        self.registry = registry

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            while True:
                try:
                    command = decode(_receive(client), AnyCommand)
                    answer = self.registry.call(command, timeout=command.wait + 30.0)
                    _send(client, encode(answer))
                except (EOFError, OSError):
                    return

    def close(self) -> None:
        self._socket.close()
        self._folder.cleanup()


class SocketRegistry(Registry):
    """The door to a RegistryServer; one connection a thread."""

    def __init__(self, path: str) -> None:
        self.url = f"test-socket:{path}"
        self._path = path
        self._local = threading.local()

    def call(self, command: AnyCommand, *, timeout: float) -> Answer:
        deadline = time.monotonic() + timeout
        while True:
            try:
                sock = getattr(self._local, "sock", None)
                if sock is None:
                    sock = self._local.sock = socket.socket(socket.AF_UNIX)
                    sock.connect(self._path)
                sock.settimeout(max(deadline - time.monotonic(), 0.05))
                _send(sock, encode(command))
                answer: Answer = decode(_receive(sock), Answer)
                return answer
            except (OSError, EOFError) as exc:
                self._local.sock = None
                if time.monotonic() >= deadline:
                    raise RegistryLost(f"no answer from {self._path} in {timeout} s") from exc
                time.sleep(0.02)

    def close(self) -> None:
        self._local = threading.local()
