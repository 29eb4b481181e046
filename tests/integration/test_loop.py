"""Where a user's coroutines and exports run in an actor, and how they end; the loops alone, without a cluster."""

import asyncio
import gc
import threading

import pytest

from mx_rl.errors import Closed
from mx_rl.ray import loop as loops
from mx_rl.ray.loop import Loop


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of the deaf one, when it is freed
@pytest.mark.parametrize("deaf", [False, True])
def test_whoever_waits_for_a_coroutine_is_told_when_the_loop_ends(monkeypatch, deaf):
    monkeypatch.setattr(loops, "_END_S", 0.2)
    loop, begun, told = Loop(), threading.Event(), []

    async def endless():
        begun.set()
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                if not deaf:
                    raise

    def wait():
        with pytest.raises(Closed) as found:
            loop.run(endless)
        told.append(found.value)

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    assert begun.wait(5)
    loop.stop()
    waiter.join(5)
    assert len(told) == 1
    assert not any(thread.name == "mx-rl-user-loop" for thread in threading.enumerate())
    with pytest.raises(Closed):
        loop.run(endless)
    loop.stop()
    told.clear()
    gc.collect()


def test_a_coroutine_that_cleans_up_is_awaited_and_its_loop_is_closed():
    loop, ends = Loop(), []

    async def leave_one_behind():
        begun = asyncio.Event()

        async def task():
            try:
                begun.set()
                await asyncio.sleep(3600)
            finally:
                await asyncio.sleep(0)
                ends.append(asyncio.get_running_loop())

        asyncio.current_task().kept = asyncio.create_task(task())
        await begun.wait()

    loop.run(leave_one_behind)
    loop.stop()
    assert [end.is_closed() for end in ends] == [True]


def test_steps_of_an_async_iterable_run_on_the_loop_of_the_coroutines():
    loop, seen = Loop(), []

    async def here():
        return asyncio.get_running_loop()

    async def export():
        for index in range(3):
            await asyncio.sleep(0)
            seen.append(asyncio.get_running_loop())
            yield index

    assert list(loop.drawn(loop.run(export))) == [0, 1, 2]
    assert set(seen) == {loop.run(here)}
    assert list(loop.drawn(range(3))) == [0, 1, 2]
    loop.stop()
