"""What crosses a wire: typed, bounded, versioned records and the registry's commands (msgpack by msgspec, never
pickle)."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from mx_rl.errors import CorruptRecord

FORMAT = 1
"""Raised when a record changes so that an older reader would misread it; both sides compare it before anything else."""

MAX_RECORD_BYTES = 256 << 20
MAX_EXTENTS = 1 << 16
"""Separate pieces of memory behind one header."""

SEAT_PREFIX = "seat:"
"""With an incarnation behind it: the blob that says where its holder answers now, the one kind that its owner may replace."""

PACKING = "packing"
"""The order of a publisher's run table: that of its own rank layout."""

Record = TypeVar("Record")

Extent: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
"""An address, a length or an index: two of them add up within the int64 columns that they end in."""


Balance: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
"""Of sums: modulo 2^64."""


class _Base(msgspec.Struct, frozen=True, omit_defaults=True):
    pass


# ---- the data plane: where memory lies


class Place(_Base, kw_only=True):
    """Where a process is, level by level, to tell which lane reaches it."""

    boot: str  # kernel boot id: the same host
    pid_ns: str  # PID namespace: one shared-memory copy needs the same
    net_ns: str
    pid: int
    host: str  # for people only: never compared


class ExtentRecord(_Base, kw_only=True, array_like=True):
    address: Extent
    nbytes: Extent
    device: str = "cpu"


class RegionRecord(_Base, kw_only=True):
    """One slot or stage: its bytes, and the 64-byte header that guards them (``arena.py``).

    With ``extents`` it is memory that lies elsewhere, in no order of ours: what lies where is told by the run table under
    ``table_key``.
    """

    header: Extent  # address of the header
    address: Extent
    nbytes: Extent
    device: str = "cpu"
    extents: Annotated[tuple[ExtentRecord, ...], msgspec.Meta(max_length=MAX_EXTENTS)] = ()


class EndpointRecord(_Base, kw_only=True):
    """How to reach the memory that one agent serves. Immutable; stored under the agent's name."""

    agent: str  # incarnation: unique for ever
    nonce: int  # 63 random bits, equal to the nonce in every header of this agent
    transport: str  # "nixl" or "memory"
    release: str  # of the transport, e.g. "1.5.1"
    place: Place
    address: bytes  # the transport's own blob
    regions: tuple[RegionRecord, ...]
    format: int = FORMAT


def table_key(agent: str, order: str) -> str:
    """Blob of the run table of an agent's scattered memory, from offsets in ``order``: the hash of the world layout whose
    plan fixes a stage's order, or PACKING."""
    return f"{agent}/{order}"


class Source(_Base, kw_only=True):
    """One rank's memory that holds its part of a version, valid under this generation only."""

    agent: str
    region: Extent  # index into EndpointRecord.regions
    generation: Extent


class VersionRecord(_Base, kw_only=True):
    """One READY version. Small: in proportion to ranks, never to tensors."""

    policy: str
    number: int
    epoch: int
    nonce: int
    step: int | None
    kind: str  # "full"
    layout: str  # hash of the world layout blob
    window_bytes: int
    sources: tuple[Source, ...]  # by trainer rank
    wire_bytes: int
    metadata: bytes = b"{}"  # JSON, at most 64 KiB
    # Every box lies at the ranks of one of these sets: whole while one of each lives. () where each rank is needed.
    copies: tuple[tuple[int, ...], ...] = ()
    proofs: tuple[bytes, ...] = ()  # by trainer rank: the hash of its trailer (``trailer.py``)
    format: int = FORMAT

    @property
    def identity(self) -> tuple[int, int, int]:
        return (self.epoch, self.nonce, self.number)


class Holder(_Base, kw_only=True):
    """A replica whose stages hold a version whole, in the order that its layouts fix."""

    replica: str
    layouts: tuple[str, ...]  # rank layout hashes, by rank of the replica
    sources: tuple[Source, ...]  # by rank of the replica


# ---- commands: trainer ranks


class Command(_Base, kw_only=True, tag_field="c", tag=True):
    """Everything a member may ask. ``wait`` is how long (seconds) the registry may hold the answer."""

    policy: str
    wait: float = 0.0


class PutBlob(Command, kw_only=True):
    """Store an immutable blob (layout, endpoint record) under its key for as long as a living member refers to it."""

    key: str
    data: bytes
    owner: str  # incarnation whose lease keeps it
    replaces: tuple[str, ...] = ()  # keys of the owner's that are of no use any more


class GetBlobs(Command, kw_only=True):
    keys: tuple[str, ...]


class Claim(Command, kw_only=True):
    """Take seat ``rank`` of ``world``. Answered with Seat once every seat is taken, or as it stands when ``wait`` is
    over."""

    world: str
    rank: int
    world_size: int
    incarnation: str
    nonce: int  # random; in a re-assertion the nonce of ``epoch``
    start_after: int = 0
    held: VersionRecord | None = None  # re-assertion: newest READY version of mine
    epoch: int = 0  # re-assertion: the epoch I hold
    base: int = 0  # the last number told less its k
    k: int = 0  # how many publishes of that epoch I have begun
    rejoined: bool = False  # re-assertion: Seat.rejoined, while no version of that epoch has become READY


class Commit(Command, kw_only=True):
    """The k-th publish of an epoch, done (or failed: ``error``) on one rank."""

    epoch: int
    nonce: int
    k: int
    rank: int
    incarnation: str
    step: int | None = None
    kind: str = "full"
    layout: str = ""  # hash of this rank's layout: what it has snapshotted
    source: Source | None = None
    window_bytes: int = 0
    wire_bytes: int = 0
    metadata: bytes | None = None  # rank 0 only
    error: str | None = None
    holds: str = ""  # hash of the layout of all that it holds, where ``layout`` is a share of it; "" where it is all
    basis: str = ""  # Outcome.basis that it knows its share and partners from; "" where it knows none
    proof: bytes = b""  # of the slot's trailer, as in VersionRecord
    sums: dict[int, bytes] = {}  # by partner rank: of the boxes that both have snapshotted (``partners.py``)


class Declare(Command, kw_only=True):
    """Rank 0: these rank layouts, by rank, form the world layout under this hash (checked for coverage); ``copies`` as in
    VersionRecord."""

    epoch: int
    nonce: int
    incarnation: str
    layouts: tuple[str, ...]
    world_layout: str
    copies: tuple[tuple[int, ...], ...] = ()


class Await(Command, kw_only=True):
    """Wait until the k-th version of an epoch is READY or aborted, or all ranks have told their layouts of it
    (``layouts_only``)."""

    epoch: int
    k: int
    layouts_only: bool = False


class AwaitInstalled(Command, kw_only=True):
    """Wait until ``replicas`` (None: the members at READY) have installed this version or a newer one."""

    number: int
    replicas: int | None = None


class AwaitFree(Command, kw_only=True):
    """Wait until nobody holds a lease on a version older than the newest READY one that lies in this source; ``closing``:
    on the newest one neither."""

    source: Source
    closing: bool = False


# ---- commands: replicas


class Join(Command, kw_only=True):
    """Take seat ``rank`` of a replica. Answered with ReplicaSeats once all seats are taken."""

    replica: str
    rank: int
    ranks: int
    incarnation: str
    layout: str  # hash of this rank's layout blob; "" where it takes the publisher's names
    endpoint: str  # key of the endpoint record of the agent it serves with; "" where it serves nothing
    named: bool = True  # False: named by its incarnation, leaves with it


class Resolve(Command, kw_only=True):
    """Which version to take, from whom, with a lease. Answered with Target, or Nothing when ``wait`` is over."""

    replica: str
    incarnation: str  # of rank 0
    installed: tuple[int, int, int] | None = None  # (epoch, nonce, number)
    at_least: int | None = None
    exactly: int | None = None
    force: bool = False  # answer even if it is installed already (healing)
    dead: tuple[str, ...] = ()  # agents that the transport reports lost
    lost: int = 0  # versions lost in a row by this reader
    read_s: float = 0.0  # its measured read time
    lease: bool = True  # False: news only


class Ack(Command, kw_only=True):
    """The end of a round: what the replica runs now."""

    replica: str
    incarnation: str
    record: VersionRecord | None  # what is installed now
    state: str  # "installed", "failed", "tainted", "discarded", or "staged": read whole, ``record`` runs on
    number: int = 0  # the version the round was about
    reason: str = ""
    held: tuple[Source, ...] = ()  # by rank: memory that holds ``record`` whole, also while another is staged; () none
    previous: int = 0
    seq: int = 0  # counts the acknowledgements of this incarnation: one that was overtaken is ignored; 0: not counted


class Beat(Command, kw_only=True):
    """I live. Renews every lease of these incarnations; ``policy`` is "" for all policies."""

    incarnations: tuple[str, ...]


class Dead(Command, kw_only=True):
    """The transport says that these agents are gone. Withdrawn by their next beat."""

    agents: tuple[str, ...]


class Leave(Command, kw_only=True):
    """An incarnation closes: everything of it, or only its seat in ``replica`` or ``world`` where one is named."""

    incarnation: str
    keep_sources: bool = False  # its memory may still be read, for one lease
    replica: str = ""
    world: str = ""


class View(Command, kw_only=True):
    """The state of one policy ("" for the list of policies) for people and for tests, as JSON."""


AnyCommand = (
    PutBlob
    | GetBlobs
    | Claim
    | Commit
    | Declare
    | Await
    | AwaitInstalled
    | AwaitFree
    | Join
    | Resolve
    | Ack
    | Beat
    | Dead
    | Leave
    | View
)

# ---- results


class Result(_Base, kw_only=True, tag_field="r", tag=True):
    pass


class Ok(Result, kw_only=True):
    pass


class Blobs(Result, kw_only=True):
    blobs: dict[str, bytes]  # those that are known; the caller names what is missing


class Seat(Result, kw_only=True):
    epoch: int
    nonce: int
    base: int  # the k-th publish (k from 1) of this epoch is version base + k, unless the floor jumps
    open: bool
    missing: tuple[int, ...]  # ranks that have not claimed
    rejoined: bool = False  # opened by the loss of a rank, and nothing READY yet: the first version needs ``step``


class Outcome(Result, kw_only=True):
    """Of one version: what became of it so far."""

    number: int
    state: str  # "staging", "ready", "aborted"
    reason: str = ""
    missing: tuple[int, ...] = ()  # ranks that have not committed
    layouts: tuple[str, ...] = ()  # rank layouts, by rank, once all are told
    declared: bool = True
    latest: int = 0
    leased: tuple[int, ...] = ()  # older versions that are still leased: this set only shrinks
    record: VersionRecord | None = None  # once READY: what a publisher re-asserts to a registry that forgot
    steps: dict[str, int | None] = {}  # by rank: filled only where different (or missing) steps aborted it
    basis: str = ""  # stands for the layouts of all that the ranks held, once all have committed
    whole: bool = False  # every rank has snapshotted all that it held: shares can be told from the world layout
    differ: tuple[int, ...] = ()  # ranks whose copies differ, where that aborted it
    entries: tuple[int, ...] = ()  # which entries of the sums of the first two differ


class Installs(Result, kw_only=True):
    number: int
    ready: bool
    installed: tuple[str, ...]
    failed: dict[str, str]
    missing: tuple[str, ...]


class Free(Result, kw_only=True):
    leased_by: tuple[str, ...]  # replicas
    held_for_s: float = 0.0  # a reader that lost twice has this slot for so long, beyond the grace


class ReplicaSeats(Result, kw_only=True):
    agents: tuple[str, ...]  # by rank: incarnation, "" where empty
    endpoints: tuple[str, ...]
    layouts: tuple[str, ...]
    open: bool


class Target(Result, kw_only=True):
    record: VersionRecord
    trainer: bool  # the record's own sources are alive
    holders: tuple[Holder, ...]  # complete peers with this replica's layouts, best first
    lease_s: float  # what is left of the lease; 0.0: none was granted, a slot may be reused at any time
    newer_lost: int = 0  # a newer READY version that no living source covers, or 0


class Nothing(Result, kw_only=True):
    latest: int
    staging: int = 0
    missing: tuple[int, ...] = ()  # trainer ranks that have not committed the staging version
    lost: int = 0  # newest READY version without a complete living source
    read_s: float = 0.0
    held_s: float = 0.0


class ViewOf(Result, kw_only=True):
    json: bytes


class Refused(Result, kw_only=True):
    """An error of ``errors.py``, by its class name."""

    error: str
    message: str
    fields: dict[str, Any] = {}


AnyResult = Ok | Blobs | Seat | Outcome | Installs | Free | ReplicaSeats | Target | Nothing | ViewOf | Refused


class Answer(_Base, kw_only=True):
    """Every reply: the registry's boot id and the policy's floor let a member notice a registry that has forgotten."""

    boot: int
    floor: int
    result: AnyResult
    known: bool = True  # False: the incarnation that asked is not a member here; it should say again what it holds
    format: int = FORMAT


# ---- messages between the ranks of a replica


class RankMessage(_Base, kw_only=True, tag_field="m", tag=True):
    round: int


class Hello(RankMessage, kw_only=True):
    """A rank has started (again), under this agent; ``amiss``: it does not run what rank 0 runs. Rank 0 looks up the seats,
    and makes the next round a full one where the rank's process is another or something is amiss."""

    rank: int
    agent: str
    amiss: bool = False


class Round(RankMessage, kw_only=True):
    """Rank 0 fixes a round's target; ``record`` None: nothing newer than ``installed``, its identity."""

    record: VersionRecord | None
    installed: tuple[int, int, int] | None = None
    trainer: bool = True
    holders: tuple[Holder, ...] = ()
    full: bool = False  # install even if this version is installed (healing)
    ahead: bool = False  # a prefetch: no call of rank 0 asks for it yet; told again without this when one does


class Moved(RankMessage, kw_only=True):
    """How far a rank's part is, so that whoever waits for it sees progress. From rank 0: the sum over all ranks."""

    rank: int
    windows: int
    whole: bool = False  # it lies whole in the stage


class Ready(RankMessage, kw_only=True):
    """A rank has staged its part and was asked to install it."""

    rank: int


class Shut(RankMessage, kw_only=True):
    """All ranks are ready: each shuts its holds and votes."""


class Stage(_Base, kw_only=True):
    """Where a rank has staged its part, in the order that ``layout``, the hash of its layout, fixes."""

    layout: str
    source: Source


class Vote(RankMessage, kw_only=True):
    rank: int
    agree: bool
    reason: str = ""
    stage: Stage | None = None  # where this rank serves it
    balance: Balance | None = (
        None  # what this rank's parts of split boxes add to a total of 0; None: not told, or later
    )


class Decision(RankMessage, kw_only=True):
    commit: bool
    reason: str = ""
    stages: tuple[Stage | None, ...] = ()  # by rank, as voted: what ranks on one host may borrow


class Installed(RankMessage, kw_only=True):
    rank: int
    agree: bool
    reason: str = ""
    source: Source | None = None  # the stage that holds the version now, where this rank serves it
    balance: Balance | None = None  # as in Vote, where the bytes came after it


class Finished(RankMessage, kw_only=True):
    agree: bool
    reason: str = ""


AnyRankMessage = Hello | Round | Moved | Ready | Shut | Vote | Decision | Installed | Finished

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def encode(record: Any) -> bytes:
    return _encoder.encode(record)


def decode(data: bytes, kind: type[Record] | Any, *, max_bytes: int = MAX_RECORD_BYTES) -> Any:
    """Decode and check types. Raises CorruptRecord for anything that is not a ``kind`` of this format."""
    if len(data) > max_bytes:
        raise CorruptRecord(f"a record of {len(data)} bytes is over the limit of {max_bytes}")
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        record = decoder.decode(data)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise CorruptRecord(f"{len(data)} bytes are no valid record: {exc}") from exc
    found = getattr(record, "format", FORMAT)
    if found != FORMAT:
        raise CorruptRecord(
            f"record format {found}, this release speaks {FORMAT}: upgrade the older side", format=found
        )
    return record
