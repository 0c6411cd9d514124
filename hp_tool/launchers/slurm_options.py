"""What an operator says once about a Slurm cluster: the devices, what jobs ask for, and where they run.

Read from a YAML file: HP_SLURM_CONFIG, else slurm.yaml in the user's configuration folder. Nothing here comes from a
query. Values that end up in the batch script are held to characters that mean nothing to a shell; only `setup` is shell,
and it is the operator's own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from hp_tool.domain.fields import Strict
from hp_tool.launchers import options
from hp_tool.launchers.options import check, check_devices, check_environment, check_seconds, check_words

_ARGUMENT = re.compile(r"--[a-z][a-z0-9-]*(=[\w.,:;@%+&|*()\[\]/=-]{1,512})?", re.ASCII)

_LOGS = re.compile(r"/[\w.,:@+/-]{0,256}", re.ASCII)  # Slurm's own words in a log's name begin with %


@dataclass(frozen=True, slots=True, kw_only=True)
class Container(Strict):
    """The image each node's processes run in, through Slurm's pyxis plugin."""

    image: str
    """What `srun --container-image` takes: a registry reference or the path of a squashfs file."""
    mounts: tuple[str, ...] = ()
    """`source:destination[:flags]` each; a shared job's folder is always mounted where it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logs(Strict):
    """The one folder that jobs write and this host reads, where the jobs' own folders are not shared."""

    folder: str
    """As the nodes see it. It exists; each job writes a few files there."""
    here: str | None = None
    """As this host sees it, to read at least. By default under the same path."""

    @property
    def seen_here(self) -> str:
        """Its path on this host."""
        return self.here if self.here is not None else self.folder


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions(Strict):
    """One cluster, or one partition of it, as profile jobs use it."""

    name: str = "slurm"
    """What the cluster is called where no node's own name is known."""
    gpu: str
    """Catalogue name of the nodes' device; `cpu` runs one process with one thread each."""
    gpus_per_node: int
    """Devices (cpu: processes) a job takes of one node."""
    max_nodes: int = 1
    """Nodes one job may have."""
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    time_s: float | None = None
    """Wall time asked of Slurm; by default a run's own limit and two minutes."""
    gres: str | None = None
    """The generic resource of a device, as in `gpu:h100`, asked for as `--gres=<gres>:<number>`. By default `gpu`; an empty
    string asks for none, where nodes are given whole. Without meaning for `cpu`."""
    exclusive: bool = False
    """Share no node with other jobs: measurements are then not disturbed by them."""
    requeue: bool = False
    """Let Slurm start a job again that was preempted or lost its node. By default such a job ends, and the search decides."""
    container: Container | None = None
    modules: tuple[str, ...] = ()
    """Environment modules to load."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that jobs get beside those every job has."""
    setup: tuple[str, ...] = ()
    """Lines of bash run on the first node before the job; what they export reaches every node."""
    sbatch_arguments: tuple[str, ...] = ()
    """Any other option of sbatch, as in `--constraint=nvlink`."""
    python: str | None = None
    """The nodes' (or the container's) interpreter with hp_tool, torch and megatron-core; by default this process's own."""
    folder: str | None = None
    """Where the jobs' folders live, on a file system that the nodes see under the same path. By default HP_RUNS_DIR, else
    the user's data folder."""
    logs: Logs | None = None
    """For nodes that do not see `folder`: a job's files travel in its script, and what it left comes back in its logs."""
    poll_s: float = 5.0
    """The controller is asked for all jobs at once, and no more often than this."""
    patience_s: float = 900.0
    """How long a controller may be away before a search is told; jobs go on without it."""

    def __post_init__(self) -> None:
        """Raises InputError for a number out of range or a string that could mean something to a shell."""
        for name in ("gpus_per_node", "max_nodes"):
            check_devices(getattr(self, name), f"slurm.{name}")
        for name, least in (("time_s", 1.0), ("poll_s", 0.0), ("patience_s", 0.0)):
            check_seconds(getattr(self, name), f"slurm.{name}", least=least)
        for name in ("gpu", "account", "partition", "qos"):
            check_words([getattr(self, name)] if getattr(self, name) is not None else [], f"slurm.{name}")
        check_words([self.gres] if self.gres else [], "slurm.gres")
        check_words(self.modules, "slurm.modules")
        if self.container is not None:
            check_words([self.container.image.replace("#", "/")], "slurm.container.image")  # pyxis writes registry#image
            check_words(self.container.mounts, "slurm.container.mounts")
        arguments = all(map(_ARGUMENT.fullmatch, self.sbatch_arguments))
        check(arguments, "slurm.sbatch_arguments", "must be --name or --name=value")
        check_environment(self.environment, "slurm.environment")
        check(not re.search(r"[\0\r\n]", "".join(self.setup)), "slurm.setup", "must be a list of single lines")
        for name in ("python", "folder"):
            value = getattr(self, name)
            good = value is None or (Path(value).is_absolute() and value.isprintable())
            check(good, f"slurm.{name}", "must be an absolute path")
        if self.logs is not None:
            for path in (self.logs.folder, self.logs.seen_here):
                check(_LOGS.fullmatch(path), "slurm.logs", "must be absolute paths of letters, digits and _ . , : @ + / -")

    @property
    def num_gpus(self) -> int:
        """The most one job can have."""
        return self.gpus_per_node * self.max_nodes


_SLURM_OPTIONS = TypeAdapter(SlurmOptions)


def load() -> SlurmOptions:
    """The options this environment names. Raises InputError where there is no file, or one with a mistake in it."""
    return options.load(_SLURM_OPTIONS, launcher="slurm", words="gpu, gpus_per_node, max_nodes, partition ...")


def parse(fields: Mapping[str, Any], *, origin: str) -> SlurmOptions:
    """Options from a mapping, strictly: an unknown key or a wrong type is an InputError that names `origin`."""
    return options.parse(_SLURM_OPTIONS, fields, launcher="slurm", origin=origin)
