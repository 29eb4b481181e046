"""The thread of a subscriber that stages each version as soon as it is announced, so that ``sync`` is the install alone."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod

from mx_rl.errors import Busy, Closed, IncompleteVersion, MxRLError
from mx_rl.patience import Patience

log = logging.getLogger("mx_rl")

_NAP_S = (0.05, 5.0)
_WAIT_S = 0.5
_WAITING = "waits for a call, or for a rank"
_NEWS_S = 10.0


class Prefetched(ABC):
    """What the thread needs of its subscriber. No method raises for a registry or a source that is away but MxRLError."""

    @abstractmethod
    def _idle(self) -> bool:
        """Nothing to fetch: a version waits complete in the stage, or the subscriber is paused."""

    @abstractmethod
    def _await_news(self, patience: Patience) -> bool:
        """Wait, without any lock or lease, until there is a version to stage."""

    @abstractmethod
    def _stage_ahead(self) -> bool:
        """Stage it. False where there was none after all."""


class Prefetch:
    """One thread. ``poke`` it when a stage was emptied or a pause has ended."""

    def __init__(self, what: str, subscriber: Prefetched) -> None:
        self._what = what
        self._subscriber = subscriber
        self._poked = threading.Event()
        self._stopped = threading.Event()
        self._news = Patience(_NEWS_S)
        self._thread = threading.Thread(target=self._run, name="mx-rl-prefetch", daemon=True)
        self._thread.start()

    def poke(self) -> None:
        self._poked.set()

    def stop(self) -> None:
        """Returns at once; ``join`` waits."""
        self._stopped.set()
        self._poked.set()
        self._news.stop(Closed(f"{self._what}: closed"))

    def join(self, timeout: float) -> bool:
        """Whether the thread has ended."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        nap, said = _NAP_S[0], ""
        while not self._stopped.is_set():
            self._poked.clear()
            if self._subscriber._idle():
                self._poked.wait()
                continue
            begun = time.monotonic()
            staged, problem = self._try()
            if problem not in ("", _WAITING, said) and not self._subscriber._idle():
                log.warning("%s: prefetch: %s", self._what, problem)
            said = problem
            if staged:
                nap = _NAP_S[0]
            else:  # a poll that was answered in its time is followed by the next at once
                self._poked.wait(max(nap - (time.monotonic() - begun), 0.0))
                longest = _WAIT_S if problem == _WAITING else _NAP_S[1]
                nap = min(nap * 2, longest) if problem else _NAP_S[0]

    def _try(self) -> tuple[bool, str]:
        """Whether a version was staged, and what went wrong."""
        self._news = Patience(_NEWS_S)
        if self._stopped.is_set():
            return False, ""
        try:
            return self._subscriber._await_news(self._news) and self._subscriber._stage_ahead(), ""
        except (Busy, Closed, IncompleteVersion):  # a call has, or wants, the stage; or a rank has not come yet
            return False, _WAITING
        except MxRLError as exc:  # the next sync meets it again, and raises it
            return False, f"{type(exc).__name__}: {exc}"
        except Exception as exc:
            log.exception("%s: prefetch: a fault of ours must not end it", self._what)
            return False, f"{type(exc).__name__}: {exc}"
