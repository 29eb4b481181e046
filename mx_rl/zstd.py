"""Zstandard at level 1, with an exact bound on what comes out. In Python's own library since 3.14, a backport before."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from mx_rl.errors import CorruptRecord, MissingExtra


@cache
def _library() -> Any:
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise MissingExtra(
        "packed deltas need zstd: pip install backports.zstd (Python 3.14 has its own)", extra="backports.zstd"
    )


def compress(data: bytes) -> bytes:
    """The shorter of a zstd frame and the data themselves: ``expand`` tells them apart by their length."""
    packed: bytes = _library().compress(data, level=1)
    return packed if len(packed) < len(data) else data


def expand(data: bytes, nbytes: int) -> bytes:
    """What ``compress`` was given, which had ``nbytes``. Raises CorruptRecord for anything else; nothing longer is made."""
    if len(data) >= nbytes:
        if len(data) > nbytes:
            raise CorruptRecord(f"a stream of {len(data)} bytes stands for {nbytes}")
        return data
    library = _library()
    engine = library.ZstdDecompressor()
    try:
        found: bytes = engine.decompress(data, max_length=nbytes)
    except library.ZstdError as exc:
        raise CorruptRecord(f"a stream of {len(data)} bytes is damaged: {exc}") from exc
    if len(found) != nbytes or not engine.eof or engine.unused_data:
        raise CorruptRecord(f"a stream of {len(data)} bytes does not unpack to {nbytes}")
    return found
