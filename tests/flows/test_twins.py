"""Awaitable twins: the event loop runs on, a cancel leaves the old version, and a task's holds are its own."""

import asyncio
import threading
import time

import pytest
import torch

from mx_rl import Subscriber
from mx_rl.errors import HoldTimeout, NotReady
from tests.support.local import FAST


@pytest.fixture
def target():
    return {"w": torch.zeros(5000)}


@pytest.fixture
def sub(registry, target, gate):
    with Subscriber("p", target, registry=registry, options=FAST, before_install=gate.before) as sub:
        yield sub


class Gate:
    """A ``before_install`` hook that stops an install until it is opened."""

    def __init__(self):
        self.reached, self.open = threading.Event(), threading.Event()
        self.open.set()

    def before(self, old, new):
        self.reached.set()
        assert self.open.wait(10)


@pytest.fixture
def gate():
    return Gate()


async def eventually(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


async def cancelled(task):
    """Cancel it; how long it took to end."""
    begun = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return time.monotonic() - begun


def test_every_call_has_a_twin_that_does_the_same(registry, weights, target, pub, sub):
    async def main():
        version = await pub.async_publish(step=3)
        assert (await pub.async_wait(version, replicas=0, timeout=5)).ready
        report = await sub.async_sync(timeout=10)
        assert (report.version, report.step) == (version.number, 3)
        assert await sub.async_latest() == await pub.async_latest() == version.number
        second = await pub.async_publish()
        await pub.async_wait(second, replicas=0, timeout=5)
        staged = await sub.async_stage(timeout=5)
        assert sub.staged == second.number
        async with sub.async_hold() as held:
            assert held == version.number
        assert (await staged.async_install(timeout=5)).version == second.number
        await sub.async_pause()
        assert not sub.ready
        sub.resume()

    asyncio.run(main())


def test_the_loop_runs_on_while_a_sync_waits(pub, sub):
    async def main():
        task = asyncio.create_task(sub.async_sync(timeout=0.5))
        ticks = 0
        while not task.done():
            await asyncio.sleep(0.01)
            ticks += 1
        assert ticks > 10
        with pytest.raises(NotReady):
            await task

    asyncio.run(main())


def test_a_sync_cancelled_while_it_waits_for_a_version_ends_soon_and_the_next_works(pub, sub, target):
    async def main():
        task = asyncio.create_task(sub.async_sync(timeout=60))
        await eventually(lambda: sub._current is not None)
        assert await cancelled(task) < 3
        assert sub.version is None
        version = pub.publish()
        assert (await sub.async_sync(timeout=10)).version == version.number

    asyncio.run(main())


def test_a_sync_cancelled_while_bytes_move_leaves_the_old_version(registry, weights, target, pub, sub, monkeypatch):
    from mx_rl.fetch import Fetch

    moving, step = threading.Event(), Fetch._step

    def stuck(self):
        moving.set()
        return False

    async def main():
        first = pub.publish()
        await sub.async_sync(timeout=10)
        weights["w"].fill_(2.0)
        second = pub.publish()
        monkeypatch.setattr(Fetch, "_step", stuck)
        task = asyncio.create_task(sub.async_sync(at_least=second.number, timeout=60))
        await eventually(moving.is_set)
        assert await cancelled(task) < 3
        assert sub.version == first.number
        assert sub.ready
        assert target["w"].eq(0).all()
        monkeypatch.setattr(Fetch, "_step", step)
        assert (await sub.async_sync(timeout=10)).version == second.number
        assert not pub.wait(second, timeout=5).failed, "a cancel is no failure of the version"

    asyncio.run(main())


def test_a_sync_cancelled_while_it_waits_for_holds_leaves_the_old_version(pub, sub, target):
    async def main():
        pub.wait(pub.publish(), replicas=0)
        async with sub.async_hold():
            task = asyncio.create_task(sub.async_sync(timeout=60))
            await eventually(lambda: sub._holds._shut_by is not None)
            assert await cancelled(task) < 3
        assert sub.version is None
        async with sub.async_hold(timeout=1):
            pass
        assert (await sub.async_sync(timeout=10)).kind == "full"

    asyncio.run(main())


def test_a_sync_cancelled_in_the_hook_before_the_vote_leaves_the_old_version(pub, sub, target, gate):
    async def main():
        pub.wait(pub.publish(), replicas=0)
        gate.open.clear()
        task = asyncio.create_task(sub.async_sync(timeout=60))
        await eventually(gate.reached.is_set)
        task.cancel()
        await asyncio.sleep(0)
        gate.open.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert sub.version is None
        assert sub._taint is None
        assert (await sub.async_sync(timeout=10)).kind == "full"

    asyncio.run(main())


def test_a_cancel_after_the_vote_is_too_late_and_the_report_is_returned(registry, weights, target, pub):
    reached, go = threading.Event(), threading.Event()

    def after(old, new):
        reached.set()
        assert go.wait(10)

    async def main():
        with Subscriber("p", target, registry=registry, options=FAST, after_install=after) as sub:
            version = pub.publish()
            task = asyncio.create_task(sub.async_sync(timeout=60))
            await eventually(reached.is_set)
            task.cancel()
            await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.sleep(0.01)
            go.set()
            report = await task
            assert report.version == sub.version == version.number
            assert sub.ready

    asyncio.run(main())


def test_a_sync_inside_a_hold_of_its_task_does_not_wait_for_that_hold(pub, sub):
    async def main():
        version = pub.publish()
        async with sub.async_hold() as before:
            assert before is None
            async with sub.async_hold():  # they nest
                assert (await sub.async_sync(timeout=5)).version == version.number
        assert sub._holds.count == 0

    asyncio.run(main())


def test_the_hold_of_another_task_is_waited_for(pub, sub, target, weights):
    async def main():
        first = pub.publish()
        await sub.async_sync(timeout=5)
        second = pub.publish()
        inside, leave = asyncio.Event(), asyncio.Event()

        async def generate():
            async with sub.async_hold() as version:
                inside.set()
                await leave.wait()
                assert sub.version == version == first.number

        worker = asyncio.create_task(generate())
        await inside.wait()
        with pytest.raises(HoldTimeout):
            await sub.async_sync(at_least=second.number, timeout=0.3)
        leave.set()
        await worker
        assert (await sub.async_sync(timeout=5)).version == second.number

    asyncio.run(main())


def test_a_child_task_does_not_act_for_its_parent(pub, sub):
    """A child's sync must wait for what its parent computes, though it inherits the parent's context."""

    async def main():
        pub.wait(pub.publish(), replicas=0)
        async with sub.async_hold():
            with pytest.raises(HoldTimeout):
                await asyncio.create_task(sub.async_sync(timeout=0.3))

    asyncio.run(main())


@pytest.mark.parametrize("prefetch", [True, False])
def test_four_tasks_generate_while_many_versions_arrive_and_no_output_is_mixed(
    registry, weights, target, pub, prefetch
):
    async def main():
        with Subscriber("p", target, registry=registry, options=FAST, prefetch=prefetch) as sub:
            first = pub.publish().number
            await sub.async_sync(at_least=first, timeout=10)
            stop, faults = asyncio.Event(), []

            async def generate():
                last = 0
                while not stop.is_set():
                    async with sub.async_hold() as version:
                        seen = set(target["w"][::7].tolist())
                        await asyncio.sleep(0)
                        seen |= set(target["w"].unique().tolist())
                        if seen != {float(version - first)} or version < last:
                            faults.append((version, seen))
                        last = version

            workers = [asyncio.create_task(generate()) for _ in range(4)]
            for value in range(1, 51):
                weights["w"].fill_(float(value))
                version = await pub.async_publish()
                await sub.async_sync(at_least=version, timeout=10)
            stop.set()
            await asyncio.gather(*workers)
            assert not faults
            assert sub.version == first + 50

    asyncio.run(main())


def test_a_hold_that_was_entered_as_its_task_was_cancelled_is_left_again(pub, sub):
    entered, cancelled_already = threading.Event(), threading.Event()
    enter = sub._holds.enter

    def late(patience):
        who = enter(patience)
        entered.set()
        assert cancelled_already.wait(5)
        return who

    async def body():
        async with sub.async_hold():
            pytest.fail("it was cancelled")

    async def main():
        sub._holds.enter, sub._holds.try_enter = late, lambda: None
        task = asyncio.create_task(body())
        await eventually(entered.is_set)
        task.cancel()
        await asyncio.sleep(0)
        cancelled_already.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert sub._holds.count == 0

    asyncio.run(main())
