"""Single passes over memory. ``base`` is the contract; ``plain`` and ``reference`` (the digest) say what each computes, in
torch and numpy; ``fast`` is the same made by numba (``cpu*``), ``cuda`` by ``kernels.cu``."""

from __future__ import annotations

import importlib
import logging
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mx_rl.kernels.base import Kernels

log = logging.getLogger("mx_rl")


@cache
def for_cpu() -> Kernels:
    """The fastest kernels for host memory that this process can import.

    The first call of a fresh installation compiles them, for ten seconds or more: it belongs on a thread beside the set-up,
    never into a first publish. Later processes read them from numba's cache in a fraction of a second.
    """
    try:
        found: Any = importlib.import_module("mx_rl.kernels.fast")
    except ImportError as exc:
        log.warning("kernels run in plain numpy, many times slower: numba cannot be imported: %s", exc)
        found = importlib.import_module("mx_rl.kernels.plain")
    kernels: Kernels = found
    return kernels
