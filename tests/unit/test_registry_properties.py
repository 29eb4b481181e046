"""Random commands, repeated, dropped and out of order: what must hold whatever happens."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from mx_rl.records import (
    Ack,
    Answer,
    AnyCommand,
    Await,
    AwaitFree,
    AwaitInstalled,
    Beat,
    Claim,
    Commit,
    Dead,
    Declare,
    Join,
    Leave,
    Outcome,
    Resolve,
    Seat,
    Source,
    Target,
    VersionRecord,
    View,
)
from mx_rl.registry.memory import MemoryRegistry
from mx_rl.registry.partners import basis_of
from mx_rl.registry.policy import Round
from mx_rl.registry.state import State, apply
from tests.support.registry_lab import POLICY, Clock

INCARNATIONS = ("a0", "a1", "b0", "b1", "c0")
REPLICAS = ("r", "s", "t")


class Run:
    """Drives one State with drawn commands, as members that remember only what they were told."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.boot = 1
        self.state = State(self.boot, lease_s=30.0)
        self.seats: dict[str, Seat] = {}
        self.held: dict[str, VersionRecord] = {}
        self.begun: dict[str, int] = {}
        self.records: list[VersionRecord] = []
        self.sent: list[AnyCommand] = []
        self.ready: dict[int, tuple[int, int, int]] = {}
        self.floor = 0
        self.made = 0

    def send(self, command: AnyCommand, *, final: bool = True) -> Any:
        self.sent.append(command)
        before = set(self._ready_numbers())
        answer = apply(self.state, command, self.clock.now, final=final)
        self._check(command, answer, before)
        return answer.result if answer is not None else None

    def _ready_numbers(self) -> set[int]:
        policy = self.state.policies.get(POLICY)
        return set(policy.versions) if policy is not None else set()

    def _check(self, command: AnyCommand, answer: Answer | None, before: set[int]) -> None:
        policy = self.state.policies.get(POLICY)
        if policy is None:
            return
        assert policy.floor >= self.floor, "the floor fell"
        for number in set(policy.versions) - before:
            identity = policy.versions[number].record.identity
            if isinstance(command, (Commit, Declare)):
                assert number > self.floor, f"READY {number} is not above the floor {self.floor}"
                self.made += 1
            assert self.ready.setdefault(number, identity) == identity, f"two versions under number {number}"
        for epoch in filter(None, (policy.epoch, policy.previous)):
            for item in epoch.rounds.values():
                self._check_copies(item)
        fresh = set(policy.versions) - before
        if isinstance(command, Commit) and fresh:
            assert policy.epoch is not None
            assert command.nonce == policy.epoch.nonce, "a commit of a superseded epoch made a version READY"
            key = (policy.epoch.world, command.incarnation)
            assert key not in policy.fenced, "a fenced incarnation made a version READY"
        self.floor = policy.floor
        if answer is not None:
            assert answer.floor in (0, policy.floor)
            if isinstance(answer.result, Target):
                record = answer.result.record
                assert self.ready.get(record.number, record.identity) == record.identity
                assert record.number <= policy.floor
                names = [holder.replica for holder in answer.result.holders]
                assert len(names) <= 4
                assert getattr(command, "replica", "") not in names
                installed = getattr(command, "installed", None)
                assert installed is None or record.number >= installed[2], "offered a version below the installed one"
        for value in (policy.versions, policy.leases, policy.replicas, policy.pending, policy.members):
            assert len(value) <= 260
        for epoch in (policy.epoch, policy.previous):
            assert epoch is None or len(epoch.rounds) <= 90

    def _check_copies(self, item: Round) -> None:
        """What is staging has no two commits that differ; who is blamed is told with the abort only."""
        assert not item.differ or item.state == "aborted"
        if item.state == "staging" and len(item.commits) == 2:
            one, two = item.commits[0], item.commits[1]
            assert one.sums[1] == two.sums[0]
            assert not one.holds
            assert not two.holds


def _claim(run: Run, incarnation: str, world: str, size: int, again: bool) -> None:
    rank = int(incarnation[1]) % size
    known = run.seats.get(f"{world}/{incarnation}")
    more: dict[str, Any] = {}
    if again and known is not None:
        more = {"epoch": known.epoch, "nonce": known.nonce, "base": known.base, "k": run.begun.get(incarnation, 0)}
        more["held"] = run.held.get(incarnation)
    command = Claim(
        policy=POLICY,
        world=world,
        rank=rank,
        world_size=size,
        incarnation=incarnation,
        **{"nonce": hash_of(incarnation), **more},
    )
    seat = run.send(command)
    if isinstance(seat, Seat) and seat.open:
        run.seats[f"{world}/{incarnation}"] = seat
        if known is None or known.epoch != seat.epoch:
            run.begun[incarnation] = 0


def hash_of(text: str) -> int:
    return sum((i + 1) * ord(char) for i, char in enumerate(text))


def _commit(
    run: Run, incarnation: str, world: str, size: int, skip: int, step: int | None, fails: bool, copies: str = "equal"
) -> None:
    seat = run.seats.get(f"{world}/{incarnation}")
    if seat is None:
        return
    k = max(1, run.begun.get(incarnation, 0) + 1 - skip)
    run.begun[incarnation] = max(k, run.begun.get(incarnation, 0))
    rank = int(incarnation[1]) % size
    outcome = run.send(
        Commit(
            policy=POLICY,
            epoch=seat.epoch,
            nonce=seat.nonce,
            k=k,
            rank=rank,
            incarnation=incarnation,
            step=step,
            layout=f"L{rank}",
            holds="H" if copies == "stale" else "",
            basis=basis_of([f"L{other}" for other in range(size)]),
            sums={1 - rank: (b"drifted!" if copies == "drifted" else b"the same")} if size == 2 else {},
            source=Source(agent=incarnation, region=k % 2, generation=k),
            window_bytes=4096,
            error="boom" if fails else None,
        )
    )
    if isinstance(outcome, Outcome):
        if not outcome.declared:
            run.send(
                Declare(
                    policy=POLICY,
                    epoch=seat.epoch,
                    nonce=seat.nonce,
                    incarnation=incarnation,
                    layouts=outcome.layouts,
                    world_layout="W",
                    copies=((0, 1),) if size == 2 else (),
                )
            )
            outcome = run.send(Await(policy=POLICY, epoch=seat.epoch, k=k))
        if isinstance(outcome, Outcome) and outcome.record is not None:
            run.held[incarnation] = outcome.record
            run.records.append(outcome.record)


def _sync(run: Run, replica: str, ending: str, lost: int) -> None:
    run.send(Join(policy=POLICY, replica=replica, rank=0, ranks=1, incarnation=replica, layout="R", endpoint=replica))
    held = run.held.get(replica)
    target = run.send(
        Resolve(
            policy=POLICY,
            replica=replica,
            incarnation=replica,
            installed=held.identity if held is not None else None,
            lost=lost,
            read_s=5.0,
        )
    )
    if not isinstance(target, Target) or ending == "drop":
        return
    record = target.record if ending == "installed" else held
    if ending == "installed":
        run.held[replica] = target.record
    run.send(
        Ack(
            policy=POLICY,
            replica=replica,
            incarnation=replica,
            record=record,
            state=ending,
            number=target.record.number,
            held=(Source(agent=replica, region=0, generation=target.record.number),) if ending == "installed" else (),
        )
    )


def _publish(run: Run, names: tuple[str, ...], world: str, again: bool) -> None:
    """A whole world's usual way: whoever has no seat in an epoch claims one, then every rank commits."""
    for _ in range(2):
        for incarnation in names:
            _claim(run, incarnation, world, len(names), again)
    for incarnation in names:
        _commit(run, incarnation, world, len(names), 0, 1, False)


worlds = st.sampled_from([("w", 2), ("w", 2), ("v", 2), ("u", 1)])
claims = st.tuples(st.just("claim"), st.sampled_from(INCARNATIONS), worlds, st.booleans())
commits = st.tuples(
    st.just("commit"),
    st.sampled_from(INCARNATIONS),
    worlds,
    st.sampled_from([0, 0, 0, 1, -1]),
    st.sampled_from([None, 1, 1, 2]),
    st.sampled_from([False, False, False, False, True]),
    st.sampled_from(["equal", "equal", "drifted", "stale"]),
)
publishes = st.tuples(
    st.just("publish"),
    st.sampled_from([(("a0", "a1"), "w"), (("a0", "b1"), "w"), (("b0", "b1"), "v"), (("c0",), "u")]),
    st.booleans(),
)
syncs = st.tuples(
    st.just("sync"),
    st.sampled_from(REPLICAS),
    st.sampled_from(["installed", "installed", "failed", "tainted", "drop"]),
    st.sampled_from([0, 0, 1, 2]),
)
others = (
    st.tuples(st.just("time"), st.sampled_from([0.1, 1.0, 10.0, 40.0])),
    st.tuples(st.just("beat"), st.lists(st.sampled_from(INCARNATIONS + REPLICAS), max_size=8)),
    st.tuples(st.just("dead"), st.sampled_from(INCARNATIONS + REPLICAS)),
    st.tuples(st.just("leave"), st.sampled_from(INCARNATIONS + REPLICAS), st.booleans()),
    st.tuples(st.just("wait"), st.integers(0, 9)),
    st.tuples(st.just("repeat"), st.integers(0, 10_000)),
)
steady = st.one_of(publishes, publishes, publishes, syncs, syncs, claims, commits, *others)
actions = st.one_of(steady, steady, steady, steady, steady, steady, st.tuples(st.just("restart")))


def perform(run: Run, action: tuple[Any, ...]) -> None:
    kind, *args = action
    if kind == "claim":
        incarnation, (world, size), again = args
        _claim(run, incarnation, world, size, again)
    elif kind == "commit":
        incarnation, (world, size), skip, step, fails, copies = args
        _commit(run, incarnation, world, size, skip, step, fails, copies)
    elif kind == "publish":
        (names, world), again = args
        _publish(run, names, world, again)
    elif kind == "sync":
        _sync(run, *args)
    elif kind == "time":
        run.clock.now += args[0]
    elif kind == "beat":
        run.send(Beat(policy=POLICY, incarnations=tuple(args[0])))
    elif kind == "dead":
        run.send(Dead(policy=POLICY, agents=(args[0],)))
    elif kind == "leave":
        run.send(Leave(policy=POLICY, incarnation=args[0], keep_sources=args[1]))
    elif kind == "wait":
        run.send(AwaitInstalled(policy=POLICY, number=args[0], wait=1.0), final=False)
        run.send(AwaitFree(policy=POLICY, source=Source(agent="a0", region=args[0] % 2, generation=1)))
    elif kind == "repeat" and run.sent:
        run.send(run.sent[args[0] % len(run.sent)])
    elif kind == "restart":
        # The process dies between two answers; what was saved before the last one is there again.
        run.boot += 1
        run.state = State(run.boot, saved=dict(run.state.saved), lease_s=30.0)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(actions, min_size=20, max_size=80))
def test_numbers_only_rise_and_each_is_one_version(script: list[tuple[Any, ...]]) -> None:
    run = Run()
    for action in script:
        perform(run, action)
    event(f"{min(run.made, 10)} versions made")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(steady, min_size=10, max_size=60))
def test_the_memory_registry_answers_as_the_state_machine_does(script: list[tuple[Any, ...]]) -> None:
    run = Run()
    times: list[tuple[float, AnyCommand]] = []
    for action in script:
        at = len(run.sent)
        perform(run, action)
        times += [(run.clock.now, command) for command in run.sent[at:]]
    clock = Clock()
    memory, plain = MemoryRegistry(clock=clock), State(1)
    for now, command in times:
        clock.now = now
        if isinstance(command, AwaitInstalled):
            continue  # it would really wait
        expected = apply(plain, command, now, final=True)
        assert expected is not None
        answer = memory.call(command, timeout=5.0)
        if not isinstance(command, View):
            assert (answer.result, answer.floor, answer.known) == (expected.result, expected.floor, expected.known)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(actions, min_size=10, max_size=60), st.integers(0, 1000))
def test_a_command_sent_twice_at_once_is_answered_alike_and_changes_nothing(
    script: list[tuple[Any, ...]], pick: int
) -> None:
    run = Run()
    for action in script:
        perform(run, action)
    if not run.sent:
        return
    command = run.sent[pick % len(run.sent)]
    run.send(command)
    first = run.send(command)
    policy = run.state.policies.get(POLICY)
    changes = run.state.changes(POLICY)
    view = apply(run.state, View(policy=POLICY), run.clock.now, final=True)
    again = run.send(command)
    assert again == first or isinstance(first, Target)
    assert policy is run.state.policies.get(POLICY)
    assert run.state.changes(POLICY) == changes
    if not isinstance(first, Target):
        assert apply(run.state, View(policy=POLICY), run.clock.now, final=True) == view
