"""A registry, or a member that talks through it, that names sources which cannot be: refused as such, nothing installed."""

import msgspec
import pytest
import torch

from mx_rl import Publisher, Subscriber
from mx_rl.errors import MxRLError
from mx_rl.records import Answer, Blobs, EndpointRecord, Holder, Source, Target, decode, encode
from mx_rl.registry.base import Registry
from mx_rl.registry.memory import MemoryRegistry
from tests.support.local import FAST


class Forger(Registry):
    """Answers as ``true`` does, but for what ``forge`` makes of it."""

    url = "forger"

    def __init__(self, true):
        self.true, self.forge = true, lambda result: result

    def call(self, command, *, timeout):
        answer = self.true.call(command, timeout=timeout)
        return Answer(boot=answer.boot, floor=answer.floor, result=self.forge(answer.result), known=answer.known)

    def close(self):
        pass


def target(**changes):
    def forge(result):
        if not isinstance(result, Target):
            return result
        record = msgspec.structs.replace(result.record, **changes)
        return msgspec.structs.replace(result, record=decode(encode(record), type(record)))

    return forge


def holders(*sources):
    def forge(result):
        if not isinstance(result, Target):
            return result
        return msgspec.structs.replace(result, holders=(Holder(replica="x", layouts=("h",), sources=sources),))

    return forge


def region(**changes):
    def forge(result):
        if not isinstance(result, Blobs):
            return result
        blobs = dict(result.blobs)
        for key, data in blobs.items():
            if "-pub0-" in key:
                record = decode(data, EndpointRecord)
                forged = tuple(msgspec.structs.replace(one, **changes) for one in record.regions)
                blobs[key] = encode(msgspec.structs.replace(record, regions=forged))
        return Blobs(blobs=blobs)

    return forge


def agent(**changes):
    def forge(result):
        if not isinstance(result, Blobs):
            return result
        blobs = dict(result.blobs)
        for key, data in blobs.items():
            if "-pub0-" in key:
                blobs[key] = encode(msgspec.structs.replace(decode(data, EndpointRecord), **changes))
        return Blobs(blobs=blobs)

    return forge


def source(**named):
    return Source(**({"agent": "nobody", "region": 0, "generation": 1} | named))


FORGED = {
    "no sources": target(sources=()),
    "unknown agent": target(sources=(source(),)),
    "window of nothing": target(window_bytes=0),
    "window below nothing": target(window_bytes=-4096),
    "window beyond all bounds": target(window_bytes=1 << 62),
    "unknown layout": target(layout="0" * 32),
    "holder without sources": holders(),
    "holder that nobody knows": holders(source()),
    "address beyond 64-bit signed": region(address=(1 << 64) - 8),
    "address below 0": region(address=-8),
    "bytes below 0": region(nbytes=-1),
    "bytes beyond all bounds": region(nbytes=(1 << 64) - 1),
    "memory that is shorter": region(nbytes=8),
    "no regions": agent(regions=()),
    "another transport": agent(transport="nixl"),
    "another nonce": agent(nonce=1),
    "another process": agent(address=b"1"),
}


@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED.keys())
def test_a_forged_source_is_refused_with_an_error_of_ours_or_passed_over(forge):
    registry = Forger(MemoryRegistry())
    weights, live = {"w": torch.ones(5000)}, {"w": torch.zeros(5000)}
    with Publisher("p", weights, registry=registry.true, options=FAST) as pub:
        pub.wait(pub.publish(), replicas=0, timeout=10)
        with Subscriber("p", live, registry=registry, options=FAST) as sub:
            registry.forge = forge
            try:
                sub.sync(timeout=0.6)
            except MxRLError:
                assert sub.version is None
                assert live["w"].eq(0).all()
            else:
                assert live["w"].eq(1).all()
        registry.forge = lambda result: result
        with Subscriber("p", live, registry=registry, options=FAST) as sub:
            number = pub.publish().number
            assert sub.sync(at_least=number, timeout=10).version == number
            assert live["w"].eq(1).all()


@pytest.mark.parametrize("number", [-1, 1 << 40], ids=str)
def test_a_source_in_a_region_that_is_not_there_is_refused(number):
    registry = Forger(MemoryRegistry())
    weights, live = {"w": torch.ones(5000)}, {"w": torch.zeros(5000)}
    with Publisher("p", weights, registry=registry.true, options=FAST) as pub:
        pub.wait(pub.publish(), replicas=0, timeout=10)
        with Subscriber("p", live, registry=registry, options=FAST) as sub:

            def forge(result):
                if not isinstance(result, Target):
                    return result
                sources = tuple(msgspec.structs.replace(one, region=number) for one in result.record.sources)
                return msgspec.structs.replace(result, record=msgspec.structs.replace(result.record, sources=sources))

            registry.forge = forge
            with pytest.raises(MxRLError):
                sub.sync(timeout=0.6)
            assert live["w"].eq(0).all()
