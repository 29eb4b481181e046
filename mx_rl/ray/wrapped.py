"""Actors that their user made, as the ranks of a world or replica: ours only publish or install in them."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from mx_rl.errors import StartTimeout
from mx_rl.ray.deadline import Deadline
from mx_rl.ray.host import Host, Location, operate
from mx_rl.ray.interrupts import patience
from mx_rl.ray.placement import cluster_resources
from mx_rl.ray.ranks import Ranks


class WrappedRanks(Ranks):
    """Operations run inside the user's actor by Ray's ``__ray_call__``, in turn with its own methods.

    So nothing answers while a method runs, and there is nothing to watch: a death shows at the next operation.
    """

    answers = False

    def __init__(self, kind: type[Host], actors: Sequence[Any], *, name: str, title: str, policy: str) -> None:
        super().__init__(kind, name=name, title=title, policy=policy, size=len(actors))
        self._actors = list(actors)
        self._group = secrets.token_hex(8)  # names may be used again

    def adopt(self, build: str, options: Mapping[str, Any], *, deadline: Deadline, abort: threading.Event) -> None:
        """Give every actor its Publisher or Subscriber. Raises as ``Ranks.start`` does; the actors stay."""
        up = False
        self._registry = options.get("registry")
        try:
            self.locations = tuple(self._locate_all(deadline, abort))
            given = [(seat, build, options, self._group) for seat in self._seats()]
            self._incarnations = self._each("adopt", given, deadline, abort)
            up = True
        finally:
            if not up:
                self.end(timeout=patience())

    def _locate_all(self, deadline: Deadline, abort: threading.Event) -> list[Location]:
        try:
            return self._each("locate", [()] * self.size, deadline, abort)
        except StartTimeout as error:
            in_all, free = cluster_resources()
            late = error.fields["missing"]
            raise StartTimeout(
                f"{self.title}: the actors of ranks {late} did not answer in {deadline.timeout:g} s: they are in a call "
                f"of yours, or Ray finds no room for them. The cluster has {in_all} in all and {free} free",
                missing=late,
                available=free,
                cluster=in_all,
            ) from None

    def end(self, *, timeout: float) -> None:
        """Close the publishers or subscribers in at most ``timeout`` seconds; the actors are their user's."""
        if self._session.alive():
            with self._lock:
                actors, self._actors = self._actors, []
            self._close(
                actors, timeout if self.locations else 0.0
            )  # whether a silent one has ended is not ours to say: its lease is

    def _end_one(self, actor: Any) -> Any:
        return self._invoke(actor, "end", self._group)

    def _invoke(self, actor: Any, operation: str, /, *args: Any, **kwargs: Any) -> Any:
        return actor.__ray_call__.remote(operate, self._kind, operation, *args, **kwargs)
