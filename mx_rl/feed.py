"""A streamed source: full tensors are drawn one by one, and a rank keeps its share of each."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import sys
import traceback
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from mx_rl.copies import copy
from mx_rl.errors import InvalidArgument, NameCollision, TensorUnavailable, layout_mismatch
from mx_rl.layout import RankLayout, WireDtype, wire_caster
from mx_rl.seat import WorldSeat
from mx_rl.tensors import Shard, check_travels, only_declared, strip_wrappers, unavailable

log = logging.getLogger("mx_rl")

Stream: TypeAlias = "Iterable[tuple[str, Tensor]] | AsyncIterable[tuple[str, Tensor]]"
Found: TypeAlias = "Mapping[str, Shard | tuple[Shard, ...]]"
Put: TypeAlias = "Callable[[str, Tensor], None]"

END: Any = object()
"""What ``Pairs.draw`` gives after the last pair."""
_SMALL_BYTES = 256
"""A tensor whose shares would be smaller stays whole: a run costs its reader as much as a kilobyte does."""


# ---- drawing


class Pairs:
    """What is left of a stream. ``over`` once it has ended or raised; opened by the first ``draw``."""

    def __init__(self, stream: Stream) -> None:
        self.over = False
        self._stream: Any = stream
        self._draw: Callable[[], Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def draw(self) -> Any:
        """The next pair, or END. Raises what the stream raises, as it is."""
        if self.over:
            return END
        try:
            if self._draw is None:
                self._draw = self._open()
            pair = self._draw()
        except BaseException:
            self.over = True
            raise
        self.over = pair is END
        return pair

    def drain(self) -> None:
        """Draw to the end: exporters run collectives inside, and the other ranks wait in them for this one."""
        try:
            while self.draw() is not END:
                pass
        except Exception as exc:  # noqa: BLE001 - the user's own; the error that came first is the one to raise
            log.warning("the stream raised while it was drained after another error: %r", exc)

    def close(self) -> None:
        """Give the event loop back, if this made one; what still runs on it is cancelled."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        try:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            if left:
                loop.run_until_complete(asyncio.wait(left))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
        finally:
            loop.close()

    def _open(self) -> Callable[[], Any]:
        stream, self._stream = self._stream, None
        if hasattr(stream, "__aiter__"):
            return self._open_async(stream)
        try:
            pairs = iter(stream)
        except TypeError:
            raise InvalidArgument(
                f"stream={type(stream).__name__}: takes an iterable or async iterable of (name, full tensor)"
            ) from None
        return lambda: next(pairs, END)

    def _open_async(self, stream: AsyncIterable[Any]) -> Callable[[], Any]:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise InvalidArgument(
                "publish(stream=) was given an async iterable inside a running event loop, which it would block: "
                "await async_publish(stream=...) there"
            )
        loop = self._loop = asyncio.new_event_loop()
        pairs = aiter(stream)
        return lambda: loop.run_until_complete(_next(pairs))


@contextmanager
def drawing(stream: Stream | None) -> Iterator[Pairs | None]:
    """Pairs for the body. An error that is not the stream's own is raised after the rest of the stream was drawn."""
    if stream is None:
        yield None
        return
    pairs = Pairs(stream)
    try:
        yield pairs
    except Exception:
        pairs.drain()
        raise
    finally:
        pairs.close()


def on_loop(stream: Stream, loop: asyncio.AbstractEventLoop) -> Stream:
    """For a thread beside ``loop``: an async iterable as a plain one whose steps run on that loop; others as they are."""
    return _steps(stream, loop) if isinstance(stream, AsyncIterable) else stream


def _steps(stream: AsyncIterable[Any], loop: asyncio.AbstractEventLoop) -> Iterator[Any]:
    pairs = aiter(stream)
    while True:
        step = asyncio.run_coroutine_threadsafe(_next(pairs), loop)
        while True:
            try:
                pair = step.result(timeout=1.0)
                break
            except FutureTimeout:
                if step.done():  # the stream's own error
                    raise
                if loop.is_closed():
                    raise InvalidArgument("the event loop that drives the stream was closed before it ended") from None
        if pair is END:
            return
        del step
        yield pair
        del pair


async def _next(pairs: AsyncIterator[Any]) -> Any:
    try:
        return await anext(pairs)
    except StopAsyncIteration:
        return END


# ---- shares


@dataclass(frozen=True, kw_only=True)
class Share:
    """Of one global tensor: what a rank keeps. ``size`` None: nothing, and not even an empty box can say so (0-d)."""

    shape: tuple[int, ...]
    dtype: torch.dtype  # as the exporter gives it
    wire: torch.dtype
    lo: tuple[int, ...]
    size: tuple[int, ...] | None

    @property
    def empty(self) -> bool:
        return self.size is None or math.prod(self.size) == 0

    def of(self, tensor: Tensor) -> Tensor:
        for dim, (lo, size) in enumerate(zip(self.lo, self.size or (), strict=True)):
            tensor = tensor.narrow(dim, lo, size)
        return tensor


def cut(
    name: str, shape: tuple[int, ...], itemsize: int, *, rank: int, world_size: int
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """(offset, size) of a rank's share: an even part of the first dimension that has one for every rank; tensors without
    such a dimension, and small ones, go whole to a rank drawn by their name. Size None: no share of a 0-d tensor."""
    origin = (0,) * len(shape)
    large = math.prod(shape) * itemsize >= _SMALL_BYTES * world_size
    dim = next((dim for dim, size in enumerate(shape) if size >= world_size), None) if large else None
    if dim is not None:
        begin, end = (shape[dim] * edge // world_size for edge in (rank, rank + 1))
        return (*origin[:dim], begin, *origin[dim + 1 :]), (*shape[:dim], end - begin, *shape[dim + 1 :])
    drawn = int.from_bytes(hashlib.blake2s(name.encode(), digest_size=8).digest(), "little") % world_size
    if drawn == rank:
        return origin, shape
    return origin, origin if shape else None


class Feed:
    """The shares of one rank. ``layout`` is None until a first pass has told the names (``tensors=None``).

    A pass that fails changes nothing that was learned. Each pass is compared with the shares, in any order.
    """

    def __init__(self, found: Found | None, seat: WorldSeat, wire_dtype: WireDtype) -> None:
        self.layout: RankLayout | None = None
        self._seat = seat
        self._cast = wire_caster(wire_dtype)
        self._shares: dict[str, Share] = {}
        if found is not None and only_declared(found):
            self.declare(found)

    def declare(self, found: Found) -> RankLayout:
        """The shares of these global tensors; their memory does not matter."""
        firsts = {name: value[0] if isinstance(value, tuple) else value for name, value in found.items()}
        return self._adopt(
            {name: self._share(name, one.global_shape, one.tensor.dtype) for name, one in firsts.items()}
        )

    def learn(self, pairs: Pairs) -> dict[str, Tensor]:
        """A first pass: copies of this rank's shares, in their wire dtypes, by name. From now on the layout is known."""
        shares: dict[str, Share] = {}
        copies: dict[str, Tensor] = {}

        def expect(name: str, tensor: Tensor) -> Share:
            shares[name] = self._share(name, tuple(tensor.shape), tensor.dtype)
            return shares[name]

        def put(name: str, part: Tensor) -> None:
            copies[name] = torch.empty(part.shape, dtype=shares[name].wire, device="cpu")
            copy(copies[name], part)

        _Pass(expect, put).run(pairs)
        self._adopt(shares)
        return copies

    def fill(self, pairs: Pairs, put: Put) -> None:
        """A later pass: ``put`` takes (name, this rank's part) of each tensor, before the next one is drawn."""
        _Pass(lambda name, _: self._shares.get(name), put).run(pairs, self._shares)

    def _share(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Share:
        wire = self._cast(name, dtype)
        lo, size = cut(name, shape, wire.itemsize, rank=self._seat.rank, world_size=self._seat.world_size)
        return Share(shape=shape, dtype=dtype, wire=wire, lo=lo, size=size)

    def _adopt(self, shares: dict[str, Share]) -> RankLayout:
        boxes = {
            name: (Shard(torch.empty(one.size, dtype=one.wire, device="meta"), shape=one.shape, offset=one.lo),)
            for name, one in shares.items()
            if one.size is not None
        }
        self._shares = shares
        self.layout = RankLayout.of(boxes)
        return self.layout


class _Pass:
    """One run through a stream. Every problem is noted and raised at the end, so that the stream is drawn whole."""

    def __init__(self, expect: Callable[[str, Tensor], Share | None], put: Put) -> None:
        self._expect = expect
        self._put = put
        self._seen: set[str] = set()
        self._doubled: dict[str, None] = {}
        self._lost: dict[str, str] = {}
        self._problems: dict[str, list[str]] = {"missing": [], "unexpected": [], "shapes": [], "dtypes": []}
        self._fault: Exception | None = None

    def run(self, pairs: Pairs, shares: Mapping[str, Share] | None = None) -> None:
        while (pair := pairs.draw()) is not END:
            try:
                self._take(pair)
            except Exception as exc:  # noqa: BLE001 - raised when the stream has been drawn whole
                self._note(exc)
            del pair  # nothing that was given is held while the exporter makes the next
        self._problems["missing"] = [name for name in shares or () if name not in self._seen]
        self._raise()

    def _take(self, pair: Any) -> None:
        name, tensor = _checked(pair)
        if name in self._seen:
            self._doubled[name] = None
            return
        self._seen.add(name)
        share = self._expect(name, tensor)
        if share is None:
            self._problems["unexpected"].append(name)
            return
        shape, dtype = tuple(tensor.shape), tensor.dtype
        if shape != share.shape:
            self._problems["shapes"].append(f"{name}: {share.shape} before, {shape} now")
        elif dtype != share.dtype:
            self._problems["dtypes"].append(f"{name}: {_short(share.dtype)} before, {_short(dtype)} now")
        elif (reason := unavailable(tensor)) is not None:
            self._lost[name] = reason
        elif not share.empty and self._fault is None:
            self._put(name, share.of(tensor.detach()))

    def _note(self, exc: Exception) -> None:
        if self._fault is None:
            traceback.clear_frames(exc.__traceback__)  # they hold the tensor
            self._fault = exc

    def _raise(self) -> None:
        if self._doubled:
            names = list(self._doubled)
            raise NameCollision(f"the stream gave {_list(names)} more than once: each name once a pass", names=names)
        if self._fault is not None:
            raise self._fault
        if self._lost:
            lines = [f"{name} ({reason})" for name, reason in self._lost.items()]
            raise TensorUnavailable(
                f"the stream gave {len(lines)} tensors without memory to read: {_list(lines)}", names=list(self._lost)
            )
        if any(self._problems.values()):
            raise layout_mismatch(
                "the stream is not what this Publisher's layout says",
                "Give the same names, shapes and dtypes at every publish, in any order, or make a new Publisher",
                **self._problems,
            )


def _checked(pair: Any) -> tuple[str, Tensor]:
    """Raises InvalidArgument, with the name, for what is no full tensor."""
    if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
        raise InvalidArgument(f"the stream gave a {type(pair).__name__}: it gives pairs (name, full tensor)")
    name, tensor = strip_wrappers(pair[0]), pair[1]
    dtensor = sys.modules.get("torch.distributed.tensor")
    if dtensor is not None and isinstance(tensor, dtensor.DTensor):
        raise InvalidArgument(
            f"the stream gave {name!r} as a DTensor: give tensor.full_tensor(), or give the DTensors to Publisher and "
            "publish without a stream, which gathers nothing"
        )
    if not isinstance(tensor, Tensor):
        raise InvalidArgument(f"the stream gave {name!r} as a {type(tensor).__name__}: takes a full torch.Tensor")
    check_travels(name, tensor)
    return name, tensor


def _list(lines: list[str]) -> str:
    return "; ".join(lines[:10]) + (f" and {len(lines) - 10} more" if len(lines) > 10 else "")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
