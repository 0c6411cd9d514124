"""The options of the launchers that reach a cluster: its devices, what jobs request, and where they
run.

They are the operator's: a registered cluster's entry or a YAML file holds them, and nothing in them
comes from a query. Values that reach a shell may have only characters that mean nothing to one;
only Slurm's `setup` is shell code.
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
from hp_tool.domain.fields import Devices, Strict, building
from hp_tool.domain.measurement import Hardware
from hp_tool.errors import InputError


def _matching(pattern: str, expectation: str) -> AfterValidator:
    """A check that the whole of a string matches `pattern`; the error says that it "must be
    {expectation}".
    """
    compiled = re.compile(pattern, re.ASCII)

    def check(value: str) -> str:
        if not compiled.fullmatch(value):
            raise ValueError(f"must be {expectation}")
        return value

    return AfterValidator(check)


def _absolute_path(value: str) -> str:
    if not Path(value).is_absolute() or not value.isprintable():
        raise ValueError("must be an absolute path")
    return value


_WORD = r"[\w.,:@%+/-]"
_WORD_RULE = "letters, digits and _ . , : @ % + / -"
Word = Annotated[str, _matching(_WORD + "{1,256}", _WORD_RULE)]
WordOrEmpty = Annotated[str, _matching(_WORD + "{0,256}", _WORD_RULE)]
Name = Annotated[
    str, _matching(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", "letters, digits and -, at most 63")
]
Image = Annotated[
    str,
    _matching(
        r"(?! )[\w.,:@%+/# -]{1,256}(?<! )",
        "letters, digits, _ . , : @ % + / # - and spaces between them",
    ),
]
Mount = Annotated[
    str, _matching(r"(?! )[\w.,:@%+/ -]{1,256}(?<! )", f"{_WORD_RULE} and spaces between them")
]
Template = Annotated[
    str,
    _matching(
        r"(?! )([\w.,:@%+/ -]|\{search\}|\{owner\}){1,256}(?<! )",
        f"{_WORD_RULE}, spaces between them, {{search}} and {{owner}}",
    ),
]
Host = Annotated[
    str, _matching(r"(?!-)[\w.@-]{1,253}", "a host as ssh knows it, such as user@login1")
]
Variable = Annotated[
    str, _matching(r"[A-Za-z_][A-Za-z0-9_]{0,255}", "a name of letters, digits and _")
]
Url = Annotated[
    str,
    _matching(r"https?://[\w.\[\]:-]{1,256}(/[\w./-]{0,256})?", "a URL such as http://head:8265"),
]
LogsPath = Annotated[
    str,
    _matching(
        r"/[\w.,:@+/-]{0,256}", "an absolute path of letters, digits and _ . , : @ + / -"
    ),  # % has a meaning to Slurm
]
AbsolutePath = Annotated[str, AfterValidator(_absolute_path)]
Line = Annotated[str, _matching(r"[^\0\r\n]*", "a single line")]
SbatchArgument = Annotated[
    str,
    _matching(
        r"--[a-z][a-z0-9-]*(=(?! )[\w.,:;@%+&|*()\[\]/= -]{1,512}(?<! ))?",
        "written as --name or --name=value",
    ),
]
"""An option of sbatch or srun; spaces in it are quoted."""
Seconds = Annotated[float, Field(ge=0, le=1e7)]
Environment = dict[
    Variable,
    Annotated[str, _matching(r"[^\0]*", "text without NUL")],
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions(Strict):
    """One cluster, or one partition or node pool of it, as profile jobs use it."""

    name: str
    """The cluster's name in measurements where no node's own name is known."""
    gpu: Word
    """Catalogue name of the nodes' device; `cpu` runs one process with one thread each."""
    gpus_per_node: Devices
    """Devices (cpu: processes) that a job takes per node."""
    max_nodes: Devices = 1
    """Maximum number of nodes per job."""
    environment: Environment = field(default_factory=dict)
    """Additional environment variables of jobs."""
    python: Word | None = "python3"
    """The nodes' (or the image's) interpreter, with hp_tool, torch and megatron-core (Ray, several
    nodes: and ray).
    """
    bind_rendezvous: bool = False
    """Jobs on several nodes: let the first node listen only on the address that its peers are given
    (Slurm: its host's name; Kubernetes: its pod's; Ray: its node's), which must be its address in
    the job's own network. By default PyTorch listens on every interface. On one node jobs always
    meet on the loopback device.
    """
    poll_s: Seconds = 5.0
    """Minimum interval between queries for the states of all jobs."""
    patience_s: Seconds = 900.0
    """How long the cluster may be unreachable before a search gets an error; jobs go on without
    it.
    """

    @property
    def num_gpus(self) -> int:
        """The maximum number of devices per job."""
        return self.gpus_per_node * self.max_nodes

    @property
    def launcher(self) -> str:
        """The launcher that these options are for: `slurm` for SlurmOptions."""
        return _launcher(type(self))

    def hardware(self, *, num_gpus: int) -> Hardware:
        """What a job of `num_gpus` devices runs on."""
        return Hardware(gpu=self.gpu, num_gpus=num_gpus, hosts=(self.name,))

    def num_nodes(self, *, num_gpus: int) -> int:
        """Nodes for this many devices, all with equally many. Raises InputError if one job may not
        have them.
        """
        if num_gpus <= self.gpus_per_node:
            return 1
        nodes, remainder = divmod(num_gpus, self.gpus_per_node)
        if remainder or nodes > self.max_nodes:
            raise InputError(
                f"a job of {num_gpus} devices does not fit: it may have {self.max_nodes} nodes of "
                f"{self.gpus_per_node}, and "
                "several nodes are only used whole",
                code="launcher_mismatch",
                field="cluster.num_gpus",
            )
        return nodes

    @classmethod
    def of(cls, options: Self | Mapping[str, Any] | None) -> Self:
        """The options themselves, those of a mapping, or for None those of the launcher's file."""
        if isinstance(options, Mapping):
            return cls.parse(
                options, origin=f"the options of the {_launcher(cls).capitalize()} launcher"
            )
        return cls.load() if options is None else options

    @classmethod
    def parse(cls, fields: Mapping[str, Any], *, origin: str) -> Self:
        """Options from a mapping. Raises InputError with `origin` and the field for an unknown key
        or an invalid value.
        """
        try:
            with building(described=False):
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
                f"{origin}: {name or 'the file'}: {reason}", field=f"{_launcher(cls)}.{name}"
            ) from None

    @classmethod
    def load(cls) -> Self:
        """Options from the file at `config_path`. Raises InputError if it does not exist or
        contains a mistake.
        """
        launcher = _launcher(cls)
        path = config_path(launcher)
        if not path.is_file():
            raise InputError(
                f"no {launcher.capitalize()} cluster is described: {path} does not exist; write "
                "gpu, gpus_per_node, max_nodes "
                "and other options of docs/clusters.md there, name another file by "
                f"{_variable(launcher)}, or register the "
                "cluster and name it in the query",
                field="search.launcher",
            )
        return cls.parse(documents.read(path), origin=str(path))


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions(ClusterOptions):
    """A Ray cluster."""

    name: str = "ray"
    address: Url = "http://127.0.0.1:8265"
    """Address of the Jobs API, which is the dashboard's."""
    resources: dict[str, Annotated[float, Field(ge=0, lt=1e9)]] = field(default_factory=dict)
    """Other resources that a job takes per node, such as `{"accelerator_type:H100": 0.001}`."""
    job_prefix: Annotated[
        str, _matching(r"[a-zA-Z0-9._-]{0,40}", "letters, digits, . _ and -, at most 40")
    ] = ""
    """Prefix of job names, to tell apart several databases that share a cluster."""
    poll_s: Seconds = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointOptions(ClusterOptions):
    """A running server with OpenAI's completions API. What it runs on is what the entry
    declares.
    """

    name: str = "endpoint"
    url: Url
    """Base URL, such as `http://host:8000/v1`."""
    api_key: Line | None = field(default=None, repr=False)
    """The bearer token. It reaches the process that sends the requests, and no file, log or
    database.
    """
    api_key_variable: Variable | None = None
    """Instead: the environment variable that holds it, of the process that runs the search."""
    model: Line | None = None
    """The name it is served by; None: the first that the server lists."""
    prompts: Literal["tokens", "text"] = "tokens"
    """Token ids, exactly as many as asked; or words, for servers that take only text: a first
    answer tells tokens per word.
    """
    body: dict[str, Any] = field(default_factory=lambda: {"ignore_eos": True})
    """Further fields of a request; by default an answer does not end before its length."""

    def __post_init__(self) -> None:
        if self.api_key is not None and self.api_key_variable is not None:
            raise ValueError("api_key or api_key_variable: give one of them")


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesOptions(ClusterOptions):
    """A Kubernetes cluster, or a pool of its nodes. A node is a pod."""

    name: str = "kubernetes"
    image: Word
    """The container image, with hp_tool, torch and megatron-core; a trainer's own image needs
    python3 alone.
    """
    namespace: Name = "default"
    context: (
        Annotated[
            str, _matching("(?!-)" + _WORD + "{1,256}", _WORD_RULE + ", and must not begin with -")
        ]
        | None
    ) = None
    """A context of kubectl's configuration; None means the current one."""
    kubectl: Word = "kubectl"
    """The kubectl program."""
    gpu_resource: Word = "nvidia.com/gpu"
    """Name of the device in a pod's limits. Not used for `cpu`, which requests that many cores."""
    resources: dict[str, str] = field(default_factory=dict)
    """Other limits of a pod, such as `{memory: 512Gi, rdma/hca: "8"}`."""
    node_selector: dict[str, str] = field(default_factory=dict)
    tolerations: tuple[dict[str, Any], ...] = ()
    """As in a pod's specification."""
    volumes: tuple[dict[str, Any], ...] = ()
    """As in a pod's specification; /dev/shm is always mounted."""
    volume_mounts: tuple[dict[str, Any], ...] = ()
    labels: dict[str, str] = field(default_factory=dict)
    """Of the job and its pods, such as `{kueue.x-k8s.io/queue-name: team-a}`; `{search}` and
    `{owner}` as on Slurm.
    """
    annotations: dict[str, str] = field(default_factory=dict)
    """Likewise."""
    pod_template: dict[str, Any] = field(default_factory=dict)
    """A strategic merge patch to the pods' template, `{metadata, spec}`: security context, pull
    secrets, priority, affinity, sidecars, runtime class. Our container is called `run`.
    """
    workload: Literal["job", "jobset"] = "job"
    """An indexed Job, or a JobSet of one such Job, for sites whose queues and dashboards know
    these.
    """
    service_account: Name | None = None
    host_network: bool = False
    """Use the nodes' network, which some fabrics need."""
    keep_s: Annotated[int, Field(ge=0, le=10_000_000)] = 86_400
    """How long Kubernetes keeps a finished job and its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Container(Strict):
    """The image in which each node's processes run."""

    image: Image
    """Argument of `srun --container-image`: a registry reference (`registry#image`) or the path of
    a squashfs file; of Apptainer the path of a SIF file or a `docker://` reference.
    """
    mounts: tuple[Mount, ...] = ()
    """`source:destination[:flags]` each; a shared job folder is always mounted at its own path."""
    env: tuple[Variable, ...] = ()
    """Variables whose values of the job win over the image's own."""
    name: Word | None = None
    """pyxis: keep the unpacked image on each node under this name, so that it is imported once."""
    writable: bool = False
    """Let the job write into its copy of the image."""
    mount_home: bool | None = None
    """Whether the user's home is seen inside. None: as the site has it."""
    runtime: Literal["pyxis", "apptainer"] = "pyxis"

    def __post_init__(self) -> None:
        if self.name is not None and self.runtime != "pyxis":
            raise ValueError("name is pyxis', not Apptainer's: leave it out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Logs(Strict):
    """The one folder that jobs write and this host reads, where the jobs' own folders are not
    shared.
    """

    folder: LogsPath
    """Path on the nodes. The folder must exist; each job writes a few files there."""
    here: LogsPath | None = None
    """Path on this host, which needs to read it. By default the same."""

    @property
    def seen_here(self) -> str:
        """Its path on this host."""
        return self.here if self.here is not None else self.folder


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions(ClusterOptions):
    """A Slurm cluster, or a partition of it."""

    name: str = "slurm"
    account: Template | None = None
    """Whom to charge; `{owner}` and `{search}` stand for whose search it is and its id."""
    comment: Template | None = None
    """For the site's books, likewise."""
    partition: Word | None = None
    qos: Word | None = None
    time_s: Annotated[float, Field(ge=1, le=1e7)] | None = None
    """Wall time requested from Slurm; by default the run's own limit plus two minutes."""
    gres: WordOrEmpty | None = None
    """The generic resource of a device, such as `gpu:h100`, requested as `--gres=<gres>:<number>`.
    By default `gpu`; an empty string requests none, for clusters that allocate whole nodes. Not
    used for `cpu`.
    """
    exclusive: bool | None = None
    """Share no node with other jobs, so that they cannot disturb measurements, and have all its
    memory. None: so it is on GPU nodes, unless cpus_per_gpu or memory_per_gpu is given.
    """
    cpus_per_gpu: Devices | None = None
    """Cores for each GPU, on nodes that jobs share."""
    memory_per_gpu: (
        Annotated[str, _matching(r"[0-9]{1,9}[KMGT]?", "a size as Slurm writes it, such as 120G")]
        | None
    ) = None
    """Host memory for each GPU, likewise."""
    requeue: bool = False
    """Let Slurm restart a job that was preempted or lost its node. By default such a job ends, and
    the search decides.
    """
    container: Container | None = None
    modules: tuple[Word, ...] = ()
    """Environment modules to load."""
    setup: tuple[Line, ...] = ()
    """Lines of bash to run on the first node before the job; every node gets what they export."""
    sbatch_arguments: tuple[SbatchArgument, ...] = ()
    """Other options of sbatch, such as `--constraint=nvlink`."""
    srun_arguments: tuple[SbatchArgument, ...] = ()
    """Other options of the srun that starts each node's processes, such as `--mpi=pmix`; they come
    last and win.
    """
    clusters: tuple[Word, ...] = ()
    """Clusters of a federation that may run the job (`--clusters`); by default the one of this
    host.
    """
    ssh: Host | None = None
    """The login node where Slurm's programs are run, for hosts that have none. It takes no
    password.
    """
    python: AbsolutePath | None = None
    """The nodes' (or the container's) interpreter; by default the one of this process."""
    folder: AbsolutePath | None = None
    """Where the jobs' folders live, on a file system that the nodes see under the same path. By
    default HP_RUNS_DIR, else the user's data folder.
    """
    inherit: tuple[Word, ...] = ()
    """Variables of the process that submits which jobs take over, such as LD_LIBRARY_PATH. None of
    them otherwise, but HOME, LANG, PATH and USER: what is right on that host may be wrong on the
    nodes.
    """
    logs: Logs | None = None
    """For nodes that do not see `folder`: a job's files travel in its script, and its results come
    back in its logs.
    """


def config_path(launcher: str) -> Path:
    """HP_<LAUNCHER>_CONFIG, else <launcher>.yaml in the user's configuration folder; the file need
    not exist.
    """
    from platformdirs import user_config_path

    configured = os.environ.get(_variable(launcher))
    return Path(configured) if configured else user_config_path("hp-tool") / f"{launcher}.yaml"


def _variable(launcher: str) -> str:
    return f"HP_{launcher.upper()}_CONFIG"


def _launcher(options: type[ClusterOptions]) -> str:
    return options.__name__.removesuffix("Options").lower()
