"""What an operator says once about a Slurm cluster: the devices, what jobs ask for, and where they run.

Read from a YAML file: HP_SLURM_CONFIG, else slurm.yaml in the user's configuration folder. Nothing here comes from a
query. Values that end up in the batch script are held to characters that mean nothing to a shell; only `setup` is shell,
and it is the operator's own.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hp_tool import documents
from hp_tool.errors import InputError

_WORD = re.compile(r"[\w.,:@%+/-]{1,256}", re.ASCII)
_ARGUMENT = re.compile(r"--[a-z][a-z0-9-]*(=[\w.,:;@%+&|*()\[\]/=-]{1,512})?", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")
_DEVICES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """The image each node's processes run in, through Slurm's pyxis plugin."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}

    image: str
    """What `srun --container-image` takes: a registry reference or the path of a squashfs file."""
    mounts: tuple[str, ...] = ()
    """`source:destination[:flags]` each; the job's folder is always mounted where it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """One cluster, or one partition of it, as profile jobs use it."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}

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
    poll_s: float = 5.0
    """The controller is asked for all jobs at once, and no more often than this."""
    patience_s: float = 900.0
    """How long a controller may be away before a search is told; jobs go on without it."""

    def __post_init__(self) -> None:
        """Raises InputError for a number out of range or a string that could mean something to a shell."""
        for name in ("gpus_per_node", "max_nodes"):
            _check(1 <= getattr(self, name) <= _DEVICES, name, f"must be from 1 to {_DEVICES}")
        for name, least in (("time_s", 1.0), ("poll_s", 0.0), ("patience_s", 0.0)):
            value = getattr(self, name)
            _check(value is None or least <= value <= 1e7, name, f"must be from {least:g} to 1e7 seconds")
        for name in ("gpu", "account", "partition", "qos"):
            _check_words([getattr(self, name)] if getattr(self, name) is not None else [], name)
        _check_words([self.gres] if self.gres else [], "gres")
        _check_words(self.modules, "modules")
        if self.container is not None:
            _check_words([self.container.image.replace("#", "/")], "container.image")  # pyxis writes registry#image
            _check_words(self.container.mounts, "container.mounts")
        _check(all(map(_ARGUMENT.fullmatch, self.sbatch_arguments)), "sbatch_arguments", "must be --name or --name=value")
        _check(all(map(_VARIABLE.fullmatch, self.environment)), "environment", "must have names of letters, digits and _")
        _check("\0" not in "".join(self.environment.values()), "environment", "must have no NUL in its values")
        _check(not re.search(r"[\0\r\n]", "".join(self.setup)), "setup", "must be a list of single lines")
        for name in ("python", "folder"):
            value = getattr(self, name)
            _check(value is None or (Path(value).is_absolute() and value.isprintable()), name, "must be an absolute path")

    @property
    def num_gpus(self) -> int:
        """The most one job can have."""
        return self.gpus_per_node * self.max_nodes


_SLURM_OPTIONS = TypeAdapter(SlurmOptions)


def load() -> SlurmOptions:
    """The options this environment names. Raises InputError where there is no file, or one with a mistake in it."""
    from platformdirs import user_config_path

    named = os.environ.get("HP_SLURM_CONFIG")
    path = Path(named) if named else user_config_path("hp-tool") / "slurm.yaml"
    if not path.is_file():
        raise InputError(
            f"no Slurm cluster is described: {path} does not exist; write gpu, gpus_per_node, max_nodes, partition ... there, "
            "or name another file by HP_SLURM_CONFIG",
            field="search.launcher",
        )
    return parse(documents.parse(documents.read_text(path), origin=path), origin=str(path))


def parse(fields: Mapping[str, Any], *, origin: str) -> SlurmOptions:
    """Options from a mapping, strictly: an unknown key or a wrong type is an InputError that names `origin`."""
    try:
        return _SLURM_OPTIONS.validate_json(json.dumps(dict(fields)), strict=True)
    except (ValidationError, TypeError, ValueError) as error:
        first = error.errors(include_url=False)[0] if isinstance(error, ValidationError) else {"loc": (), "msg": str(error)}
        name = ".".join(map(str, first["loc"]))
        raise InputError(f"{origin}: {name or 'the file'}: {first['msg']}", field=f"slurm.{name}") from None


def _check_words(values: Iterable[str], name: str) -> None:
    _check(all(map(_WORD.fullmatch, values)), name, "must be words of letters, digits and _ . , : @ % + / -")


def _check(good: object, name: str, expectation: str) -> None:
    if not good:
        raise InputError(f"{name} {expectation}", field=f"slurm.{name}")
