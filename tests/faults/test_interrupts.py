"""Ctrl-C in the middle of a call: KeyboardInterrupt comes out, and the objects can be used on."""

import pytest

from tests.support.interrupted import Interrupted
from tests.support.procs import Child


@pytest.fixture
def child():
    with Child(Interrupted) as child:
        assert child.call("works", 1.0)
        yield child


@pytest.mark.parametrize("method", ["in_publish", "in_wait", "in_sync_that_waits"])
def test_a_call_that_is_interrupted_raises_it_and_the_next_ones_work(child, method):
    assert child.call(method) == "KeyboardInterrupt"
    assert child.call("works", 2.0)
    assert child.call("works", 3.0)


def test_a_publish_interrupted_while_it_waits_for_its_world_counts_as_a_call(child):
    assert child.call("in_publish_of_an_incomplete_world") == ("KeyboardInterrupt", True)


def test_an_interrupt_before_the_install_leaves_the_old_version(child):
    assert child.call("in_hook", "before_install") == ("KeyboardInterrupt", True)
    assert child.call("works", 2.0)


def test_an_interrupt_in_the_install_is_raised_as_such_and_taints_until_the_next_sync(child):
    assert child.call("in_hook", "after_install") == ("KeyboardInterrupt", False)
    assert child.call("works", 2.0)


def test_an_install_whose_acknowledgement_was_interrupted_is_told_later(child):
    assert child.call("in_acknowledgement") == ("KeyboardInterrupt", True)
    assert child.call("works", 2.0)
