"""No install while a hold is open, and no new hold while an install waits."""

import threading
import time

import pytest

from mx_rl.errors import HoldTimeout
from mx_rl.holds import Holds, owner
from mx_rl.patience import Patience


def _soon() -> Patience:
    return Patience(5.0)


def test_an_install_waits_for_open_holds_and_says_how_many_stayed():
    holds, inside, leave = Holds(), threading.Event(), threading.Event()

    def compute() -> None:
        holds.enter(Patience(1))
        inside.set()
        leave.wait(10)
        holds.leave(owner())

    worker = threading.Thread(target=compute)
    worker.start()
    inside.wait(5)
    with pytest.raises(HoldTimeout) as caught, holds.shut(Patience(0.05)):
        pass
    assert caught.value.holds == 1
    leave.set()
    worker.join(5)
    with holds.shut(_soon()):
        assert holds.count == 0


def test_no_new_hold_begins_while_an_install_drains_so_that_it_cannot_starve():
    holds, stop = Holds(), threading.Event()

    def generate() -> None:
        while not stop.is_set():
            holds.enter(Patience(5))
            time.sleep(0.001)
            holds.leave(owner())

    workers = [threading.Thread(target=generate) for _ in range(4)]
    for worker in workers:
        worker.start()
    try:
        for _ in range(20):
            with holds.shut(_soon()):
                assert holds.count == 0
    finally:
        stop.set()
        for worker in workers:
            worker.join(5)


def test_an_install_inside_ones_own_hold_is_that_threads_safe_point():
    holds = Holds()
    holds.enter(Patience(1))
    with holds.shut(Patience(0.5)):
        pass
    holds.leave(owner())
    assert holds.count == 0


def test_a_hold_that_is_refused_leaves_nothing_behind():
    holds = Holds()
    refused: list[BaseException] = []

    def late() -> None:
        try:
            holds.enter(Patience(0.05))
        except HoldTimeout as exc:
            refused.append(exc)

    with holds.shut(_soon()):
        worker = threading.Thread(target=late)
        worker.start()
        worker.join(5)
    assert len(refused) == 1
    assert holds.count == 0
