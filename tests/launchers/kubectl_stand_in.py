#!/usr/bin/env -S python3 -I -S
"""Stands in for kubectl and the Job controller, for the launcher's protocol alone: objects are
files, pods are processes of this host. What a manifest may say is not its business: that is held
against Kubernetes' own schema.
"""

from __future__ import annotations

import json
import os
import shutil
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


def job_of(workload: dict[str, Any]) -> dict[str, Any]:
    """The specification of a Job, or of the one in a JobSet."""
    spec = workload["spec"]
    return spec["replicatedJobs"][0]["template"]["spec"] if workload["kind"] == "JobSet" else spec


def start_pods(job: dict[str, Any]) -> None:
    """As soon as the ConfigMap that they mount is there."""
    name = job["metadata"]["name"]
    config = read("configmap", name)
    if (
        config is None
        or (ROOT / f"pods.{name}").exists()
        or job["metadata"].get("deletionTimestamp")
    ):
        return
    pods = ROOT / f"pods.{name}"
    pods.mkdir()
    for file, text in config["data"].items():
        (pods / file).write_text(text)
    container = job_of(job)["template"]["spec"]["containers"][0]
    mount = container["volumeMounts"][0]["mountPath"]
    for index in range(job_of(job)["completions"]):
        values = {each["name"]: each.get("value", str(index)) for each in container["env"]} | {
            "PET_MASTER_ADDR": "127.0.0.1"
        }
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
            children = subprocess.run(
                ["pgrep", "-P", path.read_text()], capture_output=True, text=True, check=False
            ).stdout
            for pid in children.split():  # the container's first process, as kubelet does
                os.kill(int(pid), signal.SIGTERM)


def with_status(job: dict[str, Any]) -> dict[str, Any] | None:
    """None of a job that was deleted, once its pods have ended."""
    pods = ROOT / f"pods.{job['metadata']['name']}"
    codes = [int(path.read_text() or 0) for path in pods.glob("code.*") if path.read_text()]
    active = job_of(job)["completions"] - len(codes) if pods.exists() else 0
    if job["metadata"].get("deletionTimestamp"):
        if active:
            return job
        shutil.rmtree(pods, ignore_errors=True)
        (ROOT / f"{job['kind'].lower()}.{job['metadata']['name']}.json").unlink(missing_ok=True)
        return None
    jobset = job["kind"] == "JobSet"
    status: dict[str, Any] = {"active": active, "ready": active}
    if jobset:
        status = {"replicatedJobsStatus": [{"ready": int(active > 0)}]}
    if active:
        status["startTime"] = datetime.fromtimestamp(pods.stat().st_ctime, UTC).isoformat()
    if codes and all(code == 0 for code in codes) and not active:
        status["conditions"] = [{"type": "Completed" if jobset else "Complete", "status": "True"}]
    elif any(codes):
        status["conditions"] = [
            {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}
        ]
        end_pods(job["metadata"]["name"])
    return {**job, "status": status}


def main() -> int:
    words = [word for word in sys.argv[1:] if not word.startswith("--namespace")]
    match words:
        case ["get", ("job" | "jobset") as kind, name, "--ignore-not-found", "-o", "json"]:
            job = read(kind, name)
            shown = with_status(job) if job else None
            print(json.dumps(shown) if shown else "")
        case ["get", "configmap", name, "--ignore-not-found", "-o", "json"]:
            found = read("configmap", name)
            print(json.dumps(found) if found else "")
        case ["get", ("jobs" | "jobsets") as kinds, "--selector=hp-tool/job", "-o", "json"]:
            jobs = [
                with_status(json.loads(path.read_text()))
                for path in ROOT.glob(f"{kinds[:-1]}.*.json")
            ]
            print(json.dumps({"items": [job for job in jobs if job]}))
        case ["get", "configmaps", "--selector=hp-tool/cancelled", "-o", "json"]:
            print(
                json.dumps(
                    {
                        "items": [
                            json.loads(path.read_text())
                            for path in ROOT.glob("configmap.*-ended.json")
                        ]
                    }
                )
            )
        case ["create", "-f", "-", "-o", "json"]:
            job = json.load(sys.stdin)
            if read(job["kind"].lower(), job["metadata"]["name"]):
                print("Error from server (AlreadyExists)", file=sys.stderr)
                return 1
            job["metadata"] |= {"uid": "uid-1", "creationTimestamp": datetime.now(UTC).isoformat()}
            write(job)
            print(json.dumps(job))
        case ["create", "--dry-run=server", "-f", "-"]:
            job = json.load(sys.stdin)
            if (ROOT / "no-admission").exists():
                print(
                    f"Error from server (Forbidden): jobs {job['metadata']['name']} is forbidden: "
                    "no quota",
                    file=sys.stderr,
                )
                return 1
        case ["auth", "can-i", verb, kind]:  # kubectl fails with its no
            allowed = not (
                (ROOT / f"forbidden.{kind}").exists() or (ROOT / f"forbidden.{verb}").exists()
            )
            print("yes" if allowed else "no")
            return 0 if allowed else 1
        case ["apply", "-f", "-"]:
            content = json.load(sys.stdin)
            assert content["metadata"]["ownerReferences"][0]["uid"] == "uid-1"
            write(content)
            job = read("job", content["metadata"]["name"]) or read(
                "jobset", content["metadata"]["name"]
            )
            if job is not None:  # else it was deleted meanwhile, and what belongs to it goes
                start_pods(job)
        case ["patch", "configmap", name, "--type=merge", "--patch", patch]:
            kept = read("configmap", name)
            assert kept is not None
            said = json.loads(patch)
            kept["metadata"].setdefault("annotations", {}).update(said["metadata"]["annotations"])
            kept["data"] |= said["data"]
            write(kept)
        case [
            "delete",
            ("job" | "jobset") as kind,
            name,
            "--cascade=foreground",
            "--wait=false",
            "--ignore-not-found",
        ]:
            job = read(kind, name)
            if job is not None:
                job["metadata"]["deletionTimestamp"] = datetime.now(UTC).isoformat()
                write(job)
                end_pods(name)
        case ["delete", "configmap", name, "--ignore-not-found"]:
            (ROOT / f"configmap.{name}.json").unlink(missing_ok=True)
        case ["get", "pods", "--selector=hp-tool/job", "-o", "json"]:
            print(
                json.dumps(
                    {
                        "items": [
                            json.loads(path.read_text()) for path in ROOT.glob("waiting.*.json")
                        ]
                    }
                )
            )
        case ["get", "pods", selector, "-o", "json"] if waiting := list(
            ROOT.glob("waiting.*.json")
        ):
            print(json.dumps({"items": [json.loads(path.read_text()) for path in waiting]}))
        case ["get", "pods", selector, "-o", "json"]:
            name = selector.rpartition("=")[2]
            found = sorted((ROOT / f"pods.{name}").glob("pid.*"))
            items = [
                {"metadata": {"name": f"{name}-{i}", "annotations": {INDEX: str(i)}}, "status": {}}
                for i in range(len(found))
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
