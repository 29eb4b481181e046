"""What travels as NIXL notices: users' messages, readers' requests, sources' answers; framed, bounded, in order."""

from __future__ import annotations

import struct
import time
from typing import TypeVar

import msgspec

from mx_rl.errors import CorruptRecord, InvalidArgument

MAX_MESSAGE_BYTES = 1 << 20
MAX_TABLE_BYTES = 256 << 20
PART_BYTES = 512 << 10
WINDOWS_PER_WANT = 32 << 10
_HELD_FRAMES = 1024
_HELD_BYTES = 16 << 20

_HEAD = struct.Struct("<4sQIc")  # magic with the format's number, session, sequence number, kind
_MAGIC = b"mxr1"
USER, REQUEST = b"u", b"r"

Kind = TypeVar("Kind")


# ---- reader to source


class _Base(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    pass


class Hello(_Base, frozen=True, kw_only=True):
    """How to reach the reader's stage. First of a session."""

    metadata: tuple[bytes, ...]


class TablePart(_Base, frozen=True, kw_only=True):
    """A piece of an encoded Table."""

    table: int
    part: int
    parts: int
    data: bytes


class Want(_Base, frozen=True, kw_only=True):
    """Write these windows (int32, little-endian, in this order) as soon as the source has them. May come in pieces."""

    flow: int
    table: int
    generation: int
    windows: bytes


class Cancel(_Base, frozen=True, kw_only=True):
    """Write nothing more for this flow, and say when nothing is under way (Ended)."""

    flow: int


class Ask(_Base, frozen=True, kw_only=True):
    """What does the header at this address say? Answered with Told. A 64-byte READ would do it without the source's
    help, but over TCP even that aborts a source which was stopped while its reader died."""

    flow: int
    header: int


class Drop(_Base, frozen=True, kw_only=True):
    table: int


class Bye(_Base, frozen=True, kw_only=True):
    """Forget my routes; ``final``: my agent too, it is about to be destroyed. Over shared memory nothing else tells
    that as long as its process lives."""

    final: bool = False


Request = Hello | TablePart | Want | Cancel | Ask | Drop | Bye


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """A route: ``Windows`` as raw little-endian int64, and the block that it reads from."""

    nonce: int
    header: int
    device: str  # of the stage
    runs: bytes
    starts: bytes
    needs: bytes


# ---- source to reader


class Done(_Base, frozen=True, kw_only=True):
    """These windows are in the stage, and the source's generation was this one before and after they were written."""

    flow: int
    windows: tuple[int, ...]
    generation: int
    count: int


class Gone(_Base, frozen=True, kw_only=True):
    """The slot holds another generation (or is closed). Nothing is under way any more."""

    flow: int
    word: int
    nonce: int


class Ended(_Base, frozen=True, kw_only=True):
    """The flow was cancelled, and nothing is under way any more."""

    flow: int


class Told(_Base, frozen=True, kw_only=True):
    flow: int
    nonce: int
    word: int


class Refused(_Base, frozen=True, kw_only=True):
    """The request makes no sense to the source. Nothing was written for it."""

    flow: int
    reason: str


Reply = Done | Gone | Ended | Told | Refused

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_tables = msgspec.msgpack.Decoder(Table)


def encode(thing: Request | Reply | Table) -> bytes:
    return _encoder.encode(thing)


def decode_request(data: bytes) -> Request:
    return _decode(_requests, data)


def decode_reply(data: bytes) -> Reply:
    return _decode(_replies, data)


def decode_table(data: bytes) -> Table:
    return _decode(_tables, data)


def _decode(decoder: msgspec.msgpack.Decoder[Kind], data: bytes) -> Kind:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise CorruptRecord(f"{len(data)} bytes are no data-plane message: {exc}") from exc


def session_of(frame: bytes) -> int:
    """A frame's session; -1 for what is no frame."""
    if len(frame) < _HEAD.size or frame[: len(_MAGIC)] != _MAGIC:
        return -1
    return int(_HEAD.unpack_from(frame)[1])


class Outbox:
    """Frames of one reader for one source, numbered: a lane that has several rails may deliver them out of order."""

    def __init__(self) -> None:
        self._session = time.monotonic_ns()  # a later connection of the same agent has a higher one
        self._next = 0

    def frame(self, kind: bytes, body: bytes) -> bytes:
        if len(body) > MAX_MESSAGE_BYTES:
            raise InvalidArgument(f"a message of {len(body)} bytes: at most {MAX_MESSAGE_BYTES}")
        framed = _HEAD.pack(_MAGIC, self._session, self._next, kind) + body
        self._next += 1
        return framed


class Inbox:
    """The other end of an Outbox. ``session`` changes when the reader has connected anew."""

    def __init__(self) -> None:
        self.session = -1
        self._next = 0
        self._held: dict[int, tuple[bytes, bytes]] = {}

    def take(self, frame: bytes) -> list[tuple[bytes, bytes]]:
        """(kind, body) of every frame that is due now. Raises CorruptRecord for what no Outbox has made."""
        if len(frame) < _HEAD.size or len(frame) > _HEAD.size + MAX_MESSAGE_BYTES:
            raise CorruptRecord(f"a frame of {len(frame)} bytes")
        magic, session, number, kind = _HEAD.unpack_from(frame)
        if magic != _MAGIC or kind not in (USER, REQUEST):
            raise CorruptRecord(f"a frame that begins with {frame[:4]!r}, expected {_MAGIC!r}: another release?")
        if session < self.session:
            return []
        if session > self.session:
            self.session, self._next, self._held = session, 0, {}
        if number < self._next or number > self._next + _HELD_FRAMES:
            raise CorruptRecord(f"frame {number} where {self._next} is due")
        self._held[number] = (kind, frame[_HEAD.size :])
        due = []
        while self._next in self._held:
            due.append(self._held.pop(self._next))
            self._next += 1
        if sum(len(body) for _, body in self._held.values()) > _HELD_BYTES:
            raise CorruptRecord(f"{len(self._held)} frames came before frame {self._next}")
        return due
