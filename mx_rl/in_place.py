"""``slots=0``: the live tensors themselves are the one slot; readers are shut out before anything changes them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mx_rl.addresses import encode_table, extents, packing_rows, signature
from mx_rl.arena import num_windows
from mx_rl.columns import ints
from mx_rl.digest import Sums, warm
from mx_rl.endpoint import Endpoint
from mx_rl.errors import Closed, InvalidArgument
from mx_rl.layout import RankLayout
from mx_rl.records import PACKING, Source, table_key
from mx_rl.ring import Slot, Slots
from mx_rl.tensors import Shard
from mx_rl.trailer import Trailer


class InPlace(Slots):
    """The memory of ``tensors``, registered where it lies, with the run table that tells readers what lies where."""

    def __init__(
        self, endpoint: Endpoint, role: str, layout: RankLayout, tensors: Mapping[str, tuple[Shard, ...]]
    ) -> None:
        self.layout = layout
        self.slots = [Slot(0)]
        rows = packing_rows(layout, tensors)
        self._trailer = trailer = Trailer(layout)
        warm(layout.nbytes)
        self._sums = trailer.sums_by(rows)
        self.served = endpoint.serve(role, 1, trailer.nbytes, extents=extents(tensors))
        if trailer.nbytes:
            place = ints([[trailer.offset, self.served.arena.address(0), trailer.nbytes]])
            rows = np.concatenate([rows, place])
        self.tables = ((table_key(self.served.name, PACKING), encode_table(rows)),)
        self._endpoint = endpoint
        self._lies = signature(tensors)
        self._windows = num_windows(trailer.slot_nbytes, endpoint.options.window_bytes)
        self._sealed: tuple[int, Sums, bytes] | None = None

    def fits(self, layout: RankLayout, tensors: Mapping[str, tuple[Shard, ...]]) -> bool:
        return layout.hash == self.layout.hash and signature(tensors) == self._lies

    def snapshot(self, slot: Slot, tensors: Mapping[str, tuple[Shard, ...]]) -> Source:
        """Nothing is copied: what lies there now is the version, under a generation of its own. It is summed at once, since
        it may change as soon as this returns."""
        header = self.served.arena.headers[0]
        slot.key = None
        slot.generation = header.begin()
        sums = self._sums()
        self._sealed = (slot.generation, sums, self._trailer.write(sums, self.served.arena.blocks[0], 0))
        header.confirm(self._windows)
        return self.source(slot)

    def seal(self, slot: Slot, generation: int) -> tuple[Sums, bytes]:
        if self._sealed is None or self._sealed[0] != generation:
            raise Closed("these tensors were published again before their commit")
        return self._sealed[1:]

    def shut_out(self) -> None:
        """No read that ends after this counts."""
        self.served.arena.headers[0].begin()


class Mutations:
    """Who changes the published tensors, and when: ``mutating()``, and each step of a torch optimizer over one of them.

    ``begin`` is called before the first change after a publish, once.
    """

    def __init__(self, begin: Callable[[], None]) -> None:
        self._begin = weakref.WeakMethod(begin)
        self._lock = threading.RLock()
        self._open = False  # a version may be read
        self._bodies: set[object] = set()  # of ``mutating`` that run now
        self._storages: frozenset[int] = frozenset()
        this = weakref.ref(self)

        def stepping(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            mutations = this()
            if mutations is not None:
                mutations.before_step(optimizer)

        self._hook = register_optimizer_step_pre_hook(stepping)

    def published(self, tensors: Mapping[str, tuple[Shard, ...]]) -> None:
        with self._lock:
            # Each storage, not each extent: of storages that overlap one extent is made.
            self._storages = frozenset(
                shard.tensor.untyped_storage().data_ptr() for boxes in tensors.values() for shard in boxes
            )
            self._open = True

    def check(self) -> None:
        """Raises InvalidArgument inside ``mutating()``."""
        if self._bodies:
            raise InvalidArgument("publish() inside mutating(): leave it first, so that the tensors stay as they are")

    @contextmanager
    def mutating(self) -> Iterator[None]:
        body = object()
        try:
            with self._lock:
                self._change()
                self._bodies.add(body)
            yield
        finally:
            self._bodies.discard(body)  # whatever came between, a Ctrl-C too: it is not for ever

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        with self._lock:
            if self._open and any(self._is_ours(p) for group in optimizer.param_groups for p in group["params"]):
                self._change()

    def _is_ours(self, parameter: torch.Tensor) -> bool:
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter  # of a DTensor
        return local.numel() > 0 and local.untyped_storage().data_ptr() in self._storages

    def _change(self) -> None:
        begin = self._begin()
        if self._open and begin is not None:
            begin()
        self._open = False

    def close(self) -> None:
        self._hook.remove()
