"""A query: the result of parsing a file, a batch line, command-line flags or a POST body."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from annotated_types import Interval

from hp_tool.domain.fields import Amount, Choice, Fraction, Shown, Strict
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.inference import InferenceWorkload
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.targets import Targets
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import InputError

Kind = Literal["training", "inference"]
Repetitions = Annotated[int, Interval(ge=1, le=100_000)]
Reducible = Literal["layers", "replicas", "micro_batches"]
Objective = Literal["throughput", "days", "cost", "min_gpus", "throughput_per_gpu", "ttft", "tpot"]
RankBy = Literal["expected", "mean"]
MAX_DEVICES = 1_024
"""Maximum number of devices for objective min_gpus, if the query sets a GPU but no number of
devices.
"""


class OwnFile(str):
    """A name in a query that may be the path of a local file. A plain string is a catalogue name
    and is never opened as a file.

    JSON and YAML parsers do not create this type, so queries from HTTP or the database cannot read
    local files.
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints(Strict):
    """Limits that a recommended configuration must satisfy."""

    max_days: Annotated[Amount | None, Shown("Maximum days", "Goal", kind="training")] = None
    """Maximum duration of the training; requires training.total_tokens."""
    max_cost: Annotated[Amount | None, Shown("Maximum cost ($)", "Goal", kind="training")] = None
    """Maximum cost of the training in US dollars; requires training.total_tokens and a price."""
    memory_headroom_fraction: Annotated[
        Fraction, Shown("Free memory fraction", "Goal", unset="0.05")
    ] = 0.05
    """Fraction of device memory to leave free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings(Strict):
    """tune only: the budget of real runs, and where they run."""

    launcher: Annotated[
        Literal["local", "slurm", "ray", "kubernetes", "endpoint"] | None,
        Shown("Launcher", "Profile runs"),
    ] = None
    """Launcher of the runs; None: that of the registered cluster, else this host."""
    budget_runs: Annotated[
        Repetitions, Shown("Maximum profile runs", "Profile runs", example="8")
    ] = 8
    """Maximum number of profile runs."""
    budget_gpu_seconds: Annotated[Amount | None, Shown("Maximum GPU-seconds", "Profile runs")] = (
        None
    )
    """Maximum device seconds of profile runs; None: no limit."""
    run_timeout_s: Annotated[
        Annotated[float, Interval(ge=1e-3, le=1e7)] | Literal["auto"],
        Shown("Maximum seconds per run", "Profile runs", unset="auto"),
    ] = "auto"
    """Maximum seconds of one run. auto: twice the start-up time measured on the cluster (three
    times an assumed one before the first run), plus each step at the upper end of its predicted
    interval. A run that exceeds it keeps its measured steps.
    """
    queue_timeout_s: Annotated[
        Annotated[float, Interval(ge=1.0, le=1e7)] | None,
        Shown("Maximum seconds in the queue", "Profile runs", unset="no limit"),
    ] = None
    """Maximum seconds that a run waits for devices; then the run is withdrawn and the search ends,
    to be resumed later. None: no limit.
    """
    steps: Repetitions = 5
    """Measured optimizer steps per run."""
    warmup_steps: Annotated[int, Interval(ge=0, le=100_000)] = 2
    """Steps before measuring."""
    balanced_routing: Annotated[
        bool | None,
        Shown("Tokens spread evenly over experts", "Profile runs", unset="as expert_imbalance"),
    ] = None
    """Whether profile runs distribute tokens evenly over experts with a random router. None: if
    expert_imbalance is 1.
    """
    breakdown: bool = False
    """Also run one step of each configuration under torch's profiler, to report where its time
    goes.
    """
    step_tolerance_fraction: Fraction = 0.01
    """End a run early once at least four measured steps differ by less than this fraction."""
    hopeless_factor: Annotated[float, Interval(ge=1.0, le=1e6)] = 3.0
    """End a run after its first measured step if that takes this many times the best known step
    time.
    """
    min_gain_fraction: Fraction = 0.01
    """Stop when the expected gain of a further run is below this fraction of the best step time."""
    seed: Annotated[int, Interval(ge=0, le=(1 << 32) - 1)] = 0
    """Seed of the search's random choices."""
    reuse: Annotated[bool, Shown("Reuse earlier measurements", "Profile runs")] = False
    """Use earlier measurements of the same configuration and problem instead of new runs, at no
    cost.
    """
    fidelity: Annotated[Literal["full", "auto"], Shown("Fidelity", "Profile runs")] = "auto"
    """full: run the complete configuration. auto: a run may use fewer replicas, micro-batches and
    layers if that halves its cost, and is extrapolated; the best configuration is run completely
    before the search ends.
    """
    preflight: Annotated[bool, Shown("Check the nodes first", "Profile runs")] = False
    """Time single operations on all devices before the first run, as `hp-tool calibrate` does, and
    exclude nodes that are slower than their peers. The first run is charged for it.
    """
    baseline: Annotated[
        ParallelQuery | None, Shown("Baseline", "Your current layout (baseline)")
    ] = None
    """Your current configuration, with which the answer is compared, as `parallel` of one
    configuration. If it is a candidate, it runs once, as part of the budget. None: the first
    successful run.
    """
    parallel_runs: Annotated[int, Interval(ge=1, le=64)] = 1
    """Runs submitted at the same time. If there are too few devices for all, they wait for each
    other.
    """
    configurations_per_job: Annotated[int, Interval(ge=1, le=16)] = 1
    """Configurations that one job of the built-in profiler trains in sequence. Only the first waits
    for imports and rendezvous. Each is a separate run.
    """

    @property
    def of_profiler(self) -> tuple[str, ...]:
        """Settings in use that only trainings of the built-in profiler support."""
        used = {
            "breakdown": self.breakdown,
            "configurations_per_job": self.configurations_per_job > 1,
        }
        return tuple(name for name, is_used in used.items() if is_used)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerCommand(Strict):
    """tune only: your own training command in place of the built-in profiler."""

    command: tuple[str, ...]
    """argv with placeholders for the configuration, as in `{tensor_parallel_size}` or
    `{flags:megatron-lm}`. No shell.
    """
    reader: Literal[
        "megatron-lm", "megatron-bridge", "nemo-rl", "torchtitan", "deepspeed", "verl", "json"
    ]
    """Format of the log; json: objects with `step`, `step_s` and the like, one per line."""
    metrics_file: str | None = None
    """A file in the run's folder to read instead of the log."""
    launch: Literal["torchrun", "command"] = "torchrun"
    """torchrun: the command is a script (or `-m module`) that torchrun starts once per device.
    command: a program, started once per node.
    """
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of the command, in addition to those of every job."""
    axes: tuple[str, ...] | None = None
    """Fields of `parallel` that the command can vary. Other fields have one value, the query's or
    the default. None: all that a query leaves open; the command must contain their placeholders.
    """
    reducible: tuple[Reducible, ...] = ()
    """What `search.fidelity: auto` may leave out of its runs, because the command contains the
    placeholders for it.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Query(Strict):
    """A training or serving query. Names of models and clusters are looked up in the catalogue
    later.
    """

    id: str | None = None
    """Your name for the query, repeated in the answer."""
    kind: Kind
    model: Annotated[
        str | ModelSpec | dict[str, Any], Shown("Model", "Model", example="llama-3-70b")
    ]
    """Catalogue name, a mapping of ModelSpec's fields, or a config.json's content; from the command
    line and Python also a path to one.
    """
    cluster: Annotated[Choice[str | ClusterQuery], Shown("or a registered cluster", "Cluster")]
    """Name of a registered cluster, or a description. `recommend` also accepts a list, or `priced`
    for every machine with a price.
    """
    training: TrainingWorkload | None = None
    inference: InferenceWorkload | None = None
    parallel: ParallelQuery = ParallelQuery()
    objective: Annotated[Objective | None, Shown("Objective", "Goal", unset="most throughput")] = (
        None
    )
    """Quantity that the ranking optimises; None: throughput (inference: throughput_per_gpu)."""
    rank_by: Annotated[
        RankBy, Shown("Rank by step time", "Goal", unset="expected", kind="training")
    ] = "expected"
    """Rank trainings by the expected step time, which includes the probability of running out of
    memory, or by the predicted one.
    """
    constraints: Constraints = Constraints()
    targets: Targets | None = None
    search: SearchSettings = SearchSettings()
    trainer: Annotated[
        str | TrainerCommand | None,
        Shown("Registered trainer", "Profile runs", unset="the built-in profiler", kind="training"),
    ] = None
    """Your own training command, or the name of one that the administrator registered."""

    def with_num_gpus(self, num_gpus: int) -> Query:
        """Return this query with a given number of devices in the same kind of cluster."""
        cluster = (
            ClusterQuery(node_type=self.cluster) if isinstance(self.cluster, str) else self.cluster
        )
        return replace(self, cluster=replace(cluster, num_gpus=num_gpus))

    def check_num_gpus(self) -> None:
        """Check that the query sets the number of devices, unless objective min_gpus determines it.

        Raises:
            InputError: The query sets no number of devices.
        """
        if self.leaves_num_gpus_open():
            raise InputError(
                "an estimate requires num_gpus; use `recommend` with objective min_gpus to "
                "find the fewest",
                field="cluster.num_gpus",
                code="missing_field",
            )

    def leaves_num_gpus_open(self) -> bool:
        """Return True if objective min_gpus has to find the number of devices and the query sets no
        maximum.

        For a list of machines, return False, because each machine is a separate query.
        """
        cluster = self.cluster
        if (
            self.objective != "min_gpus"
            or not isinstance(cluster, ClusterQuery)
            or cluster.gpu is None
        ):
            return False
        return cluster.num_gpus is None and cluster.node_type is None and cluster.stages is None

    def with_most_devices(self) -> Query:
        """Return the query with a maximum of MAX_DEVICES devices, in whole nodes, if it leaves the
        number of devices open.
        """
        if isinstance(self.cluster, str) or not self.leaves_num_gpus_open():
            return self
        node = self.cluster.gpus_per_node or 1
        return self.with_num_gpus(max(MAX_DEVICES - MAX_DEVICES % node, node))
