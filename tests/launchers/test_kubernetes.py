"""The Kubernetes launcher: manifests against Kubernetes' own schema, states as kubectl prints them,
and the contract over a stand-in for kubectl (tests/launchers/kubectl_stand_in.py), since there is
no cluster here.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from hp_tool.cluster.launchers import create, kubernetes
from hp_tool.cluster.launchers.kubernetes import ending, job_state
from hp_tool.cluster.launchers.kubernetes_manifest import merge_patch
from hp_tool.cluster.launchers.options import KubernetesOptions
from hp_tool.domain.jobs import Waiting
from hp_tool.domain.ports import Launcher, Queueing, Timekeeping
from hp_tool.domain.states import JobState
from hp_tool.errors import EngineAwayError, InputError, LauncherError
from tests.launchers.contract import GOOD, LauncherContract, Launching, plan, wait
from tests.launchers.slurm_cluster import until
from tests.profiler.requests import request

GOOD_ON_TWO = (
    "import os, time\nif os.environ['PET_NODE_RANK'] == '1': time.sleep(0.3); raise SystemExit\n"
    + GOOD
)
STAND_IN = Path(__file__).with_name("kubectl_stand_in.py")
OPTIONS: dict[str, Any] = {
    "image": "registry.example/hp-tool:1",
    "gpu": "h100-sxm-80gb",
    "gpus_per_node": 8,
    "max_nodes": 4,
}
FULL: dict[str, Any] = {
    **OPTIONS,
    "namespace": "training",
    "resources": {"memory": "512Gi", "rdma/hca": "8"},
    "node_selector": {"gpu": "h100"},
    "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
    "volume_mounts": [{"name": "data", "mountPath": "/data"}],
    "service_account": "trainer",
    "host_network": True,
}


def over_the_stand_in(folder: Path, **changes: Any) -> Callable[[], Launcher]:
    kubectl = folder / "kubectl"
    shutil.copy(STAND_IN, kubectl)
    kubectl.chmod(0o755)
    given = {
        "gpu": "cpu",
        "gpus_per_node": 1,
        "max_nodes": 2,
        "poll_s": 0.2,
        "python": sys.executable,
        **changes,
    }
    return lambda: create("kubernetes", options={**OPTIONS, **given, "kubectl": str(kubectl)})


class OnKubernetes(Launching):
    @pytest.fixture
    def new_launcher(self, tmp_path: Path) -> Callable[[], Launcher]:
        return over_the_stand_in(tmp_path)


@pytest.mark.long
class TestKubernetesContract(OnKubernetes, LauncherContract):
    """The stand-in starts an interpreter for each question."""


@pytest.mark.components
class TestKubernetesLauncher(OnKubernetes):
    def test_a_cancelled_job_is_deleted_and_its_log_stays(
        self, launcher: Launcher, new_launcher: Callable[[], Launcher], tmp_path: Path
    ) -> None:
        handle = launcher.submit(
            plan("print('half-way', flush=True)\nimport time; time.sleep(300)")
        )
        until(lambda: "half-way" in launcher.output(handle))
        launcher.cancel("job-1")
        assert wait(launcher, handle, until={JobState.CANCELLED}) is JobState.CANCELLED
        assert not (tmp_path / f"job.{handle}.json").exists()
        assert "half-way" in launcher.output(handle)
        measurement = launcher.fetch(handle)
        assert (
            measurement.wall_s is not None
            and measurement.hardware is not None
            and measurement.hardware.num_gpus == 1
        )
        left = tmp_path / f"configmap.{handle}-ended.json"
        record = json.loads(left.read_text())
        record["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
        left.write_text(json.dumps(record))
        launcher.submit(plan("import time; time.sleep(300)", job_name="job-2"))
        assert new_launcher().open_jobs() == ["job-2"]
        launcher.cancel("job-2")  # and what was cancelled long ago is tidied up
        assert not left.exists()

    def test_a_rendezvous_that_never_filled_is_no_time_limit(
        self, launcher: Launcher, tmp_path: Path
    ) -> None:
        """One node's supervisor counts down while the other waits for devices: its output is all
        there is.
        """
        handle = launcher.submit(
            replace(plan("import time; time.sleep(300)", timeout_s=2.0), num_gpus=2)
        )
        until(lambda: (tmp_path / f"pods.{handle}" / "log.1").exists())
        wait(launcher, handle, until={JobState.FINISHED})
        assert launcher.fetch(handle).status == "timeout"  # both nodes began
        logs = sorted(
            (tmp_path / f"pods.{handle}").glob("log.*"),
            key=lambda log: '"timeout"' in log.read_text(),
        )
        logs[0].write_text(
            ""
        )  # the other node's supervisor told of the limit; this one may have been ended by then
        measurement = launcher.fetch(handle)
        assert (measurement.status, measurement.cause) == (
            "preempted",
            "too few nodes joined the rendezvous: 1 of 2 started",
        )

    def test_a_user_who_may_not_create_jobs_is_told(
        self, launcher: Launcher, tmp_path: Path
    ) -> None:
        (tmp_path / "forbidden.configmaps").touch()
        with pytest.raises(LauncherError, match="may not create configmaps in namespace default"):
            launcher.answers()
        (tmp_path / "forbidden.configmaps").unlink()
        (tmp_path / "forbidden.delete").touch()
        with pytest.raises(LauncherError, match=r"may not delete jobs\.batch"):
            launcher.answers()
        (tmp_path / "forbidden.delete").unlink()
        (tmp_path / "no-admission").touch()
        with pytest.raises(LauncherError, match="no quota"):
            launcher.answers()
        (tmp_path / "kubectl").write_text(
            "#!/bin/sh\necho 'Unable to connect to the server' >&2; exit 1\n"
        )
        with pytest.raises(LauncherError, match="Unable to connect"):
            launcher.answers()

    def test_pods_that_wait_say_why_and_an_image_that_is_not_there_ends_the_run(
        self, launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(kubernetes, "owned_objects", lambda *_, **__: [])
        handle = launcher.submit(plan(GOOD))
        labels = {"hp-tool/job": handle}

        def waits(**status: Any) -> None:
            (tmp_path / "waiting.0.json").write_text(
                json.dumps({"metadata": {"name": "p", "labels": labels}, "status": status})
            )

        waits(
            conditions=[
                {
                    "type": "PodScheduled",
                    "status": "False",
                    "reason": "Unschedulable",
                    "message": "0/4 nodes",
                }
            ]
        )
        assert wait(launcher, handle, until={JobState.QUEUED}) is JobState.QUEUED
        assert isinstance(launcher, Queueing) and launcher.waiting(handle) == Waiting(
            reason="Unschedulable: 0/4 nodes"
        )
        waits(
            containerStatuses=[
                {
                    "name": "run",
                    "state": {
                        "waiting": {"reason": "ImagePullBackOff", "message": "no such image"}
                    },
                }
            ]
        )
        assert wait(launcher, handle, until={JobState.FINISHED}) is JobState.FINISHED
        measurement = launcher.fetch(handle)
        assert (measurement.refused, measurement.wall_s) == (True, None)
        assert "no such image" in (measurement.cause or "")
        (tmp_path / "waiting.0.json").unlink()
        launcher.cancel("job-1")

    def test_an_api_server_that_is_away_is_waited_for_and_takes_no_result_along(
        self, launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        handle = launcher.submit(plan(GOOD))
        assert wait(launcher, handle, until={JobState.FINISHED}) is JobState.FINISHED
        kubectl = tmp_path / "kubectl"
        kubectl.rename(tmp_path / "real")

        def logs_say(message: str) -> None:
            words = f"echo 'Error from server: {message}' >&2; exit 1"
            kubectl.write_text(
                f'#!/bin/sh\ncase "$*" in *logs*) {words};; esac\nexec {tmp_path / "real"} "$@"\n'
            )
            kubectl.chmod(0o755)

        logs_say("(ServiceUnavailable): apiserver not ready")
        with pytest.raises(EngineAwayError, match="ServiceUnavailable"):
            launcher.fetch(handle)
        logs_say(
            "Get https://n1:10250/containerLogs/default/p/run: dial tcp: connect: connection "
            "refused"
        )
        assert launcher.fetch(handle).status != "ok"  # the node is gone, and the log with it
        kubectl.write_text("#!/bin/sh\nexec sleep 30\n")
        with (
            monkeypatch.context() as patch,
            pytest.raises(EngineAwayError, match=r"no response within 0\.2 s"),
        ):
            patch.setattr(kubernetes, "_COMMAND_LIMIT_S", 0.2)
            launcher.find("job-1")
        (tmp_path / "real").replace(kubectl)
        assert launcher.fetch(handle).status == "ok"

    def test_a_job_over_two_pods(self, launcher: Launcher) -> None:
        handle = launcher.submit(replace(plan(GOOD_ON_TWO), num_gpus=2))
        assert wait(launcher, handle, until={JobState.FINISHED}) is JobState.FINISHED
        assert launcher.fetch(handle).status == "ok"

    def test_a_submit_that_died_half_way_is_taken_up_again(
        self, new_launcher: Callable[[], Launcher], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        launcher = new_launcher()
        with monkeypatch.context() as patch:
            patch.setattr(kubernetes, "owned_objects", lambda *_, **__: [])
            handle = launcher.submit(plan(GOOD))
        assert launcher.poll([handle]) == {handle: JobState.QUEUED}
        assert new_launcher().submit(plan(GOOD)) == handle
        assert wait(launcher, handle, until={JobState.FINISHED}) is JobState.FINISHED
        assert launcher.fetch(handle).status == "ok"


@pytest.mark.components
def test_a_job_set_runs_is_cancelled_and_is_one_job_of_pods(tmp_path: Path) -> None:
    launcher = over_the_stand_in(tmp_path, workload="jobset")()
    assert "JobSets can be created" in launcher.answers()
    handle = launcher.submit(replace(plan(GOOD_ON_TWO), num_gpus=2))
    assert wait(launcher, handle, until={JobState.FINISHED}) is JobState.FINISHED
    assert launcher.fetch(handle).status == "ok"
    other = launcher.submit(plan("import time; time.sleep(300)", job_name="job-2"))
    wait(launcher, other, until={JobState.RUNNING})
    launcher.cancel("job-2")
    assert wait(launcher, other, until={JobState.CANCELLED}) is JobState.CANCELLED
    (made,) = tmp_path.glob("jobset.*.json")
    job = json.loads(made.read_text())
    (template,) = (each["template"] for each in job["spec"]["replicatedJobs"])
    environment = template["spec"]["template"]["spec"]["containers"][0]["env"]
    assert environment[0]["value"] == f"{handle}-node-0-0.{handle}"


SITES = sorted((Path(__file__).parents[2] / "examples" / "kubernetes").glob("*.yaml"))


@pytest.mark.parametrize("path", SITES, ids=lambda path: path.stem)
def test_the_sites_of_the_examples_get_manifests_that_kubernetes_takes(path: Path) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")

    options = KubernetesOptions.parse(yaml.safe_load(path.read_text()), origin=str(path))
    asked = replace(
        plan(GOOD, job_name="job-1"),
        num_gpus=2 * options.gpus_per_node,
        search="0123",
        owner="Ada <ada@x>",
    )
    *others, workload = kubernetes.manifest(options, plan=asked)["items"]
    inner = workload
    if workload["kind"] == "JobSet":
        inner = {"apiVersion": "batch/v1", "kind": "Job", "metadata": workload["metadata"]}
        inner["spec"] = workload["spec"]["replicatedJobs"][0]["template"]["spec"]
    for each in (*others, inner):
        kubernetes_validate.validate(each, "1.33", strict=True)
    assert "Ada-ada-x" in json.dumps(workload["metadata"])
    (run,) = (
        each for each in inner["spec"]["template"]["spec"]["containers"] if each["name"] == "run"
    )
    assert run["resources"]["limits"]["nvidia.com/gpu"] == str(options.gpus_per_node)
    assert run["volumeMounts"][0]["mountPath"] == "/hp-tool"  # whatever the patch adds


POD: dict[str, Any] = {
    "metadata": {"labels": {"a": "1"}},
    "spec": {
        "restartPolicy": "Never",
        "containers": [
            {
                "name": "run",
                "image": "x",
                "env": [{"name": "A", "value": "1"}],
                "command": ["a", "b"],
            }
        ],
        "tolerations": [{"key": "old"}],
        "nodeSelector": {"pool": "x"},
        "volumes": [{"name": "v", "emptyDir": {}}, {"name": "w", "emptyDir": {}}],
    },
}
PATCHES: dict[str, dict[str, Any]] = {
    "sidecar": {
        "metadata": {"labels": {"b": "2"}, "annotations": {"c": "3"}},
        "spec": {
            "containers": [
                {
                    "name": "run",
                    "env": [{"name": "B", "value": "2"}],
                    "securityContext": {"privileged": True},
                },
                {"name": "sidecar", "image": "y"},
            ],
            "tolerations": [{"key": "new"}],
            "imagePullSecrets": [{"name": "s"}],
            "priorityClassName": "high",
        },
    },
    "other values": {
        "spec": {
            "nodeSelector": {"pool": None, "kind": "y"},
            "containers": [{"name": "run", "command": ["c"]}],
        }
    },
    "deleted": {
        "spec": {"volumes": [{"name": "v", "$patch": "delete"}, {"name": "z", "emptyDir": {}}]}
    },
    "replaced": {
        "spec": {
            "volumes": [{"name": "z", "emptyDir": {}}, {"$patch": "replace"}],
            "nodeSelector": {"$patch": "replace"},
        }
    },
}


def in_order(value: Any) -> Any:
    """Lists of named things by name: a merge promises no order."""
    if isinstance(value, dict):
        return {key: in_order(each) for key, each in value.items()}
    if isinstance(value, list) and all(isinstance(each, dict) for each in value):
        return sorted(map(in_order, value), key=lambda each: str(each.get("name")))
    return value


@pytest.mark.parametrize("name", PATCHES)
def test_a_strategic_merge_patch_is_kubectls(name: str, tmp_path: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl")
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "a"},
        "spec": {"template": POD},
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    patch = json.dumps({"spec": {"template": PATCHES[name]}})
    command = (
        "kubectl",
        "patch",
        "--local",
        "-f",
        "job.json",
        "--type=strategic",
        "-p",
        patch,
        "-o",
        "json",
    )
    printed = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=tmp_path
    ).stdout
    theirs, ours = json.loads(printed)["spec"]["template"], merge_patch(POD, PATCHES[name])
    assert in_order(ours) == in_order(theirs)
    assert merge_patch(POD, {}) == POD


@pytest.mark.parametrize(
    "options", [OPTIONS, FULL, {**OPTIONS, "gpu": "cpu"}], ids=["plain", "full", "cpu"]
)
@pytest.mark.parametrize("version", ["1.30", "1.33"])
def test_manifests_are_what_kubernetes_takes(options: dict[str, Any], version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")

    asked = KubernetesOptions.parse(options, origin="test")
    given = replace(plan(GOOD, job_name="Search_1.run-1"), num_gpus=16)
    items = kubernetes.manifest(asked, plan=given)["items"]
    for each in items:
        kubernetes_validate.validate(each, version, strict=True)
    assert [each["kind"] for each in items] == ["ConfigMap", "Service", "Job"]
    kubernetes_validate.validate(
        kubernetes.tombstone_object(asked, handle="a"), version, strict=True
    )
    job = items[-1]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(
            {**job, "spec": {**job["spec"], "paralelism": 2}}, version, strict=True
        )


def test_the_manifest_of_a_profile_run() -> None:
    launcher = create("kubernetes", options={**FULL, "gpus_per_node": 1})
    asked = replace(
        request(parallel={"tensor_parallel_size": 2, "sequence_parallel": True}),
        gpu="h100-sxm-80gb",
    )
    given = launcher.plan(asked, job_name="a")
    assert given.command[1:5] == ("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1")
    assert "PYTHONPATH" not in given.environment
    job = kubernetes.workload_object(
        KubernetesOptions.parse({**FULL, "gpus_per_node": 1}, origin="test"), plan=given
    )
    assert (job["spec"]["parallelism"], job["spec"]["backoffLimit"]) == (2, 0)
    pod = job["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"] == {
        "nvidia.com/gpu": "1",
        "memory": "512Gi",
        "rdma/hca": "8",
    }
    assert pod["containers"][0]["env"][0] == {"name": "PET_MASTER_ADDR", "value": "a-0.a"}
    assert pod["nodeSelector"] == {"gpu": "h100"} and pod["hostNetwork"]


def test_names_are_kubernetes_names_and_stay_apart() -> None:
    names = [
        "a",
        "A",
        "a.b",
        "a-b",
        "a_b",
        "9",
        "x" * 128,
        "x" * 127 + "y",
        "search-1.run-2.token-3",
    ]
    made = [kubernetes.object_name(name) for name in names]
    assert len(set(made)) == len(names) and made[0] == "a"
    for name in made:
        assert (
            len(name) <= 45
            and name == name.lower()
            and name[0].isalpha()
            and name.replace("-", "").isalnum()
        )


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"image": "a b"}, "image"),
        ({"kubectl": "kubectl; rm"}, "kubectl"),
        ({"context": "--kubeconfig=x"}, "context"),
        ({"namespace": "A_b"}, "namespace"),
        ({"max_nodes": 0}, "max_nodes"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_options_are_read_strictly(change: dict[str, object], field: str) -> None:
    with pytest.raises(InputError) as refused:
        create("kubernetes", options={**OPTIONS, **change})
    assert refused.value.field == f"kubernetes.{field}"


def test_files_beyond_what_a_config_map_holds_are_refused() -> None:
    launcher = create("kubernetes", options={**OPTIONS, "kubectl": "/no/such/kubectl"})
    with pytest.raises(InputError, match="1,000,000"):
        launcher.submit(plan("x" * 1_000_001))
    with pytest.raises(LauncherError, match="Cannot run"):
        launcher.submit(plan(GOOD))


def job(**status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "a"}, "status": {"startTime": "2026-11-21T10:00:00Z", **status}}


def failed(reason: str) -> dict[str, Any]:
    at = "2026-11-21T10:01:40Z"
    return job(
        conditions=[
            {
                "type": "Failed",
                "status": "True",
                "reason": reason,
                "message": "m",
                "lastTransitionTime": at,
            }
        ]
    )


def pod(**status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "a-0"}, "status": status}


@pytest.mark.parametrize(
    ("known", "state"),
    [
        (job(), JobState.QUEUED),
        (job(active=2, ready=0), JobState.QUEUED),
        (job(active=2, ready=2), JobState.RUNNING),
        (job(conditions=[{"type": "Complete", "status": "True"}]), JobState.FINISHED),
        (
            job(conditions=[{"type": "Failed", "status": "False"}], active=1, ready=1),
            JobState.RUNNING,
        ),
        (failed("BackoffLimitExceeded"), JobState.FINISHED),
        (job(replicatedJobsStatus=[{"name": "node", "ready": 1}]), JobState.RUNNING),
        (job(conditions=[{"type": "Completed", "status": "True"}]), JobState.FINISHED),
        ({"metadata": {"deletionTimestamp": "2026-11-21T10:00:00Z"}}, JobState.RUNNING),
        ({"kind": "ConfigMap", "metadata": {}}, JobState.CANCELLED),
    ],
)
def test_states(known: dict[str, Any], state: JobState) -> None:
    assert job_state(known) is state


def container(**state: Any) -> dict[str, Any]:
    return pod(containerStatuses=[{"name": "run", "state": state}])


@pytest.mark.parametrize(
    ("pods", "reason", "word"),
    [
        ([], "terminated", "BackoffLimitExceeded"),
        ([pod(reason="Evicted")], "terminated", "Evicted"),
        (
            [pod(conditions=[{"type": "DisruptionTarget", "reason": "PreemptionByScheduler"}])],
            "terminated",
            "Preemption",
        ),
        ([pod(reason="DeadlineExceeded")], "timeout", ""),
        (
            [container(waiting={"reason": "ImagePullBackOff", "message": "no such image"})],
            "failed_to_start",
            "no such image",
        ),
        ([container(terminated={"reason": "OOMKilled", "exitCode": 137})], "exited", ""),
        (
            [
                container(
                    terminated={"reason": "StartError", "exitCode": 128, "message": "no python3"}
                )
            ],
            "failed_to_start",
            "python3",
        ),
    ],
)
def test_ends_that_a_job_cannot_tell_itself(
    pods: list[dict[str, Any]], reason: str, word: str
) -> None:
    told = ending(failed("BackoffLimitExceeded"), pods=pods)
    assert told.reason == reason and told.wall_s == 100.0
    assert word in (told.error or "")


def test_waiting_for_nodes_and_images_is_not_the_runs_time() -> None:
    times = {"startedAt": "2026-11-21T10:01:00Z", "finishedAt": "2026-11-21T10:01:30Z"}
    ran = container(terminated={"reason": "Error", "exitCode": 143, **times})
    assert ending(failed("BackoffLimitExceeded"), pods=[ran]).wall_s == 30.0
    still = container(running={"startedAt": "2026-11-21T10:01:10Z"})
    assert ending(failed("BackoffLimitExceeded"), pods=[ran, still]).wall_s == 40.0


def test_the_jobs_own_times_say_how_long_it_lasted(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = create("kubernetes", options=OPTIONS)
    assert isinstance(launcher, Timekeeping)
    ended = failed("BackoffLimitExceeded")
    ended["metadata"] = {"name": "a", "creationTimestamp": "2026-11-21T10:00:00Z"}
    known: list[dict[str, Any] | None] = [ended, job(), None]
    monkeypatch.setattr(launcher, "_running", lambda handle: known.pop(0))
    assert [launcher.lasted_s("a") for _ in range(3)] == [100.0, None, None]


def test_what_some_pods_wait_for_is_seen_while_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = create("kubernetes", options={**OPTIONS, "poll_s": 0.0})
    two = job(ready=1, active=2) | {"kind": "Job", "spec": {"parallelism": 2}}
    late = container(waiting={"reason": "ImagePullBackOff", "message": "no such image"})
    late["metadata"]["labels"] = {"hp-tool/job": "a"}
    listed = {"jobs": [two], "pods": [late]}
    monkeypatch.setattr(launcher, "_items", lambda kind, selector: listed[kind])
    assert launcher.poll(["a"]) == {"a": JobState.FINISHED}
    listed["pods"] = []
    assert launcher.poll(["a"]) == {"a": JobState.RUNNING}
    listed["jobs"] = [job() | {"kind": "Job", "spec": {"parallelism": 2, "suspend": True}}]
    assert launcher.poll(["a"]) == {"a": JobState.QUEUED}
    assert isinstance(launcher, Queueing) and "not admitted by its queue" in str(
        launcher.waiting("a")
    )


@pytest.mark.parametrize(
    ("keep_hours", "removed"), [(1, ["30 hours", "50 hours"]), (40, ["50 hours"])]
)
def test_a_cancelled_name_stays_taken_for_a_day_and_for_keep_s(
    keep_hours: int, removed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = create("kubernetes", options={**OPTIONS, "keep_s": keep_hours * 3600})
    now = datetime.now(UTC)
    made = [
        {
            "metadata": {
                "name": f"{hours} hours",
                "creationTimestamp": (now - timedelta(hours=hours)).isoformat(),
            }
        }
        for hours in (2, 20, 30, 50)
    ]
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(launcher, "_items", lambda kind, selector: made)
    monkeypatch.setattr(launcher, "_kubectl", lambda *words: commands.append(words))
    launcher._delete_old()  # type: ignore[attr-defined]
    assert [words[:2] for words in commands] == [("delete", "configmap")] * len(removed)
    assert [words[2] for words in commands] == removed


def test_what_is_printed_for_people_is_json() -> None:
    launcher = create("kubernetes", options=OPTIONS)
    assert json.loads(launcher.describe(plan(GOOD)))["kind"] == "List"  # type: ignore[attr-defined]
