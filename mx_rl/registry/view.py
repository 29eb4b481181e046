"""The state of a policy as JSON, for people, the command line and tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from mx_rl.registry.policy import Epoch, Policy, Replica, Saved, Version
from mx_rl.registry.worlds import unclaimed


def view_all(policies: Mapping[str, Policy], saved: Mapping[str, Saved]) -> bytes:
    names = sorted(policies.keys() | saved.keys())
    return msgspec.json.encode({"policies": {name: {"floor": _floor(name, policies, saved)} for name in names}})


def _floor(name: str, policies: Mapping[str, Policy], saved: Mapping[str, Saved]) -> int:
    return policies[name].floor if name in policies else saved[name].floor


def view(policy: Policy, boot: int, now: float) -> bytes:
    """Ages and leases in seconds; ``available`` names versions of which a living trainer or holder has every byte."""
    return msgspec.json.encode(
        {
            "policy": policy.name,
            "boot": boot,
            "floor": policy.floor,
            "latest": policy.floor,
            "epoch": _epoch(policy, policy.epoch, now),
            "pending": {
                name: {"size": world.size, "claimed": {str(rank): x.incarnation for rank, x in world.claims.items()}}
                for name, world in policy.pending.items()
            },
            "unclaimed": list(unclaimed(policy, now)),
            "staging": _staging(policy.epoch),
            "versions": [_version(policy, policy.versions[number], now) for number in sorted(policy.versions)],
            "replicas": [_replica(policy, replica, now) for _, replica in sorted(policy.replicas.items())],
            "gone": policy.gone,
            "leases": [
                {
                    "replica": name,
                    "version": lease.number,
                    "left_s": round(max(lease.until - now, 0.0), 3),
                    "trainer": lease.trainer,
                    "from": list(lease.parents),
                }
                for name, lease in sorted(policy.leases.items())
            ],
            "hold": None
            if policy.hold is None
            else {
                "replica": policy.hold.replica,
                "version": policy.hold.number,
                "left_s": round(max(policy.hold.until - now, 0.0), 3),
            },
            "counts": {
                "members": len(policy.members),
                "blobs": len(policy.blobs),
                "blob_bytes": sum(len(blob.data) for blob in policy.blobs.values()),
                "fenced": len(policy.fenced),
                "agents": len(policy.owners),
            },
        }
    )


def _epoch(policy: Policy, epoch: Epoch | None, now: float) -> dict[str, Any] | None:
    if epoch is None:
        return None
    return {
        "number": epoch.number,
        "world": epoch.world,
        "base": epoch.base,
        "rejoined": epoch.rejoined,
        "superseded": epoch.superseded,
        "seats": [
            {"rank": rank, "incarnation": incarnation, "alive": policy.alive(incarnation, now)}
            for rank, incarnation in enumerate(epoch.seats)
        ],
    }


def _staging(epoch: Epoch | None) -> list[dict[str, Any]]:
    if epoch is None:
        return []
    return [
        {"k": k, "version": item.number, "missing": list(epoch.missing(item))}
        for k, item in sorted(epoch.staging().items())
    ]


def _version(policy: Policy, version: Version, now: float) -> dict[str, Any]:
    record = version.record
    held = {name for key, names in policy.holders.items() if key[0] == record.identity for name in names}
    holders = sorted(
        name for name in held if all(policy.source_lives(source, now) for source in policy.replicas[name].held)
    )
    trainer = policy.trainer_has(version, now)
    return {
        "number": record.number,
        "epoch": record.epoch,
        "step": record.step,
        "kind": record.kind,
        "layout": record.layout,
        "wire_bytes": record.wire_bytes,
        "offered": version.offered,
        "available": version.offered and (trainer or bool(holders)),
        "trainer": trainer,
        "holders": holders,
    }


def _replica(policy: Policy, replica: Replica, now: float) -> dict[str, Any]:
    members = [policy.members.get(incarnation) for incarnation in replica.incarnations]
    left = [policy.rules.lease_s - (now - member.seen) if member is not None else 0.0 for member in members]
    return {
        "replica": replica.name,
        "version": replica.number,
        "ready": policy.ready(replica, now),
        "state": replica.said,
        "reason": replica.reason,
        "failed": replica.failed,
        "incarnations": list(replica.incarnations),
        "serves": bool(replica.held),
        "lease_left_s": round(max(min(left, default=0.0), 0.0), 3),
    }
