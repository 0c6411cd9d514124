"""Build a job's Kubernetes objects: Job or JobSet, files, and the tombstone of a cancelled job."""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hp_tool.cluster.launchers import jobs
from hp_tool.cluster.launchers.options import KubernetesOptions
from hp_tool.cluster.launchers.streamed import SUPERVISOR, job_files
from hp_tool.domain.jobs import LaunchPlan
from hp_tool.errors import InputError

LABEL = "hp-tool/job"
NUM_GPUS, TIMEOUT_S = "hp-tool/num-gpus", "hp-tool/timeout-s"
CANCELLED = "hp-tool/cancelled"
"""Label of the ConfigMap that reserves a cancelled job's name."""
_TIME_MARGIN_S = 600.0
"""Seconds by which Kubernetes' time limit exceeds the run's own limit, for images that cannot be
pulled and nodes that hang. The limit is set on pods, whose clock starts once they are on a node,
so the wait for a node does not count.
"""
_FIRST_PORT, _PORTS = 20_000, 10_000
"""First port and number of ports for rendezvous. Each job's port is derived from its name, because
jobs on the host network must not use the same port.
"""
_FILES = "/hp-tool"
_MAX_NAME_LENGTH = 45
"""Maximum length of an object name. A host name has at most 63 characters, and Kubernetes appends
the pod index and, in a JobSet, the Job's name.
"""
_REPLICATED = "node"
"""Name of the Job within a JobSet."""
_MAX_FILES_BYTES = 1_000_000
"""Maximum total size of a job's files. A ConfigMap holds at most 1 MiB."""


def object_name(job_name: str) -> str:
    """Convert a job name to a valid object name: lower case, digits and dashes.

    Append a digest if the conversion changed the name.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", jobs.check_name(job_name).lower()).strip("-")
    if plain == job_name and len(plain) <= _MAX_NAME_LENGTH and plain[0].isalpha():
        return plain
    digest = hashlib.sha256(job_name.encode()).hexdigest()[:10]
    return f"hp-{plain[: _MAX_NAME_LENGTH - 14]}".strip("-") + f"-{digest}"


def workload_object(options: KubernetesOptions, *, plan: LaunchPlan) -> dict[str, Any]:
    """Return the Job or JobSet.

    Its pods never restart, because the search itself repeats failed runs.
    """
    nodes = options.num_nodes(num_gpus=plan.num_gpus)
    name = object_name(plan.job_name)
    job_label, jobset = {LABEL: name}, options.workload == "jobset"
    labels, annotations = (
        {key: jobs.fill_template(text, plan=plan) for key, text in templates.items()}
        for templates in (options.labels, options.annotations)
    )
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "subdomain": name,
        "activeDeadlineSeconds": math.ceil(plan.timeout_s + _TIME_MARGIN_S),
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
    metadata = {"labels": {**labels, **job_label}, "annotations": annotations}
    template = merge_patch({"metadata": metadata, "spec": pod}, options.pod_template)
    template["metadata"]["labels"] = {**template["metadata"].get("labels", {}), **job_label}
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": 0,
        "template": template,
    }
    limits = {NUM_GPUS: str(plan.num_gpus), TIMEOUT_S: f"{plan.timeout_s:g}"}
    workload_metadata = {
        "name": name,
        "namespace": options.namespace,
        "labels": {**labels, **job_label},
        "annotations": {**annotations, **limits},
    }
    keep = {"ttlSecondsAfterFinished": options.keep_s}
    if not jobset:
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": workload_metadata,
            "spec": {**spec, **keep},
        }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": workload_metadata,
        "spec": {
            **keep,
            "failurePolicy": {"maxRestarts": 0},
            "network": {"enableDNSHostnames": False},  # `owned_objects` contains a Service.
            "replicatedJobs": [{"name": _REPLICATED, "replicas": 1, "template": {"spec": spec}}],
        },
    }


def tombstone_name(handle: str) -> str:
    """Return the name of the ConfigMap that reserves the name of the cancelled job `handle`."""
    return f"{handle}-ended"


def tombstone_object(options: KubernetesOptions, *, handle: str) -> dict[str, Any]:
    """Return the ConfigMap that prevents another job with the name `handle`."""
    metadata = {
        "name": tombstone_name(handle),
        "namespace": options.namespace,
        "labels": {CANCELLED: handle},
    }
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {}}


def owned_objects(
    options: KubernetesOptions, *, plan: LaunchPlan, job_uid: str | None = None
) -> list[dict[str, Any]]:
    """Return the ConfigMap and Service that the pods need.

    Both are owned by the Job with uid `job_uid`.
    """
    name = object_name(plan.job_name)
    files = job_files(plan)
    size = sum(len(text.encode()) for text in files.values())
    if size > _MAX_FILES_BYTES:
        raise InputError(
            f"The job's files have {size:,} bytes. Kubernetes' limit is {_MAX_FILES_BYTES:,}.",
            field="trainer.command",
        )
    workload = (
        ("batch/v1", "Job") if options.workload == "job" else ("jobset.x-k8s.io/v1alpha2", "JobSet")
    )
    owner = {"apiVersion": workload[0], "kind": workload[1], "name": name, "uid": job_uid}
    metadata = _metadata(options, name) | ({} if job_uid is None else {"ownerReferences": [owner]})
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": files},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": {LABEL: name},
            },
        },
    ]


def manifest(options: KubernetesOptions, *, plan: LaunchPlan) -> dict[str, Any]:
    """Return all objects of a job, as input for `kubectl apply -f -`."""
    return {
        "apiVersion": "v1",
        "kind": "List",
        "items": [*owned_objects(options, plan=plan), workload_object(options, plan=plan)],
    }


def _metadata(options: KubernetesOptions, name: str) -> dict[str, Any]:
    return {"name": name, "namespace": options.namespace, "labels": {LABEL: name}}


def _container(options: KubernetesOptions, *, name: str, per_node: int) -> dict[str, Any]:
    index = {
        "fieldRef": {
            "fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        }
    }
    devices = (
        {"cpu": str(per_node)} if options.gpu == "cpu" else {options.gpu_resource: str(per_node)}
    )
    limits = {**devices, **options.resources}
    port = _FIRST_PORT + int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) % _PORTS
    # A JobSet prefixes the names of its Jobs and their pods.
    first = f"{name}-0" if options.workload == "job" else f"{name}-{_REPLICATED}-0-0"
    return {
        "name": "run",
        "image": options.image,
        "command": [options.python, f"{_FILES}/{SUPERVISOR}", "--attached", _FILES],
        "env": [
            {"name": "PET_MASTER_ADDR", "value": f"{first}.{name}"},
            {"name": "PET_MASTER_PORT", "value": str(port)},
            {"name": "PET_NODE_RANK", "valueFrom": index},
        ],
        "ports": [{"name": "rendezvous", "containerPort": port}],
        "resources": {"limits": limits, "requests": limits},
        "volumeMounts": [
            {"name": "hp-tool", "mountPath": _FILES, "readOnly": True},
            {"name": "hp-shm", "mountPath": "/dev/shm"},  # noqa: S108 - the container's own
            *options.volume_mounts,
        ],
    }


_KEYS = {
    **dict.fromkeys(
        ("containers", "initContainers", "volumes", "env", "imagePullSecrets", "resourceClaims"),
        "name",
    ),
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
"""`patchMergeKey` of the lists in PodSpec (k8s.io/api/core/v1). A patch replaces all other lists
entirely.
"""
_DIRECTIVE = "$patch"


def merge_patch(base: Any, patch: Any, *, name: str = "") -> Any:
    """Apply a strategic merge patch.

    null removes a key, `$patch: delete` removes a list entry, and `$patch: replace` replaces a
    mapping or a list.

    Args:
        base: Original value.
        patch: Patch.
        name: Key under which `base` and `patch` are stored.
    """
    if isinstance(base, Mapping) and isinstance(patch, Mapping):
        changes = {key: value for key, value in patch.items() if key != _DIRECTIVE}
        if patch.get(_DIRECTIVE) == "replace":
            return changes
        unchanged = {key: value for key, value in base.items() if key not in changes}
        return unchanged | {
            key: merge_patch(base.get(key), value, name=key)
            for key, value in changes.items()
            if value is not None
        }
    if name in _KEYS and isinstance(base, Sequence) and isinstance(patch, Sequence):
        return _merge_lists(base, patch, key=_KEYS[name])
    return patch


def _merge_lists(
    base: Sequence[Mapping[str, Any]], patch: Sequence[Mapping[str, Any]], *, key: str
) -> list[Any]:
    if any(entry.get(_DIRECTIVE) == "replace" for entry in patch):
        return [entry for entry in patch if _DIRECTIVE not in entry]
    entries = {entry.get(key): entry for entry in base}
    for entry in patch:
        if entry.get(_DIRECTIVE) == "delete":
            entries.pop(entry.get(key), None)
        else:
            entries[entry.get(key)] = merge_patch(entries.get(entry.get(key), {}), entry)
    return list(entries.values())
