"""Run tables that lie: whoever told them is left for another source, and not one wrong byte is installed."""

import numpy as np
import pytest
import torch

from mx_rl import Publisher, Subscriber
from mx_rl.addresses import decode_table, encode_table
from mx_rl.errors import CorruptRecord
from mx_rl.registry.memory import MemoryRegistry
from tests.support.local import STEADY


def without_a_row(rows):
    return encode_table(rows[1:])


def shortened(rows):
    found = rows.copy()
    found[0, 2] -= 8
    return encode_table(found)


def elsewhere(rows):
    found = rows.copy()
    found[:, 1] += 1 << 40
    return encode_table(found)


def one_byte_beyond(rows):
    found = rows.copy()
    found[-1, 1] += 1
    return encode_table(found)


def overlapping(rows):
    return encode_table(np.concatenate([rows, rows]))


def negative(rows):
    return encode_table(-rows)


def garbage(rows):
    return b"MXT1" + bytes(1000)


def nothing(rows):
    return encode_table(rows[:0])


@pytest.mark.parametrize(
    "forge", [without_a_row, shortened, elsewhere, one_byte_beyond, overlapping, negative, garbage, nothing]
)
@pytest.mark.parametrize("stage", ["device", "none"])
def test_a_peer_with_a_forged_table_is_left_for_the_trainer(forge, stage):
    registry = MemoryRegistry()
    source = {"a": torch.randn(500, 40), "b": torch.randn(3000)}
    first, second = ({name: torch.zeros_like(tensor) for name, tensor in source.items()} for _ in range(2))
    named = {"registry": registry, "options": STEADY}
    with (
        Publisher("p", source, **named) as pub,
        Subscriber("p", first, serve="live", **named) as peer,
        Subscriber("p", second, stage=stage, serve="off", **named) as sub,
    ):
        pub.publish()
        peer.sync(timeout=10)
        blobs = registry._state.policies["p"].blobs
        (key,) = [key for key in blobs if "-live-" in key and "/" in key]
        blobs[key].data = forge(decode_table(blobs[key].data))
        report = sub.sync(timeout=10)
        assert set(report.served_by) == {"trainer:0"}
        assert set(report.refused) == {f"peer:{peer.replica}"}
        for name, tensor in source.items():
            assert torch.equal(second[name], tensor)


@pytest.mark.parametrize("data", [b"", b"MXT1", b"MXT1" + b"\xff" * 16, encode_table(np.array([[0, 0, 0]]))])
def test_what_is_no_table_is_refused_before_it_is_allocated(data):
    with pytest.raises(CorruptRecord):
        decode_table(data)
