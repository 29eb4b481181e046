"""The memory network with faults that strike at an exact read, so that "in mid-move" is no matter of luck."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from mx_rl.arena import HEADER_BYTES
from mx_rl.transport.memory import NETWORK, MemoryNetwork, _Move


class Faults:
    """``at(prefix, n, action)``: before the n-th window is read from an agent whose name begins so, call ``action`` with
    that agent's name, once. ``served`` counts windows by agent."""

    def __init__(self, network: MemoryNetwork) -> None:
        self.network = network
        self.served: dict[str, int] = {}
        self._plans: list[tuple[str, int, Callable[[str], None]]] = []

    def at(self, prefix: str, window: int, action: Callable[[str], None]) -> None:
        self.served.clear()
        for agent in self.agents(prefix):  # else one step copies it all before it asks for a header
            self.network.delay(agent, 0.001)
        self._plans.append((prefix, window, action))

    def agents(self, prefix: str) -> list[str]:
        return [agent for agent in self.network._servers if agent.startswith(prefix)]

    def note(self, agent: str, rows: Sequence[tuple[int, int, int]]) -> None:
        if all(nbytes == HEADER_BYTES for _, _, nbytes in rows):
            return
        count = self.served[agent] = self.served.get(agent, 0) + 1
        for plan in [plan for plan in self._plans if agent.startswith(plan[0]) and count == plan[1]]:
            self._plans.remove(plan)
            plan[2](agent)


@contextmanager
def faulty(patch: pytest.MonkeyPatch, *, fence: bool) -> Iterator[Faults]:
    faults = Faults(NETWORK)
    post = NETWORK.post

    def posted(receiver: object, agent: str, rows: Sequence[tuple[int, int, int]]) -> _Move:
        faults.note(agent, rows)
        return post(receiver, agent, rows)

    patch.setattr(NETWORK, "post", posted)
    patch.setattr(NETWORK, "fence", fence)
    yield faults
    for agent in list(NETWORK._servers):
        NETWORK.release(agent)
        NETWORK.delay(agent, 0.0)
