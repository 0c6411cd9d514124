"""Measurements of profile runs, and the requests that start them."""

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, Self

from annotated_types import Interval

from hp_tool.domain.fields import Flattened, Strict
from hp_tool.domain.hardware import Precision
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.workload import TrainingWorkload

MeasurementStatus = Literal["ok", "oom", "timeout", "crashed", "preempted"]
Runner = Literal["megatron-core", "vllm", "endpoint"]
KILLED_CAUSE = "a process was killed by signal 9"
"""Cause of a run that was killed from outside. Such a run is repeated once before the failure is
attributed to the configuration.
"""

GRAPHS_AFTER = 2
"""Number of steps before CUDA graphs are replayed: one eager step and one that captures the
graphs.
"""
LocalOperation = Literal["matmul", "attention", "add", "activation", "norm", "loss"]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
Seconds = Annotated[float, Interval(ge=1e-6, le=1e7)]
Spread = Annotated[float, Interval(ge=0.0, le=1e7)]
"""Non-negative seconds."""
Throughput = Annotated[float, Interval(ge=1e-6, le=1e9)]
Bytes = Annotated[int, Interval(ge=0, le=1 << 50)]
Loss = Annotated[float, Interval(ge=-1e9, le=1e9)]
WallSeconds = Annotated[float, Interval(ge=0.0, le=1e9)]
ExitCode = Annotated[int, Interval(ge=-(1 << 31), le=1 << 31)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation(Strict):
    """An operation of one size, done by all ranks at the same time as in training."""

    name: LocalOperation | Collective
    shape: tuple[int, ...]
    """matmul: m, n, k. attention (causal, forward): sequences, length, query heads, key/value
    heads, head_dim. add, and activation (forward and backward): elements. norm and loss (forward
    and backward): rows, columns. Collectives: bytes of the whole buffer, as in NCCL's tests.
    """
    precision: Precision = "fp32"
    group_size: int = 1
    """Collectives: ranks per group; the ranks form several groups that work at the same time."""
    stride: int = 1
    """Collectives: 1 groups neighbouring ranks; the number of devices per node groups one rank of
    each node.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationTimes(Strict):
    """Mean seconds of an operation on each rank."""

    operation: Operation
    seconds_per_rank: tuple[Spread, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program(Strict):
    """A user's own training command for one configuration; its log is read afterwards."""

    command: tuple[str, ...]
    """argv, run in the job's folder; never a shell string."""
    torchrun: bool = True
    """Whether torchrun starts it once per device; otherwise it is started once per node."""
    environment: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    """Contents of files to write into the job's folder before the start, by name."""
    returns: tuple[str, ...] = ()
    """Files that the program writes into the job's folder and that are read afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware(Strict):
    """The machine on which a measurement was taken."""

    gpu: str
    """Catalogue name of the device; `cpu` for one process with one thread."""
    device_name: str = ""
    """Name given by the driver."""
    num_gpus: int = 1
    """Devices used by the run."""
    hosts: tuple[str, ...] = ()
    oversubscription: float = 1.0
    """Processes per physical core (cpu) or device; above 1, times are not those of real devices."""
    declared: bool = False
    """Whether the devices of an endpoint are declared by a cluster's entry, not detected."""


Clock = Annotated[float, Interval(ge=0.0, le=1e12)]
Power = Annotated[float, Interval(ge=0.0, le=1e6)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState(Strict):
    """State of a GPU during a run, as its driver reports it."""

    host: str
    sm_clock_hz: Clock | None = None
    sm_clock_max_hz: Clock | None = None
    throttled_by: str | None = None
    """Bit mask of the driver's reasons for a reduced clock; None if the clock is not reduced or the
    device was only idle.
    """
    uncorrected_ecc_errors: Annotated[int, Interval(ge=0, le=1 << 53)] | None = None
    """Number since the driver was loaded."""
    temperature_c: Annotated[float, Interval(ge=-300.0, le=1e4)] | None = None
    power_w: Power | None = None
    power_limit_w: Power | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity(Strict):
    """Reductions of a run compared with the requested configuration; None for unchanged."""

    num_hidden_layers: int | None = None
    data_parallel_size: int | None = None
    num_micro_batches: int | None = None
    steps: int | None = None
    """Number of measured optimizer steps."""

    @property
    def is_whole(self) -> bool:
        """Whether the complete configuration runs, for any number of steps."""
        return self.num_hidden_layers is self.data_parallel_size is self.num_micro_batches is None


_QUANTILE = re.compile(r"p\d\d(\.\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail(Flattened):
    """Quantiles of a latency over requests."""

    p50: Spread
    p90: Spread
    p99: Spread
    others: tuple[tuple[str, Spread], ...] = ()
    """(quantile, seconds) of further quantiles named by targets; in JSON, keys like those above."""

    @property
    def quantiles(self) -> dict[str, float]:
        """Seconds by quantile, in increasing order."""
        quantiles = {"p50": self.p50, "p90": self.p90, "p99": self.p99, **dict(self.others)}
        return dict(sorted(quantiles.items(), key=lambda item: float(item[0][1:])))

    @classmethod
    def _fold(cls, data: dict[str, Any]) -> dict[str, Any]:
        fixed = ("p50", "p90", "p99")
        others = tuple(
            (key, value)
            for key, value in data.items()
            if key not in fixed and _QUANTILE.fullmatch(key)
        )
        return {key: value for key, value in data.items() if (key, value) not in others} | {
            "others": others
        }

    @classmethod
    def _other_keys(cls) -> tuple[str, dict[str, Any]]:
        return _QUANTILE.pattern, {"type": "number", "minimum": 0.0, "maximum": 1e7}

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Self:
        """Return the quantiles of values, with linear interpolation."""
        cuts = statistics.quantiles(
            [*values, values[-1]] if len(values) == 1 else values, n=100, method="inclusive"
        )
        return cls(p50=cuts[49], p90=cuts[89], p99=cuts[98])


@dataclass(frozen=True, slots=True, kw_only=True)
class Tails(Strict):
    """Latencies of single requests, in seconds.

    Predictions assume equal lengths. In a closed load, latencies vary only with a request's
    position among the requests that start together. At a request rate, they vary with the load and
    the prompts in progress; the request latency is then an upper bound, for a request that is slow
    in both phases.
    """

    ttft_s: Tail
    tpot_s: Tail
    request_latency_s: Tail


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingTimes(Strict):
    """Latencies of one replica with batches of `concurrency` prompts, or of a server under load."""

    ttft_s: Seconds
    """Time to first token of all prompts, median over repetitions."""
    ttft_s_spread: Spread
    """Interquartile range over repetitions."""
    tpot_s: Spread
    """Time per output token after the first, median over repetitions; 0 for a single token."""
    tpot_s_spread: Spread
    ttft_times_s: tuple[Seconds, ...]
    """All repetitions, without warm-up."""
    tpot_times_s: tuple[Spread, ...]
    output_tokens_per_second: Annotated[float, Interval(ge=0.0, le=1e12)]
    """concurrency x output_length / median seconds of a repetition, over all devices of the run."""
    runner: Runner
    """Serving software."""
    tails: Tails | None = None
    """Quantiles over single requests of all repetitions; None for a batch of equal requests."""

    @classmethod
    def from_repetitions(
        cls,
        *,
        ttft_s: Sequence[float],
        tpot_s: Sequence[float],
        output_tokens_per_second: float,
        runner: Runner,
        tails: Tails | None = None,
    ) -> Self:
        """Return medians and spread of repetitions."""
        return cls(
            ttft_s=statistics.median(ttft_s),
            ttft_s_spread=interquartile_range(ttft_s) or 0.0,
            tpot_s=statistics.median(tpot_s),
            tpot_s_spread=interquartile_range(tpot_s) or 0.0,
            ttft_times_s=tuple(ttft_s),
            tpot_times_s=tuple(tpot_s),
            output_tokens_per_second=output_tokens_per_second,
            runner=runner,
            tails=tails,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies(Strict):
    """Latencies of a request under the full load, including queueing."""

    ttft_s: float
    """Time to first token."""
    tpot_s: float
    """Time per output token after the first."""
    request_latency_s: float
    """Time to the last token at the mean lengths."""
    tails: Tails | None = None
    """Quantiles over single requests, if measured or predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLatencies(Latencies):
    """Latencies under the query's full load on all replicas, derived from one measured replica."""

    penalised_latency_s: float
    """request_latency_s plus a penalty for missed targets; minimized by a search."""
    request_latencies_s: tuple[float, ...] = ()
    """request_latency_s of each repetition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement(Strict):
    """Outcome of a profile run or a reported training, including failures."""

    status: MeasurementStatus
    step_s: Seconds | None = None
    """Median seconds of the optimizer steps; None unless ok."""
    step_s_spread: Spread | None = None
    """Interquartile range of the step times; None for a single step."""
    step_times_s: tuple[Seconds, ...] = ()
    """All measured steps, without warm-up."""
    warmup_times_s: tuple[Seconds, ...] = ()
    """Warm-up steps, until they stop getting faster."""
    extrapolated_step_s: Seconds | None = None
    """Step time of the whole configuration implied by a reduced run; None at full fidelity."""
    extrapolated_step_s_interval: tuple[Seconds, Seconds] | None = None
    tokens_per_second_per_gpu: Throughput | None = None
    peak_memory_bytes: Bytes | None = None
    """Largest allocated memory over the ranks."""
    peak_reserved_bytes: Bytes | None = None
    """Largest memory reserved by the allocator, over the ranks."""
    peak_memory_bytes_per_rank: tuple[Bytes, ...] = ()
    peak_memory_source: Literal["cuda_allocator", "resident_set_growth"] | None = None
    """Source of the peaks: torch's allocator, or (cpu) growth of the resident set since before the
    model was built.
    """
    serving: ServingTimes | None = None
    """Latencies of an inference run's replica."""
    load: LoadLatencies | None = None
    """Implied latencies under the query's load."""
    operations: tuple[OperationTimes, ...] = ()
    """Times of single operations, if the run measured them."""
    losses: tuple[Loss, ...] = ()
    """Loss of each step including warm-up, as proof of training."""
    breakdown_s: dict[str, Spread] | None = None
    """Seconds of one additional step under torch's profiler, mean over the ranks: compute, exposed
    communication by kind, idle. They sum to that step, which profiling makes longer than step_s.
    """
    parts_s: dict[str, Spread] | None = None
    """Seconds of a step by part of a prediction, measured by a trace; they sum to that step."""
    fidelity: Fidelity = Fidelity()
    hardware: Hardware | None = None
    devices: tuple[DeviceState, ...] = ()
    """GPUs of the run during warm-up, ordered by node."""
    versions: dict[str, str] = field(default_factory=dict)
    """Software versions by package, and the GPU driver."""
    differences: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Overlaps and fusions of the exported configuration that this run lacked: Megatron Core's
    field, and the component missing on its host.
    """
    wall_s: WallSeconds | None = None
    """Seconds from submission to result; the cost charged to the search."""
    refused: bool = False
    """Whether the site or its image would reject the job for any configuration."""
    suspects: tuple[str, ...] = ()
    """Nodes that may have caused the end of the run."""
    exit_code: ExitCode | None = None
    """Exit code of a job that ended by itself without a result."""
    cause: str | None = None
    """Reason why it failed or has fewer steps than requested, in one line."""
    log_tail: str | None = None
    """End of the log of a failed run."""

    @property
    def objective_s(self) -> float | None:
        """Objective value that a search minimizes, in seconds: the step time of the complete
        configuration, or the penalized serving latency.
        """
        if self.load is not None:
            return self.load.penalised_latency_s
        return self.step_s if self.fidelity.is_whole else self.extrapolated_step_s

    @property
    def measured_s(self) -> float | None:
        """Step time of the complete configuration in seconds; for serving, the mean request
        latency.
        """
        return self.objective_s if self.load is None else self.load.request_latency_s

    @property
    def repetitions_s(self) -> tuple[float, ...]:
        """Seconds of each step or repetition, as in `objective_s` but without penalties."""
        return self.step_times_s if self.load is None else self.load.request_latencies_s


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult(Measurement):
    """Measurement of a job's first configuration, and of the configurations that ran after it."""

    rivals: tuple[Measurement, ...] = ()
    """Measurements of the other configurations, in the order of the request, up to the first
    failure.
    """

    @property
    def first_measurement(self) -> Measurement:
        """Measurement of the first configuration, with `wall_s` reduced by that of the others."""
        rivals_s = sum(rival.wall_s or 0.0 for rival in self.rivals)
        values = {field.name: getattr(self, field.name) for field in fields(Measurement)}
        return Measurement(
            **values | {"wall_s": None if self.wall_s is None else max(self.wall_s - rivals_s, 0.0)}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(Strict):
    """Common fields of requests to the profiler; written as JSON, read on the cluster."""

    run_id: str
    num_gpus: int
    """World size of the run."""
    gpu: str
    """Catalogue name that the measurement is stored under; `cpu` uses gloo."""
    timeout_s: float
    seed: int = 0

    @property
    def num_processes(self) -> int:
        """Number of processes that torchrun starts."""
        return self.num_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest(Request):
    """Request to run a training configuration on t x p x c x data_parallel_size devices."""

    kind: Literal["training"] = "training"
    model: ModelSpec
    training: TrainingWorkload
    parallel: ParallelConfig
    steps: int
    warmup_steps: int
    fidelity: Fidelity = Fidelity()
    """Reductions that were applied to model, training and parallel."""
    step_tolerance_fraction: float | None = None
    """Stop when at least four steps differ by less than this fraction; None to run all steps."""
    breakdown: bool = False
    """Run one more step under torch's profiler."""
    longest_step_s: float | None = None
    """Stop after a step longer than this, far slower than the best; None to run all steps."""
    rivals: tuple[ParallelConfig, ...] = ()
    """Configurations to run afterwards in the same processes, with the same limits."""
    program: Program | None = None
    """Program to run instead of the built-in profiler."""
    nvlink_domain_size: int | None = None
    """Number of devices connected by NVLink; None: at least a whole tensor-parallel group."""
    balanced_routing: bool = False
    """Distribute tokens evenly over experts with a random router instead of the untrained router
    weights.
    """

    more_warmup_steps: int = 0
    """Maximum number of additional warm-up steps while steps still get faster."""

    @property
    def warmup(self) -> tuple[int, int]:
        """Minimum and maximum number of warm-up steps."""
        minimum = max(self.warmup_steps, GRAPHS_AFTER if self.training.cuda_graphs else 0)
        return minimum, minimum + (self.more_warmup_steps if minimum else 0)


def interquartile_range(values: Sequence[float]) -> float | None:
    """Return the interquartile range; None for a single value."""
    if len(values) < 2:
        return None
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low
