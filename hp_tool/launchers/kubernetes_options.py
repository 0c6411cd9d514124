"""What an operator says once about a Kubernetes cluster: its devices, the image, and where kubectl finds it.

Of a registered cluster's entry, or of a YAML file: HP_KUBERNETES_CONFIG, else kubernetes.yaml in the user's configuration
folder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from hp_tool.domain.fields import Strict
from hp_tool.launchers import options
from hp_tool.launchers.options import check, check_devices, check_environment, check_seconds, check_words

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesOptions(Strict):
    """One Kubernetes cluster, or one pool of its nodes, as profile jobs use it."""

    name: str = "kubernetes"
    """What the cluster is called where no node's own name is known."""
    image: str
    """The container image, with hp_tool, torch and megatron-core; a trainer's own image needs python3 alone."""
    gpu: str
    """Catalogue name of the nodes' device; `cpu` runs one process with one thread each."""
    gpus_per_node: int
    """Devices (cpu: processes) a pod takes."""
    max_nodes: int = 1
    """Pods one job may have."""
    namespace: str = "default"
    context: str | None = None
    """Of kubectl's configuration; None: the current one."""
    kubectl: str = "kubectl"
    """The program."""
    gpu_resource: str = "nvidia.com/gpu"
    """What a device is called in a pod's limits. Without meaning for `cpu`, which asks for that many cores."""
    resources: dict[str, str] = field(default_factory=dict)
    """Other limits of a pod, as in `{memory: 512Gi, rdma/hca: "8"}`."""
    node_selector: dict[str, str] = field(default_factory=dict)
    tolerations: tuple[dict[str, Any], ...] = ()
    """As in a pod's specification."""
    volumes: tuple[dict[str, Any], ...] = ()
    """As in a pod's specification; /dev/shm is there without."""
    volume_mounts: tuple[dict[str, Any], ...] = ()
    service_account: str | None = None
    host_network: bool = False
    """Use the nodes' network, which some fabrics need."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that jobs get beside those every job has."""
    python: str = "python3"
    """The image's interpreter."""
    keep_s: int = 86_400
    """How long Kubernetes keeps an ended job, and with it its log."""
    poll_s: float = 5.0
    """The cluster is asked for all jobs at once, and no more often than this."""
    patience_s: float = 900.0
    """How long the cluster may be away before a search is told."""

    def __post_init__(self) -> None:
        """Raises InputError for a number out of range or a string that is none of its kind."""
        check_devices(self.gpus_per_node, "kubernetes.gpus_per_node")
        check_devices(self.max_nodes, "kubernetes.max_nodes")
        check_words([self.gpu, self.image, self.gpu_resource, self.kubectl, self.python], "kubernetes.image")
        check_words([self.context] if self.context else [], "kubernetes.context")
        check(not (self.context or "").startswith("-"), "kubernetes.context", "must not begin with -")
        for name in ("namespace", "service_account"):
            value = getattr(self, name)
            check(value is None or _LABEL.fullmatch(value), f"kubernetes.{name}", "must be letters, digits and -, 63 at most")
        check_environment(self.environment, "kubernetes.environment")
        check(0 <= self.keep_s <= 10_000_000, "kubernetes.keep_s", "must be from 0 to 1e7 seconds")
        check_seconds(self.poll_s, "kubernetes.poll_s")
        check_seconds(self.patience_s, "kubernetes.patience_s")

    @property
    def num_gpus(self) -> int:
        """The most one job can have."""
        return self.gpus_per_node * self.max_nodes


_KUBERNETES_OPTIONS = TypeAdapter(KubernetesOptions)


def load() -> KubernetesOptions:
    """The options this environment names. Raises InputError where there is no file, or one with a mistake in it."""
    return options.load(_KUBERNETES_OPTIONS, launcher="kubernetes", words="image, gpu, gpus_per_node, max_nodes ...")


def parse(fields: Mapping[str, Any], *, origin: str) -> KubernetesOptions:
    """Options from a mapping, strictly."""
    return options.parse(_KUBERNETES_OPTIONS, fields, launcher="kubernetes", origin=origin)
