"""Several nodes: where ranks lie, and what a lost node costs."""

from __future__ import annotations

import pytest
import ray
from ray.cluster_utils import Cluster

from mx_rl.errors import StartTimeout
from mx_rl.ray import RolloutFleet, TrainerGroup
from tests.integration.workers import Fill, GlooEcho, GlooFill
from tests.support.local_ray import eventually, nothing_left, process_gone, workers_find_the_tree

POLICY = "nodes"


@pytest.fixture(scope="module")
def cluster():
    """A head for the trainer, and two nodes that rollouts ask for by a resource."""
    with workers_find_the_tree():
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        try:
            for _ in range(2):
                cluster.add_node(num_cpus=2, resources={"rollout": 2})
            ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
            yield cluster
            ray.shutdown()
        finally:
            cluster.shutdown()


def test_ranks_of_a_world_spread_over_nodes_meet(cluster):
    with TrainerGroup(GlooFill, policy="spread", world_size=3, placement="STRICT_SPREAD") as group:
        rows = group.call("where")
        assert len({row["node_id"] for row in rows}) == 3
        assert [row["local_rank"] for row in rows] == [0, 0, 0]
        assert group.call("sum_of_ranks") == [6.0, 6.0, 6.0]
        with pytest.raises(StartTimeout):
            TrainerGroup(Fill, policy="spread", world_size=4, placement="STRICT_SPREAD", timeout=1)


def test_a_replica_on_a_lost_node_is_replaced_on_another(cluster):
    with (
        TrainerGroup(Fill, policy=POLICY, num_cpus=1) as trainer,
        RolloutFleet(
            GlooEcho, policy=POLICY, ranks=2, num_cpus=1, resources={"rollout": 1}, placement="STRICT_SPREAD"
        ) as fleet,
    ):
        trainer.call("train", 5.0)
        number = trainer.publish().number
        assert fleet.sync(at_least=number).ok
        ((name, row),) = fleet.status()["replicas"].items()
        assert len(set(row["node_ids"])) == 2
        assert fleet.call("sum_of_ranks") == {name: [3.0, 3.0]}

        lost = next(node for node in cluster.worker_nodes if node.node_id == row["node_ids"][1])
        cluster.remove_node(lost, allow_graceful=False)
        fresh = cluster.add_node(num_cpus=2, resources={"rollout": 2}, wait=False)

        def replaced():
            rows = fleet.status()["replicas"]
            return name not in rows and all(each["ready"] for each in rows.values()) and rows

        ((new, there),) = eventually(replaced, timeout=60, what="a replacement on the new node").items()
        assert fresh.node_id in there["node_ids"]
        assert lost.node_id not in there["node_ids"]
        assert all(process_gone(pid) for pid in row["pids"]), "the surviving rank went with its replica"
        assert fleet.call("weigh") == {new: [[5.0], [5.0]]}
        assert fleet.map("echo", [1])[0]["version"] == number
    nothing_left()
