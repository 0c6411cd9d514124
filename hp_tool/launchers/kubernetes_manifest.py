"""The Kubernetes objects of one job: pure, printable, and of use to a person who applies them by hand.

An indexed Job has a pod for each node. The pods find the first one by the name that a headless Service gives it; a ConfigMap
holds the job's files. Both belong to the Job and go with it.
"""

from __future__ import annotations

import hashlib
import math
import re
from typing import Any

from hp_tool.domain.ports import LaunchPlan
from hp_tool.errors import InputError
from hp_tool.launchers import jobs, streamed
from hp_tool.launchers.kubernetes_options import KubernetesOptions
from hp_tool.launchers.kubernetes_states import CANCELLED

LABEL = "hp-tool/job"
NUM_GPUS, TIMEOUT_S = "hp-tool/num-gpus", "hp-tool/timeout-s"
_GRACE_S = 600.0
"""Kubernetes' own limit is a backstop, for an image that cannot be pulled or a node that hangs. It is the pods', whose clock
starts on a node: waiting for one is not the run's fault."""
_PORT = 29_400
_FILES = "/hp-tool"
_LONGEST_NAME = 52
"""Of 63 letters of a host's name a pod's index takes some."""
_LARGEST_FILES_BYTES = 1_000_000
"""A ConfigMap holds 1 MiB."""


def object_name(job_name: str) -> str:
    """A job's name as Kubernetes takes it: lower-case letters, digits and dashes; one that had to change carries its digest."""
    plain = re.sub(r"[^a-z0-9]+", "-", jobs.check_name(job_name).lower()).strip("-")
    if plain == job_name and len(plain) <= _LONGEST_NAME and plain[0].isalpha():
        return plain
    digest = hashlib.sha256(job_name.encode()).hexdigest()[:10]
    return f"hp-{plain[: _LONGEST_NAME - 14]}".strip("-") + f"-{digest}"


def job(options: KubernetesOptions, *, plan: LaunchPlan) -> dict[str, Any]:
    """The Job. No pod of it is started a second time: whether a run is repeated is the search's to decide."""
    nodes = jobs.nodes_for(plan.num_gpus, gpus_per_node=options.gpus_per_node, max_nodes=options.max_nodes)
    name = object_name(plan.job_name)
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "subdomain": name,
        "activeDeadlineSeconds": math.ceil(plan.timeout_s + _GRACE_S),
        "terminationGracePeriodSeconds": 30,
        "containers": [_container(options, name=name, per_node=plan.num_gpus // nodes)],
        "volumes": [
            {"name": "hp-tool", "configMap": {"name": name}},
            {"name": "hp-shm", "emptyDir": {"medium": "Memory"}},
            *options.volumes,
        ],
    }
    optional = {
        "nodeSelector": options.node_selector,
        "tolerations": list(options.tolerations),
        "serviceAccountName": options.service_account,
        "hostNetwork": options.host_network,
        "dnsPolicy": "ClusterFirstWithHostNet" if options.host_network else None,
    }
    pod |= {key: value for key, value in optional.items() if value}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            **_metadata(options, name),
            "annotations": {NUM_GPUS: str(plan.num_gpus), TIMEOUT_S: f"{plan.timeout_s:g}"},
        },
        "spec": {
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
            "backoffLimit": 0,
            "ttlSecondsAfterFinished": options.keep_s,
            "template": {"metadata": {"labels": {LABEL: name}}, "spec": pod},
        },
    }


def cancelled_job(options: KubernetesOptions, *, job_name: str) -> dict[str, Any]:
    """A Job that never has a pod: it takes the name, so that no other can be made under it."""
    name = object_name(job_name)
    pod = {"restartPolicy": "Never", "containers": [{"name": "run", "image": options.image}]}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {**_metadata(options, name), "annotations": {CANCELLED: "true"}},
        "spec": {"suspend": True, "template": {"metadata": {"labels": {LABEL: name}}, "spec": pod}},
    }


def belongings(options: KubernetesOptions, *, plan: LaunchPlan, job_uid: str | None = None) -> list[dict[str, Any]]:
    """What the Job's pods need to start: its files, and its hosts' names. With the Job's uid they are removed with it."""
    name = object_name(plan.job_name)
    files = streamed.job_files(plan)
    size = sum(len(text.encode()) for text in files.values())
    if size > _LARGEST_FILES_BYTES:
        raise InputError(
            f"the job's files have {size:,} bytes; Kubernetes takes {_LARGEST_FILES_BYTES:,}", field="trainer.command"
        )
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job_uid}
    metadata = _metadata(options, name) | ({} if job_uid is None else {"ownerReferences": [owner]})
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": files},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {LABEL: name}},
        },
    ]


def manifest(options: KubernetesOptions, *, plan: LaunchPlan) -> dict[str, Any]:
    """All of it, as `kubectl apply -f -` takes it."""
    return {"apiVersion": "v1", "kind": "List", "items": [*belongings(options, plan=plan), job(options, plan=plan)]}


def _metadata(options: KubernetesOptions, name: str) -> dict[str, Any]:
    return {"name": name, "namespace": options.namespace, "labels": {LABEL: name}}


def _container(options: KubernetesOptions, *, name: str, per_node: int) -> dict[str, Any]:
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    devices = {"cpu": str(per_node)} if options.gpu == "cpu" else {options.gpu_resource: str(per_node)}
    limits = {**devices, **options.resources}
    return {
        "name": "run",
        "image": options.image,
        "command": [options.python, f"{_FILES}/{streamed.SUPERVISOR}", "--attached", _FILES],
        "env": [
            {"name": "PET_MASTER_ADDR", "value": f"{name}-0.{name}"},
            {"name": "PET_MASTER_PORT", "value": str(_PORT)},
            {"name": "PET_NODE_RANK", "valueFrom": index},
        ],
        "resources": {"limits": limits, "requests": limits},
        "volumeMounts": [
            {"name": "hp-tool", "mountPath": _FILES, "readOnly": True},
            {"name": "hp-shm", "mountPath": "/dev/shm"},  # noqa: S108 - the container's own
            *options.volume_mounts,
        ],
    }
