"""Launcher options: a cluster's devices, the resources that jobs request, and where jobs run.

Options come from the operator (a registered cluster or a YAML file), never from a query. Values
that reach a shell contain no special characters; only Slurm's `setup` is shell code.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from hp_tool.catalog import documents
from hp_tool.domain.fields import Devices, Strict, build_validators
from hp_tool.domain.measurement import Hardware
from hp_tool.errors import InputError


def _pattern_validator(pattern: str, expectation: str) -> AfterValidator:
    """Return a validator for strings that match `pattern`. Its error is "must be {expectation}"."""
    compiled = re.compile(pattern, re.ASCII)

    def _check_pattern(value: str) -> str:
        if not compiled.fullmatch(value):
            raise ValueError(f"must be {expectation}")
        return value

    return AfterValidator(_check_pattern)


def _absolute_path(value: str) -> str:
    if not Path(value).is_absolute() or not value.isprintable():
        raise ValueError("must be an absolute path")
    return value


_WORD = r"[\w.,:@%+/-]"
_WORD_RULE = "letters, digits and _ . , : @ % + / -"
Word = Annotated[str, _pattern_validator(_WORD + "{1,256}", _WORD_RULE)]
WordOrEmpty = Annotated[str, _pattern_validator(_WORD + "{0,256}", _WORD_RULE)]
Name = Annotated[
    str,
    _pattern_validator(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", "letters, digits and -, at most 63"),
]
Image = Annotated[
    str,
    _pattern_validator(
        r"(?! )[\w.,:@%+/# -]{1,256}(?<! )",
        "letters, digits, _ . , : @ % + / # - and spaces between them",
    ),
]
Mount = Annotated[
    str,
    _pattern_validator(r"(?! )[\w.,:@%+/ -]{1,256}(?<! )", f"{_WORD_RULE} and spaces between them"),
]
Template = Annotated[
    str,
    _pattern_validator(
        r"(?! )([\w.,:@%+/ -]|\{search\}|\{owner\}){1,256}(?<! )",
        f"{_WORD_RULE}, spaces between them, {{search}} and {{owner}}",
    ),
]
Host = Annotated[
    str, _pattern_validator(r"(?!-)[\w.@-]{1,253}", "a host as ssh knows it, such as user@login1")
]
Variable = Annotated[
    str, _pattern_validator(r"[A-Za-z_][A-Za-z0-9_]{0,255}", "a name of letters, digits and _")
]
Url = Annotated[
    str,
    _pattern_validator(
        r"https?://[\w.\[\]:-]{1,256}(/[\w./-]{0,256})?", "a URL such as http://head:8265"
    ),
]
LogsPath = Annotated[
    str,
    _pattern_validator(
        r"/[\w.,:@+/-]{0,256}", "an absolute path of letters, digits and _ . , : @ + / -"
    ),  # % has a meaning to Slurm
]
AbsolutePath = Annotated[str, AfterValidator(_absolute_path)]
Line = Annotated[str, _pattern_validator(r"[^\0\r\n]*", "a single line")]
SbatchArgument = Annotated[
    str,
    _pattern_validator(
        r"--[a-z][a-z0-9-]*(=(?! )[\w.,:;@%+&|*()\[\]/= -]{1,512}(?<! ))?",
        "written as --name or --name=value",
    ),
]
"""Option of sbatch or srun. Values with spaces are quoted."""
Seconds = Annotated[float, Field(ge=0, le=1e7)]
Environment = dict[
    Variable,
    Annotated[str, _pattern_validator(r"[^\0]*", "text without NUL")],
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions(Strict):
    """A cluster, partition or node pool, and how profile jobs use it."""

    name: str
    """Name of the node in measurements, if the node does not report its own."""
    gpu: Word
    """Catalogue name of the nodes' device. `cpu` runs one process with one thread per device."""
    gpus_per_node: Devices
    """Devices (cpu: processes) per node that a job uses."""
    max_nodes: Devices = 1
    """Maximum number of nodes of a job."""
    environment: Environment = field(default_factory=dict)
    """Additional environment variables of jobs."""
    python: Word | None = "python3"
    """Interpreter on the nodes or in the image, with hp_tool, torch and megatron-core (and ray, on
    Ray with several nodes).
    """
    bind_rendezvous: bool = False
    """For jobs on several nodes: let the first node listen only on the address that the other nodes
    use, which must be its address in the job's network (Slurm: its host name; Kubernetes: its
    pod's; Ray: its node's). By default PyTorch listens on every interface. Jobs on one node always
    use the loopback device.
    """
    poll_s: Seconds = 5.0
    """Minimum number of seconds between queries for the states of all jobs."""
    patience_s: Seconds = 900.0
    """Seconds for which the cluster may be unreachable before a search fails; jobs continue."""

    @property
    def num_gpus(self) -> int:
        """Maximum number of devices of a job."""
        return self.gpus_per_node * self.max_nodes

    @property
    def launcher(self) -> str:
        """Name of the launcher with these options, such as `slurm` for SlurmOptions."""
        return _launcher_name(type(self))

    def hardware(self, *, num_gpus: int) -> Hardware:
        """Return the hardware of a job with `num_gpus` devices."""
        return Hardware(gpu=self.gpu, num_gpus=num_gpus, hosts=(self.name,))

    def num_nodes(self, *, num_gpus: int) -> int:
        """Return the number of nodes of a job. Each node contributes the same number of devices.

        Raises:
            InputError: The cluster cannot run a job with this many devices.
        """
        if num_gpus <= self.gpus_per_node:
            return 1
        nodes, remainder = divmod(num_gpus, self.gpus_per_node)
        if remainder or nodes > self.max_nodes:
            raise InputError(
                f"A job of {num_gpus} devices does not fit: the limit is {self.max_nodes} nodes "
                f"of {self.gpus_per_node} devices, and a job on several nodes must use whole "
                "nodes.",
                code="launcher_mismatch",
                field="cluster.num_gpus",
            )
        return nodes

    @classmethod
    def create(cls, options: Self | Mapping[str, Any] | None) -> Self:
        """Parse `options`. If it is None, load the launcher's options file."""
        if isinstance(options, Mapping):
            return cls.parse(
                options, origin=f"the options of the {_launcher_name(cls).capitalize()} launcher"
            )
        return cls.load() if options is None else options

    @classmethod
    def parse(cls, fields: Mapping[str, Any], *, origin: str) -> Self:
        """Parse options from a mapping. An InputError names `origin` and the invalid field."""
        try:
            with build_validators(described=False):
                adapter = TypeAdapter(cls)
            return adapter.validate_json(json.dumps(dict(fields)), strict=True)
        except (ValidationError, TypeError, ValueError) as error:
            first = (
                error.errors(include_url=False)[0]
                if isinstance(error, ValidationError)
                else {"loc": (), "msg": str(error)}
            )
            name = ".".join(
                part for part in first["loc"] if isinstance(part, str) and part.isidentifier()
            )
            reason = str(first["msg"]).removeprefix("Value error, ")
            raise InputError(
                f"{origin}: {name or 'the file'}: {reason}", field=f"{_launcher_name(cls)}.{name}"
            ) from None

    @classmethod
    def load(cls) -> Self:
        """Load the options file at `config_path`. Raise InputError if it is missing or invalid."""
        launcher = _launcher_name(cls)
        path = config_path(launcher)
        if not path.is_file():
            raise InputError(
                f"No {launcher.capitalize()} cluster is configured: {path} does not exist. "
                "Create it with gpu, gpus_per_node, max_nodes, ... (see docs/clusters.md), point "
                f"{_config_variable(launcher)} to another file, or register the cluster and name "
                "it in the query.",
                field="search.launcher",
            )
        return cls.parse(documents.read(path), origin=str(path))


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions(ClusterOptions):
    """Options of a Ray cluster."""

    name: str = "ray"
    address: Url = "http://127.0.0.1:8265"
    """Address of the Jobs API, which is also the dashboard's."""
    resources: dict[str, Annotated[float, Field(ge=0, lt=1e9)]] = field(default_factory=dict)
    """Other resources that a job reserves on each node, such as `{"accelerator_type:H100":
    0.001}`.
    """
    job_prefix: Annotated[
        str, _pattern_validator(r"[a-zA-Z0-9._-]{0,40}", "letters, digits, . _ and -, at most 40")
    ] = ""
    """Prefix of job names, for several databases that use one cluster."""
    poll_s: Seconds = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointOptions(ClusterOptions):
    """Options of a running server with an OpenAI-compatible completions API on declared devices."""

    name: str = "endpoint"
    url: Url
    """Base URL of the server, such as `http://host:8000/v1`."""
    api_key: Line | None = field(default=None, repr=False)
    """Bearer token. The process that sends requests receives it; it is never stored."""
    api_key_variable: Variable | None = None
    """Environment variable with the token, in the process that runs the search."""
    model: Line | None = None
    """Name of the served model; by default the first model that the server lists."""
    prompts: Literal["tokens", "text"] = "tokens"
    """Prompts as token ids, which have an exact length, or as words for servers that accept only
    text. For words, a first request measures the tokens per word.
    """
    body: dict[str, Any] = field(default_factory=lambda: {"ignore_eos": True})
    """Additional fields of a request. By default, responses do not stop before the requested
    length.
    """

    def __post_init__(self) -> None:
        if self.api_key is not None and self.api_key_variable is not None:
            raise ValueError("set either api_key or api_key_variable")


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesOptions(ClusterOptions):
    """Options of a Kubernetes cluster, or of a pool of its nodes. Each node runs one pod."""

    name: str = "kubernetes"
    image: Word
    """Container image with hp_tool, torch and megatron-core. The image of a trainer needs only
    python3.
    """
    namespace: Name = "default"
    context: (
        Annotated[
            str,
            _pattern_validator(
                "(?!-)" + _WORD + "{1,256}", _WORD_RULE + ", and must not begin with -"
            ),
        ]
        | None
    ) = None
    """Context of kubectl's configuration; None for the current context."""
    kubectl: Word = "kubectl"
    """Name or path of the kubectl program."""
    gpu_resource: Word = "nvidia.com/gpu"
    """Name of the device's resource in pod limits. For `cpu`, one core per process is requested."""
    resources: dict[str, str] = field(default_factory=dict)
    """Other limits of a pod, such as `{memory: 512Gi, rdma/hca: "8"}`."""
    node_selector: dict[str, str] = field(default_factory=dict)
    tolerations: tuple[dict[str, Any], ...] = ()
    """Tolerations, as in a pod's specification."""
    volumes: tuple[dict[str, Any], ...] = ()
    """Volumes, as in a pod's specification. /dev/shm is always mounted."""
    volume_mounts: tuple[dict[str, Any], ...] = ()
    labels: dict[str, str] = field(default_factory=dict)
    """Labels of the job and its pods, such as `{kueue.x-k8s.io/queue-name: team-a}`. `{search}` and
    `{owner}` are replaced, as on Slurm.
    """
    annotations: dict[str, str] = field(default_factory=dict)
    """Annotations of the job and its pods, with the same replacements."""
    pod_template: dict[str, Any] = field(default_factory=dict)
    """Strategic merge patch of the pod template, `{metadata, spec}`: security context, pull
    secrets, priority, affinity, sidecars, runtime class. The job's container has the name `run`.
    """
    workload: Literal["job", "jobset"] = "job"
    """Kind of object: an indexed Job, or a JobSet with one such Job."""
    service_account: Name | None = None
    host_network: bool = False
    """Use the nodes' network, which some fabrics require."""
    keep_s: Annotated[int, Field(ge=0, le=10_000_000)] = 86_400
    """Seconds for which Kubernetes stores a finished job and its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Container(Strict):
    """The container image in which each node's processes run."""

    image: Image
    """Image, as for `srun --container-image`: a registry reference (`registry#image`) or the path
    of a squashfs file; for Apptainer the path of a SIF file or a `docker://` reference.
    """
    mounts: tuple[Mount, ...] = ()
    """Mounts, as `source:destination[:flags]`. A shared job folder is always mounted at its own
    path.
    """
    env: tuple[Variable, ...] = ()
    """Variables whose value in the job overrides the value in the image."""
    name: Word | None = None
    """With pyxis: name under which each node stores the unpacked image, so that it is imported only
    once.
    """
    writable: bool = False
    """Let the job write to its copy of the image."""
    mount_home: bool | None = None
    """Mount the user's home folder; None for the site's default."""
    runtime: Literal["pyxis", "apptainer"] = "pyxis"

    def __post_init__(self) -> None:
        if self.name is not None and self.runtime != "pyxis":
            raise ValueError("name is for the pyxis runtime only; remove it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Logs(Strict):
    """The folder that jobs write and this host reads, if job folders are not shared."""

    folder: LogsPath
    """Path on the nodes. The folder must exist; each job writes a few files to it."""
    here: LogsPath | None = None
    """Path of the same folder on this host; by default the same path."""

    @property
    def local_path(self) -> str:
        """Path of the folder on this host."""
        return self.here if self.here is not None else self.folder


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions(ClusterOptions):
    """Options of a Slurm cluster, or of a partition of it."""

    name: str = "slurm"
    account: Template | None = None
    """Account to charge. `{owner}` and `{search}` are replaced by the search's owner and id."""
    comment: Template | None = None
    """Comment for the site's accounting, with the same replacements."""
    partition: Word | None = None
    qos: Word | None = None
    time_s: Annotated[float, Field(ge=1, le=1e7)] | None = None
    """Requested wall time in seconds; by default the run's limit plus two minutes."""
    gres: WordOrEmpty | None = None
    """Generic resource of a device, such as `gpu:h100`, requested as `--gres=<gres>:<number>`; by
    default `gpu`. An empty string requests none, for clusters that allocate only whole nodes. Not
    used for `cpu`.
    """
    exclusive: bool | None = None
    """Reserve whole nodes with all their memory, so that other jobs cannot disturb measurements.
    This is the default on GPU nodes, unless cpus_per_gpu or memory_per_gpu is set.
    """
    cpus_per_gpu: Devices | None = None
    """Cores per GPU on nodes that jobs share."""
    memory_per_gpu: (
        Annotated[
            str, _pattern_validator(r"[0-9]{1,9}[KMGT]?", "a size as Slurm writes it, such as 120G")
        ]
        | None
    ) = None
    """Host memory per GPU on nodes that jobs share."""
    requeue: bool = False
    """Let Slurm restart jobs that were preempted or lost a node. By default such jobs end, and the
    search decides whether to repeat them.
    """
    container: Container | None = None
    modules: tuple[Word, ...] = ()
    """Environment modules to load."""
    setup: tuple[Line, ...] = ()
    """Lines of bash that run on the first node before the job. All nodes receive the exported
    variables.
    """
    sbatch_arguments: tuple[SbatchArgument, ...] = ()
    """Additional options of sbatch, such as `--constraint=nvlink`."""
    srun_arguments: tuple[SbatchArgument, ...] = ()
    """Additional options of the srun that starts each node's processes, such as `--mpi=pmix`. They
    come last and take precedence.
    """
    clusters: tuple[Word, ...] = ()
    """Clusters of a federation that may run the job (`--clusters`); by default this host's
    cluster.
    """
    ssh: Host | None = None
    """Login node that has Slurm's programs, if this host has none. The login must not require a
    password.
    """
    python: AbsolutePath | None = None
    """Interpreter on the nodes or in the container; by default that of this process."""
    folder: AbsolutePath | None = None
    """Folder in which job folders are created, on a file system with the same path on the nodes; by
    default HP_RUNS_DIR or the user's data folder.
    """
    inherit: tuple[Word, ...] = ()
    """Variables that jobs inherit from the submitting process, such as LD_LIBRARY_PATH, in addition
    to HOME, LANG, PATH and USER.
    """
    logs: Logs | None = None
    """Folder of logs, for nodes without access to `folder`. A job's files are then part of its
    script, and its results are read from its logs.
    """


def config_path(launcher: str) -> Path:
    """Return the path of a launcher's options file, which may not exist.

    This is HP_<LAUNCHER>_CONFIG, by default <launcher>.yaml in the user's configuration folder.
    """
    from platformdirs import user_config_path

    configured = os.environ.get(_config_variable(launcher))
    return Path(configured) if configured else user_config_path("hp-tool") / f"{launcher}.yaml"


def _config_variable(launcher: str) -> str:
    return f"HP_{launcher.upper()}_CONFIG"


def _launcher_name(options: type[ClusterOptions]) -> str:
    return options.__name__.removesuffix("Options").lower()
