"""Copies between live tensors and slots or stages: plain memory moves where nothing is cast or strided."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

_CHUNK_BYTES = 4 << 20
_PARALLEL_BYTES = 64 << 20
_MAX_THREADS = 8

_pool_lock = threading.Lock()
_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}

Move = tuple[int, int, int]
"""(target address, source address, bytes)."""


def is_plain(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Both sides are contiguous host memory of one dtype: a memory move is the copy, bit for bit."""
    return (
        target.dtype == source.dtype
        and target.device.type == source.device.type == "cpu"
        and target.is_contiguous()
        and source.is_contiguous()
        and not source.is_conj()
        and not source.is_neg()
    )


@torch.no_grad()
def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """``target.copy_(source)``, also for inference tensors. torch's own parallel copy ends at a barrier a tensor, which
    costs a busy host ten times the copy: plain moves do without."""
    if is_plain(target, source):
        move([(target.data_ptr(), source.data_ptr(), target.numel() * target.element_size())])
    elif target.is_inference():
        with torch.inference_mode():
            target.copy_(source)
    else:
        target.copy_(source)


def copy_all(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy (target, source) pairs; what is plain is moved by up to ``torch.get_num_threads()`` threads."""
    moves: list[Move] = []
    for target, source in pairs:
        if is_plain(target, source):
            moves.append((target.data_ptr(), source.data_ptr(), target.numel() * target.element_size()))
        else:
            copy(target, source)
    move(moves)


def move(moves: Sequence[Move]) -> None:
    total = sum(nbytes for _, _, nbytes in moves)
    threads = min(torch.get_num_threads(), _MAX_THREADS) if total >= _PARALLEL_BYTES else 1
    if threads <= 1:
        _run(moves)
        return
    shares: list[list[Move]] = [[]]
    room = -(-total // threads)
    for target, source, nbytes in moves:
        done = 0
        while done < nbytes:
            part = min(nbytes - done, room, _CHUNK_BYTES)
            shares[-1].append((target + done, source + done, part))
            done, room = done + part, room - part
            if room == 0:
                shares.append([])
                room = -(-total // threads)
    with _pool_lock:  # a pool that is closed meanwhile runs what it was given before
        pool = _pool(threads)
        others = [pool.submit(_run, share) for share in shares[1:] if share]
    try:
        _run(shares[0])
    finally:
        _join(others)


def spread(jobs: Sequence[Callable[[], None]]) -> None:
    """Run ``jobs``, which give the interpreter up while they work, on up to ``torch.get_num_threads()`` threads."""
    threads = min(torch.get_num_threads(), _MAX_THREADS)
    if min(threads, len(jobs)) <= 1:
        _run_jobs(jobs)
        return
    with _pool_lock:
        pool = _pool(threads)
        others = [pool.submit(_run_jobs, jobs[turn::threads]) for turn in range(1, min(threads, len(jobs)))]
    try:
        _run_jobs(jobs[::threads])
    finally:
        _join(others)


def _run_jobs(jobs: Iterable[Callable[[], None]]) -> None:
    for job in jobs:
        job()


def _join(others: Sequence[Future[None]]) -> None:
    """Nobody writes any more when this returns or raises: the caller may free or reuse both sides then."""
    interrupt: KeyboardInterrupt | None = None
    while True:
        try:
            wait(others)
            break
        except KeyboardInterrupt as exc:
            interrupt = exc
    if interrupt is not None:
        raise interrupt
    for other in others:
        other.result()


def _run(moves: Iterable[Move]) -> None:
    for target, source, nbytes in moves:
        ctypes.memmove(target, source, nbytes)  # gives the interpreter up while it copies


def close_pools() -> None:
    """End the threads; a later copy starts new ones. Called when this process's last endpoint closes."""
    with _pool_lock:
        pools = [pool for (pid, _), pool in _pools.items() if pid == os.getpid()]
        _pools.clear()
    for pool in pools:
        pool.shutdown(wait=True)


def _pool(threads: int) -> ThreadPoolExecutor:
    key = (os.getpid(), threads)  # a forked child has none of its parent's threads
    pool = _pools.get(key)
    if pool is None:
        pool = _pools[key] = ThreadPoolExecutor(threads - 1, thread_name_prefix="mx-rl-copy")
    return pool
