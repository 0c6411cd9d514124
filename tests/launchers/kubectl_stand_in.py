#!/usr/bin/env python3
"""Stands in for kubectl and the Job controller, for the launcher's protocol alone: objects are files, pods are processes of
this host. What a manifest may say is not its business: that is held against Kubernetes' own schema.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent  # a copy of this file stands in each test's own folder
INDEX = "batch.kubernetes.io/job-completion-index"


def read(kind: str, name: str) -> dict[str, Any] | None:
    path = ROOT / f"{kind}.{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def write(content: dict[str, Any]) -> None:
    path = ROOT / f"{content['kind'].lower()}.{content['metadata']['name']}.json"
    path.with_suffix(".tmp").write_text(json.dumps(content))
    path.with_suffix(".tmp").replace(path)


def start_pods(job: dict[str, Any]) -> None:
    """As soon as the ConfigMap that they mount is there."""
    name = job["metadata"]["name"]
    config = read("configmap", name)
    if config is None or (ROOT / f"pods.{name}").exists() or job["spec"].get("suspend"):
        return
    pods = ROOT / f"pods.{name}"
    pods.mkdir()
    for file, text in config["data"].items():
        (pods / file).write_text(text)
    container = job["spec"]["template"]["spec"]["containers"][0]
    mount = container["volumeMounts"][0]["mountPath"]
    for index in range(job["spec"]["completions"]):
        values = {each["name"]: each.get("value", str(index)) for each in container["env"]} | {"PET_MASTER_ADDR": "127.0.0.1"}
        command = [word.replace(mount, str(pods)) for word in container["command"]]
        log = (pods / f"log.{index}").open("wb")
        # A shell notes the exit code, since nobody waits for the process.
        shell = ["/bin/sh", "-c", '"$@"; echo $? > "$0"', str(pods / f"code.{index}"), *command]
        kept = {"PATH": os.environ["PATH"], **values}
        process = subprocess.Popen(shell, env=kept, stdout=log, stderr=log, start_new_session=True)
        (pods / f"pid.{index}").write_text(str(process.pid))


def end_pods(name: str) -> None:
    for path in (ROOT / f"pods.{name}").glob("pid.*"):
        if not path.with_name(path.name.replace("pid", "code")).exists():
            children = subprocess.run(["pgrep", "-P", path.read_text()], capture_output=True, text=True, check=False).stdout
            for pid in children.split():  # the container's first process, as kubelet does
                os.kill(int(pid), signal.SIGTERM)


def with_status(job: dict[str, Any]) -> dict[str, Any]:
    pods = ROOT / f"pods.{job['metadata']['name']}"
    codes = [int(path.read_text() or 0) for path in pods.glob("code.*") if path.read_text()]
    active = job["spec"].get("completions", 1) - len(codes) if pods.exists() else 0
    status: dict[str, Any] = {"active": active, "ready": active}
    if active:
        status["startTime"] = datetime.fromtimestamp(pods.stat().st_ctime, UTC).isoformat()
    if codes and all(code == 0 for code in codes) and not active:
        status["conditions"] = [{"type": "Complete", "status": "True"}]
    elif any(codes) and not job["spec"].get("suspend"):
        status["conditions"] = [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}]
        end_pods(job["metadata"]["name"])
    return {**job, "status": status}


def main() -> int:
    words = [word for word in sys.argv[1:] if not word.startswith("--namespace")]
    match words:
        case ["get", "job", name, "--ignore-not-found", "-o", "json"]:
            job = read("job", name)
            print(json.dumps(with_status(job)) if job else "")
        case ["get", "jobs", "--selector=hp-tool/job", "-o", "json"]:
            print(json.dumps({"items": [with_status(json.loads(path.read_text())) for path in ROOT.glob("job.*.json")]}))
        case ["create", "-f", "-", "-o", "json"]:
            job = json.load(sys.stdin)
            if read("job", job["metadata"]["name"]):
                print("Error from server (AlreadyExists)", file=sys.stderr)
                return 1
            job["metadata"]["uid"] = "uid-1"
            write(job)
            print(json.dumps(job))
        case ["create", "--dry-run=server", "-f", "-"]:
            job = json.load(sys.stdin)
            if (ROOT / "no-admission").exists():
                print(f"Error from server (Forbidden): jobs {job['metadata']['name']} is forbidden: no quota", file=sys.stderr)
                return 1
        case ["auth", "can-i", "create", kind]:  # kubectl fails with its no
            allowed = not (ROOT / f"forbidden.{kind}").exists()
            print("yes" if allowed else "no")
            return 0 if allowed else 1
        case ["apply", "-f", "-"]:
            content = json.load(sys.stdin)
            assert content["metadata"]["ownerReferences"][0]["uid"] == "uid-1"
            write(content)
            job = read("job", content["metadata"]["name"])
            assert job is not None
            start_pods(job)
        case ["patch", "job", name, "--type=merge", "--patch", patch]:
            job = read("job", name)
            assert job is not None
            said = json.loads(patch)
            job["metadata"].setdefault("annotations", {}).update(said["metadata"]["annotations"])
            job["spec"] |= said["spec"]
            write(job)
            end_pods(name)
        case ["get", "pods", "--selector=hp-tool/job", "-o", "json"]:
            print(json.dumps({"items": [json.loads(path.read_text()) for path in ROOT.glob("waiting.*.json")]}))
        case ["get", "pods", selector, "-o", "json"] if waiting := list(ROOT.glob("waiting.*.json")):
            print(json.dumps({"items": [json.loads(path.read_text()) for path in waiting]}))
        case ["get", "pods", selector, "-o", "json"]:
            name = selector.rpartition("=")[2]
            found = sorted((ROOT / f"pods.{name}").glob("pid.*"))
            items = [
                {"metadata": {"name": f"{name}-{i}", "annotations": {INDEX: str(i)}}, "status": {}} for i in range(len(found))
            ]
            print(json.dumps({"items": items}))
        case ["logs", pod, "--container=run", _]:
            name, _, index = pod.rpartition("-")
            sys.stdout.write((ROOT / f"pods.{name}" / f"log.{index}").read_text())
        case _:
            print(f"unknown command {words}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
