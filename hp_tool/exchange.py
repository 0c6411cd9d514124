"""Results as other tools' configurations; and those as queries, their runs compared with prediction and best alternative."""

import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from hp_tool import catalog, documents, serving, training
from hp_tool.domain.parallel import ParallelConfig, ParallelQuery
from hp_tool.domain.pipeline_layout import ends_are_shorter, parse_layout
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate, Recommendation
from hp_tool.domain.serving import InferenceEstimate, ServingConfig, ServingRecommendation
from hp_tool.domain.workload import OverlapSpec, TrainingWorkload
from hp_tool.errors import InputError
from hp_tool.formats import accelerate, deepspeed, engine_commands, engines, megatron_bridge, megatron_lm, shell, torchtitan
from hp_tool.formats.logs import LogFacts, read_log
from hp_tool.formats.setup import ServingSetup, TrainingSetup
from hp_tool.queries import schema
from hp_tool.serving.problem import cache_precision, resolve_serving
from hp_tool.training.problem import TrainingProblem, resolve_training

TRAINING: dict[str, Callable[[TrainingSetup], str]] = {
    "megatron-lm": megatron_lm.command,
    "megatron-lm-yaml": megatron_lm.yaml,
    "nemo": megatron_bridge.text,
    "torchtitan": torchtitan.toml,
    "deepspeed": deepspeed.text,
    "accelerate": accelerate.text,
    "slurm": megatron_lm.slurm,
}
READ_ENGINES = ("vllm", "sglang")
"""Inference engines whose commands are read."""
WARMUP_LINES = 2
"""Logged steps at a run's start that are left out where more follow: compilation, caches, first communication."""


def export(
    *, result: Mapping[str, Any], format: str, rank: int = 1, read: Callable[[Mapping[str, Any]], Query] = schema.parse_query
) -> str:
    """The text of one configuration in another tool's words.

    `result` is what estimate, recommend or tune answered with --json (its `query` says the model and the workload), or a
    query, which is answered first. `rank` picks a recommendation, `read` parses the query. Raises InputError, UnsupportedError.
    """
    if format not in (formats := (*TRAINING, *engines.ENGINES)):
        raise InputError(f"no format {format}; choose one of {', '.join(formats)}", field="format")
    if "kind" in result:
        query = read(result)
        ranking = (serving.recommend if query.kind == "inference" else training.recommend)(query=query, top=rank)
        if (count := len(ranking.recommendations)) < rank:
            raise InputError(f"the query has {count} acceptable configurations; rank {rank} is not among them", field="rank")
        return _write(query, ranking.recommendations[rank - 1].parallel, format)
    if not isinstance(result.get("query"), dict):
        raise InputError(
            "the result does not hold its query; export what estimate, recommend or tune print with --json",
            field="query",
            code="missing_field",
        )
    query = read(result["query"])
    return _write(query, _chosen(result, rank, kind=ServingConfig if query.kind == "inference" else ParallelConfig), format)


def _chosen(result: Mapping[str, Any], rank: int, *, kind: type[Any]) -> Any:
    """The configuration of this rank in a result's recommendations, or the one it estimates."""
    rows = result.get("recommendations")
    if rows is None and isinstance(result.get("estimate"), dict):
        rows = [result["estimate"]]
    if not isinstance(rows, list) or not 1 <= rank <= len(rows) or not isinstance(rows[rank - 1], dict):
        count = len(rows) if isinstance(rows, list) else 0
        raise InputError(f"the result has {count} configurations; rank {rank} is not among them", field="rank")
    return schema.parse(kind, rows[rank - 1].get("parallel") or {})


def _write(query: Query, config: ParallelConfig | ServingConfig, format: str) -> str:
    if isinstance(config, ServingConfig):
        if format not in engines.ENGINES:
            raise InputError(f"{format} trains; a serving configuration becomes {', '.join(engines.ENGINES)}", field="format")
        problem, workload = resolve_serving(query), query.inference
        assert workload is not None  # checked with the query
        setup = ServingSetup(
            model=problem.model,
            model_path=query.model if isinstance(query.model, str) else problem.model.name,
            cluster=problem.cluster,
            workload=replace(workload, kv_cache_precision=cache_precision(workload, engine=problem.engine)),
            parallel=config,
            memory_fraction=min(problem.engine.memory_fraction, 1.0 - query.constraints.memory_headroom_fraction),
        )
        return engines.command(setup, engine=format)
    if format not in TRAINING:
        raise InputError(f"{format} serves; a training configuration becomes {', '.join(TRAINING)}", field="format")
    return TRAINING[format](training_setup(resolve_training(query), config))


def training_setup(problem: TrainingProblem, config: ParallelConfig) -> TrainingSetup:
    """The case of one configuration; objective min_gpus may have chosen fewer devices than the query has."""
    model_parallel = config.tensor_parallel_size * config.pipeline_parallel_size * config.context_parallel_size
    used = model_parallel * config.data_parallel_size
    at = problem if used == problem.cluster.num_gpus else problem.with_num_gpus(used)
    strategy, layout = at.strategy, at.named(config).pipeline_layout
    sizes = {"stages": config.pipeline_parallel_size, "chunks": config.virtual_pipeline_parallel_size}
    if layout is not None and not ends_are_shorter(num_layers=at.model.num_hidden_layers, **sizes):
        strategy = replace(strategy, pipeline_layout=parse_layout(layout))
    return TrainingSetup(model=at.model, cluster=at.cluster, workload=at.workload, parallel=config, strategy=strategy)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    """The figures of a run's log."""

    step_s: float | None
    """Median of the logged optimizer steps after the first ones."""
    steps: int
    """Logged figures it is the median of."""
    tokens_per_second_per_gpu: float | None
    allocated_bytes: float | None
    reserved_bytes: float | None
    out_of_memory: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """A run as it is, as it is predicted, and the best configuration for the same work on the same devices."""

    query: dict[str, Any]
    """The configuration as a query; valid input everywhere else."""
    estimate: Estimate | InferenceEstimate
    logged: LoggedRun | None
    step_gap_fraction: float | None
    """Logged step time over the predicted one, less 1."""
    better: Recommendation | ServingRecommendation | None
    """None where nothing acceptable is predicted to be faster than what runs."""
    gain_fraction: float | None
    """0.2: the better configuration is predicted to train 20 % more tokens in the same time."""
    switched_on: tuple[str, ...]
    """Overlaps (of training.overlap) that the better configuration counts on and the command leaves off."""
    parts_gained_s: dict[str, float]
    """Where the gain comes from: seconds a step of what runs less those of the better one, by part."""


def detect(text: str) -> str:
    """megatron-lm, torchtitan, deepspeed, vllm or sglang: whose configuration a text is. Raises InputError for others."""
    stripped = text.lstrip()
    if (engine := engine_commands.engine_of(text)) is not None:
        return engine
    if stripped.startswith("{"):
        return "deepspeed"
    if re.search(r"(?m)^[ \t]*\[(parallelism|training|model|job)\]", text):
        return "torchtitan"
    if re.search(r"(?<!\S)--[A-Za-z]", text):
        return "megatron-lm"
    raise InputError(
        "neither a Megatron-LM command (--flags), torchtitan TOML, DeepSpeed JSON nor a command of vLLM or SGLang; "
        "say which with --format",
        field="format",
    )


def read_query(
    text: str, *, format: str | None = None, num_gpus: int | None = None, overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The query of a foreign configuration. `overrides` (dotted paths) say what it cannot: the GPU, a vocabulary, a model.

    Raises InputError naming what is missing, UnsupportedError for what is not modelled.
    """
    tool = format or detect(text)
    changes = dict(overrides or {})
    if tool in READ_ENGINES:
        return _read_serving(text, engine=tool, num_gpus=num_gpus, changes=changes)
    devices = num_gpus or changes.get("cluster.num_gpus") or (shell.num_gpus(text) if tool == "megatron-lm" else None)
    if not isinstance(devices, int) or devices < 1:
        raise InputError(
            "the configuration does not say how many devices it runs on; add --num-gpus", field="num_gpus", code="missing_field"
        )
    data: dict[str, Any]
    if tool == "megatron-lm":
        flags = shell.flags(text)
        if "model.vocab_size" in changes:
            flags["padded-vocab-size"] = [str(changes.pop("model.vocab_size"))]
        data = megatron_lm.read(flags, num_gpus=devices)
    elif tool == "torchtitan":
        data = torchtitan.read(text, num_gpus=devices, layers_of=lambda name: catalog.model(name).num_hidden_layers)
    elif tool == "deepspeed":
        data = deepspeed.read(documents.parse(text, origin=Path("deepspeed.json")), num_gpus=devices)
    else:
        raise InputError(
            f"no format {tool}; choose one of megatron-lm, torchtitan, deepspeed, {', '.join(READ_ENGINES)}", field="format"
        )
    data["cluster"] = {"num_gpus": devices}
    schema.lay(data, changes)
    needed = {"model": "--model", "cluster.gpu": "--gpu", "training.sequence_length": "--set training.sequence_length=4096"}
    return _complete(data, needed, tool=tool)


def _read_serving(text: str, *, engine: str, num_gpus: int | None, changes: dict[str, Any]) -> dict[str, Any]:
    """The query of a command of an inference engine; its load comes from `changes`."""

    def num_experts_of(name: str) -> int | None:
        return catalog.model(changes.get("model", name)).num_experts

    data = engine_commands.read(text, engine=engine, num_experts_of=num_experts_of)
    one = data.pop("num_gpus")
    data["cluster"] = {"num_gpus": num_gpus or changes.pop("cluster.num_gpus", None) or one}
    schema.lay(data, changes)
    needed = {
        "model": "--model",
        "cluster.gpu": "--gpu",
        "inference.input_length": "--set inference.input_length=4000",
        "inference.output_length": "--set inference.output_length=1000",
    }
    return _complete(data, needed, tool=engine)


def _complete(data: dict[str, Any], needed: Mapping[str, str], *, tool: str) -> dict[str, Any]:
    """The query, if it has all that no default stands for."""
    for path, flag in needed.items():
        section, _, name = path.rpartition(".")
        holder = data.get(section) if section else data
        if not isinstance(holder, Mapping) or name not in holder:
            raise InputError(f"a {tool} configuration does not say {path}; add {flag}", field=path, code="missing_field")
    return data


def assess(query: Query, *, log: Iterable[str] | None = None, reader: str = "megatron-lm") -> Assessment:
    """Compare a run with its prediction and with the best configuration for the same model, batch and devices; of a deployment
    for the same load.

    `reader` is one of formats.logs.READERS, whose trainer wrote the log. Raises InputError, UnsupportedError.
    """
    if query.kind == "inference":
        return _assess_serving(query)
    workload, num_gpus = query.training, resolve_training(query).cluster.num_gpus
    assert workload is not None  # resolved above
    estimate = training.estimate(query=query)
    logged = None if log is None else _logged(read_log(log, reader=reader), workload, num_gpus=num_gpus)
    hidden = workload.overlap or OverlapSpec()
    off = tuple(f.name for f in fields(hidden) if getattr(hidden, f.name) is False)
    free = replace(query, training=replace(workload, overlap=None), parallel=ParallelQuery(), objective=None)
    best = next(iter(training.recommend(query=free, top=1).recommendations), None)
    gap = gain = None
    gained: dict[str, float] = {}
    if estimate.time is not None:
        if logged is not None and logged.step_s is not None:
            gap = logged.step_s / estimate.time.step_s - 1.0
        if best is not None and best.estimate.time is not None:
            theirs, ours = estimate.time, best.estimate.time
            gain = theirs.step_s / ours.step_s - 1.0
            gained = {name: seconds - ours.parts_s.get(name, 0.0) for name, seconds in theirs.parts_s.items()}
            if estimate.feasible and gain <= 0.0:
                best, gain, gained = None, None, {}
    return Assessment(
        query=schema.query_mapping(query),
        estimate=estimate,
        logged=logged,
        step_gap_fraction=gap,
        better=best,
        gain_fraction=gain,
        switched_on=off if best is not None else (),
        parts_gained_s=gained,
    )


def _assess_serving(query: Query) -> Assessment:
    """A deployment beside the best one for its load on its devices, by tokens a second and GPU."""
    found = serving.estimate(query=query)
    best = next(iter(serving.recommend(query=replace(query, parallel=ParallelQuery()), top=1).recommendations), None)
    gain = None
    if best is not None and found.output_tokens_per_second_per_gpu is not None:
        reached = best.estimate.output_tokens_per_second_per_gpu or 0.0
        gain = reached / found.output_tokens_per_second_per_gpu - 1.0
        if found.feasible and gain <= 0.0:
            best, gain = None, None
    return Assessment(
        query=schema.query_mapping(query),
        estimate=found,
        logged=None,
        step_gap_fraction=None,
        better=best,
        gain_fraction=gain,
        switched_on=(),
        parts_gained_s={},
    )


def _logged(facts: LogFacts, workload: TrainingWorkload, *, num_gpus: int) -> LoggedRun:
    """Medians of what a log printed, as seconds a step whatever unit the trainer prefers."""
    tokens = workload.global_batch_size * workload.sequence_length / num_gpus
    seconds, _ = facts.step_times_s(workload, num_gpus=num_gpus)
    settled = seconds[WARMUP_LINES:] or seconds
    step_s = statistics.median(settled) if settled else None
    return LoggedRun(
        step_s=step_s,
        steps=len(settled),
        tokens_per_second_per_gpu=None if step_s is None else tokens / step_s,
        allocated_bytes=facts.allocated_bytes,
        reserved_bytes=facts.reserved_bytes,
        out_of_memory=facts.out_of_memory,
    )
