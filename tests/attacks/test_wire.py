"""Bytes from the wire are data: whatever they say, they are refused with CorruptRecord and cost nothing else."""

import ast
import random
import typing
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mx_rl
from mx_rl import Publisher, Shard, Subscriber, records
from mx_rl.arena import Arena
from mx_rl.errors import CorruptRecord, InvalidArgument
from mx_rl.layout import RankLayout, WorldLayout
from mx_rl.records import Answer, AnyCommand, AnyRankMessage, EndpointRecord, VersionRecord
from mx_rl.registry.memory import MemoryRegistry
from mx_rl.transport import wire
from mx_rl.transport.base import Region, Windows
from mx_rl.transport.memory import MemoryNetwork, MemoryTransport
from mx_rl.transport.runs import check_windows
from tests.support.local import FAST

FORBIDDEN_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "cPickle", "jsonpickle"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
KINDS = [AnyCommand, Answer, AnyRankMessage, EndpointRecord, VersionRecord]


def test_nothing_in_the_package_can_execute_what_it_is_sent():
    found = []
    for path in Path(mx_rl.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = set()
            if isinstance(node, ast.Import):
                names = {alias.name.split(".")[0] for alias in node.names} & FORBIDDEN_MODULES
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").split(".")[0]} & FORBIDDEN_MODULES
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                names = {node.func.id} & FORBIDDEN_CALLS
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                target = ast.unparse(node.func)
                if target in ("torch.load", "numpy.load", "np.load", "os.system", "torch.jit.load"):
                    names = {target}
            found += [f"{path.name}:{node.lineno}: {name}" for name in names]
    assert not found


def example(kind):
    """A record of a Struct class with something in every field."""
    hints = typing.get_type_hints(kind)
    values = {field.name: sample(hints[field.name]) for field in msgspec.structs.fields(kind)}
    if "format" in values:
        values["format"] = records.FORMAT
    return kind(**values)


def sample(hint):
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in (int, float, str, bytes, bool):
        return {int: 7, float: 0.5, str: "some name", bytes: b"\x00\xff", bool: True}[hint]
    if origin is tuple:
        return tuple(sample(args[0]) for _ in range(3 if args[-1] is Ellipsis else len(args)))
    if origin is dict:
        return {sample(args[0]): sample(args[1])}
    if args:  # a union: its first member that is not None
        return sample(next(arg for arg in args if arg is not type(None)))
    return "x" if hint is typing.Any else example(hint)


def good_records():
    for union in (AnyCommand, AnyRankMessage):
        for kind in typing.get_args(union):
            yield union, example(kind)
    for kind in (Answer, EndpointRecord, VersionRecord):
        yield kind, example(kind)


GOOD = [(kind, records.encode(record), record) for kind, record in good_records()]
IDS = [type(record).__name__ for _, _, record in GOOD]


def decoded(decode, data):
    """What a decoder gave, or None where it refused; any other error fails the test."""
    try:
        return decode(data)
    except CorruptRecord:
        return None


@pytest.mark.parametrize(("kind", "data", "record"), GOOD, ids=IDS)
def test_every_record_comes_back_whole_and_no_shortened_or_altered_one_breaks_the_decoder(kind, data, record):
    assert records.decode(data, kind) == record
    for length in range(len(data)):
        with pytest.raises(CorruptRecord):
            records.decode(data[:length], kind)
    with pytest.raises(CorruptRecord):
        records.decode(data + b"\x00", kind)
    noise = random.Random(1)
    for _ in range(300):
        altered = bytearray(data)
        for _ in range(noise.randint(1, 4)):
            altered[noise.randrange(len(altered))] = noise.randrange(256)
        decoded(lambda bytes_: records.decode(bytes_, kind), bytes(altered))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@given(data=st.binary(max_size=200))
@settings(max_examples=100)
def test_noise_is_no_record(kind, data):
    with pytest.raises(CorruptRecord):
        records.decode(data, kind)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_records_that_claim_what_they_do_not_carry_are_refused_before_memory_is_taken(kind):
    for head in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"):
        with pytest.raises(CorruptRecord):
            records.decode(head, kind)
    with pytest.raises(CorruptRecord):
        records.decode(b"\x91" * 100_000, kind)  # nested as deep as the stack would be
    with pytest.raises(CorruptRecord, match="limit"):
        records.decode(b"\x00" * 2000, kind, max_bytes=1000)


def test_another_format_is_named():
    data = records.encode(msgspec.structs.replace(example(VersionRecord), format=records.FORMAT + 1))
    with pytest.raises(CorruptRecord, match="format"):
        records.decode(data, VersionRecord)


def layouts():
    shard = {"a": (Shard(torch.zeros(4, 6), shape=(8, 6), offset=(0, 0)),), "b": (Shard(torch.zeros(5)),)}
    other = {"a": (Shard(torch.zeros(4, 6), shape=(8, 6), offset=(4, 0)),), "b": (Shard(torch.zeros(5)),)}
    ranks = [RankLayout.of(shard), RankLayout.of(other)]
    return [(RankLayout, ranks[0].encode()), (WorldLayout, WorldLayout.merge(ranks).encode())]


@pytest.mark.parametrize(("kind", "data"), layouts(), ids=["rank", "world"])
def test_damaged_layouts_are_refused(kind, data):
    assert kind.decode(data).encode() == data
    for length in range(len(data)):
        with pytest.raises(CorruptRecord):
            kind.decode(data[:length])
    noise = random.Random(2)
    for _ in range(1500):
        altered = bytearray(data)
        for _ in range(noise.randint(1, 3)):
            altered[noise.randrange(len(altered))] = noise.choice([0, 1, 0x7F, 0x80, 0xFF, noise.randrange(256)])
        decoded(kind.decode, bytes(altered))


MESSAGES = [example(kind) for union in (wire.Request, wire.Reply) for kind in typing.get_args(union)]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_damaged_messages_of_requested_writes_are_refused(message):
    data = wire.encode(message)
    decode = wire.decode_request if isinstance(message, typing.get_args(wire.Request)) else wire.decode_reply
    assert decode(data) == message
    for length in range(len(data)):
        with pytest.raises(CorruptRecord):
            decode(data[:length])
    noise = random.Random(3)
    for _ in range(500):
        altered = bytearray(data)
        altered[noise.randrange(len(altered))] = noise.randrange(256)
        decoded(decode, bytes(altered))


@given(data=st.binary(max_size=300))
@settings(max_examples=200)
def test_noise_is_no_message(data):
    for decode in (wire.decode_request, wire.decode_reply, wire.decode_table, wire.Inbox().take):
        with pytest.raises(CorruptRecord):
            decode(data)


def test_frames_out_of_bounds_are_refused():
    inbox = wire.Inbox()
    outbox = wire.Outbox()
    first = outbox.frame(wire.USER, b"one")
    assert inbox.take(first) == [(wire.USER, b"one")]
    with pytest.raises(CorruptRecord):
        inbox.take(first)  # again
    with pytest.raises(CorruptRecord):
        inbox.take(b"\x00" * (wire.MAX_MESSAGE_BYTES + 1000))
    far = wire.Inbox()
    far.take(wire.Outbox().frame(wire.USER, b""))
    ahead = wire.Outbox()
    ahead._next = 1 << 20
    with pytest.raises(CorruptRecord):
        far.take(ahead.frame(wire.USER, b""))
    with pytest.raises(InvalidArgument):
        outbox.frame(wire.USER, b"\x00" * (wire.MAX_MESSAGE_BYTES + 1))


def windows(*rows):
    runs = np.array(rows, dtype=np.int64).reshape(-1, 3)
    return Windows(
        runs=runs, starts=np.arange(len(runs) + 1, dtype=np.int64), needs=np.zeros(len(runs), dtype=np.int64)
    )


STAGE, SOURCE = Region(address=1 << 20, nbytes=1 << 16), Region(address=1 << 24, nbytes=1 << 16)
FORGED = [
    (STAGE.address - 1, SOURCE.address, 8),
    (STAGE.address, SOURCE.address - 1, 8),
    (STAGE.address, SOURCE.address, SOURCE.nbytes + 1),
    (STAGE.address + 1, SOURCE.address, STAGE.nbytes),
    (STAGE.address, SOURCE.address + SOURCE.nbytes, 1),
    (STAGE.address, SOURCE.address, 0),
    (STAGE.address, SOURCE.address, -8),
    (STAGE.address, SOURCE.address + 8, (1 << 63) - 1),
    (STAGE.address, -(1 << 63), 8),
    (-8, SOURCE.address, 8),
    (STAGE.address, (1 << 63) - 1, 8),
    (0, 0, 8),
]


@pytest.mark.parametrize("row", FORGED, ids=str)
def test_a_forged_window_table_outside_registered_memory_is_refused(row):
    good = (STAGE.address, SOURCE.address, 64)
    check_windows(windows(good), source=[SOURCE], stage=[STAGE])
    with pytest.raises(InvalidArgument):
        check_windows(windows(good, row), source=[SOURCE], stage=[STAGE])


def test_a_record_that_claims_foreign_memory_gives_no_route_outside_the_own_stage():
    """The record comes from the wire: a route may only ever write into what this process registered to be written."""
    transport = MemoryTransport(FAST, network=MemoryNetwork())
    served, stage = Arena(1, 1 << 16, nonce=5), Arena(1, 1 << 16, nonce=6)
    server = transport.serve("attacks-source", served.regions())
    record = EndpointRecord(
        agent="attacks-source",
        nonce=5,
        transport="memory",
        release="1",
        place=example(records.Place),
        address=server.address,
        regions=served.records(),
    )
    receiver = transport.receive("attacks-reader", stage.regions())
    link = receiver.connect(record)
    inside = (stage.address(0), served.address(0), 64)
    link.route(0, windows(inside)).close()
    outside = stage.regions()[0].address + stage.total_bytes
    with pytest.raises(InvalidArgument):
        link.route(0, windows((outside, served.address(0), 64)))
    with pytest.raises(InvalidArgument):
        link.route(0, windows((stage.address(0), served.address(0) + (1 << 16), 64)))
    link.close()
    receiver.close()
    server.close()


@pytest.mark.parametrize(
    "policy", ["", "a/b", "/", "../x", "a\nb", "a\x00b", "\x1b[31m", "x" * 129, "a\u2028b", 5, None, b"bytes"], ids=repr
)
def test_policy_names_that_could_be_a_path_or_a_command_are_refused(policy):
    registry, tensors = MemoryRegistry(), {"w": torch.zeros(3)}
    for kind in (Publisher, Subscriber):
        with pytest.raises(InvalidArgument, match="policy"):
            kind(policy, tensors, registry=registry, options=FAST)
