"""How bytes move between processes."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mx_rl.config import Options
    from mx_rl.transport.base import Transport


def make_transport(options: Options | None = None) -> Transport:
    """The transport that ``options.transport`` names: "nixl", "memory", or "auto", which is nixl where it is installed.

    Raises MissingExtra where nixl is asked for and not installed.
    """
    from mx_rl.config import Options

    options = options or Options()
    kind = options.transport
    if kind == "auto":
        kind = "nixl" if sys.platform.startswith("linux") and find_spec("nixl") is not None else "memory"
    if kind == "nixl":
        from mx_rl.transport.near import NearTransport
        from mx_rl.transport.nixl import NixlTransport

        wire = NixlTransport(options)
        # A lane that was asked for by name is taken, within the process too.
        return NearTransport(wire, in_flight=options.in_flight) if options.lane == "auto" else wire
    from mx_rl.transport.memory import MemoryTransport

    return MemoryTransport(options)
