"""A publisher's slots: one registered arena, one slot a version, filled by the snapshot window by window."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mx_rl.arena import num_windows
from mx_rl.copies import copy_all
from mx_rl.digest import Sums, warm
from mx_rl.endpoint import Endpoint, Served
from mx_rl.errors import Closed
from mx_rl.layout import RankLayout
from mx_rl.records import Source
from mx_rl.tensors import Shard
from mx_rl.trailer import Trailer

_BATCH_BYTES = 128 << 20


@dataclass
class Slot:
    """``key`` is (epoch, k) of the publish that lies here, or None."""

    index: int
    key: tuple[int, int] | None = None
    generation: int = 0


class Slots(ABC):
    """What a publisher publishes from, for one rank layout, served under an agent of its own."""

    layout: RankLayout
    served: Served
    slots: list[Slot]
    tables: tuple[tuple[str, bytes], ...] = ()
    """Blobs that readers need beside the endpoint record."""
    _endpoint: Endpoint

    @abstractmethod
    def fits(self, layout: RankLayout, tensors: Mapping[str, tuple[Shard, ...]]) -> bool:
        """These tensors can be published from here."""

    @abstractmethod
    def snapshot(self, slot: Slot, tensors: Mapping[str, tuple[Shard, ...]]) -> Source:
        """Make the tensors of now the slot's version; on return its boxes may be read, but for those in its last window."""

    @abstractmethod
    def seal(self, slot: Slot, generation: int) -> tuple[Sums, bytes]:
        """Write the trailer of what lies in the slot, and let it be read with the last window: (the sums by row of the
        layout, their proof). Raises Closed where the slot holds something else by now."""

    def source(self, slot: Slot) -> Source:
        return Source(agent=self.served.name, region=slot.index, generation=slot.generation)

    def close(self) -> None:
        self._endpoint.unserve(self.served)


class Ring(Slots):
    """``count`` slots of registered memory."""

    def __init__(self, endpoint: Endpoint, role: str, layout: RankLayout, count: int) -> None:
        self.layout = layout
        self.trailer = Trailer(layout)
        warm(layout.nbytes)
        self.served = endpoint.serve(role, count, self.trailer.slot_nbytes)
        self.slots = [Slot(index) for index in range(count)]
        self.window_bytes = endpoint.options.window_bytes
        self._endpoint = endpoint
        self._boxes = [box for box in layout.packing() if box.nbytes]
        self._views = [
            [
                block[box.offset : box.offset + box.nbytes].view(getattr(torch, box.dtype)).view(box.shape)
                for box in self._boxes
            ]
            for block in self.served.arena.blocks
        ]

    def fits(self, layout: RankLayout, tensors: Mapping[str, tuple[Shard, ...]]) -> bool:
        return layout.hash == self.layout.hash

    def snapshot(self, slot: Slot, tensors: Mapping[str, tuple[Shard, ...]]) -> Source:
        """Copy (and cast, as ``Tensor.to`` does) every box into the slot. The header says "nothing" before the first byte
        changes, and its count of windows follows the bytes."""
        header = self.served.arena.headers[slot.index]
        slot.key = None
        slot.generation = header.begin()
        batch: list[tuple[torch.Tensor, torch.Tensor]] = []
        begun = 0
        for box, view in zip(self._boxes, self._views[slot.index], strict=True):
            if box.offset - begun >= _BATCH_BYTES:
                copy_all(batch)
                header.confirm(box.offset // self.window_bytes)
                batch, begun = [], box.offset
            batch.append((view, tensors[box.name][box.box].tensor))
        copy_all(batch)
        header.confirm(self.trailer.offset // self.window_bytes)
        return self.source(slot)

    def seal(self, slot: Slot, generation: int) -> tuple[Sums, bytes]:
        header, block = self.served.arena.headers[slot.index], self.served.arena.blocks[slot.index]
        sums = self.trailer.sums(block.numpy())
        if header.generation != generation:
            raise Closed("this slot was closed, or taken for another version, before its commit")
        proof = self.trailer.write(sums, block, self.trailer.offset)
        header.confirm(num_windows(self.trailer.slot_nbytes, self.window_bytes))
        return sums, proof

    def begin(self, slot: Slot) -> Filling:
        """As ``snapshot``, box by box as they come."""
        slot.key = None
        slot.generation = self.served.arena.headers[slot.index].begin()
        return Filling(self, slot)


class Filling:
    """A version on its way into a slot, in any order of boxes; the header counts the windows that are whole."""

    def __init__(self, ring: Ring, slot: Slot) -> None:
        self._ring = ring
        self._slot = slot
        self._header = ring.served.arena.headers[slot.index]
        self._views = ring._views[slot.index]
        self._index = {(box.name, box.box): index for index, box in enumerate(ring._boxes)}
        self._ends = [box.offset for box in ring._boxes[1:]] + [ring.layout.nbytes]
        self._done = [False] * len(self._views)
        self._prefix = 0  # boxes that are there without a gap

    def put(self, name: str, tensor: torch.Tensor, box: int = 0) -> None:
        """Copy (and cast, as ``Tensor.to`` does) one box; ``tensor`` may be changed or freed when this returns."""
        index = self._index[name, box]
        copy_all([(self._views[index], tensor)])
        self._done[index] = True
        begun = self._prefix
        while self._prefix < len(self._done) and self._done[self._prefix]:
            self._prefix += 1
        if begun < self._prefix < len(self._done):
            self._header.confirm(self._ends[self._prefix - 1] // self._ring.window_bytes)

    def finish(self) -> Source:
        """Every box was put: the slot is whole but for its trailer."""
        assert all(self._done), "finish() before every box was put"
        self._header.confirm(self._ring.trailer.offset // self._ring.window_bytes)
        return self._ring.source(self._slot)
