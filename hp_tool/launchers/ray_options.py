"""What an operator says once about a Ray cluster: where it answers, its devices, and what jobs ask for.

Of a registered cluster's entry, or of a YAML file: HP_RAY_CONFIG, else ray.yaml in the user's configuration folder.
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

_ADDRESS = re.compile(r"https?://[\w.\[\]:-]{1,256}(/[\w./-]{0,256})?", re.ASCII)
_PREFIX = re.compile(r"[a-zA-Z0-9._-]{0,40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions(Strict):
    """One Ray cluster as profile jobs use it."""

    name: str = "ray"
    """What the cluster is called where no node's own name is known."""
    address: str = "http://127.0.0.1:8265"
    """Where its Jobs API answers: the dashboard's."""
    gpu: str
    """Catalogue name of the nodes' device; `cpu` runs one process with one thread each."""
    gpus_per_node: int
    """Devices (cpu: processes) a job takes of one node."""
    max_nodes: int = 1
    """Nodes one job may have."""
    resources: dict[str, float] = field(default_factory=dict)
    """Any other resource that a job takes of each node, as in `{"accelerator_type:H100": 0.001}`."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that jobs get beside those every job has."""
    python: str = "python3"
    """The nodes' interpreter with hp_tool, torch and megatron-core; of several nodes, with ray too."""
    job_prefix: str = ""
    """Put before the names of jobs, where several databases of ours share a cluster."""
    poll_s: float = 2.0
    """The cluster is asked for all jobs at once, and no more often than this."""
    patience_s: float = 900.0
    """How long the cluster may be away before a search is told."""

    def __post_init__(self) -> None:
        """Raises InputError for a number out of range or a string that could mean something to a shell."""
        check_devices(self.gpus_per_node, "ray.gpus_per_node")
        check_devices(self.max_nodes, "ray.max_nodes")
        check(_ADDRESS.fullmatch(self.address), "ray.address", "must be as http://head:8265")
        check_words([self.gpu, self.python], "ray.python")
        check(_PREFIX.fullmatch(self.job_prefix), "ray.job_prefix", "must be letters, digits, . _ and -")
        check(all(0 <= each < 1e9 for each in self.resources.values()), "ray.resources", "must be from 0 to 1e9")
        check_environment(self.environment, "ray.environment")
        check_seconds(self.poll_s, "ray.poll_s")
        check_seconds(self.patience_s, "ray.patience_s")

    @property
    def num_gpus(self) -> int:
        """The most one job can have."""
        return self.gpus_per_node * self.max_nodes


_RAY_OPTIONS = TypeAdapter(RayOptions)


def load() -> RayOptions:
    """The options this environment names. Raises InputError where there is no file, or one with a mistake in it."""
    return options.load(_RAY_OPTIONS, launcher="ray", words="address, gpu, gpus_per_node, max_nodes ...")


def parse(fields: Mapping[str, Any], *, origin: str) -> RayOptions:
    """Options from a mapping, strictly."""
    return options.parse(_RAY_OPTIONS, fields, launcher="ray", origin=origin)
