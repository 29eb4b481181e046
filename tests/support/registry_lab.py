"""Trainers and replicas in a few words, over anything that answers registry commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mx_rl.records import (
    Ack,
    Answer,
    AnyCommand,
    Await,
    Beat,
    Claim,
    Commit,
    Declare,
    Join,
    Outcome,
    Refused,
    Resolve,
    Seat,
    Source,
    Target,
    VersionRecord,
    View,
    ViewOf,
)
from mx_rl.registry.state import State, apply

POLICY = "p"


@dataclass
class Clock:
    now: float = 1_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Lab:
    """``call`` runs a command to its answer; the methods are the members' usual words."""

    call: Callable[[AnyCommand], Answer]
    policy: str = POLICY
    seats: dict[str, Seat] = field(default_factory=dict)  # by world: the newest open seat
    last: Answer | None = None

    def ask(self, command: AnyCommand) -> Any:
        self.last = self.call(command)
        return self.last.result

    # ---- trainer ranks ----

    def claim(self, incarnation: str, rank: int = 0, size: int = 1, *, world: str = "w", **more: Any) -> Any:
        more.setdefault("nonce", sum(incarnation.encode()) * 1000 + rank)
        seat = self.ask(
            Claim(policy=self.policy, world=world, rank=rank, world_size=size, incarnation=incarnation, **more)
        )
        if isinstance(seat, Seat) and seat.open:
            self.seats[world] = seat
        return seat

    def launch(self, *incarnations: str, world: str = "w", **more: Any) -> Seat:
        """A whole world claims; all ranks but the last are answered before it is open."""
        for rank, incarnation in enumerate(incarnations):
            self.claim(incarnation, rank, len(incarnations), world=world, **more)
        seat = self.seats[world]
        assert seat.open
        return seat

    def commit(self, incarnation: str, rank: int = 0, *, k: int = 1, world: str = "w", **more: Any) -> Any:
        seat = more.pop("seat", None) or self.seats[world]
        more.setdefault("source", source(incarnation, k % 2, k))
        more.setdefault("window_bytes", 4096)
        more.setdefault("wire_bytes", 100)
        return self.ask(
            Commit(
                policy=self.policy,
                epoch=seat.epoch,
                nonce=seat.nonce,
                k=k,
                rank=rank,
                incarnation=incarnation,
                layout=more.pop("layout", f"layout{rank}"),
                **more,
            )
        )

    def declare(self, incarnation: str, size: int = 1, *, world: str = "w", **more: Any) -> Any:
        seat = more.pop("seat", None) or self.seats[world]
        layouts = more.pop("layouts", tuple(f"layout{rank}" for rank in range(size)))
        return self.ask(
            Declare(
                policy=self.policy,
                epoch=seat.epoch,
                nonce=seat.nonce,
                incarnation=incarnation,
                layouts=layouts,
                world_layout=more.pop("world_layout", "W"),
                **more,
            )
        )

    def wait(self, k: int = 1, *, world: str = "w", **more: Any) -> Any:
        seat = more.pop("seat", None) or self.seats[world]
        return self.ask(Await(policy=self.policy, epoch=seat.epoch, k=k, **more))

    def publish(self, *incarnations: str, k: int = 1, world: str = "w", **more: Any) -> VersionRecord:
        """Every rank commits; rank 0 declares. Returns the READY record."""
        for rank, incarnation in enumerate(incarnations):
            outcome = self.commit(incarnation, rank, k=k, world=world, **more)
            assert isinstance(outcome, Outcome), outcome
        if not outcome.declared:
            self.declare(incarnations[0], len(incarnations), world=world)
        outcome = self.wait(k, world=world)
        assert outcome.state == "ready", outcome
        assert outcome.record is not None
        return outcome.record

    # ---- replicas ----

    def join(self, replica: str, rank: int = 0, ranks: int = 1, *, incarnation: str = "", **more: Any) -> Any:
        incarnation = incarnation or replica
        more.setdefault("layout", "R")
        return self.ask(
            Join(
                policy=self.policy,
                replica=replica,
                rank=rank,
                ranks=ranks,
                incarnation=incarnation,
                endpoint=more.pop("endpoint", incarnation),
                **more,
            )
        )

    def resolve(self, replica: str, **more: Any) -> Any:
        more.setdefault("incarnation", replica)
        return self.ask(Resolve(policy=self.policy, replica=replica, **more))

    def ack(self, replica: str, record: VersionRecord | None, *, state: str = "installed", **more: Any) -> Any:
        more.setdefault("incarnation", replica)
        more.setdefault("number", record.number if record is not None else 0)
        return self.ask(Ack(policy=self.policy, replica=replica, record=record, state=state, **more))

    def install(self, replica: str, *, serve: bool = True, **more: Any) -> VersionRecord:
        """Resolve the newest version, and acknowledge it; it serves its stage afterwards."""
        target = self.resolve(replica, **more)
        assert isinstance(target, Target), target
        incarnation = more.get("incarnation", replica)
        held = (source(incarnation, 0, target.record.number),) if serve else ()
        self.ack(replica, target.record, incarnation=incarnation, held=held)
        return target.record

    # ---- anybody ----

    def beat(self, *incarnations: str) -> Any:
        return self.ask(Beat(policy=self.policy, incarnations=incarnations))

    def view(self) -> dict[str, Any]:
        result = self.ask(View(policy=self.policy))
        assert isinstance(result, ViewOf)
        found = json.loads(result.json)
        assert isinstance(found, dict)
        return found


def source(agent: str, region: int = 0, generation: int = 1) -> Source:
    return Source(agent=agent, region=region, generation=generation)


def error(result: Any) -> str:
    """The name of the error that a command was refused with; "" where it was not."""
    return result.error if isinstance(result, Refused) else ""


class StateLab(Lab):
    """A Lab over the bare state machine, whose clock the test moves."""

    def __init__(self, state: State | None = None, *, clock: Clock | None = None, **rules: Any) -> None:
        self.clock = clock or Clock()
        self.state = state or State(1, **rules)
        super().__init__(self._apply)

    def _apply(self, command: AnyCommand) -> Answer:
        answer = apply(self.state, command, self.clock.now, final=True)
        assert answer is not None, f"{command} got no answer although its wait was over"
        return answer

    def poll(self, command: AnyCommand, *, again: bool = True) -> Any:
        """A command that waits: its result if it has one by now, else None."""
        answer = apply(self.state, command, self.clock.now, again=again)
        return answer.result if answer is not None else None

    def restart(self, *, saved: bool = True) -> StateLab:
        """The registry's process dies; a new one knows only what was written, or not even that."""
        state = State(
            self.state.boot + 1,
            saved=self.state.unsaved if saved else {},
            lease_s=self.state.rules.lease_s,
            grace_max_s=self.state.rules.grace_max_s,
        )
        lab = StateLab(state, clock=self.clock)
        lab.seats = dict(self.seats)
        return lab

    def pass_time(self, seconds: float, *beating: str, step: float = 3.0) -> None:
        """Time passes; the members named keep beating."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now = min(end, self.clock.now + step)
            self.beat(*beating)
