"""A registry that children can reach, and children that end with their test."""

import os
import signal

import pytest

from tests.support.procs import Child
from tests.support.socket_registry import RegistryServer


@pytest.fixture
def server():
    server = RegistryServer()
    yield server
    server.close()


@pytest.fixture
def children():
    """Children made in a test end with it, whatever happened."""
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
