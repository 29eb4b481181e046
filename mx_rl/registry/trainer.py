"""What trainer ranks ask: commit the k-th publish, declare its layout, wait for what becomes of it."""

from __future__ import annotations

from mx_rl.errors import Fenced, IncompleteVersion, InvalidArgument
from mx_rl.records import Await, Commit, Declare, Ok, Outcome, Refused, Source, VersionRecord
from mx_rl.registry.partners import basis_of, disagreement
from mx_rl.registry.policy import MAX_DECLARED, MAX_ROUNDS, MAX_STAGING, Epoch, Policy, Round, refused
from mx_rl.registry.worlds import fenced, unclaimed

MAX_METADATA_BYTES = 64 << 10
MAX_SUMS_BYTES = 4096
MAX_PROOF_BYTES = 64
EMPTY_SHARE = Source(agent="", region=0, generation=0)
"""Stands in a version record for a rank that commits no bytes."""


def commit(policy: Policy, command: Commit, now: float, *, final: bool) -> Outcome | Refused | None:
    """First word wins: a commit is keyed by (epoch, k, rank), and repeating one changes nothing; but a rank that has
    committed may still give the version up while it is staging."""
    epoch = _epoch_of(policy, command.epoch, command.nonce, command.incarnation, command.rank, now)
    if isinstance(epoch, Refused):
        return epoch
    item = epoch.rounds.get(command.k)
    if item is None:
        if epoch.superseded:
            return claim_again(policy, epoch.superseded, command.epoch, now)
        if command.k < 1:
            return refused(InvalidArgument, f"policy {policy.name!r}: publishes count from 1, got {command.k}")
        item = _begin(policy, epoch, command.k)
    if item.state == "staging" and (command.rank not in item.commits or command.error is not None):
        if len(command.metadata or b"") > MAX_METADATA_BYTES:
            size = len(command.metadata or b"")
            return refused(InvalidArgument, f"metadata of {size} bytes: at most {MAX_METADATA_BYTES} (64 KiB) of JSON")
        if any(len(sums) > MAX_SUMS_BYTES for sums in command.sums.values()):
            return refused(InvalidArgument, f"sums of one partner: at most {MAX_SUMS_BYTES} bytes")
        if len(command.proof) > MAX_PROOF_BYTES:
            return refused(InvalidArgument, f"a proof of {len(command.proof)} bytes: at most {MAX_PROOF_BYTES}")
        item.commits[command.rank] = command
        if command.source is not None:
            policy.owners.setdefault(command.source.agent, command.incarnation)
            policy.saw(command.source)
        policy.bump()
        _settle(policy, epoch, command.k, item)
    out = outcome(policy, epoch, item, now)
    undeclared = bool(out.layouts) and not out.declared
    if out.state == "staging" and not undeclared and not final and command.wait > 0:
        return None
    return out


def declare(policy: Policy, command: Declare, now: float) -> Ok | Refused:
    epoch = _epoch_of(policy, command.epoch, command.nonce, command.incarnation, None, now)
    if isinstance(epoch, Refused):
        return epoch
    known = policy.declared.get(command.layouts)
    if known is None or (known.world_layout, known.copies) != (command.world_layout, command.copies):
        policy.declared.pop(command.layouts, None)
        policy.declared[command.layouts] = command
        while len(policy.declared) > MAX_DECLARED:
            del policy.declared[next(iter(policy.declared))]
        policy.bump()
    for k, item in sorted(epoch.staging().items()):
        _settle(policy, epoch, k, item)
    return Ok()


def await_version(policy: Policy, command: Await, now: float, *, final: bool) -> Outcome | Refused | None:
    found = [epoch for epoch in (policy.epoch, policy.previous) if epoch is not None and epoch.number == command.epoch]
    if not found:
        if command.epoch < policy.known_epoch:
            return _fenced_epoch(policy, command.epoch)
        return claim_again(policy, "", command.epoch, now)
    epoch, k = found[0], command.k
    item = epoch.rounds.get(k)
    if item is None:
        number = epoch.base + k
        known = policy.versions.get(number)
        if known is not None and known.record.identity == (epoch.number, epoch.nonce, number):
            item = Round(number, state="ready")
        elif epoch.superseded:
            item = Round(number, state="aborted", reason=epoch.superseded)
        elif any(other > k and entry.state == "ready" for other, entry in epoch.rounds.items()):
            item = Round(number, state="aborted", reason="a later publish of this epoch became READY first")
        else:
            item = Round(max(number, policy.floor + 1))
    out = outcome(policy, epoch, item, now)
    if out.state == "staging" and not (command.layouts_only and out.layouts) and not final and command.wait > 0:
        return None
    return out


def outcome(policy: Policy, epoch: Epoch, item: Round, now: float) -> Outcome:
    if item.state == "staging":
        told = _layouts(epoch, item)
        return Outcome(
            number=item.number,
            state="staging",
            missing=epoch.missing(item),
            layouts=told,
            declared=not told or told in policy.declared,
            latest=policy.floor,
            leased=policy.leased(now),
        )
    known = policy.versions.get(item.number) if item.state == "ready" else None
    mine = known is not None and known.record.identity == (epoch.number, epoch.nonce, item.number)
    return Outcome(
        number=item.number,
        state=item.state,
        record=known.record if known is not None and mine else None,
        reason=item.reason,
        layouts=item.layouts,
        latest=policy.floor,
        leased=policy.leased(now),
        steps=item.steps,
        basis=item.basis,
        whole=item.whole,
        differ=item.differ,
        entries=item.entries,
    )


def claim_again(policy: Policy, why: str, epoch: int, now: float) -> Refused:
    """Told to a rank that keeps its seat but not its epoch: the registry forgot it, or another rank was replaced."""
    missing = unclaimed(policy, now)
    why = why or f"epoch {epoch} is not open here: this registry was started anew"
    waits = f"; ranks {list(missing)[:10]} have not claimed yet" if missing else ""
    return refused(
        IncompleteVersion,
        f"policy {policy.name!r}: {why}. Claim the seat again, then commit{waits}",
        claim_again=True,
        epoch=epoch,
        version=0,
        missing=list(missing),
    )


def abort(policy: Policy, epoch: Epoch, k: int, reason: str) -> None:
    item = epoch.rounds[k]
    item.state, item.reason = "aborted", reason
    item.commits = {}
    policy.bump()


def _fenced_epoch(policy: Policy, epoch: int) -> Refused:
    return refused(
        Fenced,
        f"policy {policy.name!r}: epoch {epoch} is over, epoch {policy.known_epoch} of world {policy.known_world!r} "
        "publishes now. This publisher is finished; start a new world to take over",
        policy=policy.name,
        epoch=policy.known_epoch,
    )


def _epoch_of(
    policy: Policy, number: int, nonce: int, incarnation: str, rank: int | None, now: float
) -> Epoch | Refused:
    """The epoch that a rank names, or why it may not speak for it."""
    found = [x for x in (policy.epoch, policy.previous) if x is not None and (x.number, x.nonce) == (number, nonce)]
    if not found:
        claimed = any(x.incarnation == incarnation for world in policy.pending.values() for x in world.claims.values())
        survives = claimed or (policy.epoch is not None and incarnation in policy.epoch.seats)
        if survives or number >= policy.known_epoch:
            return claim_again(policy, "", number, now)
        return fenced(policy, incarnation)
    epoch = found[0]
    if rank is not None and not 0 <= rank < len(epoch.seats):
        return refused(InvalidArgument, f"policy {policy.name!r}: rank {rank} in a world of {len(epoch.seats)}")
    mine = incarnation in epoch.seats if rank is None else epoch.seats[rank] == incarnation
    if not mine or (epoch.world, incarnation) in policy.fenced:
        return fenced(policy, incarnation)
    return epoch


def _begin(policy: Policy, epoch: Epoch, k: int) -> Round:
    """The k-th publish, begun by whoever commits first. A number that was given once is not given again."""
    number = epoch.base + k
    known = policy.versions.get(number)
    if known is not None and known.record.identity == (epoch.number, epoch.nonce, number):
        return Round(number, state="ready")  # READY before this registry forgot its rounds
    done = [other for other, entry in epoch.rounds.items() if entry.state == "ready"]
    if done and k < max(done):
        return Round(number, state="aborted", reason=f"publish {max(done)} of this epoch became READY first")
    if number <= policy.floor:
        epoch.base = policy.floor + 1 - k
    item = epoch.rounds[k] = Round(epoch.base + k)
    policy.highest = max(policy.highest, item.number)
    for old in sorted(epoch.staging())[:-MAX_STAGING]:
        abort(policy, epoch, old, f"{MAX_STAGING} later publishes were begun")
    finished = sorted(other for other, entry in epoch.rounds.items() if entry.state != "staging")
    for old in finished[:-MAX_ROUNDS]:
        del epoch.rounds[old]
    return item


def _layouts(epoch: Epoch, item: Round) -> tuple[str, ...]:
    if len(item.commits) < len(epoch.seats):
        return ()
    return tuple(item.commits[rank].layout for rank in range(len(epoch.seats)))


def _settle(policy: Policy, epoch: Epoch, k: int, item: Round) -> None:
    """Decide what can be decided: aborted by the first error or difference, READY when all agree and are declared."""
    commits = dict(sorted(item.commits.items()))
    full = len(commits) == len(epoch.seats)
    if full:
        item.basis = basis_of([entry.holds or entry.layout for entry in commits.values()])
        item.whole = not any(entry.holds for entry in commits.values())
    reason = _disagreement(epoch, item, commits, full=full) or disagreement(item, commits)
    if reason:
        abort(policy, epoch, k, reason)
        return
    layouts = _layouts(epoch, item)
    if not full or layouts not in policy.declared:
        return
    for older in sorted(other for other in epoch.staging() if other < k):
        abort(policy, epoch, older, f"publish {k} of this epoch became READY first")
    if epoch.base + k <= policy.floor:
        epoch.base = policy.floor + 1 - k  # a higher number was told since this publish began
    item.number = epoch.base + k
    policy.highest = max(policy.highest, item.number)
    item.state, item.layouts, item.commits = "ready", layouts, {}
    epoch.ready = True
    policy.become_ready(_record(policy, epoch, item.number, commits, policy.declared[layouts]))


def _disagreement(epoch: Epoch, item: Round, commits: dict[int, Commit], *, full: bool) -> str:
    """Why this version can never be READY; "" while it still can. Notes the steps where they are why."""
    errors = [f"rank {rank}: {entry.error}" for rank, entry in commits.items() if entry.error is not None]
    if errors:
        return "; ".join(errors[:10])
    steps = {rank: entry.step for rank, entry in commits.items()}
    why = ""
    if len(set(steps.values()) - {None}) > 1:
        why = "ranks gave different steps"
    elif full and epoch.rejoined and not epoch.ready and None in steps.values():
        why = "a rank of this world was replaced, so that its first version needs step= on every rank"
    if why:
        listed = ", ".join(f"rank {rank}: {step}" for rank, step in list(steps.items())[:10])
        item.steps = {str(rank): step for rank, step in steps.items()}
        return f"StepMismatch: {why} ({listed})"
    windows = {rank: entry.window_bytes for rank, entry in commits.items() if entry.source is not None}
    if len(set(windows.values())) > 1:
        listed = ", ".join(f"rank {rank}: {size}" for rank, size in list(windows.items())[:10])
        return f"window_bytes must be equal on all ranks ({listed})"
    return ""


def _record(policy: Policy, epoch: Epoch, number: int, commits: dict[int, Commit], known: Declare) -> VersionRecord:
    kinds = {entry.kind for entry in commits.values()}
    return VersionRecord(
        policy=policy.name,
        number=number,
        epoch=epoch.number,
        nonce=epoch.nonce,
        step=next((entry.step for entry in commits.values() if entry.step is not None), None),
        kind=kinds.pop() if len(kinds) == 1 else "full",
        layout=known.world_layout,
        copies=known.copies,
        window_bytes=next((entry.window_bytes for entry in commits.values() if entry.source is not None), 0),
        sources=tuple(entry.source or EMPTY_SHARE for entry in commits.values()),
        proofs=tuple(entry.proof for entry in commits.values()),
        wire_bytes=sum(entry.wire_bytes for entry in commits.values()),
        metadata=commits[0].metadata or b"{}",
    )


def staging_of(policy: Policy, now: float) -> tuple[int, tuple[int, ...]]:
    """(number, ranks awaited) of the oldest publish that is staging; (0, unclaimed seats) where nothing is."""
    epoch = policy.epoch
    if epoch is None or epoch.superseded:
        return 0, unclaimed(policy, now)
    staging = epoch.staging()
    if not staging:
        return 0, ()
    item = staging[min(staging)]
    return item.number, epoch.missing(item)
