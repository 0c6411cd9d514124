"""Driver of a multi-node Ray job.

It is uploaded with the job and needs only Ray and the standard library. The driver reserves the
devices of all nodes in one placement group, so no job gets only part of its devices. It then runs
the supervisor on each node. When all supervisors are done, it prints each node's output after a
marker line.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

_GRACE_S = 10.0
"""Seconds that the other nodes may continue after one node has failed."""


def main() -> int:
    """Run the job; return 0 if it succeeded on every node, else 1."""
    job = json.loads(Path("job.json").read_text())
    ray.init(log_to_driver=False)
    bundle: dict[str, float] = job["bundle"]
    group = placement_group([bundle] * job["nodes"], strategy="STRICT_SPREAD")
    ray.get(group.ready())
    share: dict[str, Any] = {
        "num_cpus": bundle.get("CPU", 0),
        "num_gpus": bundle.get("GPU", 0),
        "resources": {
            name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")
        },
        "max_retries": 0,
    }

    def run_on_node(node: int, function: Any) -> Any:
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node)
        return ray.remote(**share, scheduling_strategy=place)(function)

    address, port = ray.get(run_on_node(0, _rendezvous).remote())
    waiting = [
        run_on_node(node, _run_node).remote(node, address, port) for node in range(job["nodes"])
    ]
    node_of = {reference: node for node, reference in enumerate(waiting)}
    texts: dict[int, str] = {}
    failed = False
    while waiting:
        done, waiting = ray.wait(waiting, timeout=_GRACE_S if failed else None)
        if not done:
            for reference in waiting:
                ray.cancel(reference, force=True)
            break
        for reference in done:
            text, code = _result_of(reference)
            texts[node_of[reference]] = text
            failed = failed or code != 0
    for node in sorted(texts):
        print(f"\n<<<hp-tool:{json.dumps({'node': node})}:hp-tool>>>\n{texts[node]}", flush=True)
    return int(failed)


def _result_of(reference: Any) -> tuple[str, int]:
    try:
        text, code = ray.get(reference)
    except ray.exceptions.RayError as error:
        return f"{type(error).__name__}: {error}\n", 1
    return text, code


def _rendezvous() -> tuple[str, int]:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return ray.util.get_node_ip_address(), probe.getsockname()[1]  # type: ignore[no-untyped-call]


def _run_node(node: int, address: str, port: int) -> tuple[str, int]:
    variables = {
        "PET_MASTER_ADDR": address,
        "PET_MASTER_PORT": str(port),
        "PET_NODE_RANK": str(node),
    }
    command = [sys.executable, "supervisor.py", "--attached", "."]
    done = subprocess.run(
        command,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    return done.stdout[-(2**24) :], done.returncode


if __name__ == "__main__":
    sys.exit(main())
