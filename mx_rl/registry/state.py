"""The registry as a pure function: ``apply(state, command, now)``. Every registry runs it, or equals it.

``None`` means "not yet": the runner tries again with ``again=True`` whenever ``state.changes(policy)`` has moved, and
every 0.25 s since time moves too, and with ``final=True`` when the command's ``wait`` is over, which always answers.
Before an answer leaves, the runner writes ``state.unsaved`` to where it outlives this process.
"""

from __future__ import annotations

from collections.abc import Mapping

from mx_rl.errors import InvalidArgument
from mx_rl.records import (
    SEAT_PREFIX,
    Ack,
    Answer,
    AnyCommand,
    AnyResult,
    Await,
    AwaitFree,
    AwaitInstalled,
    Beat,
    Blobs,
    Claim,
    Commit,
    Dead,
    Declare,
    GetBlobs,
    Join,
    Leave,
    Ok,
    PutBlob,
    Refused,
    Resolve,
    View,
    ViewOf,
)
from mx_rl.registry.offers import await_free, resolve
from mx_rl.registry.policy import Blob, Policy, Rules, Saved, refused
from mx_rl.registry.replicas import ack, await_installed, dead, join, leave, led_by
from mx_rl.registry.sweep import SWEEP_S, sweep
from mx_rl.registry.trainer import await_version, commit, declare
from mx_rl.registry.view import view, view_all
from mx_rl.registry.worlds import claim

MAX_NAME = 256


class State:
    """All policies of one registry. ``boot`` tells members that this one has forgotten; ``saved`` is what an earlier
    one wrote. Durations are seconds."""

    def __init__(
        self,
        boot: int,
        *,
        saved: Mapping[str, Saved] | None = None,
        lease_s: float = 30.0,
        grace_max_s: float = 60.0,
        settle_s: float = 0.0,
    ) -> None:
        self.boot = boot
        self.rules = Rules(lease_s=lease_s, grace_max_s=grace_max_s, settle_s=settle_s)
        self.saved: dict[str, Saved] = dict(saved or {})
        self.unsaved: dict[str, Saved] = {}
        self.policies: dict[str, Policy] = {}
        self.now = 0.0
        self.started: float | None = None
        self.idle_since: float | None = None
        self._births = 0

    def advance(self, now: float) -> float:
        """``now`` never falls."""
        self.now = max(self.now, now)
        if self.started is None:
            self.started = self.idle_since = self.now
        return self.now

    def changes(self, policy: str) -> int:
        """Moves when an answer that waited may have become ready."""
        found = self.policies.get(policy)
        return found.changes if found is not None else -1

    def policy(self, name: str, *, keep: bool) -> Policy:
        """``keep`` False: an unknown policy is looked at, not begun."""
        found = self.policies.get(name)
        if found is None:
            saved = self.saved.get(name, Saved())
            self._births += 1
            found = Policy(
                name,
                self.rules,
                settled_at=(self.started or 0.0) + self.rules.settle_s,
                changes=self._births << 32,
                floor=saved.floor,
                highest=saved.floor,
                known_epoch=saved.epoch,
                known_world=saved.world,
            )
            if keep:
                self.policies[name] = found
        return found

    def forget(self, name: str, now: float) -> bool:
        """Drop a policy with its floor, so that its numbers begin anew. False while members live."""
        found = self.policies.get(name)
        if found is not None and found.anyone(self.advance(now)):
            return False
        self.policies.pop(name, None)
        self.saved.pop(name, None)
        self.unsaved.pop(name, None)
        return True

    def sweep(self, now: float) -> None:
        """Drop what has expired in every policy. A registry that nothing asks has nobody to answer, but may end."""
        now = self.advance(now)
        for policy in list(self.policies.values()):
            self.sweep_policy(policy, now)
        if any(policy.anyone(now) for policy in self.policies.values()):
            self.idle_since = None
        elif self.idle_since is None:
            self.idle_since = now

    def idle_s(self) -> float:
        """How long no policy has had a member, as of the last ``sweep``."""
        return self.now - self.idle_since if self.idle_since is not None else 0.0

    def sweep_policy(self, policy: Policy, now: float) -> None:
        if now >= policy.next_sweep:
            policy.next_sweep = now + SWEEP_S
            if sweep(policy, now):
                self.policies.pop(policy.name, None)


def apply(state: State, command: AnyCommand, now: float, *, final: bool = False, again: bool = False) -> Answer | None:
    """Run one command. Deterministic; ``now`` is the registry's clock in seconds since 1970.

    ``again``: this command was seen before and waits: it renews no lease and reports no death a second time.
    """
    now = state.advance(now)
    refusal = _unfit(command)
    if refusal is not None:
        return Answer(boot=state.boot, floor=0, result=refusal)
    if isinstance(command, Beat) and not command.policy:
        return Answer(boot=state.boot, floor=0, result=Ok(), known=_beat_all(state, command, now))
    if isinstance(command, View) and not command.policy:
        return Answer(boot=state.boot, floor=0, result=ViewOf(json=view_all(state.policies, state.saved)))
    policy = state.policy(command.policy, keep=isinstance(command, (PutBlob, Claim, Join, Ack)))
    state.sweep_policy(policy, now)
    if not again:
        _touch(policy, command, now)
    result = _run(state, policy, command, now, final=final, again=again)
    if policy.unsaved:
        policy.unsaved = False
        state.saved[policy.name] = state.unsaved[policy.name] = policy.saved()
    if result is None:
        return None
    return Answer(boot=state.boot, floor=policy.floor, result=result, known=_known(policy, command))


def _unfit(command: AnyCommand) -> Refused | None:
    whole = isinstance(command, (Beat, View, Dead))
    if (command.policy or whole) and len(command.policy) <= MAX_NAME:
        return None
    return refused(
        InvalidArgument,
        f"a policy's name has 1 to {MAX_NAME} characters, got {command.policy[:80]!r} ({len(command.policy)} characters)",
    )


def _run(
    state: State, policy: Policy, command: AnyCommand, now: float, *, final: bool, again: bool
) -> AnyResult | None:
    match command:
        case Resolve():
            return resolve(policy, command, now, final=final, again=again)
        case Commit():
            return commit(policy, command, now, final=final)
        case Await():
            return await_version(policy, command, now, final=final)
        case AwaitFree():
            return await_free(policy, command, now, final=final)
        case AwaitInstalled():
            return await_installed(policy, command, now, final=final)
        case Claim():
            return claim(policy, command, now, final=final)
        case Join():
            return join(policy, command, now, final=final)
        case Ack():
            return ack(policy, command, now)
        case Declare():
            return declare(policy, command, now)
        case PutBlob():
            return put_blob(policy, command, now)
        case GetBlobs():
            return get_blobs(policy, command, final=final)
        case Leave():
            return leave(policy, command, now)
        case View():
            return ViewOf(json=view(policy, state.boot, now))
        case Beat():
            for incarnation in command.incarnations:
                policy.touch(incarnation, now)
            return Ok()
        case Dead():
            for each in [policy] if command.policy else list(state.policies.values()):
                dead(each, command.agents)
            return Ok()


def _touch(policy: Policy, command: AnyCommand, now: float) -> None:
    match command:
        case Claim() | Commit() | Declare() | Join() | Resolve() | Ack():
            policy.touch(command.incarnation, now)
        case PutBlob():
            policy.touch(command.owner, now)


def _known(policy: Policy, command: AnyCommand) -> bool:
    match command:
        case Claim() | Commit() | Declare():
            return _seated(policy, command.incarnation, "world")
        case Join():
            return _seated(policy, command.incarnation, "replica")
        case Resolve() | Ack():
            return led_by(policy, command.replica, command.incarnation) is not None
        case Beat():
            return all(x in policy.members and bool(policy.members[x].seats) for x in command.incarnations)
    return True


def _seated(policy: Policy, incarnation: str, kind: str) -> bool:
    member = policy.members.get(incarnation)
    return member is not None and any(seat[0] == kind for seat in member.seats)


def _beat_all(state: State, command: Beat, now: float) -> bool:
    seated = set()
    for policy in state.policies.values():
        for incarnation in command.incarnations:
            policy.touch(incarnation, now)
            member = policy.members.get(incarnation)
            if member is not None and member.seats:
                seated.add(incarnation)
    return seated.issuperset(command.incarnations)


def put_blob(policy: Policy, command: PutBlob, now: float) -> Ok | Refused:
    """An endpoint's record is stored under its agent's name: that is how the registry learns whose memory it is."""
    policy.member(command.owner, now)
    for key in command.replaces:
        old = policy.blobs.get(key)
        if old is not None and old.owners == {command.owner} and key != command.key:
            del policy.blobs[key]
            policy.owners.pop(key, None)
            policy.bump()
    policy.owners[command.key] = command.owner
    known = policy.blobs.get(command.key)
    if known is None:
        policy.blobs[command.key] = Blob(command.data, {command.owner})
        policy.bump()
    elif known.data != command.data:
        if command.key == SEAT_PREFIX + command.owner:  # it serves with another agent now
            policy.blobs[command.key] = Blob(command.data, {command.owner})
            policy.bump()
            return Ok()
        return refused(
            InvalidArgument,
            f"policy {policy.name!r}: blob {command.key!r} is immutable, and {command.owner} puts other bytes "
            f"({len(command.data)}, known {len(known.data)}) under its name: use a new key",
            key=command.key,
        )
    else:
        known.owners.add(command.owner)
    return Ok()


def get_blobs(policy: Policy, command: GetBlobs, *, final: bool) -> Blobs | None:
    found = {key: policy.blobs[key].data for key in command.keys if key in policy.blobs}
    if len(found) < len(set(command.keys)) and not final and command.wait > 0:
        return None
    return Blobs(blobs=found)
