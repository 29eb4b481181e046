"""Deltas: what changed in one rank's arena from one version to another, taken through the runs of any layout.

encode (publisher) -> fetch the blocks that are met -> decode -> chain -> check -> write: pure, told by tables and memory.
Values are absolute, so that writing twice is harmless; a packed delta becomes absolute when it is decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mx_rl import blob, packed
from mx_rl.blob import Head
from mx_rl.blocks import ragged
from mx_rl.columns import Flags, Ints, groups, starts_of
from mx_rl.errors import CorruptRecord
from mx_rl.kernels import base
from mx_rl.kernels.base import (
    BLOCK_ELEMENTS,
    E_BLOCK,
    E_COUNT,
    E_DENSE,
    E_FIRST,
    E_INDEX,
    E_LAST,
    E_VALUE,
    LENGTH,
    Bytes,
    Counts,
    Kernels,
    Sums,
    met,
)
from mx_rl.lattice import Units


@dataclass(frozen=True, eq=False, kw_only=True)
class Encoded:
    """What a snapshot listed beside its copy. ``payload`` and ``old`` are views of the room that was given."""

    sums: Sums  # the digest of each box of the layout
    told: Sums  # of each box, that of its new values where they changed
    counts: Counts
    payload: Bytes
    old: Bytes

    def raw(self, base_number: int, number: int, layout: str) -> tuple[Head, bytes]:
        """(head, table): with ``payload`` behind them the raw blob."""
        head = Head(blob.RAW, base_number, number, layout, len(self.counts), 0, len(self.payload), 0)
        return head, blob.raw_table(self.counts)

    def packed(self, runs: Ints, blocks: Ints, *, base_number: int, number: int, layout: str) -> bytes:
        """The packed blob, whole. ``runs``: those of the snapshot."""
        kept = self.told[np.unique(runs[:, base.UNIT])]
        frames = packed.pack(blocks, self.counts, self.payload, self.old)
        sizes = list(map(len, frames))
        head = Head(blob.PACKED, base_number, number, layout, len(blocks), len(frames), sum(sizes), len(kept))
        return b"".join([head.encode(), blob.packed_table(sizes), kept.astype("<u8").tobytes(), *frames])


def encode(
    kernels: Kernels,
    runs: Ints,
    blocks: Ints,
    *,
    slot: int,
    base_slot: int,
    num_units: int,
    payload: Bytes,
    old: Bytes | None = None,
    base_sums: Sums | None = None,
) -> tuple[Encoded | None, Sums]:
    """Snapshot into ``slot`` and list what differs from ``base_slot``, in one pass: (None if it did not fit, digests).

    ``payload``: the room for the raw payload, most often behind a head and table in a blob. ``old``: as much for the old
    values, made where None. ``base_sums``: the digests of the base; then those of the
    slot are reckoned from the changes, which takes half the time of a whole digest or less.
    """
    counts, sums = np.zeros(len(blocks), np.uint16), np.zeros(num_units, np.uint64)
    room = np.empty(len(payload), np.uint8) if old is None else old
    copied = runs
    if base_sums is not None:
        copied = runs.copy()
        copied[:, base.UNIT] = -1
    used = kernels.diff(copied, blocks, slot, base_slot, sums, counts, payload, room)
    if used < 0:
        if base_sums is not None:
            kernels.snapshot(runs, slot, sums)
        return None, sums
    entries, _ = blob.entries_of(blocks, counts)
    listed = Delta(blocks=blocks, entries=entries, payload=payload[:used]).met_by(runs)
    was, told = np.zeros(num_units, np.uint64), np.zeros(num_units, np.uint64)
    kernels.weigh(listed.entries, blocks, listed.payload, room, runs, was, told)
    if base_sums is not None:
        sums = base_sums - was + told
    return Encoded(sums=sums, told=told, counts=counts, payload=listed.payload, old=room[:used]), sums


@dataclass(frozen=True, eq=False, kw_only=True)
class Delta:
    """Changes of (some blocks of) one rank's arena, decoded and absolute: what ``check`` and ``write`` take."""

    blocks: Ints
    entries: Ints
    payload: Bytes

    @property
    def num_changes(self) -> int:
        return int(self.entries[:, E_COUNT].sum())

    def met_by(self, runs: Ints) -> Delta:
        """With, for each block, the runs that meet it: those of ``lattice.target_runs``, in arena order."""
        first, last = met(self.blocks, runs)
        entries = self.entries.copy()
        entries[:, E_FIRST], entries[:, E_LAST] = first[entries[:, E_BLOCK]], last[entries[:, E_BLOCK]]
        return replace(self, entries=entries)

    def check(self, kernels: Kernels, runs: Ints, num_units: int) -> tuple[Sums, Sums]:
        """Digests, by unit, of what ``write`` would overwrite and of what it would put there; nothing is written."""
        was, will = np.zeros(num_units, np.uint64), np.zeros(num_units, np.uint64)
        kernels.check(self.entries, self.blocks, self.payload, runs, was, will)
        return was, will

    def write(self, kernels: Kernels, runs: Ints) -> None:
        kernels.write(self.entries, self.blocks, self.payload, runs)


def decode_raw(kernels: Kernels, blocks: Ints, entries: Ints, payload: Bytes) -> Delta:
    """``entries`` as ``blob.fetch_entries`` placed them in ``payload``. Raises CorruptRecord for indices out of order."""
    payload = _aligned(payload)
    ends = entries[:, E_VALUE] + entries[:, E_COUNT] * blocks[entries[:, E_BLOCK], base.WIDTH]
    if int(ends.max(initial=0)) > len(payload):
        raise CorruptRecord(f"{len(payload)} bytes of a delta are here, of {ends.max()}")
    row = kernels.disorder(entries, blocks, payload)
    if row >= 0:
        raise CorruptRecord(
            f"block {int(entries[row, E_BLOCK])} of a delta lists elements out of order or out of range"
        )
    return Delta(blocks=blocks, entries=entries, payload=payload)


def decode_packed(
    kernels: Kernels,
    blocks: Ints,
    frames: Ints,
    data: Sequence[bytes],
    runs: Ints,
    *,
    onto: Delta | None = None,
) -> Delta:
    """The frames (ascending numbers) of a packed delta, made absolute by what live memory holds.

    ``onto``: deltas between live memory and this one's base, composed; what they list counts as the old values. Elements
    that no run takes come out without meaning, and are never written. Raises CorruptRecord for damaged frames.
    """
    overlay = _columns(onto) if onto is not None else None
    entries, payloads, at = [np.zeros((0, base.ENTRY_COLUMNS), np.int64)], [np.zeros(0, np.uint8)], 0
    for number, one in zip(frames.tolist(), data, strict=True):
        begin = number * blob.FRAME_BLOCKS
        rows = blocks[begin : begin + blob.FRAME_BLOCKS]
        frame = packed.unpack(rows, one)
        found = Delta(blocks=rows, entries=frame.entries, payload=frame.payload).met_by(runs)
        if kernels.disorder(found.entries, rows, found.payload) >= 0:
            raise CorruptRecord(f"frame {number} of a delta lists elements out of order or out of range")
        old = np.zeros_like(frame.payload)
        kernels.gather(found.entries, rows, found.payload, runs, old)
        if overlay is not None:
            _lay_over(found, begin, overlay, old)
        frame.resolve(old)
        moved = frame.entries.copy()
        moved[:, E_BLOCK] += begin
        moved[:, [E_INDEX, E_VALUE]] += at
        entries.append(moved)
        payloads.append(frame.payload)
        at += len(frame.payload)
    return Delta(blocks=blocks, entries=np.concatenate(entries), payload=np.concatenate(payloads))


def compose(older: Delta, newer: Delta) -> Delta:
    """Both in one, over the same blocks: where both list an element, the newer one counts."""
    one, two = _columns(older), _columns(newer)
    key = np.concatenate([one[0], two[0]])
    order = np.argsort(key, kind="stable")
    last = np.append(groups(key[order])[1:], True) if len(key) else np.zeros(0, np.bool_)
    chosen = order[last]
    key, values = key[chosen], np.concatenate([one[1], two[1]])[chosen]
    blocks = older.blocks
    block, starts = np.unique(key // BLOCK_ELEMENTS, return_index=True)
    counts = np.diff(np.append(starts, len(key)))
    entries = np.zeros((len(block), base.ENTRY_COLUMNS), np.int64)
    entries[:, E_BLOCK], entries[:, E_COUNT] = block, counts
    dense = counts == blocks[block, LENGTH]
    entries[:, E_DENSE] = dense
    index_bytes = np.where(dense, 0, -(-2 * counts // 8) * 8)
    at = starts_of(index_bytes + -(-counts * blocks[block, base.WIDTH] // 8) * 8)
    entries[:, E_INDEX], entries[:, E_VALUE] = at[:-1], at[:-1] + index_bytes
    payload = np.zeros(int(at[-1]), np.uint8)
    listed = entries[~dense]
    index = key % BLOCK_ELEMENTS
    payload.view(np.uint16)[ragged(listed[:, E_INDEX] // 2, listed[:, E_COUNT])] = index[np.repeat(~dense, counts)]
    packed.put_values(blocks, entries, payload, values)
    return Delta(blocks=blocks, entries=entries, payload=payload)


@dataclass(frozen=True, eq=False, kw_only=True)
class Proof:
    """What sums say about source shards: rows of the world's boxes. ``wrong`` empty: nothing speaks against a write."""

    wrong: Ints
    partial: Ints  # the shard is here in part: the replica's ranks add up their ``sums``, and compare
    sums: Sums  # row for row with ``partial``


def prove(units: Units, was: Sums, will: Sums, *, volume: Ints, base_digest: Sums, digest: Sums) -> Proof:
    """Before a delta is written: does it lead from the base to the version, from what this memory really holds?

    ``was``, ``will``: sums by unit, from ``Delta.check``. ``volume`` (elements), ``base_digest``, ``digest``: by row of
    the world's boxes. The sums of a partial shard are its share of digest - base digest.
    """
    unlike = was != was[units.first]  # the same bytes under two names, and this memory has two minds about them
    return _compare(units, will - was, volume, digest - base_digest, unlike)


def prove_packed(units: Units, will: Sums, *, volume: Ints, told: Sums) -> Proof:
    """Of a packed delta, besides: are the new values those that were published? ``told``: its sums, by row of the
    world's boxes. Each delta of a chain by itself, before it is composed."""
    return _compare(units, will, volume, told, np.zeros(len(will), np.bool_))


def _compare(units: Units, sums: Sums, volume: Ints, wanted: Sums, unlike: Flags) -> Proof:
    primary = units.first == np.arange(len(units.first))
    boxes, place = np.unique(units.box, return_inverse=True)
    here, total = np.zeros(len(boxes), np.int64), np.zeros(len(boxes), np.uint64)
    np.add.at(here, place[primary], units.elements[primary])
    np.add.at(total, place[primary], sums[primary])
    whole = here == volume[boxes]
    wrong = whole & (total != wanted[boxes])
    wrong[place[unlike | (sums != sums[units.first])]] = True
    part = ~whole & ~wrong
    return Proof(wrong=boxes[wrong], partial=boxes[part], sums=total[part])


def _columns(delta: Delta) -> tuple[Ints, packed.Values]:
    """(block x 2^16 + element, value) of all changes, ascending."""
    entries = delta.entries
    index = ragged(np.zeros(len(entries), np.int64), entries[:, E_COUNT])
    listed = entries[:, E_DENSE] == 0
    places = ragged(entries[listed, E_INDEX] // 2, entries[listed, E_COUNT])
    index[np.repeat(listed, entries[:, E_COUNT])] = delta.payload.view(np.uint16)[places]
    key = np.repeat(entries[:, E_BLOCK] * BLOCK_ELEMENTS, entries[:, E_COUNT]) + index
    return key, packed.values_of(delta.blocks, entries, delta.payload)


def _lay_over(found: Delta, first_block: int, overlay: tuple[Ints, packed.Values], old: Bytes) -> None:
    """Replace old values by those of earlier deltas that live memory does not have yet."""
    key, _ = _columns(found)
    key = key + first_block * BLOCK_ELEMENTS
    at = np.minimum(np.searchsorted(overlay[0], key), max(len(overlay[0]) - 1, 0))
    same = overlay[0][at] == key if len(overlay[0]) else np.zeros(len(key), np.bool_)
    values = packed.values_of(found.blocks, found.entries, old)
    values[same] = overlay[1][at[same]]
    packed.put_values(found.blocks, found.entries, old, values)


def _aligned(payload: Bytes) -> Bytes:
    """Whole words, on a word: what the views of a payload need."""
    if payload.ctypes.data % 8 == 0 and len(payload) % 8 == 0:
        return payload
    found = np.zeros(base.pad8(len(payload)), np.uint8)
    found[: len(payload)] = payload
    return found
