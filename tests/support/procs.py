"""Objects in real child processes, driven by name: a tiny actor, so that tests of the data plane need no Ray."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "numpy", "msgspec", "tests.support.preload"])


class ChildFailed(RuntimeError):
    """The child's method raised something that could not travel; the text is its traceback."""


def _main(pipe: Connection, factory: Any, args: tuple[Any, ...], env: dict[str, str]) -> None:
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        thing = factory(*args)
        pipe.send((True, os.getpid()))
    except BaseException as exc:
        pipe.send((False, (exc, traceback.format_exc())))
        return
    while True:
        try:
            name, positional, named = pipe.recv()
        except EOFError:
            break
        if name is None:
            break
        try:
            pipe.send((True, getattr(thing, name)(*positional, **named)))
        except BaseException as exc:
            try:
                pipe.send((False, (exc, traceback.format_exc())))
            except Exception:
                pipe.send((False, (ChildFailed(repr(exc)), traceback.format_exc())))
    close = getattr(thing, "close", None)
    if close is not None:
        close()
    pipe.send((True, None))


class Child:
    """``factory(*args)`` lives in a process of its own; ``call`` runs a method there and returns or raises its
    outcome."""

    def __init__(
        self, factory: Any, *args: Any, env: dict[str, str] | None = None, start_timeout: float = 60.0
    ) -> None:
        self._pipe, theirs = _context.Pipe()
        self.process = _context.Process(target=_main, args=(theirs, factory, args, env or {}), daemon=True)
        self.process.start()
        theirs.close()
        self._lock = threading.Lock()
        self.pid: int = self._receive(start_timeout)

    def _receive(self, timeout: float) -> Any:
        if not self._pipe.poll(timeout):
            raise TimeoutError(f"child {self.process.pid} did not answer in {timeout} s")
        try:
            fine, value = self._pipe.recv()
        except (EOFError, ConnectionResetError) as exc:
            raise ChildFailed(f"child {self.process.pid} died") from exc
        if fine:
            return value
        error, text = value
        error.add_note(text)
        raise error

    def call(self, name: str, *args: Any, timeout: float = 60.0, **named: Any) -> Any:
        with self._lock:
            self._pipe.send((name, args, named))
            return self._receive(timeout)

    def begin(self, name: str, *args: Any, timeout: float = 60.0, **named: Any) -> Future[Any]:
        """``call`` on a thread of the parent."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(self.call(name, *args, timeout=timeout, **named))
            except BaseException as exc:
                future.set_exception(exc)

        threading.Thread(target=run, daemon=True).start()
        return future

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)

    def stop(self, timeout: float = 20.0) -> None:
        """Close the object and end the process; killed if it does not end."""
        if self.process.is_alive():
            try:
                with self._lock:
                    self._pipe.send((None, (), {}))
                    self._receive(timeout)
            except (OSError, TimeoutError, ChildFailed):
                self.process.kill()
        self.process.join(timeout)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(10)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
