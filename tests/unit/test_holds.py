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


def test_a_hold_is_open_again_after_its_safe_point_though_the_wait_for_an_install_is_cut_short(monkeypatch):
    monkeypatch.setattr("mx_rl.holds._REOPEN_S", 0.05)
    holds, shut, leave = Holds(), threading.Event(), threading.Event()

    def install() -> None:
        with holds.shut(_soon()):
            shut.set()
            leave.wait(10)

    def interrupt(*_: object) -> bool:
        raise KeyboardInterrupt

    me = holds.enter(_soon())
    installing = threading.Thread(target=install)
    with pytest.raises(HoldTimeout, match="enter anew"), holds.suspended(Patience(0.05)):
        installing.start()
        assert shut.wait(5)
    assert holds.count == 1
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt), holds.suspended(_soon()):
        patched.setattr(Patience, "wait_for", interrupt)
    assert holds.count == 1
    leave.set()
    installing.join(5)
    with holds.suspended(_soon()):
        assert holds.count == 0
    holds.leave(me)
    assert holds.count == 0
    holds.leave(me)  # once too often
    assert holds.count == 0
