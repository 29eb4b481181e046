"""Every kind of tensor in one policy, between separate processes over NIXL, on both lanes of this machine."""

import pytest

from tests.support.kinds import KindsRollout, KindsTrainer, values
from tests.support.model import digest
from tests.support.procs import Child
from tests.support.socket_registry import RegistryServer


@pytest.mark.parametrize("lane", ["shm", "tcp"])
def test_every_kind_of_tensor_arrives_bit_for_bit(lane):
    env = {"UCX_TLS": "tcp"} if lane == "tcp" else {}
    server = RegistryServer()
    trainer, rollout = Child(KindsTrainer, server.path, env=env), Child(KindsRollout, server.path, env=env)
    try:
        for seed in (1, 2):
            number = trainer.call("publish", seed)
            report = rollout.call("sync", number)
            assert report.lane == lane
            assert rollout.call("digests") == {name: digest(tensor) for name, tensor in values(seed).items()}
    finally:
        rollout.stop()
        trainer.stop()
        server.close()
