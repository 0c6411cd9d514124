"""A query: what a file, a batch line, command-line flags or a POST body all become."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Interval

from hp_tool.domain.fields import Amount, Fraction, Strict
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.workload import InferenceWorkload, TrainingWorkload

Kind = Literal["training", "inference"]
Repetitions = Annotated[int, Interval(ge=1, le=100_000)]
Objective = Literal["throughput", "days", "cost", "min_gpus", "throughput_per_gpu", "ttft", "tpot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints(Strict):
    """What a recommended configuration must keep to."""

    max_days: Amount | None = None
    """Needs training.total_tokens."""
    max_cost: Amount | None = None
    """US dollars; needs training.total_tokens and a price."""
    memory_headroom_fraction: Fraction = 0.05
    """Share of device memory kept free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings(Strict):
    """tune only: how much may be spent on real runs, and where they run."""

    launcher: Literal["local", "slurm", "ray", "kubernetes"] | None = None
    """Where the runs go; None: where the registered cluster's entry says, else this host."""
    budget_runs: Repetitions = 8
    """Profile runs at most."""
    budget_gpu_seconds: Amount | None = None
    """Device seconds of profile runs at most."""
    run_timeout_s: Annotated[float, Interval(ge=1e-3, le=1e7)] = 300.0
    """One run, start to end."""
    steps: Repetitions = 5
    """Measured optimizer steps a run."""
    warmup_steps: Annotated[int, Interval(ge=0, le=100_000)] = 2
    """Repetitions before measuring."""
    breakdown: bool = False
    """Also run one step of each configuration under torch's profiler: the measurement says where its seconds went."""
    step_tolerance_fraction: Fraction = 0.01
    """A run ends early once at least four measured steps differ by less than this share."""
    hopeless_factor: Annotated[float, Interval(ge=1.0, le=1e6)] = 3.0
    """A run ends after its first measured step where that takes this many times the best known step time."""
    min_gain_fraction: Fraction = 0.02
    """Stop when no further run is expected to win more than this share of the best step time."""
    seed: Annotated[int, Interval(ge=0, le=(1 << 32) - 1)] = 0
    reuse: bool = False
    """Earlier measurements of the same configuration and problem stand for runs; they cost nothing and count in no budget."""
    fidelity: Literal["full", "auto"] = "auto"
    """full: only the configuration itself is run. auto: a run may leave out replicas, micro-batches and layers where that
    saves half its cost, and stands for the whole by extrapolation; the best is run whole before the search ends."""
    parallel_runs: Annotated[int, Interval(ge=1, le=64)] = 1
    """Runs submitted at a time. They wait for each other where the launcher's devices do not suffice for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerCommand(Strict):
    """tune only: someone's own training command in place of the built-in profiler."""

    command: tuple[str, ...]
    """argv with placeholders for the configuration, as in `{tensor_parallel_size}` or `{flags:megatron-lm}`. No shell."""
    reader: Literal["megatron-lm", "torchtitan", "deepspeed", "json"]
    """Whose log lines are read; json: objects with `step`, `step_s` and the like, one a line."""
    metrics_file: str | None = None
    """A file in the run's folder that is read in place of the log."""
    launch: Literal["torchrun", "command"] = "torchrun"
    """torchrun: the command is a script (or `-m module`) that torchrun starts once for each device. command: it is a program
    that is started once on each node."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that the command gets beside those every job has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets(Strict):
    """Inference: latency targets in seconds."""

    ttft_s: Amount | None = None
    tpot_s: Amount | None = None
    request_latency_s: Amount | None = None
    ttft_p90_s: Amount | None = None
    ttft_p99_s: Amount | None = None
    tpot_p90_s: Amount | None = None
    tpot_p99_s: Amount | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Query(Strict):
    """One question. Names (model, cluster) are resolved against the catalogue afterwards."""

    id: str | None = None
    """Echoed back."""
    kind: Kind
    model: str | ModelSpec | dict[str, Any]
    """Catalogue name, a mapping of ModelSpec's fields, or a config.json's content; from the command line and Python also a path
    to one."""
    cluster: str | ClusterQuery
    """A registered cluster's name, or its description."""
    training: TrainingWorkload | None = None
    inference: InferenceWorkload | None = None
    parallel: ParallelQuery = ParallelQuery()
    objective: Objective | None = None
    """None: throughput (inference: throughput_per_gpu)."""
    constraints: Constraints = Constraints()
    targets: Targets | None = None
    search: SearchSettings = SearchSettings()
    trainer: TrainerCommand | None = None
