"""Settings that every test shares, and the processes that tests of real ones are made of."""

import os
import signal

import pytest
from hypothesis import settings

settings.register_profile("mx-rl", deadline=None)  # a busy machine is no failure
settings.load_profile("mx-rl")


@pytest.fixture
def server():
    """A registry that children can reach."""
    from tests.support.socket_registry import RegistryServer

    server = RegistryServer()
    yield server
    server.close()


@pytest.fixture
def children():
    """Children made in a test end with it, whatever happened."""
    from tests.support.procs import Child

    found: list[Child] = []

    def make(*args, **named):
        child = Child(*args, **named)
        found.append(child)
        return child

    yield make
    for child in found:
        if child.process.is_alive():
            os.kill(child.pid, signal.SIGCONT)
    for child in found:
        child.stop()
