"""The command line: ``mx-rl status`` looks at a registry, ``mx-rl doctor`` at this machine."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from mx_rl import __version__
from mx_rl.config import registry_url
from mx_rl.errors import InvalidArgument, MxRLError


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: fine; 1: something needed does not work; 2: wrong arguments (argparse's own)."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
    except (MxRLError, TimeoutError) as exc:
        print(f"mx-rl: {exc}", file=sys.stderr)
        code = 1
    except BrokenPipeError:  # `mx-rl status | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    return code


def console() -> None:
    """The entry point: leaves without waiting for what was given up, which Ray's own clean-up would."""
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mx-rl", description="The weight plane for RL post-training on Ray.")
    parser.add_argument("--version", action="version", version=f"mx-rl {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    status = commands.add_parser(
        "status",
        help="policies, versions and replicas of a registry",
        description="Policies of a registry, or all about one: who trains it, which versions there are, who runs which.",
    )
    status.add_argument("policy", nargs="?", help="all policies in short where it is left out")
    status.set_defaults(run=_status)

    doctor = commands.add_parser(
        "doctor",
        help="what this machine can do, and the cure for what it cannot",
        description="Check versions, move bytes between two processes over NIXL, look at limits, GPU, Ray and registry.",
    )
    doctor.set_defaults(run=_doctor)

    for command in (status, doctor):
        command.add_argument(
            "--registry",
            metavar="URL",
            help='"ray" (default: every registry of the cluster of RAY_ADDRESS, else of this machine) or "ray://name"; '
            "MXRL_REGISTRY is read where it is not given",
        )
        command.add_argument("--json", action="store_true", help="for programs")
        command.add_argument("--timeout", type=float, default=30.0, metavar="S", help="for each wait (default: 30)")
    return parser


def _status(options: argparse.Namespace) -> int:
    from mx_rl.display import policies_text, policy_text

    found = _views(options.registry or registry_url() or "ray", options.policy, options.timeout)
    if options.json:
        print(json.dumps(found, indent=2))
    elif not found:
        print("no registry runs on this cluster: the first publisher or subscriber starts one")
    elif options.policy is not None:
        print("\n\n".join(policy_text(view) for entry in found for view in entry["policies"]))
    else:
        for index, entry in enumerate(found):
            if index:
                print()
            print(f"registry {entry['registry']} ({entry['where']})")
            print(policies_text(entry["policies"]) if entry["policies"] else "no policy is known")
    if options.policy is not None and found and not any(entry["policies"] for entry in found):
        raise InvalidArgument(f"no registry of this cluster knows a policy {options.policy!r}")
    return 0 if found else 1


def _views(url: str, policy: str | None, timeout: float) -> list[dict[str, Any]]:
    """One entry a registry: its URL, where it is, and views of the policies asked for."""
    from mx_rl.clusters import find_registries, join_cluster
    from mx_rl.deadline import within
    from mx_rl.status import Connection

    if url != "ray" and not url.startswith("ray://"):
        raise InvalidArgument(f'registry {url!r} cannot be seen from another process: use "ray" or "ray://name"')
    address = join_cluster(timeout=timeout)
    entries = []
    for door in within(timeout, lambda: find_registries(url), what=f"Ray at {address}"):
        with Connection(door) as connection:
            names = connection.policies(timeout=timeout)
            views = [connection.status(name, timeout=timeout) for name in names if policy in (None, name)]
        entries.append({"registry": door.url, "where": f"Ray at {address}, {door.namespace()}", "policies": views})
    return entries


def _doctor(options: argparse.Namespace) -> int:
    from mx_rl.display import findings_text
    from mx_rl.doctor import examine

    findings = examine(options.registry, timeout=options.timeout)
    if options.json:
        print(json.dumps([one.as_dict() for one in findings], indent=2))
    else:
        print(findings_text(findings))
    return 1 if any(one.state == "fail" for one in findings) else 0


if __name__ == "__main__":
    console()
