"""What really ran: a profile run's request and the numbers it brought back."""

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
KILLED = "a process was killed by signal 9"
"""Cause of a run that somebody ended from outside: it is tried once more before its configuration
is blamed.
"""

GRAPHS_AFTER = 2
"""Steps before CUDA graphs run: one as usual, one to record them."""
LocalOperation = Literal["matmul", "attention", "add", "activation", "norm", "loss"]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
Seconds = Annotated[float, Interval(ge=1e-6, le=1e7)]
Spread = Annotated[float, Interval(ge=0.0, le=1e7)]
"""Seconds that may be none."""
Throughput = Annotated[float, Interval(ge=1e-6, le=1e9)]
Bytes = Annotated[int, Interval(ge=0, le=1 << 50)]
Loss = Annotated[float, Interval(ge=-1e9, le=1e9)]
WallSeconds = Annotated[float, Interval(ge=0.0, le=1e9)]
ExitCode = Annotated[int, Interval(ge=-(1 << 31), le=1 << 31)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation(Strict):
    """One operation of one size. All ranks do it at the same time, as in training."""

    name: LocalOperation | Collective
    shape: tuple[int, ...]
    """matmul: m, n, k. attention, causal, forward: sequences, length, query heads, key/value heads,
    head_dim. add, and forward and backward of activation: elements. norm and loss, forward and
    backward: rows, columns. Collectives: bytes of the whole buffer, as NCCL's tests count them.
    """
    precision: Precision = "fp32"
    group_size: int = 1
    """Collectives: ranks of a group; the ranks are dealt out into as many groups, which all work at
    once.
    """
    stride: int = 1
    """Collectives: 1: neighbouring ranks; the devices of a node: groups that have one rank on each
    node.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationTimes(Strict):
    """An operation and each rank's mean seconds."""

    operation: Operation
    seconds_per_rank: tuple[Spread, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program(Strict):
    """Someone's own trainer, with the configuration filled in. Its log is read afterwards; it needs
    nothing of ours.
    """

    command: tuple[str, ...]
    """argv, run in the job's folder; never a shell string."""
    torchrun: bool = True
    """Whether torchrun starts it, once for each device; else it is started as it stands, once on
    each node.
    """
    environment: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    """Texts to lay into the job's folder before it starts, by name."""
    returns: tuple[str, ...] = ()
    """Files that it leaves there and that are read afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware(Strict):
    """The machine a measurement belongs to."""

    gpu: str
    """Catalogue name of the device, `cpu` for one process with one thread."""
    device_name: str = ""
    """What the driver calls it."""
    num_gpus: int = 1
    """Devices the run used."""
    hosts: tuple[str, ...] = ()
    oversubscription: float = 1.0
    """Processes per physical core (cpu) or per device; above 1 the times are not those of real
    devices.
    """
    declared: bool = False
    """Whether a cluster's entry names the devices and the run did not see them: those behind an
    endpoint.
    """


Clock = Annotated[float, Interval(ge=0.0, le=1e12)]
Power = Annotated[float, Interval(ge=0.0, le=1e6)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState(Strict):
    """A GPU while a run trained, as its driver told."""

    host: str
    sm_clock_hz: Clock | None = None
    sm_clock_max_hz: Clock | None = None
    throttled_by: str | None = None
    """Why its clock is held down, as a mask of the driver's reasons; None: it is not, or only
    because it idles.
    """
    uncorrected_ecc_errors: Annotated[int, Interval(ge=0, le=1 << 53)] | None = None
    """Since the driver was loaded."""
    temperature_c: Annotated[float, Interval(ge=-300.0, le=1e4)] | None = None
    power_w: Power | None = None
    power_limit_w: Power | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity(Strict):
    """How much of the asked configuration was run; all None means the whole of it."""

    num_hidden_layers: int | None = None
    data_parallel_size: int | None = None
    num_micro_batches: int | None = None
    steps: int | None = None
    """Optimizer steps measured."""

    @property
    def is_whole(self) -> bool:
        """Whether the configuration itself runs, for however many steps."""
        return self.num_hidden_layers is self.data_parallel_size is self.num_micro_batches is None


_QUANTILE = re.compile(r"p\d\d(\.\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail(Flattened):
    """Quantiles of one latency over requests."""

    p50: Spread
    p90: Spread
    p99: Spread
    others: tuple[tuple[str, Spread], ...] = ()
    """(quantile, seconds) of those that targets name besides; in JSON keys like those above."""

    @property
    def quantiles(self) -> dict[str, float]:
        """Seconds by quantile, rising."""
        every = {"p50": self.p50, "p90": self.p90, "p99": self.p99, **dict(self.others)}
        return dict(sorted(every.items(), key=lambda each: float(each[0][1:])))

    @classmethod
    def _fold(cls, data: dict[str, Any]) -> dict[str, Any]:
        own = ("p50", "p90", "p99")
        others = tuple(
            (key, value)
            for key, value in data.items()
            if key not in own and _QUANTILE.fullmatch(key)
        )
        return {key: value for key, value in data.items() if (key, value) not in others} | {
            "others": others
        }

    @classmethod
    def _other_keys(cls) -> tuple[str, dict[str, Any]]:
        return _QUANTILE.pattern, {"type": "number", "minimum": 0.0, "maximum": 1e7}

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Those of the values, with lines between neighbours."""
        cuts = statistics.quantiles(
            [*values, values[-1]] if len(values) == 1 else values, n=100, method="inclusive"
        )
        return cls(p50=cuts[49], p90=cuts[89], p99=cuts[98])


@dataclass(frozen=True, slots=True, kw_only=True)
class Tails(Strict):
    """Seconds of single requests. Predicted ones are of equal lengths: in a closed load they spread
    by a request's place in its wave alone; at a request rate by the load and the prompts that a
    request meets, and the request latency is that of one late in both: a bound.
    """

    ttft_s: Tail
    tpot_s: Tail
    request_latency_s: Tail


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingTimes(Strict):
    """Latencies of one replica that is given `concurrency` prompts at once, again and again, or of
    a server under its load.
    """

    ttft_s: Seconds
    """Time to first token: from the prompts to the first token of all of them, median over
    repetitions.
    """
    ttft_s_spread: Spread
    """Interquartile range over repetitions."""
    tpot_s: Spread
    """Time per output token after the first, median over repetitions; 0 where one token is asked
    for.
    """
    tpot_s_spread: Spread
    ttft_times_s: tuple[Seconds, ...]
    """Every repetition, warm-up left out."""
    tpot_times_s: tuple[Spread, ...]
    output_tokens_per_second: Annotated[float, Interval(ge=0.0, le=1e12)]
    """concurrency x output_length / median seconds of a repetition, over all devices of the run."""
    runner: Runner
    """The software that served."""
    tails: Tails | None = None
    """Of the single requests of all repetitions; None: a batch of equals has none."""

    @classmethod
    def of(
        cls,
        *,
        ttft_s: Sequence[float],
        tpot_s: Sequence[float],
        output_tokens_per_second: float,
        runner: Runner,
        tails: Tails | None = None,
    ) -> Self:
        """Medians and spread of these repetitions."""
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
    """Latencies of a request under a whole load, the wait for room included."""

    ttft_s: float
    """Time to first token."""
    tpot_s: float
    """Time per output token after the first."""
    request_latency_s: float
    """Until the last token, at the mean lengths."""
    tails: Tails | None = None
    """Of single requests, where they were measured or predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLatencies(Latencies):
    """Latencies that one measured replica implies for all of the query's load on all of its
    replicas.
    """

    penalised_latency_s: float
    """request_latency_s, and more where a target is missed: what a search minimises."""
    request_latencies_s: tuple[float, ...] = ()
    """request_latency_s of every repetition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement(Strict):
    """The outcome of one profile run (or of a reported training). Failures are measurements too."""

    status: MeasurementStatus
    step_s: Seconds | None = None
    """Median seconds of the optimizer steps that ran; None unless ok."""
    step_s_spread: Spread | None = None
    """Interquartile range of the step seconds; None of a single step."""
    step_times_s: tuple[Seconds, ...] = ()
    """Every measured step, warm-up left out."""
    warmup_times_s: tuple[Seconds, ...] = ()
    """The steps before, until they no longer became faster."""
    extrapolated_step_s: Seconds | None = None
    """What a reduced run implies for the whole configuration; None for full fidelity."""
    extrapolated_step_s_interval: tuple[Seconds, Seconds] | None = None
    tokens_per_second_per_gpu: Throughput | None = None
    peak_memory_bytes: Bytes | None = None
    """Largest allocated memory over the ranks."""
    peak_reserved_bytes: Bytes | None = None
    """Largest memory the allocator held, over the ranks."""
    peak_memory_bytes_per_rank: tuple[Bytes, ...] = ()
    peak_memory_source: Literal["cuda_allocator", "resident_set_growth"] | None = None
    """What the peaks count: torch's allocator, or (cpu) how far the process grew since before the
    model was built.
    """
    serving: ServingTimes | None = None
    """Latencies of an inference run's one replica; it has no steps."""
    load: LoadLatencies | None = None
    """What these latencies imply for the load that the query describes."""
    operations: tuple[OperationTimes, ...] = ()
    """Of a run that timed single operations."""
    losses: tuple[Loss, ...] = ()
    """Loss of each step, warm-up included: a run that trained shows it."""
    breakdown_s: dict[str, Spread] | None = None
    """Seconds of one further step under torch's profiler, where that was asked for, mean over the
    ranks: compute, each kind of communication that nothing hides, idle. They sum to that step,
    which the profiler makes longer than step_s.
    """
    parts_s: dict[str, Spread] | None = None
    """Seconds of a step by the parts of a prediction, as a trace of the run measured them; they sum
    to that step.
    """
    fidelity: Fidelity = Fidelity()
    hardware: Hardware | None = None
    devices: tuple[DeviceState, ...] = ()
    """The run's GPUs during its warm-up, node by node."""
    versions: dict[str, str] = field(default_factory=dict)
    """Software that ran, by package, and the GPUs' driver."""
    differences: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """What the exported configuration overlaps or fuses and this run did not: Megatron Core's
    field, what its host lacks.
    """
    wall_s: WallSeconds | None = None
    """Submit to result: what the search pays for."""
    refused: bool = False
    """The job never began, because the site or its image would not have it: this says nothing about
    the configuration.
    """
    suspects: tuple[str, ...] = ()
    """Nodes whose fault the end of the run may be."""
    exit_code: ExitCode | None = None
    """Of a job that ended by itself and brought no result."""
    cause: str | None = None
    """Why it failed, or why a run that is ok has fewer steps than asked for, in one line."""
    log_tail: str | None = None
    """The end of the run's log, where it failed."""

    @property
    def objective_s(self) -> float | None:
        """The seconds that a search minimises: of the whole configuration's step, measured or
        implied by a reduced run; of serving the penalised latency.
        """
        if self.load is not None:
            return self.load.penalised_latency_s
        return self.step_s if self.fidelity.is_whole else self.extrapolated_step_s

    @property
    def measured_s(self) -> float | None:
        """Seconds of the whole configuration's step, measured or implied by a reduced run; of
        serving the mean request latency, without penalties.
        """
        return self.objective_s if self.load is None else self.load.request_latency_s

    @property
    def repetitions_s(self) -> tuple[float, ...]:
        """Seconds of every step or repetition that ran, as `objective_s` counts them but without
        penalties.
        """
        return self.step_times_s if self.load is None else self.load.request_latencies_s


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult(Measurement):
    """What a job brought that ran several configurations: the first one's measurement, and those of
    its rivals.
    """

    rivals: tuple[Measurement, ...] = ()
    """In the order of the request, up to the first that failed."""

    @property
    def own(self) -> Measurement:
        """The first one's alone, with its own share of the time."""
        beside_s = sum(rival.wall_s or 0.0 for rival in self.rivals)
        values = {each.name: getattr(self, each.name) for each in fields(Measurement)}
        return Measurement(
            **values | {"wall_s": None if self.wall_s is None else max(self.wall_s - beside_s, 0.0)}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(Strict):
    """What every request to the profiler names; written as JSON, read on the cluster."""

    run_id: str
    num_gpus: int
    """World size of the run."""
    gpu: str
    """Catalogue name that the measurement is stored under; `cpu` runs gloo."""
    timeout_s: float
    seed: int = 0

    @property
    def num_processes(self) -> int:
        """Processes that torchrun starts."""
        return self.num_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest(Request):
    """All the profiler needs to run one configuration: on t x p x c x data_parallel_size
    devices.
    """

    kind: Literal["training"] = "training"
    model: ModelSpec
    training: TrainingWorkload
    parallel: ParallelConfig
    steps: int
    warmup_steps: int
    fidelity: Fidelity = Fidelity()
    """What was reduced to get here (already applied to model, training and parallel)."""
    step_tolerance_fraction: float | None = None
    """Stop measuring once four or more steps differ by less than this share; None: run all
    steps.
    """
    breakdown: bool = False
    """Run one further step under torch's profiler."""
    longest_step_s: float | None = None
    """Stop after the first measured step beyond this: hopeless against what is known already; None:
    run all steps.
    """
    rivals: tuple[ParallelConfig, ...] = ()
    """Configurations that run afterwards, in the same processes, with the same limits."""
    program: Program | None = None
    """What runs in place of the built-in profiler."""
    nvlink_domain_size: int | None = None
    """Devices of the cluster that NVLink connects; None: at least those of a tensor-parallel
    group.
    """
    balanced_routing: bool = False
    """Spread tokens evenly over experts by a router that draws, instead of by its untrained
    weights.
    """

    more_warmup_steps: int = 0
    """Further steps to warm up at most, while they still become faster."""

    @property
    def warmup(self) -> tuple[int, int]:
        """Steps to warm up at least and at most."""
        least = max(self.warmup_steps, GRAPHS_AFTER if self.training.cuda_graphs else 0)
        return least, least + (self.more_warmup_steps if least else 0)


def interquartile_range(values: Sequence[float]) -> float | None:
    """Spread of the middle half; None for a single value, which shows none."""
    if len(values) < 2:
        return None
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low
