"""The second half of a publish, on a thread of its own: commit, rank 0's world layout, and what became of each
version."""

from __future__ import annotations

import logging
import queue
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

import msgspec

from mx_rl.claim import Claimant, name_ranks
from mx_rl.endpoint import Member
from mx_rl.errors import (
    Closed,
    Fenced,
    IncompleteVersion,
    MxRLError,
    PeerLost,
    ReplicaMismatch,
    SeatTaken,
    StepMismatch,
    VersionAborted,
)
from mx_rl.layout import RankLayout, WorldLayout
from mx_rl.partners import Partners, Snapshot
from mx_rl.records import Await, Commit, Declare, Outcome, Seat, VersionRecord

log = logging.getLogger("mx_rl")

Key = tuple[int, int]
"""(epoch, k): the k-th publish of an epoch, counted from 1."""

_POLL_S = 10.0
_KEPT = 64
_JOIN_S = 1.0
"""How long close() waits for a thread that may be in a call to a registry that is away: it ends by itself then."""


class Commits:
    """Commits in the order of publishing. ``newest`` is the newest READY version that this rank knows of.

    A version keeps the key under which it was published, also where a rank of the world was replaced meanwhile and its
    commit is carried over to the epoch that opened then: no call of a surviving rank is lost, so that the n-th publish of
    all ranks stays one version.
    """

    def __init__(self, member: Member, claimant: Claimant, rank: int) -> None:
        self.partners = Partners(member, rank)
        self.newest: Key | None = None
        self.held: VersionRecord | None = None
        self.world: tuple[str, bytes] | None = None  # rank 0: the world layout that it declared last
        self._member = member
        self._claimant = claimant
        self._rank = rank
        # A daemon, unlike an executor's: a script that ends while another rank is awaited must not hang at exit.
        self._queue: queue.SimpleQueue[tuple[Commit, Snapshot | None, Future[Outcome]] | None] = queue.SimpleQueue()
        self._pending: dict[Key, Future[Outcome]] = {}
        self._outcomes: dict[Key, Outcome] = {}
        self._keys: dict[int, Key] = {}  # foretold number -> key
        self._carried: dict[int, Seat] = {}  # ended epoch -> the next one
        self._down: dict[int, int] = {}  # ended epoch -> by how much k goes down from it to the next
        self._failure: MxRLError | None = None
        self._closing = False
        self._learning = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="mx-rl-commit", daemon=True)
        self._thread.start()

    def submit(self, commit: Commit, number: int, snapshot: Snapshot | None = None) -> None:
        """``number``: what the version is called if nothing happens; ``snapshot``: what its sums are made from."""
        key = (commit.epoch, commit.k)
        future = self._pending[key] = Future()
        self._keys[number] = key
        self._queue.put((commit, snapshot, future))
        for old in list(self._pending)[:-_KEPT]:
            if old != self.newest and self._pending[old].done():
                del self._pending[old]
                self._outcomes.pop(old, None)
        for foretold in list(self._keys)[:-_KEPT]:
            del self._keys[foretold]

    def key_of(self, number: int) -> Key | None:
        return self._keys.get(number)

    def count_on(self, ended: int, k: int) -> int:
        """The k of ``ended`` in the epoch that its open publishes were carried to."""
        return k - self._down[ended] if ended in self._down else 0

    def outcome(self, key: Key) -> Outcome | None:
        return self._outcomes.get(key)

    def is_past(self, key: Key) -> bool:
        """It can never again be the newest READY version."""
        if key == self.newest:
            return False
        outcome = self._outcomes.get(key)
        if outcome is None:
            return key not in self._pending
        return outcome.state != "staging"

    def raise_failure(self) -> None:
        """What a former commit failed with, once; Fenced and SeatTaken for good."""
        failure = self._failure
        if failure is None:
            return
        if not isinstance(failure, (Fenced, SeatTaken)):
            self._failure = None
        raise failure

    def settle(self, key: Key, deadline: float) -> Outcome:
        """What became of a version, as far as known at the deadline (its state may still be "staging")."""
        known = self._outcomes.get(key)
        if known is not None and known.state != "staging":
            return known
        try:
            outcome = self._pending[key].result(timeout=max(deadline - time.monotonic(), 0))
        except MxRLError:  # before the time-out: some of ours are TimeoutErrors too
            return self._outcomes[key]
        except FutureTimeout:
            if self._outcomes.get(key) is None:
                return Outcome(number=0, state="staging")
            outcome = self._await(key, 0.0)
        while outcome.state == "staging":
            left = deadline - time.monotonic()
            if left <= 0:
                break
            outcome = self._await(key, min(left, _POLL_S))
        return outcome

    def close(self, deadline: float) -> None:
        """Finish what was begun, as far as the deadline allows."""
        waiting = [future for future in self._pending.values() if not future.done()]
        for future in waiting:
            self._closing = time.monotonic() >= deadline
            try:
                future.result(timeout=max(deadline - time.monotonic(), 0.01))
            except (MxRLError, FutureTimeout) as exc:
                log.warning("policy %s: closed with a version unfinished: %s", self._member.policy, exc or "no answer")
        self._closing = True
        self._queue.put(None)
        self._thread.join(_JOIN_S)  # its frame holds the last slot

    # ---- on the thread

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            commit, snapshot, future = item
            try:
                if self._closing:
                    raise Closed(f"closed before publish {commit.k} of epoch {commit.epoch} was committed")
                future.set_result(self._run((commit.epoch, commit.k), commit, snapshot))
            except BaseException as exc:  # noqa: BLE001 - it belongs to whoever asks for the outcome
                future.set_exception(exc)

    def _run(self, key: Key, commit: Commit, snapshot: Snapshot | None) -> Outcome:
        try:
            if snapshot is not None:
                commit = self._prove(key, commit, snapshot)
            outcome = self._learn(key, self._commit(commit))
            if self._rank == 0 and outcome.state == "staging":
                outcome = self._declare_world(key, commit)
            return outcome
        except BaseException as exc:
            text = f"publish {key[1]} was not committed: {type(exc).__name__}: {exc}"
            failure = exc if isinstance(exc, MxRLError) else MxRLError(text)
            if commit.error is None:
                self._failure = failure
            self._outcomes[key] = Outcome(number=0, state="aborted", reason=str(failure))
            if failure is exc:
                raise
            raise failure from exc

    def _prove(self, key: Key, commit: Commit, snapshot: Snapshot) -> Commit:
        before = (key[0], key[1] - 1)
        known = self._outcomes.get(before)
        if not self.partners.knows(key[0]) and known is not None and known.state == "staging":
            try:
                self._await(before, 0.0)  # the other ranks' layouts are news until they are known
            except MxRLError as exc:
                log.warning("policy %s: what became of the last publish is not known yet: %s", self._member.policy, exc)
        try:
            return self.partners.prove(commit, snapshot)
        except Exception as exc:
            self._commit(msgspec.structs.replace(commit, error=f"{type(exc).__name__}: {exc}"[:4096]))
            raise

    def _commit(self, commit: Commit) -> Outcome:
        try:
            return self._member.ask(self._carry(commit), Outcome)
        except IncompleteVersion as exc:
            # Refused, not aborted: the epoch ended before this commit arrived, and it belongs to the next one.
            log.warning("policy %s: %s", self._member.policy, exc)
            present = self._carry(commit)
            # Before the publishing thread can see that the epoch is over: it counts on from here.
            self._down[present.epoch] = present.k - 1
            self._claimant.superseded(present.epoch)
            seat = self._rejoin()
            if seat.epoch != present.epoch:
                self._carried[present.epoch] = seat
            else:
                del self._down[present.epoch]  # the registry had forgotten, and knows it again
            return self._member.ask(self._carry(commit), Outcome)

    def _rejoin(self) -> Seat:
        """As long as it takes: a commit that one rank gave up and another carried over would part their counts."""
        while True:
            if self._closing:
                raise Closed("closed while a replaced rank was awaited")
            try:
                return self._claimant.wait_open(time.monotonic() + _POLL_S)
            except IncompleteVersion as exc:
                log.warning("policy %s: %s", self._member.policy, exc)

    def _carry(self, commit: Commit) -> Commit:
        """The commit as the present epoch knows it."""
        while commit.epoch in self._carried:
            seat, k = self._carried[commit.epoch], commit.k - self._down[commit.epoch]
            commit = msgspec.structs.replace(commit, epoch=seat.epoch, nonce=seat.nonce, k=k)
        return commit

    def _place(self, key: Key) -> Key:
        epoch, k = key
        while epoch in self._carried and k > self._down[epoch]:
            epoch, k = self._carried[epoch].epoch, k - self._down[epoch]
        return epoch, k

    def _await(self, key: Key, wait: float, *, layouts_only: bool = False) -> Outcome:
        epoch, k = self._place(key)
        command = Await(policy=self._member.policy, epoch=epoch, k=k, layouts_only=layouts_only, wait=wait)
        try:
            outcome = self._member.ask(command, Outcome)
        except IncompleteVersion as exc:
            outcome = Outcome(number=0, state="aborted", reason=str(exc))
        return self._learn(key, outcome)

    def _learn(self, key: Key, outcome: Outcome) -> Outcome:
        """Also where two threads learn the same: what it failed with is kept once, before anybody sees the outcome."""
        with self._learning:
            before = self._outcomes.get(key)
            self.partners.note(key, outcome)
            told = before is not None and before.state == "aborted"
            if outcome.state == "aborted" and (outcome.steps or outcome.differ) and not told:
                self._failure = self.aborted(key, outcome)
            if outcome.state == "ready" and (self.newest is None or key >= self.newest):
                self.newest = key  # before the outcome: else its slot would look free for a moment
                self.held = outcome.record or self.held
            self._outcomes[key] = outcome
        return outcome

    def aborted(self, key: Key, outcome: Outcome) -> MxRLError:
        text = f"version {outcome.number} was aborted: {outcome.reason}"
        if outcome.steps:
            return StepMismatch(text, version=outcome.number, steps=dict(outcome.steps))
        if outcome.differ:
            names = self.partners.suspects(outcome, key[1])
            told = (
                f" (between ranks {outcome.differ[0]} and {outcome.differ[1]}: {', '.join(names[:10])})"
                if names
                else ""
            )
            more = f" and {len(names) - 10} more" if len(names) > 10 else ""
            return ReplicaMismatch(
                f"{text}{told}{more}. The ranks hold different values under one name: their training has drifted apart, "
                "or each keeps its own. Make them equal before publish, or leave them out with shards(exclude=...)",
                ranks=list(outcome.differ),
                version=outcome.number,
                tensors=names,
            )
        return VersionAborted(text, version=outcome.number, reason=outcome.reason)

    def _declare_world(self, key: Key, commit: Commit) -> Outcome:
        """Rank 0: join the layouts of all ranks into one, check that they cover every tensor, and store it."""
        while True:
            outcome = self._await(key, _POLL_S, layouts_only=True)
            if outcome.state != "staging" or (outcome.layouts and outcome.declared):
                return outcome
            if self._closing:
                raise Closed(f"closed while version {outcome.number} waited for rank(s) {name_ranks(outcome.missing)}")
            if not outcome.layouts:
                continue
            try:
                world = self._merge(outcome.layouts)
            except Exception as exc:
                failed = msgspec.structs.replace(commit, error=f"{type(exc).__name__}: {exc}"[:4096])
                self._learn(key, self._commit(failed))
                raise
            present = self._carry(commit)
            self.world = (world.hash, world.encode())
            self._member.put(*self.world)
            self._member.ask(
                Declare(
                    policy=self._member.policy,
                    epoch=present.epoch,
                    nonce=present.nonce,
                    incarnation=commit.incarnation,
                    layouts=outcome.layouts,
                    world_layout=world.hash,
                    copies=world.copy_sets if world.replicated else (),
                )
            )
            return self._await(key, 0.0)

    def _merge(self, hashes: tuple[str, ...]) -> WorldLayout:
        blobs = self._member.blobs(sorted(set(hashes)))
        lost = [rank for rank, name in enumerate(hashes) if name not in blobs]
        if lost:
            raise PeerLost(f"the layouts of rank(s) {name_ranks(lost)} have left the registry", peer=name_ranks(lost))
        layouts = {name: RankLayout.decode(blobs[name]) for name in set(hashes)}
        return WorldLayout.merge([layouts[name] for name in hashes])
